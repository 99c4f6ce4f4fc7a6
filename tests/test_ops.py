"""Every kind of operator, by its samples: traced as PyTorch calls it, saved, and computed in random pieces."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsearch.graph import Operator, OperatorGraph, Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops import KINDS, Sample, backward_flops, forward_flops, kind_of, shipped
from flexsearch.report.words import axis_word
from tests.interpret import Intervals, interpret

NAMES = sorted(name for name in KINDS if shipped(name))
TRIES = 6


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class Called(nn.Module):
    """The call of a sample as a model: its real tensors are parameters, the others inputs; the loss is a weighted sum
    of all that it returns."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self.weights = nn.ParameterList(x for x in sample.tensors if x.is_floating_point())

    def forward(self, anchor: Tensor, *others: Tensor) -> Tensor:
        weights, rest = iter(self.weights), iter(others)
        result = self.sample.call(*(next(weights if floating(x) else rest) for x in self.sample.tensors))
        results = result if isinstance(result, list | tuple) else (result,)
        total = anchor.sum()
        for y in results:
            z = y.abs().double() if y.is_complex() else y.double()
            total = total + (z * torch.arange(1, z.numel() + 1, dtype=torch.float64).view(z.shape).cos()).sum()
        return total

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(1, dtype=torch.float64), *(x for x in self.sample.tensors if not floating(x)))


@cache
def _imported(name: str, number: int) -> tuple[Called, Imported]:
    torch.manual_seed(number)
    model = Called(list(KINDS[name].samples())[number])
    return model, import_with_constants(model, model.inputs(), tracing=Tracing(opaque=name == "opaque"))


SAMPLES = [(name, number) for name in NAMES for number, _ in enumerate(KINDS[name].samples())]


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


def _values(model: Called, imported: Imported) -> dict[str, Tensor]:
    values: dict[str, Tensor] = dict(imported.constants)
    values |= dict(zip(imported.input_names, model.inputs(), strict=True))
    return values | dict(model.named_parameters())


def _close(x: Tensor, y: Tensor) -> None:
    digits = 1e-9 if y.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(x, y, rtol=digits, atol=digits * (1e-3 + float(y.abs().max() if y.numel() else 0)))


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_has_samples_that_give_it(name: str) -> None:
    numbers = range(len(list(KINDS[name].samples())))
    kinds = {op.kind for number in numbers for op in _imported(name, number)[1].graph.operators}
    assert name in kinds, f"give {name} samples that are traced to it"


@pytest.mark.parametrize(("name", "number"), SAMPLES)
def test_pieces_add_up_to_what_pytorch_computes(name: str, number: int) -> None:
    model, imported = _imported(name, number)
    graph, draw = imported.graph, random.Random(f"{name} {number}")
    leaves = dict(model.named_parameters())
    plain = model(*model.inputs())
    expected = torch.autograd.grad(plain, list(leaves.values()), allow_unused=True)
    random_numbers = any(op.kind in ("dropout", "uniform") or op.attributes.get("dropout") for op in graph.operators)
    first = None
    for attempt in range(TRIES):
        values = _values(model, imported)
        result = interpret(graph, values, cuts=(lambda op: _cuts(op, draw)) if attempt else _whole)
        gradients = torch.autograd.grad(result[graph.loss], list(leaves.values()), allow_unused=True)
        if random_numbers:  # PyTorch draws others: every split must draw those of the whole
            first = first or (result[graph.loss], gradients)
            plain, expected = first
        _close(result[graph.loss].detach(), plain.detach())
        for x, y in zip(gradients, expected, strict=True):
            _close(torch.zeros(()) if x is None else x, torch.zeros(()) if y is None else y)


def _whole(op: Operator) -> Intervals:
    return {axis: [(0, size)] for axis, size in op.sizes.items()}


@pytest.mark.parametrize(("name", "number"), SAMPLES)
def test_its_graph_can_be_saved_counted_and_told(name: str, number: int, tmp_path: Path) -> None:
    graph = _imported(name, number)[1].graph
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
        assert kind_of(op).saves(op, None) is not None
