"""The plans that people write by hand, for any graph and any number of devices: what a search must beat.

- ``single``: all on the fastest device.
- ``data-parallel``: every operator split over the batch.
- ``data-parallel-by-speed``: where devices are not equally fast, each gets a share of the batch in proportion.
- ``fsdp``: data parallel with sharded weights (ZeRO-3: Rajbhandari et al., SC 2020).
- ``hsdp``: the same inside a host; the hosts have the same parts (hybrid sharding: Zhao et al., VLDB 2023).
- ``megatron``: tensor parallelism (Shoeybi et al., 2019): a weight is split by its output features, the next one on the
  way by its input features, attention by heads, vocabularies by rows; convolutions likewise by channels.
- ``placement``: consecutive stages of about equal time, one a device. One microbatch: nothing overlaps in a chain.
- ``one-weird-trick`` (Krizhevsky, 2014): convolutions data parallel, linear layers split by output features.
- ``layer-wise`` (Wu et al., 2016, as the FlexFlow paper has it): unrolled recurrent layers of the same depth on one
  device of a host, data parallel over the hosts (and inside one that has devices for every depth twice).
- products: ``data-parallel x megatron`` (tensor parallel inside a host, data parallel over the hosts; ``-2``: tensor
  parallel in pairs), ``data-parallel x placement`` (stages over the hosts, data parallel inside each) and
  ``data-parallel x layer-wise`` (unrolled layers of the same depth on one host, data parallel inside it, so that no
  gradient leaves it; hosts beyond the number of depths do nothing).
- ``pipeline`` and ``data-parallel x pipeline``: the stages of a placement with microbatches. They are made where plans
  are tuned (``search.tuning``).

Each is a walk over the operators in graph order: an operator that the plan says nothing about follows its producers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod

import numpy as np

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.ops import forward_flops
from flexsearch.graph.samples import counting
from flexsearch.strategy.config import OperatorConfig, States, make_config
from flexsearch.strategy.depth import balance, depths
from flexsearch.strategy.model import Strategy
from flexsearch.strategy.propagate import Propagation
from flexsearch.strategy.records import Options
from flexsearch.strategy.shares import in_whole_numbers
from flexsearch.strategy.weights import has_weights, is_heavy, table_axes
from flexsearch.topology import Topology

Seconds = Callable[[int, int], float]
"""(operator, device) -> seconds of the whole operator, forward and backward."""

Configs = list[OperatorConfig]
"""One config for each operator, in graph order."""


def baselines(
    graph: OperatorGraph, topology: Topology, options: Options | None = None, seconds: Seconds | None = None
) -> dict[str, Strategy]:
    """Every baseline that makes sense for this graph and topology, by name, checked. ``seconds`` balances the pipeline
    stages; without it FLOPs over the devices' rates do. ``data-parallel`` and ``single`` are always there."""
    plans, setting = {}, _Setting(graph, topology, seconds)
    for name, build in _BUILDERS.items():
        try:
            configs = build(setting)
        except _LeftOut:
            continue
        plans[name] = _strategy(graph, topology, configs, options)
    return plans


def baseline(
    name: str, graph: OperatorGraph, topology: Topology, options: Options | None = None, seconds: Seconds | None = None
) -> Strategy:
    """The baseline called ``name``. Raises StrategyError if there is none, or if it makes no sense here, with the
    reason."""
    if name in PIPELINES:
        raise StrategyError(f'the baseline "{name}" has microbatches, which flexsearch.search.tuning chooses')
    if name not in _BUILDERS:
        raise StrategyError(f'no baseline "{name}"; there are: {", ".join(NAMES)}')
    try:
        return _strategy(graph, topology, _BUILDERS[name](_Setting(graph, topology, seconds)), options)
    except _LeftOut as reason:
        raise StrategyError(f'baseline "{name}" does not apply to {graph.name} on {topology.name}: {reason}') from None


