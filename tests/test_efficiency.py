"""What kernels reach of a device's peaks, by the device's own figures."""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.truth import Scored, in_ranks, regret, tau
from flexsearch.cost import Costs, Profile, ProfileDevice
from flexsearch.cost.efficiency import product_of
from flexsearch.cost.profile import Entry, Work
from flexsearch.cost.ticks import TICK
from flexsearch.errors import TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.precision import with_precision
from flexsearch.search.hybrid import Layout
from flexsearch.topology import Communication, Device, Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.kernels import USUAL, Efficiency, Launches, Traffic

FLOPS, BANDWIDTH = 1e12, 1e15
REACHED = Efficiency(
    matrix=0.8, matrix_size=100.0, attention_forward=0.5, attention_backward=0.25, memory=0.5, overhead_s=0.0
)


def machine(
    efficiency: Efficiency | None = REACHED, bandwidth: float = BANDWIDTH, kind: Literal["cpu", "cuda"] = "cpu"
) -> Topology:
    device = Device(
        name="a", kind=kind, host="h", model="chip", flops={"float32": FLOPS}, memory_bandwidth=bandwidth,
        memory_bytes=2**40, overhead_s=0.0, efficiency=efficiency,
    )  # fmt: skip
    return Topology(name="one", devices=(device,), communication=Communication(backend="gloo"))


