"""In which order the dimensions of tensors lie in memory, and go from rank to rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexsearch.graph import Tracing
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.orders import Order, orders
from flexsearch.runtime.parts import flat, unflat
from tests.staged_plans import Deep, tokens_loss


def test_heads_lie_inside_of_positions() -> None:
    tokens = torch.randint(7, (4, 3))
    imported = import_with_constants(
        Deep(1, 8), (tokens,), tokens_loss, targets=torch.randint(7, (4, 3)), tracing=Tracing()
    )
    found = orders(imported.graph)
    assert found["layers.0.sdpa"] == (0, 2, 1, 3)
    assert found["layers.0.permute"] == (1, 3, 0, 2, 4)  # of (3, batch, heads, positions, features)
    assert [order for name, order in found.items() if name.startswith("layers.0.select")] == [(0, 2, 1, 3)] * 3
    assert "layers.0.qkv" not in found and "layers.0.transpose" not in found  # in the order of their dimensions


def test_what_is_permuted_twice_lies_as_it_was() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.permute(2, 0, 1).permute(1, 2, 0) * 2).sum()

    found = orders(import_with_constants(Twice(), (torch.rand(2, 3, 4),), tracing=Tracing()).graph)
    assert list(found.values()) == [(1, 2, 0)]


@pytest.mark.parametrize("order", [None, (0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_what_lies_in_the_order_that_it_goes_in_is_not_copied(order: Order | None) -> None:
    shape = (2, 3, 4, 5)
    tensor = unflat(torch.arange(120), shape, order)
    assert tensor.shape == shape
    message = flat(tensor, order)
    assert message.tolist() == list(range(120)) and message.data_ptr() == tensor.data_ptr()
