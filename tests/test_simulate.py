"""A simulated step: times are those of the definition, and bytes, busy time and memory add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK, task_seconds
from flexsearch.errors import FlexsearchError
from flexsearch.graph import Axis, Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import instantiate
from flexsearch.graph.ops import Saved, kind_of
from flexsearch.graph.precision import Precision
from flexsearch.lower import Lowered, Lowering, lower
from flexsearch.lower.rows import FORWARD
from flexsearch.lower.schedule import Stages
from flexsearch.simulate import Memory, makespan, over_memory, simulate
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests import engine_oracle
from tests.memory_spans import spans_of
from tests.random_strategies import strategies
from tests.test_delta import TOPOLOGIES

# small graphs and plans, used by the report's tests too


class FixedCosts:
    """1 ms for each axis point of 10^6, backward twice that."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.alike = tuple(range(len(graph.operators)))
        self.kinds = np.zeros(64, dtype=np.int64)
        self.profile = None

    def of_extents(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> np.ndarray:
        points = np.array([prod(extent) for extent in extents])
        backward = 2e-9 * points if self.graph.has_backward[operator] else 0.0 * points
        return task_seconds(np.stack((1e-9 * points, backward)))

    def pieces(self, operator: int, extents: Sequence[tuple[int, ...]], extent_of: np.ndarray, _: object) -> np.ndarray:
        return self.of_extents(operator, extents, 0)[:, extent_of]

    def halves(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> np.ndarray:
        backward = self.of_extents(operator, extents, kind)[1]
        weights = np.rint(0.5 * backward / TICK) * TICK
        return np.stack((backward - weights, weights))

    def casting(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> np.ndarray:
        return np.zeros(len(extents))

    def launches(self, operator: int) -> tuple[float, float, float]:
        return 1.0, 1.0, 0.0

    def launch_s(self, device: int) -> float:
        return 0.0

    def update_launches(self, optimizer: str, precision: str) -> float:
        return 1.0

    def update_rates(self, device: int, optimizer: str, precision: Precision = "as-is") -> tuple[float, float]:
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
    graph: OperatorGraph, topology: Topology, degrees: Mapping[str, Mapping[str, int]], states: States = States.WHOLE,
    **options: object,
) -> Lowered:  # fmt: skip
    """``degrees``: operator name -> degrees, or "" for those not named: by batch where none is given."""
    everyone = range(len(topology.devices))
    configs = {}
    for op in graph.operators:
        batch = {op.axes_of("sample")[0]: len(topology.devices)} if op.axes_of("sample") else {}
        configs[op.name] = make_config(op, degrees.get(op.name, degrees.get("", batch)), everyone, states)
    strategy = Strategy.make(graph, topology, configs, Options(**options))  # type: ignore[arg-type]
    return lower(graph, strategy, topology, FixedCosts(graph))  # type: ignore[arg-type]


def weird_trick(graph: OperatorGraph, topology: Topology) -> Lowered:
    """Convolutions by batch, linear layers and what follows them by output features."""
    n = len(topology.devices)
    degrees = {op.name: {"o": n} for op in graph.operators if op.kind == "linear"}
    degrees |= {op.name: {"b1": n} for op in graph.operators if op.name.startswith("classifier.relu")}
    return plan(graph, topology, degrees)


# a whole step


@pytest.fixture(scope="module")
def hosts() -> Topology:
    return Topology.load("ethernet-1g:4")


def test_simulation_accounts_for_all_time_and_bytes(hosts: Topology) -> None:
    lowered = plan(convnet(), hosts, {})
    s = simulate(lowered)
    assert s.makespan_s == s.end.max() == makespan(lowered)
    np.testing.assert_allclose(s.busy_s + s.idle_s, s.makespan_s)
    weights = sum(t.nbytes for t in lowered.graph.of_kind("parameter"))
    assert s.moved_bytes == pytest.approx(2 * 3 * weights, rel=0.01)  # a ring, or scatter and gather: 2 (n-1)/n each
    links = [k for k, r in enumerate(hosts.resources) if r.kind == "link"]
    assert s.link_bytes[links].sum() == pytest.approx(2 * s.moved_bytes, rel=0.01)  # host -> switch -> host
    assert (s.link_busy_s <= s.makespan_s + 1e-12).all()
    processors = [k for k, r in enumerate(hosts.resources) if r.kind == "processor"]
    assert (s.link_busy_s[processors] >= s.busy_s - 1e-12).all()
    assert (s.link_bytes[processors] == 0).all()


@settings(derandomize=True, max_examples=20, deadline=None, phases=(Phase.generate,))
@given(st.data(), st.sampled_from(sorted(TOPOLOGIES)), st.sampled_from([mlp(), convnet()]), st.integers(1, 3))
def test_starts_and_ends_are_those_of_the_definition(
    data: st.DataObject, name: str, graph: OperatorGraph, microbatches: int
) -> None:
    topology = TOPOLOGIES[name]()
    everyone = tuple(range(len(topology.devices)))
    strategy = data.draw(strategies(graph, topology))
    stages = Stages((0, 2), (everyone, everyone), microbatches) if microbatches > 1 else Stages.one(len(everyone))
    lowering = Lowering(graph, topology, Costs(graph, topology))
    lowered = lowering.lower(strategy.in_order(graph), strategy.options, stages)
    rows, found = lowered.rows, simulate(lowered)
    definition = engine_oracle.Simulation(rows.schedule, rows.machine, rows.segments, rows.segment)
    assert found.makespan_s == definition.run() * TICK
    for row, start, end in zip(lowered.tasks.identity, found.start, found.end, strict=True):
        assert (start, end) == tuple(ticks * TICK for ticks in definition.times[row])  # type: ignore[index]
    assert len(lowered.tasks) == len(definition.times)


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
    images = 64 * 3 * 256 * 4
    given_bytes = images + 64 * 4 * 4 + images  # the convolution reads a copy with the channels last
    feature_map = 64 * 8 * 256 * 4
    # The map is kept for fc's weight gradient; its own gradient stands beside it. Were the view counted, it were three.
    assert use.activations == pytest.approx(given_bytes + 2 * feature_map, rel=0.01)


def test_splitting_divides_what_each_device_holds(hosts: Topology) -> None:
    graph = convnet()
    alone = simulate(plan(graph, Topology.load("ethernet-1g:1"), {})).memory[0]
    data_parallel = simulate(plan(graph, hosts, {})).memory
    sharded = simulate(plan(graph, hosts, {}, states=States.WEIGHTS)).memory
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

    def saved(op: Operator, *before: Operator) -> Saved:
        return kind_of(op).saves(op, *before)

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
    last = 4 * int(np.flatnonzero(lowered.rows.blocks.kind == FORWARD).max()) + 3  # moment at which the forward ends
    spans = [s for s in spans_of(lowered) if s.part == "activations" and s.first <= last < s.last]
    assert sum(s.nbytes for s in spans) == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.parametrize(
    "slow, remedy",
    (("memory_bandwidth", "overhead_s of device 0, and the times of its profile"), ("bandwidth", "latency_s")),
)
def test_a_step_of_more_than_24_days_is_refused(slow: str, remedy: str) -> None:
    """Its ticks would not fit an int64."""
    graph = mlp(widths=(4096, 4096), inputs=4096)
    fields = Topology.load("ethernet-1g:2").model_dump()
    for row in fields["devices" if slow == "memory_bandwidth" else "links"]:
        row[slow] = 1.0
    topology = Topology(**fields)
    plans = {name: baseline(name, graph, topology) for name in ("data-parallel", "single")}
    refused = {name for name, plan in plans.items() if _is_endless(graph, plan, topology, remedy)}
    assert refused == ({"data-parallel", "single"} if slow == "memory_bandwidth" else {"data-parallel"})


def _is_endless(graph: OperatorGraph, plan: Strategy, topology: Topology, remedy: str) -> bool:
    try:
        makespan(lower(graph, plan, topology, Costs(graph, topology)))
    except FlexsearchError as error:
        assert "24 days, which is too long to be simulated" in error.message and remedy in error.remedy
        return True
    return False
