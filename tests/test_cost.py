"""Compute costs: the roofline by hand, measurements before estimates, and profiles as files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexsearch.cost import Costs, Profile, ProfileDevice
from flexsearch.cost.costed import Costed
from flexsearch.cost.profile import Entry, UpdateEntry, Work
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FileFormatError, ProfileError
from flexsearch.graph import Axis, Operator, OperatorGraph, Piece, Tensor, make_piece
from flexsearch.graph.importer import import_model
from flexsearch.graph.ops.base import TRACES
from flexsearch.topology import Communication, Device, Link, Topology
from flexsearch.topology.changes import captured, edited
from flexsearch.topology.kernels import USUAL

FLOPS, BANDWIDTH, OVERHEAD = 1e9, 1e9, 1e-6
FLOAT = "float32"


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name=name, size=size, role="attribute") for name, size in sizes.items())


def tensor(name: str, *shape: int, kind: str = "activation", dtype: str = FLOAT) -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=kind == "parameter")


def small_net() -> OperatorGraph:
    """Convolution of images, flattened, two linear layers of one form, a view between them, and a sum as the loss."""
    linear = {"kind": "linear", "pattern": "b o, p o, +p -> b p"}
    return OperatorGraph(
        name="net",
        tensors=(
            tensor("x", 4, 6, 9, 9, kind="input"),
            tensor("k", 8, 6, 3, 3, kind="parameter"),
            tensor("w1", 128, 128, kind="parameter"),
            tensor("b1", 128, kind="parameter"),
            tensor("w2", 128, 128, kind="parameter"),
            tensor("b2", 128, kind="parameter"),
            tensor("c", 4, 8, 4, 4),
            tensor("v", 4, 128),
            tensor("y1", 4, 128),
            tensor("y2", 4, 128),
            tensor("loss"),
        ),
        operators=(
            Operator(
                name="conv", kind="conv2d", pattern="n (g c) (2*h+KH) (2*w+KW), (g o) c KH KW -> n (g o) h w",
                axes=axes(n=4, g=1, o=8, h=4, w=4, c=6, KH=3, KW=3), inputs=("x", "k"), outputs=("c",),
                attributes={"stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "groups": 1},
            ),
            Operator(name="flat", kind="view", pattern="b c H W -> b (c H W)", axes=axes(b=4, c=8, H=4, W=4),
                     inputs=("c",), outputs=("v",)),
            Operator(name="fc1", **linear, axes=axes(b=4, p=128, o=128), inputs=("v", "w1", "b1"), outputs=("y1",)),
            Operator(name="fc2", **linear, axes=axes(b=4, p=128, o=128), inputs=("y1", "w2", "b2"), outputs=("y2",)),
            Operator(name="sum", kind="sum", pattern="b p -> ", axes=axes(b=4, p=128), inputs=("y2",),
                     outputs=("loss",), attributes={"dims": [0, 1], "keepdim": False}),
        ),
        loss="loss",
    )  # fmt: skip


def machines(*models: str, kind: str = "cpu", flops: tuple[float, ...] = (), bandwidth: float = BANDWIDTH) -> Topology:
    devices = tuple(
        Device(name=f"d{k}", kind=kind, host=f"h{k}", model=model, flops={FLOAT: flops[k] if flops else FLOPS},
               memory_bandwidth=bandwidth, memory_bytes=1 << 30, overhead_s=OVERHEAD)
        for k, model in enumerate(models)
    )  # fmt: skip
    links = tuple(Link(a="s", b=device.name, bandwidth=1e8, latency_s=1e-5) for device in devices)
    return Topology(
        name="t", devices=devices, switches=("s",), links=links, communication=Communication(backend="gloo")
    )


def training_only(*names: str) -> OperatorGraph:
    """The same graph with all other parameters frozen."""
    tensors = tuple(t.model_copy(update={"requires_grad": t.name in names}) for t in GRAPH.tensors)
    return OperatorGraph(name="frozen", tensors=tensors, operators=GRAPH.operators, loss="loss")


def piece(graph: OperatorGraph, operator: int, **intervals: tuple[int, int]) -> Piece:
    op = graph.operators[operator]
    shapes = [[graph.tensor[n].shape for n in names] for names in (op.inputs, op.outputs)]
    return make_piece(op, {a: (0, s) for a, s in op.sizes.items()} | intervals, *shapes)


def key(graph: OperatorGraph, operator: int, **extents: int) -> str:
    return Costed.of(graph, operator).signature(graph.operators[operator].sizes | extents)


def profile(entries: dict[str, Entry], model: str = "chip", **device: object) -> Profile:
    return Profile(device=ProfileDevice(kind="cpu", model=model, **device), torch="2", entries=entries)


def entry(graph: OperatorGraph, operator: int, forward_s: float, backward_s: float, **extents: int) -> Entry:
    costed = Costed.of(graph, operator)
    local = costed.op.sizes | extents
    return Entry(kind=costed.op.kind, dtype=costed.dtype, forward_s=forward_s, backward_s=backward_s, repeats=3,
                 forward=costed.forward(local), backward=costed.backward(local))  # fmt: skip


GRAPH = small_net()


def test_roofline_of_a_convolution_is_its_flops_when_it_computes_much() -> None:
    forward, backward = Costs(GRAPH, machines("chip")).compute(0, piece(GRAPH, 0, n=(0, 2), h=(1, 4)), 0)
    flops = 2 * (2 * 8 * 3 * 4) * (6 * 3 * 3)
    assert forward == pytest.approx(OVERHEAD + flops / (FLOPS * USUAL.matrix))
    assert backward == pytest.approx(forward)  # of the weight alone: images need no gradient


def test_roofline_of_a_linear_layer_is_its_bytes_when_it_moves_much() -> None:
    forward, backward = Costs(GRAPH, machines("chip")).compute(3, piece(GRAPH, 3, b=(0, 1), p=(64, 128)), 0)
    x, w, bias, y = 128, 64 * 128, 64, 64
    rate = BANDWIDTH * USUAL.memory
    assert forward == pytest.approx(OVERHEAD + 4 * (x + w + bias + y) / rate)
    assert backward == pytest.approx(OVERHEAD + 4 * (y + 2 * (x + w + bias)) / rate)


def test_a_window_reads_its_halo() -> None:
    costed = Costed.of(GRAPH, 0)
    local = costed.op.sizes | {"n": 1, "h": 2}
    assert costed.forward(local).nbytes == 4 * (6 * 5 * 9 + 8 * 6 * 9 + 8 * 2 * 4)


def test_a_view_costs_only_its_overhead() -> None:
    seconds = Costs(GRAPH, machines("chip")).compute(1, piece(GRAPH, 1), 0)
    assert seconds == pytest.approx((OVERHEAD, OVERHEAD), abs=TICK)


def test_a_gpu_is_launched_by_its_host_and_a_view_takes_it_no_time() -> None:
    devices = tuple(device.model_copy(update={"kind": "cuda"}) for device in machines("chip").devices)
    costs = Costs(GRAPH, edited(machines("chip"), devices=devices))
    assert costs.compute(1, piece(GRAPH, 1), 0) == (TICK, TICK)
    on_cpu, on_gpu = (one.compute(3, piece(GRAPH, 3), 0) for one in (Costs(GRAPH, machines("chip")), costs))
    assert [c - OVERHEAD for c in on_cpu] == pytest.approx([g - USUAL.overhead_s for g in on_gpu])
    assert costs.update(1000, 2, 0, "adam") == costs.update(1000, 1, 0, "adam")
    # convolution of images, view, linear layer with bias, sum
    assert [costs.launches(k) for k in (0, 1, 2, 4)] == [(1, 1, 1), (1, 1, 0), (1, 3, 2), (1, 1, 0)]


def test_other_work_is_further_from_the_peak() -> None:
    forward, _ = Costs(GRAPH, machines("chip", bandwidth=1e15)).compute(4, piece(GRAPH, 4), 0)
    assert forward == pytest.approx(OVERHEAD + 4 * 128 / (FLOPS * USUAL.other))


def test_an_operator_without_backward_task_has_no_backward_cost() -> None:
    graph = training_only("w2")
    costs = Costs(graph, machines("chip"))
    assert costs.compute(2, piece(graph, 2), 0)[1] == 0.0
    everything = Costs(GRAPH, machines("chip")).compute(3, piece(GRAPH, 3), 0)[1]
    assert 0 < costs.compute(3, piece(graph, 3), 0)[1] < everything


def test_cost_depends_on_the_size_of_a_piece_and_not_on_its_place() -> None:
    costs = [Costs(GRAPH, machines("chip")) for _ in range(2)]
    pieces = [piece(GRAPH, 0, h=interval) for interval in ((0, 2), (2, 4))]
    assert costs[0].compute(0, pieces[0], 0) == costs[1].compute(0, pieces[1], 0)


def test_devices_are_told_apart_by_their_figures() -> None:
    costs = Costs(GRAPH, machines("chip", "chip", flops=(FLOPS, FLOPS / 2)))
    first, second = (costs.compute(0, piece(GRAPH, 0), device)[0] for device in (0, 1))
    assert second - OVERHEAD == pytest.approx(2 * (first - OVERHEAD))


@pytest.mark.parametrize("models", [("chip",), ("chip", "other", "chip"), ("other", "chip"), ("other",)])
def test_costs_on_another_topology_are_those_of_that_topology(models: tuple[str, ...]) -> None:
    measured = profile({key(GRAPH, 2): entry(GRAPH, 2, 7.0, 9.0)})
    rates = tuple(FLOPS / (1 if model == "chip" else 2) for model in models)
    cluster = machines(*models, flops=rates)
    costs = Costs(GRAPH, machines("chip", "other", flops=(FLOPS, FLOPS / 2)), measured)
    whole = piece(GRAPH, 2)
    assert costs.compute(2, whole, 0) == (7.0, 9.0)
    if "chip" not in models:
        with pytest.raises(ProfileError):
            costs.on(cluster)
        return
    other, anew = costs.on(cluster), Costs(GRAPH, cluster, measured)
    assert other.topology is cluster
    assert other.kinds.tolist() == anew.kinds.tolist()
    for device in range(len(models)):
        assert other.compute(2, whole, device) == anew.compute(2, whole, device)
    assert costs.compute(2, whole, 0) == (7.0, 9.0)


@pytest.mark.parametrize("measured", [False, True])
def test_many_pieces_at_once_cost_what_each_costs_alone(measured: bool) -> None:
    found = profile({key(GRAPH, 2, p=64): entry(GRAPH, 2, 7.0, 9.0, p=64)}) if measured else None
    costs = Costs(GRAPH, machines("chip"), found)
    for operator, op in enumerate(GRAPH.operators):
        rows = [{a: n // d if a in op.splittable else n for a, n in op.sizes.items()} for d in (1, 2, 3)]
        if operator in (2, 3):
            rows.append(op.sizes | {"p": 64})
        columns = {a: np.array([row[a] for row in rows]) for a in op.sizes}
        many = costs.compute_many(operator, columns, 0)
        alone = [costs.compute(operator, piece(GRAPH, operator, **{a: (0, n) for a, n in row.items()}), 0)
                 for row in rows]  # fmt: skip
        assert list(zip(*(column.tolist() for column in many), strict=True)) == alone


def test_update_moves_what_the_optimizer_keeps() -> None:
    costs = Costs(GRAPH, machines("chip"))
    rate = BANDWIDTH * USUAL.memory
    for optimizer, streams in (("sgd", 3), ("momentum", 5), ("adam", 7)):
        by_bytes = costs.update(2000, 1, 0, optimizer) - costs.update(1000, 1, 0, optimizer)
        assert by_bytes == pytest.approx(1000 * streams / rate)
        assert costs.update(1000, 2, 0, optimizer) > costs.update(1000, 1, 0, optimizer)


def test_update_prefers_measurements() -> None:
    measured = profile({}).model_copy(update={"updates": {"sgd": UpdateEntry(s_per_byte=1.0, s_per_tensor=10.0)}})
    costs = Costs(GRAPH, machines("chip"), measured)
    assert costs.update(3, 2, 0, "sgd") == 23.0
    assert costs.update(3, 2, 0, "adam") == Costs(GRAPH, machines("chip")).update(3, 2, 0, "adam")


def test_a_measurement_takes_precedence() -> None:
    costs = Costs(GRAPH, machines("chip"), profile({key(GRAPH, 2, p=64): entry(GRAPH, 2, 7.0, 9.0, p=64)}))
    for operator in (2, 3):  # layers of one form share it, and so do all pieces of the size
        for half in ((0, 64), (64, 128)):
            assert costs.compute(operator, piece(GRAPH, operator, p=half), 0) == (7.0, 9.0)
    axes = GRAPH.operators[2].sizes
    assert costs.is_measured(2, {**axes, "p": 64}, 0) and not costs.is_measured(2, axes, 0)


@pytest.mark.parametrize(
    ("measured", "halves"),
    [
        ((3.0, 8.0), (3.0, 8.0)),
        ((3.0, 1.0), (3.0, 6.0)),  # together they take no less than the whole
        ((11.0, 4.0), (11.0, 4.0)),  # the first sets aside what it reads
    ],
)
def test_halves_of_backward_passes_are_measured(measured: tuple[float, float], halves: tuple[float, float]) -> None:
    both = entry(GRAPH, 2, 7.0, 9.0).model_copy(update={"halves_s": measured})
    costs, op = Costs(GRAPH, machines("chip"), profile({key(GRAPH, 2): both})), GRAPH.operators[2]
    extents = [tuple(op.sizes[axis] for axis in op.access.axes)]
    assert tuple(costs.halves(2, extents, 0)[:, 0]) == halves


def test_halves_that_were_not_measured_are_shares_of_the_whole_made_longer_as_others_of_the_kind() -> None:
    op = GRAPH.operators[2]
    extents = [tuple(op.sizes[axis] for axis in op.access.axes)]
    plain = Costs(GRAPH, machines("chip"))
    inputs, weights = plain.halves(2, extents, 0)[:, 0]
    assert inputs + weights == plain.of_extents(2, extents, 0)[1, 0]
    assert inputs == pytest.approx(weights, rel=0.1)  # two products of equal size, and the sum of the bias
    both = entry(GRAPH, 2, 7.0, 8.0, p=64).model_copy(update={"halves_s": (5.0, 7.0)})
    costs = Costs(GRAPH, machines("chip"), profile({key(GRAPH, 2, p=64): both}))
    backward, (first, second) = costs.of_extents(2, extents, 0)[1, 0], costs.halves(2, extents, 0)[:, 0]
    assert first == pytest.approx(backward * inputs / (inputs + weights))
    assert first + second == pytest.approx(1.5 * backward)


def test_frozen_layers_have_no_second_half() -> None:
    frozen = training_only("k")  # the convolution's: the layers behind it hand gradients on
    op = frozen.operators[2]
    extents = [tuple(op.sizes[axis] for axis in op.access.axes)]
    costs = Costs(frozen, machines("chip"))
    assert tuple(costs.halves(2, extents, 0)[:, 0]) == (costs.of_extents(2, extents, 0)[1, 0], 0.0)


def test_gaps_are_filled_by_the_roofline_scaled_by_the_same_kind() -> None:
    plain = Costs(GRAPH, machines("chip"))

    def scaled(operator: int, factor: float, **extents: int) -> Entry:
        local = {axis: (0, size) for axis, size in extents.items()}
        forward, backward = plain.compute(operator, piece(GRAPH, operator, **local), 0)
        return entry(GRAPH, operator, factor * forward, 2 * factor * backward, **extents)

    sizes, factors = (16, 32, 64), (2.0, 5.0, 3.0)
    entries = {key(GRAPH, 2, p=p): scaled(2, f, p=p) for p, f in zip(sizes, factors, strict=True)}
    costs = Costs(GRAPH, machines("chip"), profile(entries | {key(GRAPH, 4): scaled(4, 11.0)}))
    forward, backward = plain.compute(3, piece(GRAPH, 3), 0)
    assert costs.compute(3, piece(GRAPH, 3), 0) == pytest.approx((3 * forward, 6 * backward))
    forward, backward = plain.compute(0, piece(GRAPH, 0), 0)  # no convolution was measured: other matrix products
    assert costs.compute(0, piece(GRAPH, 0), 0) == pytest.approx((3 * forward, 6 * backward))
    loss_alone = Costs(GRAPH, machines("chip"), profile({key(GRAPH, 4): scaled(4, 11.0)}))  # none of these: all kinds
    assert loss_alone.compute(0, piece(GRAPH, 0), 0) == pytest.approx((11 * forward, 22 * backward))


def test_signature_is_readable_and_ignores_names_and_places() -> None:
    assert key(GRAPH, 2) == key(GRAPH, 3) == "linear b o, p o, p -> b p | f32* f32* f32* f32 | b=4 p=128 o=128"

    def cut(name: str, offset: int, salt: int) -> Operator:
        return Operator(name=name, kind="slice", pattern=f"a (h+{offset}) -> a h", axes=axes(a=2, h=3), inputs=("x",),
                        outputs=(name,), attributes={"salt": salt, "module": None})  # fmt: skip

    total = Operator(name="sum", kind="sum", pattern="a h -> ", axes=axes(a=2, h=3), inputs=("q",), outputs=("loss",))
    graph = OperatorGraph(
        name="slices",
        tensors=(tensor("x", 2, 9, kind="input"), tensor("p", 2, 3), tensor("q", 2, 3), tensor("loss")),
        operators=(cut("p", 1, 5), cut("q", 4, 6), total),
        loss="loss",
    )
    assert key(graph, 0) == key(graph, 1) == "slice a (h) -> a h | f32 f32 | a=2 h=3"


def test_signature_tells_apart_what_costs_differently() -> None:
    data = GRAPH.model_dump(mode="json")
    data["operators"][0]["attributes"]["groups"] = 2
    grouped, frozen = OperatorGraph.model_validate_json(json.dumps(data)), training_only("w2")
    assert len({key(GRAPH, 0), key(GRAPH, 0, n=2), key(grouped, 0), key(frozen, 0)}) == 4


@pytest.mark.parametrize(
    ("model", "threads", "fits"),
    [
        ("chip", 1, True),
        (" Chip ", 4, True),
        ("board", 1, True),
        ("other", 1, False),
        ("generic", 4, True),
        ("one server core", 1, True),
        ("one server core", 2, False),
        ("4 cores", 4, True),
        ("4 cores", 1, False),
    ],
)
def test_a_profile_fits_its_model_and_generic_ones(model: str, threads: int, fits: bool) -> None:
    measured = ProfileDevice(kind="cpu", model="chip", threads=threads, stands_for=("board",))
    assert measured.fits(machines(model).devices[0]) is fits
    assert not measured.fits(machines(model, kind="cuda").devices[0])


def test_a_profile_that_fits_no_device_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"measured on cpu 'chip'.*cpu 'other'.*stands_for"):
        Costs(GRAPH, machines("other"), profile({}))


def test_a_profile_holds_only_for_the_devices_that_it_fits() -> None:
    costs = Costs(GRAPH, machines("chip", "other"), profile({key(GRAPH, 2): entry(GRAPH, 2, 7.0, 9.0)}))
    whole = piece(GRAPH, 2)
    assert costs.compute(2, whole, 0) == (7.0, 9.0)
    assert costs.compute(2, whole, 1) == Costs(GRAPH, machines("other")).compute(2, whole, 0)


def test_profile_survives_its_file(tmp_path: Path) -> None:
    original = profile({key(GRAPH, 2): entry(GRAPH, 2, 7.0, 9.0)}, threads=2, stands_for=("board",))
    original.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == original


def test_an_extension_keeps_the_newer_measurement() -> None:
    work = Work(flops=1.0, nbytes=1.0)

    def made(**seconds: float) -> Profile:
        return profile({
            name: Entry(kind="k", dtype=FLOAT, forward_s=s, backward_s=0.0, repeats=1, forward=work, backward=work)
            for name, s in seconds.items()
        })  # fmt: skip

    both = made(a=1.0, b=1.0).extended(made(b=2.0, c=2.0))
    assert {name: e.forward_s for name, e in both.entries.items()} == {"a": 1.0, "b": 2.0, "c": 2.0}


@pytest.mark.parametrize("other", [{"model": "other"}, {"threads": 2}])
def test_profiles_of_different_devices_do_not_mix(other: dict[str, object]) -> None:
    with pytest.raises(ProfileError, match="cannot be extended"):
        profile({}).extended(profile({}, **{"model": "chip", **other}))
    with pytest.raises(ProfileError, match="beside 0 busy processes"):
        profile({}).extended(profile({}).model_copy(update={"busy_neighbours": 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"format": "flexsearch.profile/9"}, "flexsearch.profile/9"),
        (lambda d: d | {"surplus": 1}, "surplus"),
        (lambda d: {k: v for k, v in d.items() if k != "device"}, "device"),
        (lambda d: d | {"device": {"kind": "abacus", "model": "m"}}, "device.kind"),
        (lambda d: d | {"entries": {"k": {"kind": "linear"}}}, "entries.k"),
        (lambda d: d | {"updates": {"sgd": {"s_per_byte": -1.0, "s_per_tensor": 0.0}}}, "s_per_byte"),
        (lambda d: d | {"updates": {"lion": {"s_per_byte": 1.0, "s_per_tensor": 0.0}}}, "updates.lion"),
        (lambda d: d | {"busy_neighbours": "2"}, "busy_neighbours"),
    ],
)
def test_malformed_profiles_name_the_field(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(change(profile({}).model_dump(mode="json"))))  # type: ignore[operator]
    with pytest.raises(FileFormatError, match=message):
        Profile.load(path)


def test_a_truncated_profile_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"format": "flexsearch.profile/2", "dev')
    with pytest.raises(FileFormatError, match="cut off"):
        Profile.load(tmp_path / "p.json")


def test_costs_need_no_torch() -> None:
    code = "import sys, flexsearch.cost; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Sums(nn.Module):
    """A function of the input and of one parameter, summed."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(shape))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs, self.weight).sum()


