"""In which order the dimensions of tensors lie in memory, and go from rank to rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexsearch.cost import Costs
from flexsearch.graph import Tracing
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.orders import Order, orders
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.assembly import Piece, _joined
from flexsearch.runtime.parts import flat, lying, plan_of, unflat
from flexsearch.strategy import Strategy, make_config
from flexsearch.topology import Topology
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


def test_what_is_permuted_of_an_image_and_attention_with_dropout_lie_otherwise() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
            return (self.conv(x).permute(0, 2, 3, 1) * 2).sum() + made.sum()

    inputs = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 4, 8)
    graph = import_with_constants(Both(), inputs, tracing=Tracing()).graph
    assert {"attention", "permute", "conv2d"} <= {op.kind for op in graph.operators}
    assert orders(graph) == {}


def test_heads_that_move_and_their_gradients_go_as_they_lie() -> None:
    tokens, targets = torch.randint(7, (4, 3)), torch.randint(7, (4, 3))
    graph = import_with_constants(Deep(1, 8), (tokens,), tokens_loss, targets=targets, tracing=Tracing()).graph
    cluster, cut = Topology.load("ethernet-1g:2"), 1 + graph.index["layers.0.sdpa"]
    configs = {op.name: make_config(op, {}, [int(i >= cut)]) for i, op in enumerate(graph.operators)}
    lowered = lower_for_ranks(graph, Strategy.make(graph, cluster, configs), cluster, Costs(graph, cluster))
    moved = []
    for what in filter(None, lowered.tasks.communication):
        names = {lowered.edges[member.key].tensor for member in what.members if what.purpose != "synchronise"}
        if names == {"layers.0.sdpa"}:
            moved.append(what.purpose)
            for rank in (0, 1):
                assert plan_of(lowered, what, rank, lying(lowered, torch.device("cpu"))).orders == {0: (0, 2, 1, 3)}
    assert sorted(moved) == ["backward", "forward"]


@pytest.mark.parametrize("order", [(0, 2, 1, 3), None])
def test_what_is_put_together_of_parts_lies_in_the_order_that_it_would_have_whole(order: Order | None) -> None:
    whole = torch.arange(120.0).view(2, 3, 4, 5)
    boxes = [((k, k + 1), (0, 3), (0, 4), (0, 5)) for k in (0, 1)]
    pieces = [Piece(k, box, lambda k=k: whole[k : k + 1]) for k, box in enumerate(boxes)]  # type: ignore[misc]
    box = ((0, 2), (0, 3), (0, 4), (0, 5))
    made = _joined(box, pieces, torch.float32, torch.device("cpu"), order)()
    assert torch.equal(made, whole) and flat(made, order).data_ptr() == made.data_ptr()


@pytest.mark.parametrize("order", [None, (0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_what_lies_in_the_order_that_it_goes_in_is_not_copied(order: Order | None) -> None:
    shape = (2, 3, 4, 5)
    tensor = unflat(torch.arange(120), shape, order)
    assert tensor.shape == shape
    message = flat(tensor, order)
    assert message.tolist() == list(range(120)) and message.data_ptr() == tensor.data_ptr()