def inside_group(graph: OperatorGraph, topology: Topology, count: int, shares: int = 1) -> Configs:
    """Megatron's splits among ``count`` devices (all of it on each, if there is nothing to split), in each of
    ``shares`` rows of the first devices; rows share out the samples."""
    setting = _Setting(graph, topology, None)
    inner = [make_config(op, {}, range(count)) for op in setting.operators]
    if count > 1:
        with suppress(_LeftOut):
            inner = _tensor_parallel(setting, range(count))
    return _in_rows(setting, inner, count, shares)


def in_rows(
    graph: OperatorGraph, topology: Topology, inner: Configs, count: int, shares: int
) -> Configs:  # fmt: skip
    """The plan ``inner`` of ``count`` devices in each of ``shares`` rows of the first devices; rows share out the
    samples."""
    return _in_rows(_Setting(graph, topology, None), inner, count, shares)


def _in_rows(setting: _Setting, inner: Configs, count: int, shares: int) -> Configs:
    if shares == 1:
        return inner
    outer = setting.walk(lambda i, followed: _shared_out(setting.operators[i], followed, range(shares)))
    rows = [range(row * count, (row + 1) * count) for row in range(shares)]
    return [product(op, a, b, rows) for op, a, b in zip(setting.operators, outer, inner, strict=True)]


class _LeftOut(Exception):
    """A baseline that makes no sense here; the message is the reason."""


class _Setting:
    """What all builders start from."""

    def __init__(self, graph: OperatorGraph, topology: Topology, seconds: Seconds | None) -> None:
        self.graph, self.topology = graph, topology
        self.seconds = seconds or self._flops_seconds
        self.propagation = Propagation(graph)
        self.operators = graph.operators
        self.devices = tuple(range(len(topology.devices)))

    def several(self) -> None:
        """Leave the baseline out where there is nothing to split over."""
        if len(self.devices) < 2:
            raise _LeftOut("there is only one device")

    def walk(self, rule: Callable[[int, OperatorConfig | None], OperatorConfig]) -> Configs:
        """Configs made by ``rule`` from an operator and what it would be if it followed its producers."""
        configs: dict[int, OperatorConfig] = {}
        for i in range(len(self.operators)):
            configs[i] = rule(i, self.propagation.best(i, configs))
        return [configs[i] for i in range(len(self.operators))]

    def by_host(self) -> list[tuple[int, ...]]:
        """Devices of each host, equally many of each: the fewest that any has."""
        hosts: dict[str, list[int]] = {}
        for device, description in enumerate(self.topology.devices):
            hosts.setdefault(description.host, []).append(device)
        each = min(map(len, hosts.values()))
        return [tuple(devices[:each]) for devices in hosts.values()]

    def several_hosts(self) -> list[tuple[int, ...]]:
        """The same, for baselines that divide work inside hosts otherwise than among them."""
        hosts = self.by_host()
        if len(hosts) < 2 or len(hosts[0]) < 2:
            raise _LeftOut("it needs several hosts with several devices each")
        return hosts

    def _flops_seconds(self, operator: int, device: int) -> float:
        op = self.operators[operator]
        flops = forward_flops(op, op.sizes) + prod(op.sizes[a] for a in op.access.outputs[0].names())
        return float(flops / self.topology.devices[device].flops["float32"])


def _strategy(graph: OperatorGraph, topology: Topology, configs: Configs, options: Options | None) -> Strategy:
    return Strategy.make(graph, topology, {op.name: c for op, c in zip(graph.operators, configs, strict=True)}, options)


def _single(setting: _Setting) -> Configs:
    devices = setting.topology.devices
    fastest = max(setting.devices, key=lambda d: (devices[d].flops["float32"], -d))
    return [make_config(op, {}, (fastest,)) for op in setting.operators]


def _data_parallel(setting: _Setting) -> Configs:
    return _over_batch(setting, setting.devices)


