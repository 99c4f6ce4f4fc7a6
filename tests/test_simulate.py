"""The simulator: the compiled kernel gives the bits of a plain one, and memory and critical paths add up."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost.communication import Transfer
from flexsearch.cost.ticks import task_seconds
from flexsearch.graph import Axis, Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import instantiate
from flexsearch.graph.ops import Saved, kind_of
from flexsearch.lower import Communication, Lowered, TaskArrays, TaskGraph, TaskKind, lower
from flexsearch.simulate import Memory, makespan, over_memory, simulate
from flexsearch.simulate.kernel import run, times
from flexsearch.simulate.memory import spans_of
from flexsearch.strategy import Options, Strategy, make_config
from flexsearch.topology import Topology

# small graphs and plans, used by the report's tests too


class FixedCosts:
    """1 ms for each axis point of 10^6, backward twice that."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.alike = tuple(range(len(graph.operators)))

    def pieces(self, operator: int, extents: Sequence[tuple[int, ...]], extent_of: np.ndarray, _: object) -> object:
        points = np.array([prod(extent) for extent in extents])[extent_of]
        backward = 2e-9 * points if self.graph.has_backward[operator] else 0.0 * points
        return task_seconds(np.stack((1e-9 * points, backward)))

    def update_rates(self, device: int, optimizer: str) -> tuple[float, float]:
        return 1e-10, 0.0

    def update_rates(self, device: int, optimizer: str) -> tuple[float, float]:
        return 1e-10, 0.0


