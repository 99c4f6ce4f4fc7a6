"""Following a neighbour leaves tensors where they are, and every baseline is legal and moves what its name promises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.files import shipped_names
from flexsearch.graph import Axis, Operator, OperatorGraph, Tensor, volume
from flexsearch.graph.notation import instantiate, parse
from flexsearch.graph.ops import axis_roles
from flexsearch.lower import Lowered, lower
from flexsearch.lower.layout import Layouts
from flexsearch.lower.pieces import Placed
from flexsearch.lower.reshard import reshard
from flexsearch.lower.split import Splitter
from flexsearch.strategy import OperatorConfig, Strategy, make_config
from flexsearch.strategy.baselines import NAMES, PIPELINES, baseline, baselines
from flexsearch.strategy.propagate import Propagation, follow
from flexsearch.strategy.weights import is_heavy
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.kernels import USUAL

LINEAR = "b.. i, o i, +o -> b.. o"
CONV = "n (g c) (s*h+d*KH-p) (s*w+d*KW-p), (g o) c KH KW, +(g o) -> n (g o) h w"
POOL = "n c (2*h+KH) (2*w+KW) -> n c h w"


class Builder:
    """Makes small graphs by hand; the first axis of an input is the batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.sample: dict[str, set[int]] = {}
        """Tensor -> its dimensions that run over the batch."""

    def source(self, name: str, *shape: int, kind: str = "input", dtype: str = "float32") -> str:
        """A tensor that no operator makes."""
        made = {"name": name, "shape": shape, "dtype": dtype, "kind": kind, "requires_grad": kind == "parameter"}
        self.tensors[name] = Tensor(**made)  # type: ignore[arg-type]
        self.sample[name] = {0} if kind == "input" and shape else set()
        return name

    def weight(self, name: str, *shape: int) -> str:
        """A parameter."""
        return self.source(name, *shape, kind="parameter")

    def add(
        self, name: str, kind: str, template: str, inputs: Sequence[str], shape: Sequence[int],
        parameters: dict[str, int] | None = None, sizes: dict[str, int] | None = None,
    ) -> str:  # fmt: skip
        """An operator with one output, called as the operator."""
        read = [self.tensors[t].shape for t in inputs]
        pattern, found = instantiate(template, read, [tuple(shape)], parameters, sizes)
        access = parse(pattern)
        batch = {
            axis
            for operand, t in zip(access.inputs, inputs, strict=True)
            for k in self.sample[t]
            for axis in operand.dimensions[k].axes[:1]
        }
        weights = [self.tensors[t].kind == "parameter" for t in inputs]
        roles = axis_roles(kind, access, batch, weights)
        axes = tuple(Axis(name=a, size=n, role=roles[a]) for a, n in found.items())
        self.operators.append(
            Operator(name=name, kind=kind, pattern=pattern, axes=axes, inputs=tuple(inputs), outputs=(name,))
        )
        self.tensors[name] = Tensor(name=name, shape=tuple(shape), dtype="float32", kind="activation")
        self.sample[name] = {k for k, d in enumerate(access.outputs[0].dimensions) if set(d.axes[:1]) & batch}
        return name

    def linear(self, name: str, x: str, features: int) -> str:
        """With bias."""
        *batch, size = self.tensors[x].shape
        weights = self.weight(f"{name}.weight", features, size), self.weight(f"{name}.bias", features)
        return self.add(name, "linear", LINEAR, [x, *weights], [*batch, features])

    def conv(self, name: str, x: str, channels: int, kernel: int = 3) -> str:
        """Padded to keep the size, with bias."""
        n, c, h, w = self.tensors[x].shape
        weights = self.weight(f"{name}.weight", channels, c, kernel, kernel), self.weight(f"{name}.bias", channels)
        parameters = {"s": 1, "d": 1, "p": kernel // 2}
        return self.add(name, "conv2d", CONV, [x, *weights], [n, channels, h, w], parameters, {"g": 1})

    def pool(self, name: str, x: str) -> str:
        """2x2 max pooling."""
        n, c, h, w = self.tensors[x].shape
        return self.add(name, "max_pool2d", POOL, [x], [n, c, h // 2, w // 2], sizes={"KH": 2, "KW": 2})

    def pointwise(self, name: str, *xs: str) -> str:
        """Of operands of one shape."""
        template = ", ".join(["a.."] * len(xs)) + " -> a.."
        return self.add(name, "pointwise", template, xs, self.tensors[xs[0]].shape)

    def norm(self, name: str, x: str) -> str:
        """layer_norm over the last dimension."""
        weights = [self.weight(f"{name}.{w}", self.tensors[x].shape[-1]) for w in ("weight", "bias")]
        return self.add(name, "layer_norm", "b.. D, D, D -> b.. D", [x, *weights], self.tensors[x].shape)

    def finish(self, x: str) -> OperatorGraph:
        """Cross entropy of (batch, classes)."""
        target = self.source("target", *self.tensors[x].shape[:1], dtype="int64")
        self.add("loss", "cross_entropy", "n C, n -> ", [x, target], [])
        return OperatorGraph(
            name=self.name, tensors=tuple(self.tensors.values()), operators=tuple(self.operators), loss="loss"
        )


def mlp(batch: int = 12, width: int = 24, layers: int = 3, classes: int = 10) -> OperatorGraph:
    b = Builder("mlp")
    x = b.source("x", batch, width)
    for k in range(layers):
        x = b.pointwise(f"relu{k}", b.linear(f"fc{k}", x, width))
    return b.finish(b.linear("out", x, classes))


def cnn(batch: int = 8, hidden: int = 256) -> OperatorGraph:
    """A small AlexNet: convolutions of few weights, linear layers of many."""
    b = Builder("cnn")
    x = b.source("x", batch, 3, 16, 16)
    for k in (1, 2):
        x = b.pool(f"pool{k}", b.pointwise(f"relu{k}", b.conv(f"conv{k}", x, 8 * k)))
    x = b.add("flatten", "view", "n c H W -> n (c H W)", [x], [batch, 16 * 4 * 4])
    for k in (3, 4):
        x = b.pointwise(f"relu{k}", b.linear(f"fc{k}", x, hidden))
    return b.finish(b.linear("fc5", x, 10))


def transformer(batch: int = 8, seq: int = 6, hidden: int = 24, heads: int = 12, layers: int = 2) -> OperatorGraph:
    """Pre-normalised blocks with tied embeddings, as GPT-2."""
    b = Builder("transformer")
    vocab, size = 50, hidden // heads
    b.source("tokens", batch, seq, dtype="int64")
    b.weight("table", vocab, hidden)
    x = b.add("embed", "embedding", "b.., v d -> b.. d", ["tokens", "table"], [batch, seq, hidden])
    for k in range(layers):
        y = b.norm(f"{k}.ln1", x)
        parts = []
        for p in "qkv":
            z = b.linear(f"{k}.{p}", y, hidden)
            z = b.add(f"{k}.{p}.view", "view", "b s (h D) -> b s h D", [z], [batch, seq, heads, size])
            parts.append(b.add(f"{k}.{p}.t", "permute", "b s h D -> b h s D", [z], [batch, heads, seq, size]))
        pattern = "b h q E, b h K E, b h K v -> b h q v"
        y = b.add(f"{k}.attention", "attention", pattern, parts, [batch, heads, seq, size])
        y = b.add(f"{k}.back", "permute", "b h s D -> b s h D", [y], [batch, seq, heads, size])
        y = b.add(f"{k}.merge", "view", "b s h D -> b s (h D)", [y], [batch, seq, hidden])
        x = b.pointwise(f"{k}.add1", x, b.linear(f"{k}.proj", y, hidden))
        y = b.pointwise(f"{k}.gelu", b.linear(f"{k}.fc1", b.norm(f"{k}.ln2", x), 4 * hidden))
        x = b.pointwise(f"{k}.add2", x, b.linear(f"{k}.fc2", y, hidden))
    x = b.add("head", "linear", "b.. i, o i -> b.. o", [b.norm("ln", x), "table"], [batch, seq, vocab])
    return b.finish(b.add("flat", "view", "b s v -> (b s) v", [x], [batch * seq, vocab]))


GRAPHS = {"mlp": mlp(), "cnn": cnn(), "transformer": transformer()}


def without_launching(topology: Topology) -> Topology:
    """As of captured graphs: nothing waits for hosts."""
    return edited(topology, devices=tuple(d.model_copy(update={"overhead_s": 0.0}) for d in topology.devices))


def with_kernels(topology: Topology, seconds: float) -> Topology:
    """GPUs that take so long to start a kernel which does not compute in half precision."""
    reached = USUAL.model_copy(update={"overhead_s": seconds})
    return edited(topology, devices=tuple(d.model_copy(update={"efficiency_full": reached}) for d in topology.devices))


def ethernet(count: int) -> Topology:
    return Topology.load(f"ethernet-1g-{count}")


def lowered(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Lowered:
    return lower(graph, strategy, topology, Costs(graph, topology))


@st.composite
def configured(draw: st.DrawFn, op: Operator, devices: int = 8) -> OperatorConfig:
    """A random legal config."""
    left, degrees = devices, {}
    for axis in draw(st.permutations(op.splittable)):
        degrees[axis] = draw(st.integers(1, min(left, op.sizes[axis])))
        left //= degrees[axis]
    parts = 1
    for n in degrees.values():
        parts *= n
    count = parts * draw(st.integers(1, left))
    return make_config(op, degrees, draw(st.permutations(range(devices)))[:count])


def test_degrees_pass_through_merged_dimensions_and_windows() -> None:
    graph = cnn()
    index = graph.index
    pool = make_config(graph.operators[index["pool2"]], {"n": 2, "c": 2}, (3, 1, 2, 0))
    flat = follow(graph, index["pool2"], pool, index["flatten"])
    assert flat == OperatorConfig((("n", 2), ("c", 2)), (3, 1, 2, 0))
    linear = follow(graph, index["flatten"], flat, index["fc3"])
    assert linear == OperatorConfig((("b0", 2), ("i", 2)), (3, 1, 2, 0))
    assert follow(graph, index["fc3"], linear, index["flatten"]) == flat
    rows = make_config(graph.operators[index["pool1"]], {"h": 4}, (0, 1, 2, 3))
    assert follow(graph, index["pool1"], rows, index["relu1"]).degrees == (("a2", 4),)
    assert follow(graph, index["pool1"], rows, index["conv2"]).degrees == (("h", 4),)


def test_what_cannot_be_carried_becomes_replicas() -> None:
    graph = mlp()
    fc, relu = graph.index["fc0"], graph.index["relu0"]
    split = make_config(graph.operators[fc], {"b0": 2, "i": 3}, (5, 4, 3, 2, 1, 0))
    assert follow(graph, fc, split, relu) == OperatorConfig((("a0", 2),), (5, 4, 3, 2, 1, 0), replicas=3)
    with pytest.raises(StrategyError, match="share no activation"):
        follow(graph, fc, split, graph.index["loss"])


@pytest.mark.parametrize("name", GRAPHS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_following_is_legal_and_keeps_tensors_where_they_are(name: str, data: st.DataObject) -> None:
    graph, topology = GRAPHS[name], ethernet(8)
    links = Propagation(graph).links
    source = data.draw(st.sampled_from(range(len(graph.operators))))
    link = data.draw(st.sampled_from(links[source]))
    config = data.draw(configured(graph.operators[source]))
    other = Propagation(graph).over(source, config, link)
    Strategy.make(  # legal
        graph, topology, {op.name: make_config(op, {}, (0,)) for op in graph.operators}
        | {graph.operators[link.target].name: other}
    )  # fmt: skip
    assert other.devices == config.devices or sorted(other.devices) == sorted(config.devices)
    quiet = {"pointwise", "view", "permute"}
    a, b = graph.operators[source], graph.operators[link.target]
    carried = {x for x, _ in link.pairs}
    all_carried = all(axis in carried for axis, _ in config.degrees) and config.parts == other.parts
    aligned = all(op.sizes[axis] % n == 0 for op, c in ((a, config), (b, other)) for axis, n in c.degrees)
    if not ({a.kind, b.kind} <= quiet and all_carried and aligned):
        return
    (p, pc), (c, cc) = ((a, config), (b, other)) if link.forward else ((b, other), (a, config))
    shapes = {t.name: t.shape for t in graph.tensors}
    made, read = (
        Placed(Splitter(x, [shapes[t] for t in x.inputs], [shapes[t] for t in x.outputs], Layouts()), config)
        for x, config in ((p, pc), (c, cc))
    )
    source, destination = made.writes[0].entries, read.reads[c.inputs.index(link.tensor)].entries
    assert reshard(source, destination, 4, topology).trivial


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize(
    "graph", [*GRAPHS.values(), mlp(batch=3), cnn(batch=2), transformer(batch=1)], ids=lambda g: g.name
)
def test_every_baseline_is_legal_on_any_number_of_devices(graph: OperatorGraph, count: int) -> None:
    topology = ethernet(count)
    found = baselines(graph, topology)
    assert {"single", "data-parallel"} <= set(found)
    for strategy in found.values():
        strategy.check(graph, topology)
        assert lowered(graph, strategy, topology).tasks.kind
    if count > 1:
        assert {"fsdp", "megatron", "placement"} <= set(found)


HUGE = {"llama_70b", "llama_405b", "gpt3_175b"}
"""The same blocks as in ``llama_7b``, more often."""


@pytest.mark.parametrize("name", [name for name in shipped_names("graphs") if name not in HUGE])
def test_every_baseline_is_legal_on_the_shipped_graphs(name: str) -> None:
    graph = OperatorGraph.load(name)
    topologies = (Topology.load("p100:2"), ethernet(3), *(ethernet(n) for n in (1, 2, 5, 7, 8)), Topology.load("k80:3"))
    for topology in topologies[: 1 if len(graph.operators) > 1000 else None]:  # the large ones repeat one block
        for strategy in baselines(graph, topology).values():
            strategy.check(graph, topology)


def test_products_appear_on_hosts_with_several_devices() -> None:
    found = baselines(GRAPHS["transformer"], Topology.load("p100:2"))
    assert set(found) == set(NAMES) - set(PIPELINES) - {
        "one-weird-trick", "layer-wise", "data-parallel x layer-wise", "data-parallel-by-speed"
    }  # fmt: skip
    linear = found["data-parallel x megatron"].configs["0.fc1"]
    assert linear == OperatorConfig((("b0", 2), ("o", 4)), tuple(range(8)))
    assert found["data-parallel x megatron-2"].configs["0.fc1"].degrees == (("b0", 4), ("o", 2))
    stages = {c.devices for c in found["data-parallel x placement"].configs.values()}
    assert stages == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_names_are_known_and_reasons_given() -> None:
    with pytest.raises(StrategyError, match="data-parallel, data-parallel-by-speed, fsdp"):
        baseline("zero", mlp(), ethernet(2))
    with pytest.raises(StrategyError, match="needs convolutions"):
        baseline("one-weird-trick", mlp(), ethernet(2))
    with pytest.raises(StrategyError, match="only one device"):
        baseline("megatron", mlp(), ethernet(1))
    with pytest.raises(StrategyError, match="has microbatches"):
        baseline("pipeline", mlp(), ethernet(2))


@pytest.mark.parametrize("graph", [mlp(width=512, classes=400), transformer(hidden=192)], ids=lambda g: g.name)
def test_data_parallel_moves_the_gradients_and_nothing_else(graph: OperatorGraph) -> None:
    topology = ethernet(4)
    found = lowered(graph, baseline("data-parallel", graph, topology), topology)
    moves = [c for c in found.tasks.communication if c is not None]
    moved: dict[str, int] = {}
    for member in (m for c in moves if c.purpose == "synchronise" for m in c.members):
        tensor = found.weights[member.key].tensor
        moved[tensor] = moved.get(tensor, 0) + member.what.nbytes
    for tensor in graph.of_kind("parameter"):
        least = 2 * 3 * tensor.nbytes  # 2 (n-1) times each byte; small ones go to everyone at once to save latency
        assert moved[tensor.name] == least or (tensor.nbytes < 2**16 and moved[tensor.name] == 2 * least)
    assert any(tensor.nbytes > 2**16 for tensor in graph.of_kind("parameter"))
    assert sum(c.nbytes for c in moves if c.purpose != "synchronise") <= 4 * 3 * 4  # the loss


def test_fsdp_stores_each_weight_once() -> None:
    graph, topology = GRAPHS["transformer"], ethernet(4)
    found = lowered(graph, baseline("fsdp", graph, topology), topology)
    stored = [volume(e.box) * graph.tensor[w.tensor].itemsize for w in found.weights for e in w.plan.storage]
    assert sum(stored) == sum(t.nbytes for t in graph.of_kind("parameter"))


def test_one_weird_trick_splits_linears_by_outputs_and_the_rest_by_the_batch() -> None:
    graph = GRAPHS["cnn"]
    configs = baseline("one-weird-trick", graph, ethernet(4)).configs
    assert all(configs[n].degrees == (("n", 4),) for n in ("conv1", "conv2", "pool1", "flatten"))
    assert all(configs[n].degrees == (("o", 4),) for n in ("fc3", "fc4"))
    assert configs["relu3"].degrees == (("a1", 4),)


@pytest.mark.parametrize("count", [2, 4])
def test_megatron_reduces_twice_forward_and_twice_backward_in_a_block(count: int) -> None:
    graph, topology = transformer(seq=64, hidden=768), ethernet(count)  # large enough not to save latency
    found = lowered(graph, baseline("megatron", graph, topology), topology)
    block = {t for t in graph.tensor if t.startswith("1.")} | {"0.add2"}  # a block and what it reads
    edges = [e for e in found.edges if e.tensor in block and graph.tensor[e.tensor].kind == "activation"]
    forward = [e for e in edges if e.forward is not None and e.forward.exchanges]
    backward = [e for e in edges if e.backward is not None and e.backward.exchanges]
    assert sorted(e.tensor for e in forward) == ["1.fc2", "1.proj"]
    assert sorted(e.tensor for e in backward) == ["1.ln1", "1.ln2"]
    for edge, plan in [(e, e.forward) for e in forward] + [(e, e.backward) for e in backward]:
        assert plan is not None and plan.form in ("all_reduce", "reduce_scatter + all_gather")
        assert sum(x.nbytes for x in plan.exchanges) == 2 * (count - 1) * graph.tensor[edge.tensor].nbytes
    assert not [c for c in found.tasks.communication if c and c.purpose in ("synchronise", "gather")]


def test_megatron_splits_the_tied_vocabulary_and_convolutions_in_turn() -> None:
    configs = baseline("megatron", GRAPHS["transformer"], ethernet(4)).configs
    assert configs["embed"].degrees == (("v", 4),) and configs["head"].degrees == (("o", 4),)
    configs = baseline("megatron", GRAPHS["cnn"], ethernet(4)).configs
    assert configs["conv1"].degrees == (("o", 4),) and configs["conv2"].degrees == (("c", 4),)


def test_placement_balances_stages_by_the_given_times() -> None:
    graph = mlp(layers=4)
    slow = graph.index["fc0"]
    found = baseline("placement", graph, ethernet(2), seconds=lambda i, d: 100.0 if i == slow else 1.0)
    first = [op.name for op in graph.operators if found.configs[op.name].devices == (0,)]
    assert first == ["fc0"]
    faster = baseline("placement", graph, ethernet(2), seconds=lambda i, d: 1.0 if d == 0 else 3.0)
    assert sum(c.devices == (0,) for c in faster.configs.values()) == 8  # of 10: as fast as two of three times the time


def test_heavy_operators_are_those_with_weights_to_split_and_attention() -> None:
    graph = GRAPHS["transformer"]
    heavy = {op.kind for i, op in enumerate(graph.operators) if is_heavy(graph, i)}
    assert heavy == {"embedding", "linear", "attention"}