class Net(nn.Module):
    """A convolution, attention, a batch of products, and a linear layer, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(2)  # (2, 8, 16)
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
        y = (y @ y.transpose(1, 2)) @ y
        return self.linear(y)  # type: ignore[no-any-return]


def net() -> OperatorGraph:
    return import_model(Net(), (torch.randn(2, 3, 6, 6),), lambda y: y.sum())


FLOAT = net()
GRAPH = with_precision(FLOAT, "bf16")


def operator(kind: str) -> int:
    return next(i for i, op in enumerate(GRAPH.operators) if op.kind == kind)


def sizes(kind: str) -> list[int]:
    op = GRAPH.operators[operator(kind)]
    product = product_of(op)
    assert product is not None
    return [prod(op.sizes[axis] for axis in axes) for axes in product]


def seconds(
    topology: Topology, kind: str, profile: Profile | None = None, graph: OperatorGraph = GRAPH
) -> tuple[float, float]:
    i = operator(kind)
    op = graph.operators[i]
    forward, backward = Costs(graph, topology, profile).of_extents(i, [tuple(op.sizes[a] for a in op.access.axes)], 0)
    return float(forward[0]), float(backward[0])


def test_axes_of_a_product_are_rows_columns_and_what_is_summed() -> None:
    assert sizes("linear") == [2 * 8, 24, 16]
    assert sizes("conv2d") == [2 * 4 * 4, 8, 3 * 3 * 3]
    assert product_of(GRAPH.operators[operator("attention")]) is None


def test_what_indexes_all_counts_products_and_makes_none_larger() -> None:
    rows, columns, summed = sizes("einsum" if any(op.kind == "einsum" for op in GRAPH.operators) else "matmul")
    assert sorted((rows, columns, summed)) == [8, 8, 16]


def test_a_product_takes_longer_the_smaller_its_sides() -> None:
    """The formula of ``Efficiency``, by hand."""
    share = 0.8 / ((1 + 100 / 16) * (1 + 100 / 24) * (1 + 100 / 16))
    forward, backward = seconds(machine(), "linear")
    assert forward == pytest.approx(2 * 16 * 24 * 16 / (FLOPS * share), abs=TICK)
    assert backward / forward == pytest.approx(2.0, rel=0.05)  # two products of these sizes, and the sum of a bias


def test_attention_without_a_causal_mask_takes_twice_as_long() -> None:
    """Kernels skip what a causal mask hides, and figures are of causal attention counted as full work."""
    times = []
    for causal in (True, False):

        class Attends(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)  # noqa: B023

        x = torch.randn(2, 8, 16, requires_grad=True)
        graph = with_precision(import_model(Attends(), (x,), lambda y: y.sum()), "bf16")
        (i,) = (i for i, op in enumerate(graph.operators) if op.kind == "attention")
        op, costs = graph.operators[i], Costs(graph, machine())
        times.append(costs.of_extents(i, [tuple(op.sizes[axis] for axis in op.access.axes)], 0)[0, 0])
    assert times[1] == pytest.approx(2 * times[0])


def test_attention_has_shares_of_its_own() -> None:
    forward, backward = seconds(machine(), "attention")
    assert backward / forward == pytest.approx(2.5 * 0.5 / 0.25, rel=1e-3)


def test_memory_has_a_share() -> None:
    slow, fast = (
        seconds(machine(e, bandwidth=1e6), "linear")[0] for e in (REACHED, REACHED.model_copy(update={"memory": 1.0}))
    )
    assert slow / fast == pytest.approx(2.0, rel=1e-3)


def test_rows_that_tensor_cores_read_slowly_limit_a_product() -> None:
    """By the lowest bit of columns and summed indices; products of 8 samples of (16, 24) have aligned ones."""
    unaligned = REACHED.model_copy(update={"unaligned": (0.001, 0.002, 0.003), "matrix_size": 0.0})
    i, usual = operator("linear"), REACHED.model_copy(update={"matrix_size": 0.0})
    of, (rows, columns, summed) = GRAPH.operators[i], product_of(GRAPH.operators[i]) or ((), (), ())
    costs, plain = Costs(GRAPH, machine(unaligned)), Costs(GRAPH, machine(usual))

    def ratio(**sizes: int) -> float:
        extents = [tuple((dict(of.sizes) | sizes)[axis] for axis in of.access.axes)]
        return float(costs.of_extents(i, extents, 0)[0, 0] / plain.of_extents(i, extents, 0)[0, 0])

    assert ratio() == ratio(**{rows[0]: 3}) == 1.0
    for size, most in ((23, 0.001), (22, 0.002), (20, 0.003), (16, 0.8)):
        assert ratio(**{columns[0]: size}) == pytest.approx(0.8 / most, rel=0.02)
    assert ratio(**{summed[0]: 15}) == pytest.approx(0.8 / 0.001, rel=0.02)
    extents = {axis: np.full(4, size) for axis, size in of.sizes.items()} | {columns[0]: np.array([23, 22, 20, 16])}
    many = costs.compute_many(i, extents, 0)[0] / plain.compute_many(i, extents, 0)[0]
    assert many == pytest.approx([800.0, 400.0, 0.8 / 0.003, 1.0], rel=0.02)


def test_many_pieces_cost_what_each_does() -> None:
    i = operator("linear")
    op, costs = GRAPH.operators[i], Costs(GRAPH, machine())
    extents = {axis: np.array([size, max(1, size // 2)]) for axis, size in op.sizes.items()}
    forward, backward = costs.compute_many(i, extents, 0)
    for k in range(2):
        one = costs.of_extents(i, [tuple(int(extents[axis][k]) for axis in op.access.axes)], 0)
        assert (forward[k], backward[k]) == pytest.approx(tuple(one[:, 0]))


def test_without_figures_one_share_holds_for_all_shapes() -> None:
    assert seconds(machine(None), "linear")[0] == pytest.approx(
        2 * 16 * 24 * 16 / (FLOPS * USUAL.matrix), abs=TICK
    )


def test_the_figures_hold_for_half_precision_alone() -> None:
    assert seconds(machine(), "linear", graph=FLOAT) == seconds(machine(None), "linear", graph=FLOAT)
    with_launch = machine(REACHED.model_copy(update={"overhead_s": 1.0}), kind="cuda")
    assert seconds(with_launch, "linear")[0] == pytest.approx(1.0 + seconds(machine(), "linear")[0])
    assert seconds(with_launch, "linear", graph=FLOAT)[0] < 1.0


def test_where_a_profile_was_measured_it_and_the_plain_roofline_count() -> None:
    empty = Profile(device=ProfileDevice(kind="cpu", model="chip"), torch="2")
    assert seconds(machine(), "linear", profile=empty) == seconds(machine(), "linear")
    work = Work(flops=1, nbytes=1)
    other = Entry(
        kind="pool", dtype="float32", forward_s=1.0, backward_s=1.0, repeats=1, forward=work, backward=work
    )  # fmt: skip
    measured = empty.model_copy(update={"entries": {"another": other}})
    assert seconds(machine(), "linear", profile=measured) == seconds(machine(None), "linear", profile=measured)


def test_the_figures_of_full_precision_are_those_of_other_types() -> None:
    full = edited(machine(None), devices=(machine(None).devices[0].model_copy(update={"efficiency_full": REACHED}),))
    assert seconds(full, "linear", graph=FLOAT) == pytest.approx(seconds(machine(), "linear"), abs=2 * TICK)
    assert seconds(full, "linear") == seconds(machine(None), "linear")


@pytest.mark.parametrize(("kind", "traffic"), [("softmax", "normalisation"), ("cat", "copy"), ("embedding", "lookup")])
def test_some_traffic_has_a_share_of_its_own(kind: str, traffic: Traffic) -> None:
    x, table = torch.randn(8, 16), nn.Embedding(32, 16)
    module = nn.Module()
    module.table = table
    module.forward = lambda t: torch.cat([torch.softmax(table(t) * 2.0, -1), table(t)], 1)
    graph = import_model(module, (torch.randint(32, (8,)),), lambda y: (y * torch.cat([x, x], 1)).sum())
    i = next(i for i, op in enumerate(graph.operators) if op.kind == kind)
    extents = [tuple(graph.operators[i].sizes[a] for a in graph.operators[i].access.axes)]

    def of(shares: dict[Traffic, float]) -> float:
        reached = USUAL.model_copy(update={"traffic": shares})
        device = machine(None, bandwidth=1e6).devices[0].model_copy(update={"efficiency_full": reached})
        return float(Costs(graph, edited(machine(None), devices=(device,))).of_extents(i, extents, 0)[0][0])

    assert of({traffic: 0.4}) == pytest.approx(2 * of({}), rel=1e-6)
    assert of({"update": 0.4}) == of({})


def test_updates_have_a_share_and_passes_of_their_own() -> None:
    plain = machine(None).devices[0].model_copy(update={"overhead_s": 1e-3})

    def rates(**figures: object) -> tuple[float, float]:
        return Costs(FLOAT, edited(machine(None), devices=(plain.model_copy(update=figures),))).update_rates(
            0, "adam", "as-is"
        )

    per_byte, per_tensor = rates()
    assert per_tensor == pytest.approx(6e-3)
    assert rates(launches=Launches(adam=1))[1] == pytest.approx(1e-3)
    reached = USUAL.model_copy(update={"traffic": {"update": 0.4}})
    assert rates(efficiency_full=reached)[0] == pytest.approx(2 * per_byte)


def test_a_chain_of_kernels_starts_and_is_launched_as_often() -> None:
    device = machine(REACHED.model_copy(update={"overhead_s": 1.0}), kind="cuda").devices[0]
    one, three = (
        edited(machine(), devices=(device.model_copy(update={"launches": Launches(kernels=kernels)}),))
        for kernels in ({"conv2d": 3}, {"linear": 3})
    )
    assert seconds(three, "linear")[0] == pytest.approx(2.0 + seconds(one, "linear")[0])
    i = operator("linear")
    assert Costs(GRAPH, three).launches(i) == tuple(3 * n for n in Costs(GRAPH, one).launches(i))
    unknown = edited(one, devices=(device.model_copy(update={"launches": Launches(kernels={"liner": 2})}),))
    with pytest.raises(TopologyError, match="liner"):
        Costs(GRAPH, unknown)


def test_usual_figures_are_none_however_a_file_says_them() -> None:
    plain = machine(None).devices[0]
    said = Device(**dict(plain) | {"efficiency": Efficiency(), "efficiency_full": USUAL, "launches": Launches()})
    assert said == plain
    other = machine(REACHED.model_copy(update={"other": 0.5}))
    assert other.content_hash() != machine().content_hash()


def test_files_without_figures_keep_their_hash() -> None:
    plain = machine(None)
    assert "efficiency" not in plain.model_dump(exclude_none=True)["devices"][0]
    assert plain.content_hash() != machine().content_hash()
    assert plain.content_hash() == "0a4296403f14d280"  # of a version that had no such figures


def test_scores_of_an_order() -> None:
    class Measured:
        def __init__(self, seconds: float) -> None:
            self.measured_s = seconds

    def scored(*pairs: tuple[float, float]) -> list[Scored]:
        return [Scored(Measured(m), p) for p, m in pairs]  # type: ignore[arg-type]

    assert tau(scored((1, 1), (2, 2), (3, 3))) == 1.0
    assert tau(scored((3, 1), (2, 2), (1, 3))) == -1.0
    assert tau(scored((1, 1), (2, 2))) is None
    assert regret(scored((3, 1), (2, 2), (1, 3))) == pytest.approx(2.0)
    assert regret(scored((1, 1), (2, 2), (3, 3))) == 0.0


def test_replicas_of_a_stage_are_numbered_before_the_next_stage() -> None:
    """tensor 2, data 2, pipeline 4: Megatron-LM's ranks 0 to 3 are all of the first stage."""
    cluster = Topology.load("dgx-a100:2")
    ordered = in_ranks(cluster, Layout(2, 2, 4))
    place = {device.name: rank for rank, device in enumerate(cluster.devices)}
    ranks = [place[device.name] for device in ordered.devices]
    assert ranks == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