class GraphMaker:
    """Builds operator graphs by hand from the importer's patterns."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []

    def tensor(self, name: str, shape: Sequence[int], kind: str, dtype: str = "float32") -> str:
        trained = kind == "parameter"
        self.tensors[name] = Tensor(
            name=name, shape=tuple(shape), dtype=dtype, kind=kind, requires_grad=trained  # type: ignore[arg-type]
        )  # fmt: skip
        return name

    def add(
        self, name: str, kind: str, template: str, inputs: Sequence[str], shape: Sequence[int],
        roles: Mapping[str, str], **attributes: object,
    ) -> str:  # fmt: skip
        parameters = {k: v for k, v in attributes.items() if isinstance(v, int) and len(k) == 1}
        pattern, sizes = instantiate(template, [self.tensors[n].shape for n in inputs], [shape], parameters, {})
        axes = tuple(Axis(name=a, size=n, role=roles.get(a, "reduction")) for a, n in sizes.items())  # type: ignore[arg-type]
        kept = {k: v for k, v in attributes.items() if len(k) > 1}
        self.tensor(f"{name}.out", shape, "activation")
        self.operators.append(
            Operator(
                name=name, kind=kind, pattern=pattern, axes=axes, inputs=tuple(inputs), outputs=(f"{name}.out",),
                attributes=kept, module=name,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        return f"{name}.out"

    def linear(self, name: str, x: str, features: int) -> str:
        batch, width = self.tensors[x].shape
        weight = self.tensor(f"{name}.weight", (features, width), "parameter")
        bias = self.tensor(f"{name}.bias", (features,), "parameter")
        roles = {"b0": "sample", "o": "parameter", "i": "reduction"}
        return self.add(name, "linear", "b.. i, o i, +o -> b.. o", (x, weight, bias), (batch, features), roles)

    def conv(self, name: str, x: str, channels: int, kernel: int = 3) -> str:
        n, c, h, w = self.tensors[x].shape
        weight = self.tensor(f"{name}.weight", (channels, c, kernel, kernel), "parameter")
        roles = {"n": "sample", "o": "parameter", "h": "attribute", "w": "attribute"}
        return self.add(
            name, "conv2d", "n c (h+KH-p) (w+KW-p), o c KH KW -> n o h w", (x, weight), (n, channels, h, w), roles,
            p=kernel // 2,
        )  # fmt: skip

    def pointwise(self, name: str, target: str, *inputs: str) -> str:
        shape = self.tensors[inputs[0]].shape
        roles = {"b0": "sample", "b1": "attribute", "b2": "attribute", "b3": "attribute"}
        template = ", ".join("b.." for _ in inputs) + " -> b.."
        return self.add(name, "pointwise", template, inputs, shape, roles, target=f"aten.{target}.default")

    def flatten(self, name: str, x: str) -> str:
        n, c, h, w = self.tensors[x].shape
        roles = {"b": "sample", "c": "attribute"}
        return self.add(name, "view", "b c H W -> b (c H W)", (x,), (n, c * h * w), roles)

    def loss(self, x: str) -> OperatorGraph:
        target = self.tensor("target", self.tensors[x].shape, "input")
        out = self.add("loss", "mse_loss", "b.. , b.. -> ", (x, target), (), {"b0": "sample"})
        return OperatorGraph(
            name="small", tensors=tuple(self.tensors.values()), operators=tuple(self.operators), loss=out
        )


def mlp(batch: int = 8, widths: Sequence[int] = (64, 64, 64), inputs: int = 64) -> OperatorGraph:
    g = GraphMaker()
    x = g.tensor("x", (batch, inputs), "input")
    for k, width in enumerate(widths):
        x = g.linear(f"fc{k}", x, width)
        if k < len(widths) - 1:
            x = g.pointwise(f"relu{k}", "relu", x)
    return g.loss(x)


def convnet(batch: int = 16) -> OperatorGraph:
    """Five convolutions with little weight, three linear layers with much: AlexNet in small."""
    g = GraphMaker()
    x = g.tensor("x", (batch, 3, 16, 16), "input")
    for k in range(1, 6):
        x = g.pointwise(f"features.relu{k}", "relu", g.conv(f"features.conv{k}", x, 8))
    x = g.flatten("flatten", x)
    for k in range(6, 9):
        x = g.linear(f"classifier.fc{k}", x, 512)
        if k < 8:
            x = g.pointwise(f"classifier.relu{k}", "relu", x)
    return g.loss(x)


def plan(
    graph: OperatorGraph, topology: Topology, degrees: Mapping[str, Mapping[str, int]], shard: bool = False,
    **options: object,
) -> Lowered:  # fmt: skip
    """``degrees``: operator name -> degrees, or "" for those not named: by batch where none is given."""
    everyone = range(len(topology.devices))
    configs = {}
    for op in graph.operators:
        batch = {op.axes_of("sample")[0]: len(topology.devices)} if op.axes_of("sample") else {}
        configs[op.name] = make_config(op, degrees.get(op.name, degrees.get("", batch)), everyone, shard)
    strategy = Strategy.make(graph, topology, configs, Options(**options))  # type: ignore[arg-type]
    return lower(graph, strategy, topology, FixedCosts(graph))  # type: ignore[arg-type]


def weird_trick(graph: OperatorGraph, topology: Topology) -> Lowered:
    """Convolutions by batch, linear layers and what follows them by output features."""
    n = len(topology.devices)
    degrees = {op.name: {"o": n} for op in graph.operators if op.kind == "linear"}
    degrees |= {op.name: {"b1": n} for op in graph.operators if op.name.startswith("classifier.relu")}
    return plan(graph, topology, degrees)


# the kernel


def reference(tasks: TaskGraph) -> tuple[list[float], list[float]]:
    """The same rules, in plain Python."""
    n = len(tasks)
    readers: list[list[int]] = [[] for _ in range(n)]
    missing = [len(row) for row in tasks.dependencies]
    for t, row in enumerate(tasks.dependencies):
        for d in row:
            readers[d].append(t)
    ready, start, end, free = [0.0] * n, [-1.0] * n, [0.0] * n, {}
    left = list(tasks.duration)
    heap = [(0.0, t) for t in range(n) if not missing[t]]
    while heap:
        _, t = heapq.heappop(heap)
        begin = max([ready[t], *(free.get(r, 0.0) for r, _ in tasks.links[t])])
        start[t] = begin if start[t] < 0 else start[t]
        if tasks.turn[t] < left[t]:
            left[t] -= tasks.turn[t]
            ready[t] = begin + tasks.turn[t]
            free.update((r, ready[t]) for r, _ in tasks.links[t])
            heapq.heappush(heap, (ready[t], t))
            continue
        for r, s in tasks.links[t]:
            free[r] = begin + (s if left[t] == tasks.duration[t] else left[t])
        for r, s in tasks.drag[t]:
            free[r] = max(free.get(r, 0.0), ready[t]) + s
        end[t] = begin + left[t]
        for follower in readers[t]:
            ready[follower] = max(ready[follower], end[t])
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(heap, (ready[follower], follower))
    return start, end


@st.composite
def task_graphs(draw: st.DrawFn) -> TaskGraph:
    tasks = TaskGraph()
    seconds = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.3]), st.floats(0, 2, allow_nan=False))  # ties are likely
    for t in range(draw(st.integers(1, 40))):
        rows = st.lists(st.tuples(st.integers(0, 5), seconds), max_size=3, unique_by=lambda row: row[0])
        tasks.kind.append(TaskKind.FORWARD)
        tasks.operator.append(0)
        tasks.device.append(0)
        tasks.duration.append(draw(seconds))
        tasks.communication.append(None)
        tasks.dependencies.append(sorted(draw(st.sets(st.integers(0, t - 1), max_size=4))) if t else ())
        tasks.links.append(draw(rows))
        tasks.drag.append(draw(rows) if draw(st.booleans()) else ())
        tasks.turn.append(draw(st.sampled_from([inf, inf, 0.1, 0.07])))
    return tasks


@settings(derandomize=True, max_examples=200, deadline=None)
@given(task_graphs())
def test_kernel_gives_the_bits_of_a_plain_simulator(tasks: TaskGraph) -> None:
    start, end = reference(tasks)
    total, kernel_start, kernel_end = times(tasks.arrays())
    assert kernel_start.tolist() == start
    assert kernel_end.tolist() == end
    assert total == max(end) == makespan(tasks)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(task_graphs())
def test_no_task_overlaps_another_on_a_link_or_starts_before_its_dependencies(tasks: TaskGraph) -> None:
    _, start, end = times(tasks.arrays())
    for t, row in enumerate(tasks.dependencies):
        assert all(end[d] <= start[t] for d in row)
    for resource in range(6):
        held = sorted(
            (start[t], start[t] + s)
            for t, row in enumerate(tasks.links)
            for r, s in row
            if r == resource and tasks.turn[t] == inf  # a task that takes turns lets others in between
        )
        assert all(a[1] <= b[0] or a[1] == a[0] for a, b in pairwise(held))


def test_latency_does_not_occupy_a_link_and_drag_delays_only_the_processor() -> None:
    tasks = TaskGraph()
    for duration, links, drag in (
        (1.5, ((1, 1.0),), ((0, 0.25),)),  # a message: link busy for 1 s, arrived after 1.5 s
        (1.5, ((1, 1.0),), ()),  # the next message follows after 1 s
        (2.0, ((0, 2.0),), ()),  # computing, 0.25 s late
    ):
        tasks.kind.append(TaskKind.FORWARD)
        tasks.operator.append(0)
        tasks.device.append(0)
        tasks.duration.append(duration)
        tasks.communication.append(None)
        tasks.dependencies.append(())
        tasks.links.append(links)
        tasks.drag.append(drag)
        tasks.turn.append(inf)
    _, start, end = times(tasks.arrays())
    assert start.tolist() == [0.0, 1.0, 0.25]
    assert end.tolist() == [1.5, 2.5, 2.25]


def test_a_transfer_that_waits_for_its_link_does_not_hold_the_processor() -> None:
    tasks = TaskGraph()
    transfer = Transfer(1.0, ((1, 1.0),), ((0, 0.125),), ())
    for _ in range(2):
        tasks.communicate(Communication("forward", "exchange", (0,), (), (), (), transfer, 0), (), 1.0)
    tasks.compute(TaskKind.FORWARD, 0, 0, 0, 1.0, ())
    assert times(tasks.arrays())[1].tolist() == [0.0, 1.0, 0.25]


def test_devices_that_share_a_processor_take_turns() -> None:
    tasks = TaskGraph()
    for _ in range(2):
        tasks.compute(TaskKind.FORWARD, 0, 0, 0, 1.0, (), turn=0.25)
    makespan_s, start, end = times(tasks.arrays())
    assert makespan_s == 2.0
    assert start.tolist() == [0.0, 0.25] and end.tolist() == [1.75, 2.0]


def test_a_simulation_is_given_up_when_what_follows_a_task_comes_too_late() -> None:
    """Ten tasks of 1 s share a resource; the last is followed by one of 5 s elsewhere. The critical path (6 s) and the
    work of each resource (10 s) are below the limit; the end is known to be above it when task 9 starts at 9 s."""
    count = 11
    duration = np.array([1.0] * 10 + [5.0])
    rows = np.arange(count + 1, dtype=np.uint32)
    link = np.array([0] * 10 + [1], np.uint32)
    dependency_start = np.array([0] * 11 + [1], np.uint32)
    none, start, end = np.zeros(count + 1, np.uint32), np.empty(count), np.empty(count)

    def simulated(limit: float) -> float:
        return float(run(
            duration, dependency_start, np.array([9], np.uint32), rows, link, duration, none, none[:0], duration[:0],
            np.full(count, inf), start, end, np.empty(count), np.empty(count), np.empty(2), none.copy(),
            np.empty(count + 2, np.uint32), np.empty(1, np.uint32), none.copy(), np.empty(2), limit,
        ))  # fmt: skip

    assert simulated(inf) == simulated(15.0) == 15.0
    assert simulated(12.0) == inf and start[8] == 8.0 and start[9] == -1.0


def test_an_empty_task_graph_takes_no_time() -> None:
    assert makespan(TaskGraph()) == 0.0


# a whole step


@pytest.fixture(scope="module")
def hosts() -> Topology:
    return Topology.load("ethernet-1g:4")


def test_simulation_accounts_for_all_time_and_bytes(hosts: Topology) -> None:
    lowered = plan(convnet(), hosts, {})
    s = simulate(lowered)
    assert s.makespan_s == s.end.max() == makespan(lowered.tasks)
    np.testing.assert_allclose(s.busy_s + s.idle_s, s.makespan_s)
    weights = sum(t.nbytes for t in lowered.graph.of_kind("parameter"))
    assert s.moved_bytes == pytest.approx(2 * 3 * weights, rel=0.01)  # a ring, or scatter and gather: 2 (n-1)/n each
    links = [k for k, r in enumerate(hosts.resources) if r.kind == "link"]
    assert s.link_bytes[links].sum() == pytest.approx(2 * s.moved_bytes, rel=0.01)  # host -> switch -> host
    assert (s.link_busy_s <= s.makespan_s + 1e-12).all()
    processors = [k for k, r in enumerate(hosts.resources) if r.kind == "processor"]
    assert (s.link_busy_s[processors] >= s.busy_s - 1e-12).all()
    assert (s.link_bytes[processors] == 0).all()


# memory


def test_a_single_device_holds_weights_gradients_state_and_activations() -> None:
    topology = Topology.load("ethernet-1g:1")
    graph = mlp(batch=8, widths=(64, 64), inputs=64)
    weights = sum(t.nbytes for t in graph.of_kind("parameter"))
    (use,) = simulate(plan(graph, topology, {}, optimizer="adam")).memory
    assert use.weights == weights
    assert use.optimizer == 2 * weights
    tensor = 8 * 64 * 4
    last = 64 * 64 * 4 + 64 * 4
    # At the end all gradients are there and x, target are; at the loss only activations are. Weights outweigh here.
    assert use.gradients == weights
    assert use.buffers == 0
    assert 2 * tensor <= use.activations <= 8 * tensor
    (sgd,) = simulate(plan(graph, topology, {}, optimizer="sgd")).memory
    assert sgd.optimizer == 0
    assert sgd.peak == use.peak - 2 * weights
    assert last < sgd.peak


def test_activations_wait_for_their_backward_and_views_take_nothing() -> None:
    topology = Topology.load("ethernet-1g:1")
    g = GraphMaker()
    x = g.flatten("flat", g.conv("conv", g.tensor("x", (64, 3, 16, 16), "input"), 8))
    viewed = g.loss(g.linear("fc", x, 4))
    (use,) = simulate(plan(viewed, topology, {})).memory
    given_bytes = 64 * 3 * 256 * 4 + 64 * 4 * 4
    feature_map = 64 * 8 * 256 * 4
    # The map is kept for fc's weight gradient; its own gradient stands beside it. Were the view counted, it were three.
    assert use.activations == pytest.approx(given_bytes + 2 * feature_map, rel=0.01)


def test_splitting_divides_what_each_device_holds(hosts: Topology) -> None:
    graph = convnet()
    alone = simulate(plan(graph, Topology.load("ethernet-1g:1"), {})).memory[0]
    data_parallel = simulate(plan(graph, hosts, {})).memory
    sharded = simulate(plan(graph, hosts, {}, shard=True)).memory
    trick = simulate(weird_trick(graph, hosts)).memory
    assert all(m.weights == alone.weights for m in data_parallel)
    assert all(m.optimizer == alone.optimizer for m in data_parallel)
    for m in sharded:
        assert m.optimizer == pytest.approx(alone.optimizer / 4, rel=0.05)
    for m in trick:
        assert m.weights < 0.3 * alone.weights
        assert m.optimizer < 0.3 * alone.optimizer
    assert max(m.peak for m in trick) < min(m.peak for m in data_parallel)


def test_a_plan_that_does_not_fit_names_devices_and_shortfall(hosts: Topology) -> None:
    s = simulate(plan(convnet(), hosts, {}))
    assert over_memory(s, hosts) == []
    limits = [10**12, 10**12, 1000, 10**12]
    devices = [d.model_copy(update={"memory_bytes": n}) for d, n in zip(hosts.devices, limits, strict=True)]
    assert over_memory(s, hosts.model_copy(update={"devices": devices})) == [(2, s.peak_bytes[2] - 1000)]


def test_unused_devices_hold_nothing_but_the_loss(hosts: Topology) -> None:
    graph = mlp()
    configs = {op.name: make_config(op, {}, (1,)) for op in graph.operators}
    lowered = lower(graph, Strategy.make(graph, hosts, configs), hosts, FixedCosts(graph))  # type: ignore[arg-type]
    s = simulate(lowered)
    assert s.memory[0] == Memory(activations=4)
    assert s.peak_bytes[1] > 0
    assert s.busy_s[0] == 0.0
    assert s.idle_s[1] <= 1e-3  # the loss may be under way when the last task ends
    assert s.moved_bytes == 3 * 4


def test_what_a_backward_needs_follows_the_kind() -> None:
    graph = convnet()
    op = {o.name: o for o in graph.operators}

    def saved(op: Operator, before: Operator | None = None) -> Saved:
        return kind_of(op).saves(op, before)

    assert saved(op["flatten"]).alias
    assert saved(op["features.relu1"])[:2] == (False, True)
    assert saved(op["features.conv1"])[:2] == (True, False)
    assert saved(op["loss"])[:2] == (True, False)
    unknown = op["loss"].model_copy(update={"kind": "something new"})
    assert saved(unknown)[:2] == (True, True)
    assert not saved(op["flatten"], op["flatten"].model_copy(update={"kind": "permute"})).alias


@pytest.mark.parametrize("name", ["lenet", "gpt2", "rnntc"])
def test_activations_kept_for_the_backward_are_those_that_autograd_saves(name: str) -> None:
    torch = pytest.importorskip("torch")
    from flexsearch import zoo
    from flexsearch.graph.importer import import_model

    z = {
        "lenet": lambda: zoo.lenet(batch=32),
        "gpt2": lambda: zoo.gpt2(batch=2, layers=2, hidden=64, heads=4, vocab=500, seq=64),
        "rnntc": lambda: zoo.rnntc(batch=16, steps=8, layers=2, hidden=64, vocab=100),
    }[name]()
    weights = {p.untyped_storage().data_ptr() for p in z.model.parameters()}
    saved: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z.loss(z.model(*z.inputs), z.targets)
    lowered = plan(import_model(z.model, z.inputs, z.loss, targets=z.targets), Topology.load("ethernet-1g:1"), {})
    last = 2 * (len(lowered.weights) + len(lowered.graph.operators)) - 1  # blocks of gathers stand before the forward's
    spans = [s for s in spans_of(lowered) if s.part == "activations" and s.first <= last < s.last]
    assert sum(s.nbytes for s in spans) == pytest.approx(sum(saved.values()), rel=0.1)


def test_task_arrays_are_the_only_thing_the_kernel_needs(hosts: Topology) -> None:
    arrays = plan(mlp(), hosts, {}).tasks.arrays()
    assert isinstance(arrays, TaskArrays)
    assert makespan(arrays) > 0