def _by_speed(setting: _Setting) -> Configs:
    setting.several()
    rates = [1.0 / sum(setting.seconds(i, d) for i in range(len(setting.operators))) for d in setting.devices]
    shares = in_whole_numbers(rates)
    if len(set(shares)) == 1:
        raise _LeftOut("all devices are equally fast")
    fastest = sorted(setting.devices, key=lambda d: -shares[d])[: setting.graph.batch]
    devices = sorted(fastest)
    configs = _over_batch(setting, devices, [shares[d] for d in devices])
    if not any(config.shares for config in configs):
        raise _LeftOut("the batch is too small to be shared out unequally")
    return configs


def _over_batch(setting: _Setting, devices: Sequence[int], shares: Sequence[int] = ()) -> Configs:
    """Data parallelism over ``devices``; those that a small batch leaves nothing for are left out. ``shares``: of the
    batch, by device; left out: equal."""
    devices = tuple(devices)[: setting.graph.batch]
    return setting.walk(lambda i, followed: _shared_out(setting.operators[i], followed, devices, shares))


def _shared_out(
    op: Operator, followed: OperatorConfig | None, devices: Sequence[int], shares: Sequence[int] = ()
) -> OperatorConfig:
    """Samples over ``devices``, as the producers have it if they have."""
    if followed is not None and any(op.roles[a] == "sample" and n == len(devices) for a, n in followed.degrees):
        return followed
    return _by_sample(op, devices, shares) or followed or make_config(op, {}, devices)


def _by_sample(op: Operator, devices: Sequence[int], shares: Sequence[int] = ()) -> OperatorConfig | None:
    axis = next((a for a in op.axes_of("sample") if op.sizes[a] >= len(devices)), None)
    return None if axis is None else make_config(op, {axis: len(devices)}, devices, shares={axis: shares})


def _fsdp(setting: _Setting) -> Configs:
    setting.several()
    return _sharded(setting)


def _hsdp(setting: _Setting) -> Configs:
    if not setting.topology.host_size:
        raise _LeftOut("it needs several hosts, each with equally many devices, at least two")
    return _sharded(setting, setting.topology.host_size)


def _sharded(setting: _Setting, over: int = 0) -> Configs:
    return [
        config.sharded(States.WEIGHTS if has_weights(setting.graph, i) else States.WHOLE, over)
        for i, config in enumerate(_data_parallel(setting))
    ]


def _megatron(setting: _Setting) -> Configs:
    setting.several()
    return _tensor_parallel(setting, setting.devices)


def _tensor_parallel(setting: _Setting, devices: Sequence[int]) -> Configs:
    graph, count = setting.graph, len(devices)
    heavy = [i for i in range(len(setting.operators)) if is_heavy(graph, i)]
    if not any(setting.operators[i].axes_of("parameter") for i in heavy):
        raise _LeftOut("no operator has output features, channels, heads or a vocabulary to split")
    counts = counting(graph)  # each device counts all targets, so that they need not add up

    def rule(i: int, followed: OperatorConfig | None) -> OperatorConfig:
        op = setting.operators[i]
        if followed is not None and followed.parts > 1:
            return followed  # by input features after a split by output features; by heads; channel by channel
        if i in heavy:
            axes = op.axes_of("parameter") if op.kind != "embedding" else table_axes(graph, i)
            if (split := _by_axis(op, axes, devices)) is not None:
                return split
        if i > heavy[-1] and i not in counts:  # the loss: nothing after it wants the whole
            return _by_sample(op, devices) or make_config(op, {}, devices)
        return make_config(op, {}, devices)

    configs = setting.walk(rule)
    if all(config.parts == 1 for config in configs):
        raise _LeftOut(f"no weight can be divided by {count} devices")
    return configs


