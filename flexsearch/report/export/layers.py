"""What a plan does to the layers of one model, or of a rank's part of it: tensor parallelism, recomputation, precision,
data parallelism, in the order in which PyTorch composes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower.recompute import NO_REGION, regions_of
from flexsearch.report.export.file import File, names_text
from flexsearch.strategy import Options, States
from flexsearch.strategy.native import gathers_again
from flexsearch.strategy.tensor_parallel import computed_beside


def write_layers(file: File) -> None:
    """Fill ``file.layers``. Raises StrategyError for what is computed again, if that is no module."""
    if file.plan.tensor > 1:
        _tensor_parallel(file)
    if file.options.recompute != "none" or file.plan.pipeline > 1:
        _without_cache(file)
    if file.options.recompute != "none":
        _recompute(file)
    norms = any(op.kind == "batch_norm" for op in file.graph.operators)
    if norms and file.plan.data > 1 and file.graph.tracing.batch_norm_groups == 1:
        file.layers += [
            "# Batch normalisation over the samples of all replicas, as the plan computes it.",
            "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        ]
    if not file.precise:
        _precision(file)
    if file.wrapped:
        _data_parallel(file)
    elif file.plan.data > 1 or not file.precise:
        _fully_shard(file)


def _tensor_parallel(file: File) -> None:
    plan, graph = file.plan, file.graph
    styles: dict[str, str] = {}
    tables: dict[str, str] = {}
    for i, axis in plan.split.items():
        if _own_indices(graph, i):
            tables.setdefault(graph.operators[i].module, _table_style(file, i, axis))
        else:
            styles.setdefault(graph.operators[i].module, _style(file, i, axis))
    patterns = _patterns(styles, graph, set(chain.from_iterable(plan.stages.modules)))
    file.layers.append(f"# Tensor parallelism over {plan.tensor} ranks.")
    if patterns:
        file.needs("torch.distributed.tensor.parallel", "parallelize_module")
        file.layers += ["styles = {", *(f'    "{name}": {style},' for name, style in patterns.items()), "}"]
        if plan.pipeline > 1:
            file.layers.append('styles = {name: styles[name] for name in styles if "*" in name or here(model, [name])}')
        file.layers.append('parallelize_module(model, mesh()["tensor"], styles)')
    if tables:
        _tables(file, tables)
    _in_place(file)
    _tie(file)
    if plan.flow.heads:
        file.layers.append(f"# Attention divides its features into heads; each rank has 1 / {plan.tensor} of them.")
        file.layers += file.each(plan.flow.heads, "divide_heads(model.get_submodule(name))")
        file.functions.append(
            "def divide_heads(attention: nn.Module) -> None:\n"
            '    """Its numbers of heads (num_heads, n_head, kv_heads) become those of one rank."""\n'
            "    for name, value in list(vars(attention).items()):\n"
            '        if name.endswith(("head", "heads")) and isinstance(value, int):\n'
            f"            setattr(attention, name, value // {plan.tensor})"
        )


def _tie(file: File) -> None:
    """Layers that share a weight, in one stage, share it again: each was split on its own."""
    graph, stages = file.graph, file.plan.stages.modules or (("",),)
    ties: dict[str, None] = {}
    for name in dict.fromkeys(n for i in file.plan.split for n in graph.operators[i].inputs):
        owner = name.rpartition(".")[0]
        readers = {graph.operators[i].module for i, _ in graph.consumers[name]}
        if graph.tensor[name].kind != "parameter" or readers == {owner}:
            continue
        for parts in stages:
            inside = tuple(f"{part}." if part else "" for part in parts)
            layers = sorted((m for m in readers if f"{m}.".startswith(inside)), key=lambda m: (m != owner, m))
            for layer in [*layers[1:], *([owner] if layers and owner not in readers else [])]:
                when = f"if here(model, {names_text(layers[:1])}):\n    " if file.plan.pipeline > 1 else ""
                ties[f"{when}model.{layer}.weight = model.{layers[0]}.weight  # tied weights"] = None
    file.layers += ties


def _style(file: File, i: int, axis: str) -> str:
    op, flow = file.graph.operators[i], file.plan.flow
    rows = op.roles[axis] == "reduction"
    name = "RowwiseParallel" if rows else "ColwiseParallel"
    whole = (op.kind == "embedding" or i in flow.cut) if rows else i in flow.gathered
    file.needs("torch.distributed.tensor.parallel", name)
    if not whole:
        return f"{name}()"
    file.needs("torch.distributed.tensor", "Replicate")
    return f"{name}({'input' if rows else 'output'}_layouts=Replicate())"


def _own_indices(graph: OperatorGraph, i: int) -> bool:
    """Whether an embedding may compute its indices in its own module, as tables of positions do."""
    op = graph.operators[i]
    constant = any(graph.tensor[name].kind == "constant" for name in op.inputs)
    return op.kind == "embedding" and (constant or any(beside < i for beside in computed_beside(graph, i)))


def _table_style(file: File, i: int, axis: str) -> str:
    """Dimension of the weight and layout of the output."""
    rows = file.graph.operators[i].roles[axis] == "reduction"
    return f"{0 if rows else 1}, {'Replicate()' if rows or i in file.plan.flow.gathered else 'Shard(-1)'}"


def _tables(file: File, tables: Mapping[str, str]) -> None:
    """Embeddings that are split below what their class does with its arguments. The styles of ``parallelize_module``
    take the first argument for the indices."""
    file.needs("torch.distributed.tensor", "DTensor", "Replicate", "Shard", "distribute_tensor")
    file.functions += [
        "class Split(nn.Embedding):\n"
        '    """An embedding of which each rank has a part; layout: of the output."""\n\n'
        "    layout: Replicate | Shard\n\n"
        "    def forward(self, indices: Tensor) -> Tensor:\n"
        '        indices = DTensor.from_local(indices, mesh()["tensor"], [Replicate()], run_check=False)\n'
        "        return super().forward(indices).redistribute(placements=[self.layout]).to_local()",
        "def split(table: nn.Embedding, dim: int, layout: Replicate | Shard) -> None:\n"
        '    """Split a table along a dimension, below what its class does with its arguments."""\n'
        '    weight = distribute_tensor(table.weight.detach(), mesh()["tensor"], [Shard(dim)])\n'
        "    table.weight = nn.Parameter(weight, table.weight.requires_grad)\n"
        "    own = type(table)\n"
        '    table.__class__ = type(own.__name__, (Split,) if own is nn.Embedding else (own, Split), {})\n'
        "    table.layout = layout",
    ]
    for style in dict.fromkeys(tables.values()):
        names = [name for name, own in tables.items() if own == style]
        file.layers += file.each(names, f"split(model.get_submodule(name), {style})")


def _in_place(file: File) -> None:
    """PyTorch forbids writing over the outputs of layers that are split: they are views of DTensors."""
    graph, written, activations = file.graph, dict[str, None](), False
    for i in file.plan.split:
        op = graph.operators[i]
        for reader in (graph.operators[r] for name in op.outputs for r, _ in graph.consumers[name]):
            if reader.attributes.get("target") in ("aten.where.self", "aten.masked_fill.Scalar"):
                written[op.module] = None
            activations |= reader.kind == "pointwise" and not f"{op.module}.".startswith(f"{reader.module}.")
    if activations:
        file.layers += [
            "# The outputs of layers in parts are views, which PyTorch lets nobody write over.",
            "for module in model.modules():",
            '    if getattr(module, "inplace", False):',
            "        module.inplace = False",
        ]
    if written:
        file.layers.append("# A model may write into these: x[mask] = 0.")
        hook = "lambda module, inputs, output: output.clone()"
        file.layers += file.each(list(written), f"model.get_submodule(name).register_forward_hook({hook})")


def _patterns(styles: Mapping[str, str], graph: OperatorGraph, whole: set[str]) -> dict[str, str]:
    """The styles with "layers.*" for numbers where all such modules have the same. ``whole``: modules to be named."""
    modules = {op.module for op in graph.operators}
    patterns: dict[str, str] = {}
    for name, style in styles.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        alike = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        same = all(styles.get(m) == style for m in modules if alike.fullmatch(m))
        patterns[pattern if same and name not in whole else name] = style
    return patterns


def _without_cache(file: File) -> None:
    file.layers += [
        "# What transformers' models keep for later tokens plays no part in training.",
        "for module in model.modules():",
        '    if hasattr(config := getattr(module, "config", None), "use_cache"):',
        "        config.use_cache = False",
    ]


def _recompute(file: File) -> None:
    graph, names = file.graph, list[str]()
    stages = {name: k for k, stage in enumerate(file.strategy.stages) for name in stage.operators}
    regions = regions_of(graph, "full", [stages[op.name] for op in graph.operators], file.options.recompute_blocks)
    for region in dict.fromkeys(r for r in regions if r != NO_REGION):
        members = {i for i, r in enumerate(regions) if r == region}
        first = graph.operators[min(members)]
        parts = first.module.split(".")
        for module in (".".join(parts[: k + 1]) for k in range(len(parts))):
            if members == {i for i, op in enumerate(graph.operators) if f"{op.module}.".startswith(f"{module}.")}:
                names.append(module)
                break
        else:
            raise StrategyError(
                f"recompute: the part of the model from operator {first.name!r} on, which is computed again, is not a "
                "module, and checkpoint_wrapper takes modules",
                "Use recompute none, or a model whose repeated layers are modules.",
            )
    file.needs("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper")
    file.layers.append("# Recomputation: of these modules only the inputs are kept for the backward pass.")
    file.layers += file.each(names, "model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))")


def _precision(file: File) -> None:
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[file.options.precision]
    file.needs("", "torch")
    file.needs("torch.distributed.fsdp", "MixedPrecisionPolicy")
    reduced = dtype if file.options.gradients == "as-is" else "torch.float32"
    file.constants.append(f"PRECISION = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype={reduced})")
    file.layers += [
        "# Precision: fully_shard casts weights and gradients, and keeps float32 masters; buffers are cast here.",
        "for module in model.modules():",
        "    for name, buffer in list(module.named_buffers(recurse=False)):",
        '        if buffer.is_floating_point() and not name.startswith("running_"):',
        f"            setattr(module, name, buffer.to({dtype}))",
    ]


def _data_parallel(file: File) -> None:
    file.needs("torch.nn.parallel", "DistributedDataParallel")
    trained = sum(weight.requires_grad for weight in file.graph.of_kind("parameter"))
    size = f"{file.options.bucket_bytes / 2**20:g}"
    # Given a size, DistributedDataParallel makes its first bucket no smaller than the others.
    cap = "" if file.options.bucket_bytes == Options().bucket_bytes else f", bucket_cap_mb={size}"
    file.layers += [
        f"# Data parallelism over {file.plan.data} ranks: gradients are averaged in buckets of {size} MiB.",
        'group = mesh().get_group("data")',
        "# Parameters that the plan knows nothing of are in no loss: DistributedDataParallel must not wait for them.",
        f"unused = sum(p.requires_grad for p in model.parameters()) > {trained}",
        f"model = DistributedDataParallel(model, process_group=group{cap}, find_unused_parameters=unused)",
    ]
    if file.plan.states == States.OPTIMIZER:
        file.needs("torch.distributed.optim", "ZeroRedundancyOptimizer")
        file.needs("torch", "optim")
        file.functions.append(
            "def make_optimizer(model: nn.Module, kind: type[optim.Optimizer], **options: float):\n"
            '    """Each rank keeps a part of the optimizer\'s states (ZeRO-1)."""\n'
            '    group = mesh().get_group("data")\n'
            "    return ZeroRedundancyOptimizer(model.parameters(), kind, process_group=group, **options)"
        )


