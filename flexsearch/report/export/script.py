"""A plan as a file of ordinary PyTorch that a training script imports. Writing it does not import torch."""

from __future__ import annotations

from textwrap import indent
from typing import Final

from flexsearch.graph import OperatorGraph
from flexsearch.report.export.file import File, literal, names_text
from flexsearch.report.export.layers import write_layers
from flexsearch.report.units import seconds
from flexsearch.strategy import States, Strategy
from flexsearch.strategy.native import SINGLE, torch_plan

SCHEDULES: Final = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS", "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zero-bubble-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV",
}  # fmt: skip
"""Classes of ``torch.distributed.pipelining.schedules``."""


def torch_file(strategy: Strategy, graph: OperatorGraph) -> str:
    """The text of a file with ``apply_plan``. Raises StrategyError with the first operator or option of the plan that
    PyTorch's parts cannot express."""
    plan = torch_plan(strategy, graph)
    file = File(graph, strategy, plan)
    _mesh(file)
    if plan.pipeline > 1:
        _parts(file)
    write_layers(file)
    if plan.pipeline > 1:
        return file.text(_head(file), _pipeline(file))
    if strategy.microbatches > 1:
        _microbatches(file)
    layers = indent("\n".join([*file.layers, "return model"]), "    ")
    doc = '    """The model as this rank runs it. Call it before the optimizer is made."""\n'
    return file.text(_head(file), f"def apply_plan(model: nn.Module) -> nn.Module:\n{doc}{layers}")