def _by_axis(op: Operator, axes: Sequence[str], devices: Sequence[int]) -> OperatorConfig | None:
    """Split along the first of ``axes`` that takes most parts; devices beyond them hold replicas."""
    count = len(devices)
    parts = {a: max(p for p in range(1, min(count, op.sizes[a]) + 1) if count % p == 0) for a in axes}
    best = max(parts, key=parts.__getitem__, default=None)
    return None if best is None or parts[best] == 1 else make_config(op, {best: parts[best]}, devices)


def _one_weird_trick(setting: _Setting) -> Configs:
    setting.several()
    graph, devices = setting.graph, setting.devices
    convolutions = [i for i, op in enumerate(setting.operators) if op.kind.startswith("conv")]
    linears = [
        i
        for i, op in enumerate(setting.operators)
        if not op.kind.startswith("conv") and is_heavy(graph, i) and has_weights(graph, i) and op.axes_of("parameter")
    ]
    if not convolutions or not linears:
        raise _LeftOut("it needs convolutions and linear layers")
    parallel = _data_parallel(setting)

    def rule(i: int, followed: OperatorConfig | None) -> OperatorConfig:
        op = setting.operators[i]
        if i in linears:
            return _by_axis(op, op.axes_of("parameter"), devices) or parallel[i]
        if i < linears[0] or i in convolutions or followed is None or followed.parts == 1:
            return parallel[i]
        return followed

    return setting.walk(rule)


def _placement(setting: _Setting) -> Configs:
    setting.several()
    return _stages(setting, setting.devices)


def _stages(setting: _Setting, devices: Sequence[int]) -> Configs:
    stages = zip(setting.operators, _balanced(setting, devices), strict=True)
    return [make_config(op, {}, (devices[k],)) for op, k in stages]


def stage_of(name: str, graph: OperatorGraph, topology: Topology, seconds: Seconds) -> list[int]:
    """By operator, the stage that the placement of this name (of ``PIPELINES``) puts it in, counted from 0; on more
    devices than there are stages some numbers are left out."""
    setting = _Setting(graph, topology, seconds)
    row = setting.devices if name == "placement" else [host[0] for host in setting.several_hosts()]
    return _balanced(setting, row)


def _balanced(setting: _Setting, devices: Sequence[int]) -> list[int]:
    """By operator, the place in ``devices`` of the one that does it. Consecutive operators on consecutive devices so
    that the slowest stage is as fast as possible: bisection on its time, each device filled in turn."""
    seconds = np.array([[setting.seconds(i, d) for i in range(len(setting.operators))] for d in devices])
    ends = np.cumsum(seconds, axis=1)

    def fill(limit: float) -> list[int]:
        """First operator of each stage, and the first that no stage takes."""
        starts = [0]
        for row in ends:
            done = row[starts[-1] - 1] if starts[-1] else 0.0
            starts.append(int(np.searchsorted(row, done + limit, side="right")))
        return starts

    low, high = 0.0, float(seconds.sum())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle)[-1] >= len(setting.operators) else (middle, high)
    starts = fill(high)
    stage = np.searchsorted(starts, range(len(setting.operators)), side="right") - 1
    return list(map(int, np.clip(stage, 0, len(devices) - 1)))


def _layer_wise(setting: _Setting) -> Configs:
    setting.several()
    hosts = setting.by_host()
    nodes = hosts if len(hosts[0]) > 1 else [setting.devices]
    width = min(len(nodes[0]), 1 + max(_depths(setting)))
    rows = [node[k : k + width] for node in nodes for k in range(0, len(node) - width + 1, width)]
    return _grid(setting, rows, _depths_on)


def _depths(setting: _Setting) -> Sequence[int]:
    if (depth_of := depths(setting.graph)) is None:
        raise _LeftOut("it needs recurrent layers that are unrolled: operators that read the same weights in turn")
    return depth_of


def _depths_on(setting: _Setting, devices: Sequence[int]) -> Configs:
    """Layers of the same depth on one of ``devices``, at most as many as there are depths, which are in order."""
    depth_of = _depths(setting)
    loads = [0.0] * (1 + max(depth_of))
    for i, depth in enumerate(depth_of):
        loads[depth] += setting.seconds(i, devices[0])
    place = balance(loads, len(devices))
    return [make_config(op, {}, (devices[place[k]],)) for op, k in zip(setting.operators, depth_of, strict=True)]


