"""Every kind of operator, by its samples: traced as PyTorch calls it, saved, and computed in random pieces."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops import KINDS, backward_flops, forward_flops, kind_of
from flexsearch.report.words import axis_word
from tests.interpret import Intervals, interpret, whole
from tests.op_samples import NAMES, SAMPLES, Called, draws, imported, model

TRIES = 4


def _cuts(op: Operator, draw: random.Random) -> Intervals:
    """Uneven parts of up to three axes that can be split."""
    axes = list(op.splittable)
    chosen = draw.sample(axes, min(len(axes), draw.randint(0, 3)))
    result: dict[str, Any] = {axis: [(0, size)] for axis, size in op.sizes.items()}
    for axis in chosen:
        size = op.sizes[axis]
        points = sorted(draw.sample(range(1, size), draw.randint(1, min(3, size - 1))))
        result[axis] = list(pairwise([0, *points, size]))
    return result


def _values(called: Called, traced: Imported) -> dict[str, Tensor]:
    values: dict[str, Tensor] = dict(traced.constants)
    values |= dict(zip(traced.input_names, called.inputs(), strict=True))
    return values | dict(called.named_parameters())


def _close(x: Tensor, y: Tensor) -> None:
    digits = 1e-9 if y.dtype == torch.float64 else 1e-4
    if not bool(torch.isfinite(y).all()):
        torch.testing.assert_close(x, y, equal_nan=True)
        return
    torch.testing.assert_close(x, y, rtol=digits, atol=digits * (1e-3 + float(y.abs().max() if y.numel() else 0)))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "given"])  # which stands for no operator of torch
def test_every_kind_has_samples_that_give_it(name: str) -> None:
    numbers = range(len(list(KINDS[name].samples())))
    kinds = (op.kind for number in numbers for op in imported(name, number).graph.operators)
    assert name in kinds, f"give {name} samples that are traced to it"


FEW = [(name, number) for name, number in SAMPLES if number < 2 or os.environ.get("FLEXSEARCH_ALL_TESTS")]
"""In CI two samples of each kind."""


@pytest.mark.parametrize(("name", "number"), FEW)
def test_pieces_add_up_to_what_pytorch_computes(name: str, number: int) -> None:
    check_pieces(model(name, number), imported(name, number), f"{name} {number}")


def check_pieces(called: nn.Module, traced: Imported, seed: str) -> None:
    """Loss and gradients of the whole operators, and then of random pieces, are PyTorch's. ``called``: a model with a
    method ``inputs``, its batch."""
    graph, draw = traced.graph, random.Random(seed)
    leaves = dict(called.named_parameters())
    inputs = called.inputs()  # type: ignore[operator]
    plain = called(*inputs)
    expected = torch.autograd.grad(plain, list(leaves.values()), allow_unused=True)
    first = None
    for attempt in range(TRIES):
        values = _values(called, traced)
        result = interpret(graph, values, cuts=(lambda op: _cuts(op, draw)) if attempt else whole)
        gradients = torch.autograd.grad(result[graph.loss], list(leaves.values()), allow_unused=True)
        if draws(graph):  # PyTorch draws others: every split must draw those of the whole
            first = first or (result[graph.loss], gradients)
            plain, expected = first
        _close(result[graph.loss].detach(), plain.detach())
        for x, y in zip(gradients, expected, strict=True):
            _close(torch.zeros(()) if x is None else x, torch.zeros(()) if y is None else y)


@pytest.mark.parametrize(("name", "number"), FEW)
def test_its_graph_can_be_saved_counted_and_told(name: str, number: int, tmp_path: Path) -> None:
    graph = imported(name, number).graph
    graph.save(tmp_path / "graph.json")
    assert OperatorGraph.load(tmp_path / "graph.json") == graph
    for op in graph.operators:
        needs = [n in graph.differentiable for n in op.inputs]
        points = 1
        for size in op.sizes.values():
            points *= size
        for flops in (forward_flops(op, op.sizes), backward_flops(op, op.sizes, needs)):
            assert 0 <= float(flops) <= 200 * points * (1 + len(op.inputs))
        for axis in op.splittable:
            assert axis_word(op, axis)
        assert kind_of(op).saves(op) is not None
