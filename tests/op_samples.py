"""The samples of every kind of operator, as models."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flexsearch.graph import OperatorGraph, Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops import KINDS, Sample, shipped

NAMES = sorted(name for name in KINDS if shipped(name))
SAMPLES = [(name, number) for name in NAMES for number, _ in enumerate(KINDS[name].samples())]


def floating(x: Any) -> bool:
    """Whether ``x`` is a tensor of real numbers."""
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
        """The batch of the model."""
        return (torch.zeros(1, dtype=torch.float64), *(x for x in self.sample.tensors if not floating(x)))


def model(name: str, number: int) -> Called:
    """The model of a sample, always with the same numbers."""
    torch.manual_seed(number)
    return Called(list(KINDS[name].samples())[number])


@cache
def imported(name: str, number: int) -> Imported:
    """The graph of that model."""
    called = model(name, number)
    return import_with_constants(called, called.inputs(), tracing=Tracing(opaque=name == "opaque"))


def written(graph: OperatorGraph) -> dict[str, Any]:
    """A graph as files of the first format give it, with a record for everything: tests break one of them."""
    document: dict[str, Any] = graph.model_dump(mode="json", exclude_none=True)
    return document


def draws(graph: OperatorGraph) -> bool:
    """Whether it draws random numbers, of which PyTorch would draw others."""
    return any("salt" in op.attributes and op.attributes.get("dropout", 1) != 0 for op in graph.operators)