def _head(file: File) -> str:
    plan, strategy = file.plan, file.strategy
    sizes = (("data", plan.data), ("pipeline", plan.pipeline), ("tensor", plan.tensor))
    layout = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"
    lines = [f"{strategy.graph.name} on {strategy.cluster.name}: {layout}.", ""]
    if strategy.prediction is not None:
        time_s = strategy.prediction.iteration_s
        lines += [f"Predicted: {seconds(time_s)} a step with a global batch of {file.graph.batch}.", ""]
    lines += ["Start one process for each device; rank r is device r of the plan. In the training script:", ""]
    where = "model.cuda()" if file.device == "cuda" else "model"
    use = ["dist.init_process_group()", f"model = apply_plan({where})"]
    step = "loss(model(share(inputs)), share(target)).backward()"
    if plan.pipeline > 1:
        use[1] = f"parts, schedule = apply_plan({where}, loss)  # the optimizer takes parts.parameters()"
        step = "schedule.step(*first(share(inputs)), **last(share(target), losses))  # losses: a list"
    elif file.own_loss:
        use.append("own = {name: share(x) for name, x in batch.items()}")
        step = 'model(**own)["loss"].backward()' if strategy.microbatches == 1 else "forward_backward(model, own)"
    elif strategy.microbatches > 1:
        step = "forward_backward(model, loss, (share(inputs),), share(target))"
    if file.device == "cuda":
        use.insert(0, 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    lines += [f"    {line}" for line in [*use, step]]
    lines += ["", "The loss is a mean over samples; gradients are means over replicas and microbatches."]
    if plan.elsewhere:
        count = len(plan.elsewhere)
        what = ", ".join(plan.elsewhere[:3]) + (", ..." if count > 3 else "")
        lines += ["", f"The plan splits some operators without weights otherwise: {what}."]
    return "\n".join([*lines, ""])


def _mesh(file: File) -> None:
    """``mesh`` and ``share``."""
    plan = file.plan
    data = (("replicate", plan.data), ("shard", 1)) if file.replicated else (("data", plan.data),)
    inner = [(name, size) for name, size in (("pipeline", plan.pipeline), ("tensor", plan.tensor)) if size > 1]
    names, shape = (tuple(column) for column in zip(*data, *inner, strict=True))
    order = [device for stages in zip(*plan.mesh, strict=True) for row in stages for device in row]
    file.needs("torch", "Tensor", "nn")
    file.needs("functools", "cache")
    file.needs("torch.distributed.device_mesh", "DeviceMesh")
    if order == sorted(order):
        file.needs("torch.distributed.device_mesh", "init_device_mesh")
        body = f'    return init_device_mesh("{file.device}", {shape}, mesh_dim_names={literal(names)})'
    else:
        file.needs("", "torch")
        body = f"    ranks = torch.tensor({order}).reshape{shape}\n"
        body += f'    return DeviceMesh("{file.device}", ranks, mesh_dim_names={literal(names)})'
    file.functions += [
        f'@cache\ndef mesh() -> DeviceMesh:\n    """All ranks."""\n{body}',
        'def share(batch: Tensor) -> Tensor:\n    """This rank\'s samples of a global batch."""\n'
        f'    return batch.chunk({plan.data})[mesh().get_local_rank("{file.data}")]',
    ]


def _parts(file: File) -> None:
    """The modules of each stage, and what takes a model apart."""
    file.needs("copy", "deepcopy")
    stages = "".join(f"    {names_text(names)},\n" for names in file.plan.modules)
    file.constants += [f"STAGES = [\n{stages}]", f"HELD = {literal(file.plan.held)}  # stages of each rank"]
    file.functions += [
        'class HandOn(nn.Module):\n    """In the place of a module of another stage, with its attributes."""\n\n'
        "    def __init__(self, module: nn.Module) -> None:\n        super().__init__()\n"
        "        self.__dict__ = vars(module) | vars(self)\n\n"
        "    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:\n"
        "        return next(iter((*args, *named.values())))",
        "def returns_tensor(module: nn.Module, inputs: object, output: object) -> None:\n"
        '    """What a module returns is all that the next one gets, wherever it is."""\n'
        "    if not isinstance(output, Tensor):\n"
        "        name, kind = type(module).__name__, type(output).__name__\n"
        '        raise TypeError(f"{name} returns a {kind}; in a pipeline make it return one tensor")',
        "def plain(module: nn.Module) -> bool:\n"
        '    """Whether it is a module of PyTorch without weights or parts."""\n'
        '    own = type(module).__module__.startswith("torch.nn.")\n'
        "    return own and not [*module.children(), *module.parameters(), *module.buffers()]",
        "def part(model: nn.Module, stage: int) -> nn.Module:\n"
        '    """The model with the modules of one stage alone; these are not copied. Plain modules that the plan does\n'
        "    not name, as they change nothing at its sizes or are computed with the loss, run once, in the stage of\n"
        '    the module before them."""\n'
        "    stage_of = {name: k for k, names in enumerate(STAGES) for name in names}\n"
        "    kept = [model.get_submodule(name) for name in STAGES[stage]]\n"
        "    gone = [model.get_submodule(name) for name, k in stage_of.items() if k != stage]\n"
        "    for module in kept[:-1] if stage == len(STAGES) - 1 else kept:\n"
        "        module.register_forward_hook(returns_tensor)\n"
        "    at, inside = 0, tuple(f\"{name}.\" for name in stage_of)\n"
        "    for name, module in model.named_modules():\n"
        "        at = stage_of.get(name, at)\n"
        "        if name not in stage_of and not name.startswith(inside) and plain(module):\n"
        "            (kept if at == stage else gone).append(module)\n"
        "    return deepcopy(model, {id(m): m for m in kept} | {id(m): HandOn(m) for m in gone})",
    ]
    if file.plan.tensor > 1 or file.plan.data > 1 or file.options.recompute != "none" or not file.precise:
        file.functions.append(
            "def here(model: nn.Module, names: list[str]) -> list[str]:\n"
            '    """Those of the modules that a part of the model has."""\n'
            "    gone = [name for name, module in model.named_modules() if isinstance(module, HandOn)]\n"
            '    return [name for name in names if not any(f"{name}.".startswith(f"{g}.") for g in gone)]'
        )


def _pipeline(file: File) -> str:
    """``parallel``, ``first``, ``last``, and ``apply_plan`` for a rank of a pipeline."""
    plan, strategy = file.plan, file.strategy
    kind = SCHEDULES[strategy.schedule if strategy.microbatches > 1 or max(map(len, plan.held)) > 1 else "gpipe"]
    file.needs("", "torch")
    file.needs("collections.abc", "Callable")
    file.needs("torch.distributed.pipelining", "PipelineStage")
    file.needs("torch.distributed.pipelining.schedules", kind)
    stages = "stages[0]" if kind in (SCHEDULES[name] for name in SINGLE) else "stages"
    own = 'HELD[mesh().get_local_rank("pipeline")]'
    layers = indent("\n".join([*file.layers, "return model"]), "    ")
    file.functions += [
        f'def parallel(model: nn.Module) -> nn.Module:\n    """A part of the model as this rank runs it."""\n{layers}',
        'def first(*inputs: Tensor) -> tuple[Tensor, ...]:\n    """The inputs, where the first stage is."""\n'
        f"    return inputs if 0 in {own} else ()",
        "def last(target: Tensor, losses: list[Tensor]) -> dict[str, object]:\n"
        '    """Target and losses of the microbatches, where the last stage is."""\n'
        f'    return {{"target": target, "losses": losses}} if {len(plan.modules) - 1} in {own} else {{}}',
    ]
    return (
        "def apply_plan(model: nn.Module, loss: Callable[..., Tensor]):\n"
        '    """This rank\'s parts of the model, as it runs them, and the schedule that does."""\n'
        f"    held, group = {own}, mesh().get_group(\"pipeline\")\n"
        "    parts = nn.ModuleList(parallel(part(model, stage)) for stage in held)\n"
        f'    device = torch.device("{file.device}")\n'
        f"    stages = [PipelineStage(m, k, {len(plan.modules)}, device, group=group) for m, k in zip(parts, held)]\n"
        f"    # Schedule {strategy.schedule}: {strategy.microbatches} microbatches.\n"
        f"    return parts, {kind}({stages}, n_microbatches={strategy.microbatches}, loss_fn=loss)"
    )


def _microbatches(file: File) -> None:
    """``forward_backward``."""
    count = file.strategy.microbatches
    if file.own_loss:
        takes = "model: nn.Module, batch: dict[str, Tensor]"
        each = f"batches = ({{name: x.chunk({count})[k] for name, x in batch.items()}} for k in range({count}))"
        loop, value = "for k, own in enumerate(batches):", 'model(**own)["loss"]'
    else:
        file.needs("collections.abc", "Callable")
        takes = "model: nn.Module, loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], target: Tensor"
        each = f"samples = zip(*(x.chunk({count}) for x in inputs))"
        loop = f"for k, (own, wanted) in enumerate(zip(samples, target.chunk({count}))):"
        value = "loss(model(*own), wanted)"
    body = [f"value = {value} / {count}", "value.backward()"]
    if file.plan.states <= States.OPTIMIZER and file.plan.data > 1:
        if file.wrapped:
            file.needs("contextlib", "nullcontext")
            body = [f"with nullcontext() if k == {count - 1} else model.no_sync():", *(f"    {b}" for b in body)]
        else:
            body = [f"model.set_requires_gradient_sync(k == {count - 1})", *body]
        body.insert(0, "# Gradients are exchanged once, after the last microbatch.")
    file.needs("", "torch")
    file.functions.append(
        f"def forward_backward(\n    {takes}\n) -> Tensor:\n"
        f'    """Forward and backward pass of this rank\'s samples in {count} microbatches; their mean loss."""\n'
        f"    losses = []\n    {each}\n    {loop}\n"
        + indent("\n".join([*body, "losses.append(value.detach())"]), "        ")
        + "\n    return torch.stack(losses).sum()"
    )
