"""Where a tensor has several readers, their gradients are added up: what that takes counts beside measured pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from flexsearch.cost import Costs, Profile, ProfileDevice
from flexsearch.cost.costed import Costed
from flexsearch.cost.profile import Entry
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph, Piece, make_piece
from flexsearch.graph.importer import import_model
from flexsearch.topology import Communication, Device, Topology
from flexsearch.topology.kernels import USUAL

RATE = 1e9 * USUAL.memory
"""Bytes a second that the device streams."""
ROWS, WIDTH = 32, 16
RESULT, WEIGHT, BIAS = (2 * 4 * n / RATE for n in (ROWS * WIDTH, WIDTH * WIDTH, WIDTH))
"""Seconds of adding a gradient to the sum of each, which is read and written."""


class Twice(nn.Module):
    """A layer that is applied twice, the first time with a connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.layer(y + self.layer(y))  # type: ignore[no-any-return]


GRAPH = import_model(Twice(), (torch.randn(ROWS, WIDTH),), nn.MSELoss(), targets=torch.randn(ROWS, WIDTH), name="twice")
FIRST, AGAIN, ADDITION, LAST = range(4)


def one(kind: str = "cpu") -> Topology:
    device = Device(name="d", kind=kind, host="h", model="chip", flops={"float32": 1e9}, memory_bandwidth=1e9,
                    memory_bytes=2**30, overhead_s=1e-6)  # fmt: skip
    return Topology(name="one", devices=(device,), links=(), communication=Communication(backend="gloo"))


def whole(graph: OperatorGraph, operator: int) -> Piece:
    op = graph.operators[operator]
    shapes = [[graph.tensor[n].shape for n in names] for names in (op.inputs, op.outputs)]
    return make_piece(op, {a: (0, s) for a, s in op.sizes.items()}, *shapes)


def measured(kind: str = "cpu", halves: bool = False) -> Profile:
    """Every whole operator took 1 s forward and 2 s backward."""
    entries = {}
    for i, op in enumerate(GRAPH.operators):
        costed = Costed.of(GRAPH, i)
        entries[costed.signature(op.sizes)] = Entry(
            kind=op.kind, dtype="float32", forward_s=1.0, backward_s=2.0, repeats=1,
            halves_s=(1.25, 0.75) if halves else None, forward=costed.forward(op.sizes),
            backward=costed.backward(op.sizes),
        )  # fmt: skip
    return Profile(device=ProfileDevice(kind=kind, model="chip"), torch="2", entries=entries)


def test_each_reader_has_its_share_of_the_additions() -> None:
    kinds = [op.kind for op in GRAPH.operators[:4]]
    assert kinds == ["linear", "linear", "pointwise", "linear"]
    costs = Costs(GRAPH, one(), measured())
    more = [costs.compute(i, whole(GRAPH, i), 0)[1] - 2.0 for i in range(4)]
    layer = (WEIGHT + BIAS) / 2  # read twice: one addition, half of it in each
    assert more == pytest.approx([0.0, layer + RESULT / 2, RESULT / 2, layer], abs=2 * TICK)
    assert [costs.compute(i, whole(GRAPH, i), 0)[0] for i in range(4)] == pytest.approx([1.0] * 4)


def test_figures_of_whole_steps_have_them_already() -> None:
    plain, beside = Costs(GRAPH, one()), Costs(GRAPH, one(), measured())
    assert plain.alike[LAST] == plain.alike[AGAIN]  # alike in all but that the second one's input has one reader
    assert beside.alike[LAST] != beside.alike[AGAIN]
    one_call = Costed.of(GRAPH, LAST)
    assert one_call.sums == (0.0, 0.5, 0.5) and one_call.additions == (1.0, 1.0)
    assert plain.compute(LAST, whole(GRAPH, LAST), 0) == plain.compute(AGAIN, whole(GRAPH, AGAIN), 0)


def test_many_pieces_at_once_have_them_too() -> None:
    profile = measured()
    only = {key: entry for key, entry in profile.entries.items() if entry.kind == "pointwise"}
    costs = Costs(GRAPH, one(), profile.model_copy(update={"entries": only}))
    found = {}
    for operator in (AGAIN, LAST):
        sizes = GRAPH.operators[operator].sizes
        many = costs.compute_many(operator, {axis: np.array([size]) for axis, size in sizes.items()}, 0)
        found[operator] = tuple(float(column[0]) for column in many)
        assert found[operator] == costs.compute(operator, whole(GRAPH, operator), 0)
    assert found[AGAIN][1] - found[LAST][1] == pytest.approx(RESULT / 2, abs=2 * TICK)


def test_halves_of_backward_passes_have_their_own() -> None:
    costs, op = Costs(GRAPH, one(), measured(halves=True)), GRAPH.operators[AGAIN]
    extents = [tuple(op.sizes[axis] for axis in op.access.axes)]
    found = costs.halves(AGAIN, extents, 0)[:, 0]
    assert found.tolist() == pytest.approx([1.25 + RESULT / 2, 0.75 + (WEIGHT + BIAS) / 2], abs=2 * TICK)


def test_hosts_of_gpus_launch_them() -> None:
    plain, beside = Costs(GRAPH, one("cuda")), Costs(GRAPH, one("cuda"), measured("cuda"))
    for operator, additions, of_parameters in ((FIRST, 0.0, 0.0), (AGAIN, 1.5, 1.0), (ADDITION, 0.5, 0.0)):
        before, after = plain.launches(operator), beside.launches(operator)
        assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([0.0, additions, of_parameters])


def test_slices_and_statistics_of_batches_are_taken_with_others() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.layer(x))
            return y[:, :8] * y[:, 8:]  # type: ignore[no-any-return]

    graph = import_model(Normalised(), (torch.randn(ROWS, WIDTH),), nn.MSELoss(), targets=torch.randn(ROWS, 8))
    assert {"slice", "batch_statistics"} <= {op.kind for op in graph.operators}
    assert not any(any(Costed.of(graph, i).sums) for i in range(len(graph.operators)))