def _fully_shard(file: File) -> None:
    plan = file.plan
    file.needs("torch.distributed.fsdp", "fully_shard")
    again = gathers_again(plan.states, file.options)
    if file.replicated:
        file.layers.append(f"# Data parallelism over {plan.data} ranks: whole weights on each, in one shard.")
        mesh = 'mesh()["replicate", "shard"]'
    else:
        when = "and gathered again for the backward pass" if again else "and gathered in the forward pass"
        of = f"{plan.shards} shards on each {plan.shards} ranks" if plan.shards < plan.data else f"{plan.data} shards"
        file.layers.append(f"# Weights, gradients and states in {of}, module by module, {when}.")
        mesh = 'mesh()["replicate", "shard"]' if plan.shards < plan.data else 'mesh()["data"]'
    policy = f", reshard_after_forward={again}" + ("" if file.precise else ", mp_policy=PRECISION")
    line = f"fully_shard(model.get_submodule(name), mesh={mesh}{policy})"
    whole = "part" if plan.pipeline > 1 else "model"
    file.layers += [*file.each(_blocks(file.graph), line), f"fully_shard({whole}, mesh={mesh}{policy})"]


def _blocks(graph: OperatorGraph) -> list[str]:
    """The repeated layers; of a model that has none, the modules that have weights."""
    weighted = {
        name.rpartition(".")[0]: None
        for op in graph.operators for name in op.inputs if graph.tensor[name].kind == "parameter"
    }  # fmt: skip
    numbered = (re.match(r"(?:.*?\.)??\d+(?=\.)", name) for name in weighted)
    blocks = dict.fromkeys(match[0] for match in numbered if match)
    return list(blocks) if len(blocks) > 1 else [name for name in weighted if name]