def work(operator: str, function: Callable[..., torch.Tensor], *shape: int, opaque: bool = False) -> tuple[Work, Work]:
    """Forward and backward work of the operator of that name, of an input of shape (4, 6, 8)."""
    graph = import_model(Sums(function, *shape), (torch.ones(4, 6, 8),), opaque=opaque)
    costed = Costed.of(graph, graph.index[operator])
    return costed.forward(costed.op.sizes), costed.backward(costed.op.sizes)


@pytest.mark.parametrize(
    ("operator", "function", "elements"),
    [
        ("cumsum", lambda x, w: (x * w).cumsum(1), (192, 192)),
        ("flip", lambda x, w: (x * w).flip(1), (192, 192)),
    ],
)
def test_an_operator_that_is_not_looked_into_computes_as_much_as_it_reads_and_writes(
    operator: str, function: Callable[..., torch.Tensor], elements: tuple[int, int]
) -> None:
    forward, _ = work(operator, function)
    assert forward.flops == sum(elements)


@pytest.mark.parametrize(
    ("operator", "function", "comparisons"),
    [
        ("sort", lambda x, w: (x * w).sort(2)[0], 192 * 4),
        ("topk", lambda x, w: (x * w).topk(2, 2)[0], 192 * 2),
        ("cdist", lambda x, w: torch.cdist(x * w, x), 3 * 4 * 6 * 6 * 8),
        ("fft_rfft", lambda x, w: torch.fft.rfft(x * w).abs(), 2.5 * (4 * 6 * 8 + 4 * 6 * 5) * 3),
    ],
)
def test_what_works_along_a_dimension_computes_what_its_algorithm_does(
    operator: str, function: Callable[..., torch.Tensor], comparisons: float
) -> None:
    assert work(operator, function)[0].flops == comparisons