def _parallel_megatron(setting: _Setting) -> Configs:
    return _grid(setting, setting.several_hosts(), _tensor_parallel)


def _parallel_megatron_2(setting: _Setting) -> Configs:
    hosts = setting.by_host()
    rows = [host[k : k + 2] for host in hosts for k in range(0, len(host) - 1, 2)]
    if len(hosts[0]) == 2 or len(rows) < 2:
        raise _LeftOut("it needs hosts with more than two devices, to be taken in pairs")
    return _grid(setting, rows, _tensor_parallel)


def _parallel_placement(setting: _Setting) -> Configs:
    return _grid(setting, list(zip(*setting.several_hosts(), strict=True)), _stages)


def _parallel_layer_wise(setting: _Setting) -> Configs:
    depth = 1 + max(_depths(setting))
    return _grid(setting, list(zip(*setting.several_hosts()[:depth], strict=True)), _depths_on)


def _grid(
    setting: _Setting, rows: Sequence[Sequence[int]], inside: Callable[[_Setting, Sequence[int]], Configs]
) -> Configs:
    """Data parallelism over ``rows`` of devices, the plan ``inside`` each of them."""
    outer = _over_batch(setting, range(len(rows)))
    # Stages are balanced for the first row: its devices stand for those of the others.
    column = {device: k for k, device in enumerate(rows[0])}
    inner = [config.on(column[d] for d in config.devices) for config in inside(setting, rows[0])]
    return [product(op, a, b, rows) for op, a, b in zip(setting.operators, outer, inner, strict=True)]


def product(
    op: Operator, outer: OperatorConfig, inner: OperatorConfig, rows: Sequence[Sequence[int]]
) -> OperatorConfig:
    """Each piece of ``outer`` split again by ``inner``: ``outer`` names rows, ``inner`` columns of ``rows`` (devices).

    An axis that is too short for both degrees keeps the outer one; the inner parts become replicas."""
    shape = [n for _, n in outer.degrees] + [outer.replicas] + [n for _, n in inner.degrees] + [inner.replicas]
    grid = np.array([rows[r][c] for r in outer.devices for c in inner.devices]).reshape(shape)
    first = {axis: k for k, (axis, _) in enumerate(outer.degrees)}
    second = {axis: len(first) + 1 + k for k, (axis, _) in enumerate(inner.degrees)}
    degrees: dict[str, int] = {}
    order: list[int] = []
    for axis, size in op.sizes.items():
        degree = outer.degree(axis) * inner.degree(axis)
        dimensions = [where[axis] for where in (first, second) if axis in where]
        if degree > size:
            degree, dimensions = outer.degree(axis), dimensions[:1]
        degrees[axis] = degree
        order += dimensions
    rest = [k for k in range(len(shape)) if k not in order]
    return make_config(op, degrees, (int(d) for d in grid.transpose(order + rest).ravel()))


_BUILDERS: dict[str, Callable[[_Setting], Configs]] = {
    "single": _single,
    "data-parallel": _data_parallel,
    "data-parallel-by-speed": _by_speed,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "megatron": _megatron,
    "placement": _placement,
    "one-weird-trick": _one_weird_trick,
    "layer-wise": _layer_wise,
    "data-parallel x megatron": _parallel_megatron,
    "data-parallel x megatron-2": _parallel_megatron_2,
    "data-parallel x placement": _parallel_placement,
    "data-parallel x layer-wise": _parallel_layer_wise,
}

PIPELINES = {"pipeline": "placement", "data-parallel x pipeline": "data-parallel x placement"}
"""Baselines with microbatches, and those whose stages they have."""
NAMES = (*_BUILDERS, *PIPELINES)
"""Names of all baselines."""
