"""Plans that PyTorch's own parts express: one mesh of pipeline x data x tensor for all layers, a form for each module.

These are what ``DistributedDataParallel``, ``fully_shard``, ``parallelize_module`` and ``torch.distributed.pipelining``
do, and torchtitan and Megatron-LM. What they cannot do is refused by the first operator or option that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.strategy.config import OperatorConfig, Sharding, States
from flexsearch.strategy.model import Strategy
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import Options
from flexsearch.strategy.schedule import ranks_of
from flexsearch.strategy.stage_modules import StageModules, stage_modules
from flexsearch.strategy.tensor_parallel import NATIVE, Flow, check_split, flow
from flexsearch.strategy.weights import has_weights, is_heavy

SINGLE: Final = ("gpipe", "1f1b")
"""Schedules whose classes in PyTorch take one stage on a rank."""

SPLIT: Final = ("zero-bubble", "zero-bubble-v", "dualpipe-v")
"""Schedules that make gradients of activations and of weights in passes of their own."""

Grid = tuple[tuple[int, ...], ...]
"""Devices of a stage: a row for each share of the samples, in it the parts of tensor parallelism."""


@dataclass(frozen=True)
class NativePlan:
    """``mesh``: devices by rank of the pipeline, replica and part of the layers. ``split``: operator (by index) -> the
    axis along which its layer is split over the last of these; ``flow``: what follows from that. ``states``: how
    replicas keep weights, and so many next to each other divide them: ``shards``, all replicas or some (hybrid
    sharding). ``held``: the stages of each rank of the pipeline; ``modules``: of each stage; one stage has
    none. ``elsewhere``: operators without weights that PyTorch runs on other parts than the plan."""

    mesh: tuple[Grid, ...]
    split: Mapping[int, str]
    flow: Flow
    states: States
    shards: int
    held: tuple[tuple[int, ...], ...]
    stages: StageModules
    elsewhere: tuple[str, ...]

    @property
    def pipeline(self) -> int:
        return len(self.mesh)

    @property
    def data(self) -> int:
        return len(self.mesh[0])

    @property
    def tensor(self) -> int:
        return len(self.mesh[0][0])


def native_plan(strategy: Strategy, graph: OperatorGraph) -> NativePlan:
    """What PyTorch's parts make of a strategy for ``graph``. Raises StrategyError with the first operator or option
    that they cannot express."""
    if strategy.orders:
        raise StrategyError(
            "schedule: the plan has an order of passes of its own (auto), which no schedule of PyTorch's runs", NATIVE
        )
    if strategy.options.recipes:
        raise StrategyError(
            f"synchronisation.recipes: replicas agree by {strategy.options.recipes[0].recipe}, which no exported file "
            "does",
            "Run it with `flexsearch run` or parallelize, or leave synchronisation.recipes out.",
        )
    if strategy.weight_gradients:
        raise StrategyError(
            f"operators.{strategy.weight_gradients[0]}.weight_gradient: the gradients of its weights have a split of "
            "their own, which no part of PyTorch's does", NATIVE
        )  # fmt: skip
    pipeline = Pipeline.of(strategy, graph)
    ends = [*pipeline.first[1:], len(graph.operators)]
    stage_of = [s for s, (a, b) in enumerate(zip(pipeline.first, ends, strict=True)) for _ in range(a, b)]
    ranks = ranks_of(pipeline.devices)
    _check_ranks(strategy, pipeline, ranks)
    configs = strategy.in_order(graph)
    grids = [_grid(graph, configs, range(a, b), pipeline.devices[s])
             for s, (a, b) in enumerate(zip(pipeline.first, ends, strict=True))]  # fmt: skip
    _check_alike(grids)
    split = _split(graph, configs, [grids[stage] for stage in stage_of])
    flowing = flow(graph, len(grids[0][0]), split, stage_of)
    elsewhere = _elsewhere(graph, configs, flowing, [grids[stage] for stage in stage_of])
    stages = stage_modules(graph, stage_of) if len(grids) > 1 else StageModules()
    block = len(strategy.cluster.devices) // pipeline.replicas
    mesh = tuple(
        tuple(tuple(d + k * block for d in row) for k in range(pipeline.replicas) for row in grids[rank[0]])
        for rank in ranks
    )
    _check_function(strategy, graph, len(mesh[0]))
    sharding = _sharding(graph, configs) if len(mesh[0]) > 1 else Sharding()
    shards = _shards(mesh, sharding.over) if sharding.states else len(mesh[0])
    return NativePlan(mesh, split, flowing, sharding.states, shards, tuple(ranks), stages, elsewhere)


def torch_plan(strategy: Strategy, graph: OperatorGraph) -> NativePlan:
    """What PyTorch alone makes of a strategy. Raises StrategyError as ``native_plan``, and where only torchtitan or
    Megatron-LM have a part for an option."""
    plan, options = native_plan(strategy, graph), strategy.options
    if options.recompute == "attention":
        raise StrategyError(
            "recompute: attention: PyTorch's checkpoint_wrapper computes whole modules again, not attention alone",
            "Use recompute full or none, or export to megatron.",
        )
    alone = plan.tensor == plan.pipeline == 1 and options.precision == "as-is"
    if plan.states == States.OPTIMIZER and not alone:
        raise StrategyError(
            "states: optimizer: PyTorch's ZeroRedundancyOptimizer does not go with tensor parallelism, pipelines or "
            "another precision",
            "Use states weights (fully_shard) or whole, or export to megatron.",
        )
    if plan.states == States.OPTIMIZER and plan.shards < plan.data:
        raise StrategyError(
            f"states: optimizer, sharded over {plan.shards} of {plan.data} replicas: PyTorch's ZeroRedundancyOptimizer "
            "divides states among all replicas",
            "Use states weights (fully_shard), leave sharded_over out, or export to megatron.",
        )
    wraps = alone and plan.states in (States.WHOLE, States.OPTIMIZER)
    scalar = next((t.name for t in graph.of_kind("parameter") if not t.shape), None)
    if scalar and not wraps and (plan.data > 1 or options.precision != "as-is"):
        raise StrategyError(
            f"parameter {scalar!r} is a scalar; PyTorch's fully_shard, which this plan needs, takes tensors of one "
            "dimension or more",
            "Give it the shape (1,) in the model, or use data parallelism with states whole.",
        )
    each = max(map(len, plan.held))
    if plan.pipeline > 1 and strategy.schedule in SINGLE and each > 1:
        raise StrategyError(
            f"schedule: {strategy.schedule}: PyTorch's runs one stage on each rank, the plan has {each}",
            "Join these stages, or use interleaved-1f1b.",
        )
    if plan.pipeline > 1 and strategy.schedule in SPLIT and plan.stages.beside:
        raise StrategyError(
            f"schedule: {strategy.schedule}: operator {plan.stages.beside[0]!r} is computed from weights and nothing "
            "that its stage receives; PyTorch's schedules that split backward passes lose gradients of such weights",
            "Use gpipe, 1f1b or interleaved-1f1b, or move the border of the stage behind it.",
        )
    if plan.pipeline > 1 and strategy.schedule in SPLIT and gathers_again(plan.states, options):
        raise StrategyError(
            f"schedule: {strategy.schedule}: weights are gathered again for the backward pass (reshard_after_forward); "
            "PyTorch's schedules that split backward passes lose gradients of such weights",
            "Use gpipe, 1f1b or interleaved-1f1b, or leave out reshard_after_forward.",
        )
    return plan


def gathers_again(states: States, options: Options) -> bool:
    """Whether weights are gathered for the backward pass, too."""
    return states == States.WEIGHTS and options.reshard_after_forward


def _check_ranks(strategy: Strategy, pipeline: Pipeline, ranks: Sequence[Sequence[int]]) -> None:
    """Raise StrategyError unless the stages run on groups of devices of one size, which together are all devices."""
    sizes = [len(devices) for devices in pipeline.devices]
    for stage, size in enumerate(sizes):
        if size != sizes[0]:
            raise StrategyError(
                f"stages: stage {stage} runs on {size} devices and stage 0 on {sizes[0]}; PyTorch's pipelining and "
                "Megatron need ranks of equal size",
                NATIVE,
            )
    used = {d for devices in pipeline.devices for d in devices}
    if len(used) != len(ranks) * sizes[0] or len(used) * pipeline.replicas != len(strategy.cluster.devices):
        raise StrategyError(
            "stages: they share a part of their devices, or leave a device without a stage; a mesh of pipeline x data "
            "x tensor cannot",
            NATIVE,
        )


def _check_alike(grids: Sequence[Grid]) -> None:
    """Raise StrategyError unless all stages are split over equally many rows and columns, and those on the same
    devices over the same ones."""
    for stage, grid in enumerate(grids):
        shape, first = (len(grid), len(grid[0])), (len(grids[0]), len(grids[0][0]))
        if shape != first:
            raise StrategyError(
                f"stages: stage {stage} is data {shape[0]} x tensor {shape[1]} and stage 0 is data {first[0]} x "
                f"tensor {first[1]}; one mesh has the same for all",
                NATIVE,
            )


def _places(op: Operator, config: OperatorConfig) -> list[tuple[int, int, int]]:
    """(Device, part of the samples, part along the other axes) for each position."""
    places = []
    for position, device in enumerate(config.devices):
        coordinate, sample, other = position // config.replicas, 0, 0
        strides = {"sample": 1, "other": 1}
        for axis, parts in reversed(config.degrees):
            coordinate, index = divmod(coordinate, parts)
            if op.roles[axis] == "sample":
                sample, strides["sample"] = sample + index * strides["sample"], strides["sample"] * parts
            else:
                other, strides["other"] = other + index * strides["other"], strides["other"] * parts
        places.append((device, sample, other))
    return places


def _decisive(graph: OperatorGraph, i: int) -> bool:
    """Whether an operator decides how its layer is split: others follow."""
    return has_weights(graph, i) or is_heavy(graph, i)


def _grid(graph: OperatorGraph, configs: Sequence[OperatorConfig], stage: range, devices: Sequence[int]) -> Grid:
    """The devices of a stage by share of the samples and part of the layers, as the first operators have it that are
    split so. Raises StrategyError for operators on other devices."""
    rows: dict[int, int] = {}
    columns: dict[int, int] = {}
    by_rows = ""
    for i in (i for i in stage if _decisive(graph, i)):
        op, config = graph.operators[i], configs[i]
        if set(config.devices) != set(devices):
            raise StrategyError(
                f"operator {op.name!r} runs on {len(config.devices)} of the {len(devices)} devices of its stage; in a "
                "plan that PyTorch's modules express every layer runs on all",
                NATIVE,
            )
        if config.shares:
            raise StrategyError(
                f"operator {op.name!r}: devices get unequal shares of {config.shares[0][0]!r}; PyTorch's data "
                "parallelism and its samplers share out samples equally",
                NATIVE,
            )
        if not any(op.roles[axis] == "sample" for axis in op.sizes):
            continue  # tables of positions: the same for all samples
        places = _places(op, config)
        own = {device: sample for device, sample, _ in places}
        if by_rows and own != rows:
            raise StrategyError(
                f"operator {op.name!r} has {1 + max(own.values())} shares of the samples, {by_rows!r} has "
                f"{1 + max(rows.values())}, or on other devices; one mesh has the same for all layers",
                NATIVE,
            )
        rows, by_rows = own, by_rows or op.name
        if not columns and len({other for _, _, other in places}) == len(devices) // len(set(own.values())):
            columns = {device: other for device, _, other in places}
    order = sorted(devices, key=lambda d: (rows.get(d, 0), columns.get(d, 0), devices.index(d)))
    width = len(devices) // (1 + max(rows.values(), default=0))
    return tuple(tuple(order[k : k + width]) for k in range(0, len(order), width))


def _split(graph: OperatorGraph, configs: Sequence[OperatorConfig], grids: Sequence[Grid]) -> dict[int, str]:
    """Operators with weights that are split over the columns of their ``grids``, and along which axis. Raises
    StrategyError where no module can be split so."""
    split_axis: dict[int, str] = {}
    of_module: dict[str, tuple[str, int]] = {}
    for i, op in enumerate(graph.operators):
        if not has_weights(graph, i):
            continue
        axes = [axis for axis, _ in configs[i].degrees if op.roles[axis] != "sample"]
        if axes:
            _check_columns(op, configs[i], grids[i])
            check_split(graph, i, axes[0])
            split_axis[i] = axes[0]
        before = of_module.setdefault(op.module, (axes[0] if axes else "", i))
        if op.kind in ("linear", "embedding") and before[0] != (axes[0] if axes else ""):
            raise StrategyError(
                f"operator {op.name!r} is not split as {graph.operators[before[1]].name!r}, which is the same module",
                NATIVE,
            )
    _check_tied(graph, split_axis)
    return split_axis


def _check_tied(graph: OperatorGraph, split: Mapping[int, str]) -> None:
    """Raise StrategyError unless all readers of a weight split it along the same dimension."""
    for tensor in graph.of_kind("parameter"):
        ways: dict[tuple[int, ...], str] = {}
        for i, position in graph.consumers[tensor.name]:
            dimensions = graph.operators[i].access.inputs[position].dimensions
            ways[tuple(k for k, d in enumerate(dimensions) if split.get(i) in d.axes)] = graph.operators[i].name
        if len(ways) > 1:
            raise StrategyError(
                f"operators {' and '.join(map(repr, list(ways.values())[:2]))} read {tensor.name!r} split in different "
                "ways; a parameter of a module is split in one",
                NATIVE,
            )


def _check_columns(op: Operator, config: OperatorConfig, grid: Grid) -> None:
    column = {device: k for row in grid for k, device in enumerate(row)}
    others = [parts for axis, parts in config.degrees if op.roles[axis] != "sample"]
    if len(others) > 1 or others[0] != len(grid[0]) or any(column[d] != k for d, _, k in _places(op, config)):
        raise StrategyError(
            f"operator {op.name!r} is split over {dict(config.degrees)} by {config.replicas} replicas; a mesh of data "
            f"{len(grid)} x tensor {len(grid[0])} splits a layer along one axis over all of its tensor part, or not",
            NATIVE,
        )


def _elsewhere(
    graph: OperatorGraph, configs: Sequence[OperatorConfig], flowing: Flow, grids: Sequence[Grid]
) -> tuple[str, ...]:  # fmt: skip
    """Operators without weights that run on other parts than the plan says. Raises StrategyError for attention and
    other products of activations, which a plan does not split in passing."""
    names = []
    for i, op in enumerate(graph.operators):
        if has_weights(graph, i):
            continue
        own = [(axis, parts) for axis, parts in configs[i].degrees if op.roles[axis] != "sample"]
        expected = list(flowing.configs[i].degrees)
        rows = _shares(op, configs[i])
        if own == expected and rows == len(grids[i]):
            continue
        if is_heavy(graph, i):
            raise StrategyError(
                f"operator {op.name!r} ({op.kind}) is split over {dict(own) or 'nothing'}; between layers that are "
                f"split as the plan says, PyTorch splits it over {dict(expected) or 'nothing'}",
                NATIVE,
            )
        names.append(op.name)
    return tuple(names)


def _shares(op: Operator, config: OperatorConfig) -> int:
    """Parts into which the samples are split."""
    shares = 1
    for axis, parts in config.degrees:
        shares *= parts if op.roles[axis] == "sample" else 1
    return shares


def _sharding(graph: OperatorGraph, configs: Sequence[OperatorConfig]) -> Sharding:
    """How replicas keep the states of all weights. Raises StrategyError unless all are kept alike."""
    weighted = [i for i in range(len(graph.operators)) if has_weights(graph, i)]
    for i in weighted:
        if configs[i].states != configs[weighted[0]].states:
            first, other = graph.operators[weighted[0]].name, graph.operators[i].name
            raise StrategyError(
                f"operator {other!r}: its weights are kept {configs[i].states.name.lower()}, those of {first!r} "
                f"{configs[weighted[0]].states.name.lower()}; one data-parallel wrapper treats all alike",
                NATIVE,
            )
        if configs[i].sharded_over != configs[weighted[0]].sharded_over:
            first, other = graph.operators[weighted[0]].name, graph.operators[i].name
            raise StrategyError(
                f"operator {other!r}: its weights are sharded over {configs[i].sharded_over or 'all'} devices, "
                f"those of {first!r} over {configs[weighted[0]].sharded_over or 'all'}; one mesh has the same "
                "shards for all",
                NATIVE,
            )
    return configs[weighted[0]].sharding if weighted else Sharding()


def _shards(mesh: Sequence[Grid], over: int) -> int:
    """How many replicas divide a weight, those among ``over`` consecutive devices (0: all). Raises StrategyError unless
    they are equally many and next to each other, for every stage and part of the layers."""
    data = len(mesh[0])
    sizes = {data} if not over else set()
    for column in (column for grid in mesh if over for column in zip(*grid, strict=True)):
        groups = [device // over for device in column]
        size = groups.count(groups[0])
        alike = [groups[k - k % size] for k in range(data)] == groups and len({*groups}) * size == data
        sizes.add(size if alike else 0)
    if len(sizes) > 1 or 0 in sizes:
        raise StrategyError(
            f"sharded_over: {over} consecutive devices do not hold equally many replicas that are next to each other; "
            "a mesh of replicas x shards has such",
            "Leave sharded_over out, or apply the plan with flexsearch.parallelize.",
        )
    return sizes.pop()


def _check_function(strategy: Strategy, graph: OperatorGraph, data: int) -> None:
    """Raise StrategyError where averaging over replicas and microbatches is another function than that of the plan."""
    parts = data * strategy.microbatches
    if graph.batch % parts:
        raise StrategyError(
            f"the batch of {graph.batch} has no equal parts for {data} replicas of {strategy.microbatches} "
            "microbatches; PyTorch averages the gradients of parts as if they were equal",
            f"Use a batch that is a multiple of {parts}.",
        )
    loss = graph.operators[graph.producer[graph.loss]]
    if parts > 1 and (loss.kind == "sum" or loss.attributes.get("reduction") == "sum"):
        raise StrategyError(
            f"operator {loss.name!r} sums over samples; PyTorch averages the gradients of replicas and microbatches",
            "Use a loss that is a mean over samples.",
        )
    norm = next((op for op in graph.operators if op.kind == "batch_norm"), None)
    groups = graph.tracing.batch_norm_groups
    on_cpu = strategy.cluster.devices[0].kind == "cpu"
    if norm and groups != data and (groups != 1 or on_cpu or strategy.microbatches > 1):
        raise StrategyError(
            f"operator {norm.name!r} takes the statistics of {groups} parts of the batch, each on its own; in PyTorch "
            f"each of {data} replicas takes those of its samples, or SyncBatchNorm, on GPUs, those of all",
            f"Import the model with --batch-norm-groups {data}.",
        )