def test_a_mask_costs_no_more_than_the_arithmetic_on_its_elements() -> None:
    forward, _ = work("and", lambda x, w: (x * w.sum())[:, None] * ((x > 0)[:, None] & (w > 0)), 6, 1, 1)
    assert forward.flops == 4 * 6 * 6 * 8
    assert forward.nbytes == 4 * 6 * 8 + 6 + 4 * 6 * 6 * 8


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("index", lambda x, w: w[:, (x[0, :, 0]).long()]),
        ("gather", lambda x, w: w.gather(1, x[0].long().T)),
    ],
)
def test_looking_rows_up_reads_what_is_looked_up_and_not_the_table(
    operator: str, function: Callable[..., torch.Tensor]
) -> None:
    forward, backward = work(operator, function, 8, 1000)
    index, rows = (6 if operator == "index" else 48) * 8, 48 * 4
    assert (forward.flops, forward.nbytes) == (48, index + 2 * rows)
    assert backward.nbytes == rows + index + 2 * rows + 8 * 1000 * 4  # clears the table's gradient


def test_products_inside_an_operator_that_is_not_looked_into_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aten.conv_transpose1d", "aten.convolution"):
        monkeypatch.delitem(TRACES, name)
    forward, backward = work(
        "convolution", lambda x, w: F.conv_transpose1d(x, w), 6, 5, 3, opaque=True
    )  # (4, 6, 8) -> (4, 5, 10)
    products = 2 * (4 * 8) * 6 * (5 * 3)
    touched = 4 * 6 * 8 + 6 * 5 * 3 + 4 * 5 * 10
    assert (forward.flops, backward.flops) == (touched + products, touched + 2 * products)


def test_hosts_of_gpus_launch_as_long_as_was_measured() -> None:
    """Of an operator, or of its form or kind; captured steps have no launches in any case."""
    graph = small_net()
    device = Device(
        name="g", kind="cuda", host="h", model="H100-SXM5-80GB", flops={"float32": 1e13}, memory_bandwidth=1e12,
        memory_bytes=2**36, overhead_s=16e-6,
    )  # fmt: skip
    topology = Topology(name="one", devices=(device,), links=(), communication=Communication(backend="nccl"))
    first = Costed.of(graph, 0)
    work = Work(flops=1.0, nbytes=1.0)
    entry = Entry(
        kind=first.op.kind, dtype="float32", forward_s=1e-4, backward_s=1e-4, repeats=1, forward=work, backward=work,
        host_s=(40e-6, 100e-6),
    )  # fmt: skip
    update = UpdateEntry(s_per_byte=1e-12, s_per_tensor=1e-7, host_s_per_tensor=4e-6)
    profile = Profile(
        device=ProfileDevice(kind="cuda", model="NVIDIA H100 80GB HBM3"), torch="2", updates={"momentum": update},
        entries={first.signature({axis: 1 for axis in first.op.sizes}): entry},
    )  # fmt: skip
    costs, plain = Costs(graph, topology, profile), Costs(graph, topology)
    assert costs.launch_s(0) == plain.launch_s(0) == pytest.approx(16e-6, rel=1e-6)
    forward, backward, weights = costs.launches(0)
    assert (forward, backward) == (2.5, 6.25) and 0.0 < weights <= backward
    assert costs.launches(1) == plain.launches(1)
    assert (costs.update_launches("momentum", "as-is"), costs.update_launches("adam", "as-is")) == (0.25, 1.0)
    assert Costs(graph, captured(topology), profile).launch_s(0) == 0.0
