"""The second half of a backward pass, which makes the gradients of weights, goes on where the first has been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from flexsearch import backward
from flexsearch.cost import Costs
from flexsearch.cost.costed import Costed
from flexsearch.graph.importer import Imported
from flexsearch.lower import lower
from flexsearch.runtime.body import Call, body_of
from flexsearch.runtime.instructions import Load
from flexsearch.runtime.layers import Layer, layers_of
from flexsearch.runtime.parallel import distribute
from flexsearch.simulate import simulate
from flexsearch.strategy import Strategy, StrategyFile
from tests.exported import layout
from tests.ranks import pool
from tests.staged_plans import deep
from tests.test_program import imported

WEIGHTS = frozenset((1, 2, 3, 4))


def _call(reads: tuple[int | None, ...], *results: int) -> Call:
    return Call(lambda *x: sum(x), reads, results)


def test_calls_that_read_nothing_of_each_other_are_one_layer() -> None:
    query, key, both = _call((0, 1), 5), _call((0, 2, None), 6), _call((5, 6), 7)
    out, norm = _call((7, 3), 8, 9), _call((0, 4), 10)
    layers = layers_of((query, key, both, out, norm), WEIGHTS)
    assert layers == (Layer((8, 9), ((3, 3),)), Layer((5, 6, 10), ((0, 1), (1, 2), (4, 4))))


def test_a_weight_that_two_calls_read_belongs_to_the_layers_of_both() -> None:
    layers = layers_of((_call((0, 1), 5), _call((5, 1), 6)), WEIGHTS)
    assert layers == (Layer((6,), ((1, 1),)), Layer((5,), ((0, 1),)))
    assert layers_of((_call((1, 1), 5),), WEIGHTS) == (Layer((5,), ((0, 1),)),)


def test_a_result_that_is_made_of_another_adds_nothing_to_that_ones_gradient() -> None:
    """As the two states of an LSTM cell: the second half goes from the one to the other by itself."""

    def cell(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = x * weight
        return state.sin(), state

    calls = Call(cell, (0, 1), (2, 3)), Call(torch.mul, (2, 3), (4,))
    x, y = torch.tensor(3.0), torch.tensor(4.0, requires_grad=True)
    total, *rest = body_of(calls, 2, (4,), None, edges=(2, 3), weights=((0, 1),))(x, y)
    results, weight = rest[:2], rest[2]
    between = torch.autograd.grad(total, results, retain_graph=True)
    (gradient,) = torch.autograd.grad(results, [weight], between, retain_graph=True)
    torch.testing.assert_close(gradient, x * (torch.sin(x * y) + x * y * torch.cos(x * y)).detach())


def test_what_only_the_first_half_needs_can_be_let_go_of() -> None:
    calls = Call(torch.mul, (0, 1), (2,)), Call(torch.sin, (2,), (3,))
    x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(4.0)
    total, product, weight, saved, _ = body_of(calls, 2, (3,), None, edges=(2,), weights=((0, 0),))(x, y)
    assert len(saved) == 1
    assert torch.autograd.grad(total, [product], retain_graph=True)[0] == torch.cos(x * y) and saved == [None]
    saved.clear()
    assert torch.autograd.grad([product], [weight], [torch.tensor(2.0)], retain_graph=True)[0] == 8.0
    with pytest.raises(IndexError):
        torch.autograd.grad(total, [x])


@pytest.mark.parametrize("engine", [True, False])
def test_gradients_come_with_and_without_the_engine_that_is_private(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backward._ENGINE is not None  # or else the next PyTorch has moved it, and each call takes longer
    if not engine:
        monkeypatch.setattr(backward, "_ENGINE", None)
    x, unused = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y = x * x
    edges, gradient = [get_gradient_edge(y)], [torch.tensor(2.0)]
    for keep in (True, False):
        assert backward.gradients_of(edges, gradient, [x, unused, edges[0]], keep) == (12.0, None, 2.0)
    assert x.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        backward.gradients_of(edges, gradient, [x], False)


def test_a_body_tells_where_gradients_of_results_enter() -> None:
    calls = Call(torch.mul, (0, 1), (2,)), Call(lambda x: (x + 1, x.detach()), (2,), (3, 4))
    x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(4.0)
    total, product, cut, weight, *_ = body_of(calls, 2, (3,), None, edges=(2, 4), weights=((0, 0),))(x, y)
    assert cut is None and torch.autograd.grad(total, [product], retain_graph=True)[0] == 1.0
    for target in (x, weight):
        assert torch.autograd.grad([product], [target], [torch.tensor(2.0)], retain_graph=True)[0] == 8.0


def test_second_halves_take_as_long_as_costs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second more for each layer of the second stage and each microbatch; whole backward passes are as they were."""
    graph, before = imported().graph, Costs.halves
    border = graph.operators[2].name
    plans = [
        layout(graph, 1, 1, [border], ranks=2, topology="ethernet-1g-2", schedule=schedule, microbatches=4)
        for schedule in ("1f1b", "zero-bubble")
    ]

    def seconds() -> list[float]:
        return [simulate(lower(graph, p, p.cluster, Costs(graph, p.cluster))).makespan_s for p in plans]

    def longer(self: Costs, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> np.ndarray:
        inputs, weights = before(self, operator, extents, kind)
        return np.stack((inputs, weights + 1.0 * (weights > 0.0)))

    usual = seconds()
    monkeypatch.setattr(Costs, "halves", longer)
    whole, halved = (now - then for now, then in zip(seconds(), usual, strict=True))
    layers = sum(Costed.of(graph, i).trained for i in range(2, len(graph.operators)))
    assert layers > 1 and whole == 0.0 and halved == pytest.approx(4.0 * layers, rel=0.01)


def _depth(node: Any) -> int:
    """Steps from a node of autograd's graph to its bottom."""
    return 1 + max((_depth(following) for following, _ in node.next_functions if following is not None), default=-1)


def test_a_weight_lies_above_the_activations_that_are_read_beside_it() -> None:
    """The engine looks at nothing that is less deep than what it is asked for."""
    calls = Call(torch.mul, (0, 1), (3,)), Call(lambda x, y, z: x * y * z, (3, 2, 2), (4,))
    x, y, z = (torch.tensor(float(k), requires_grad=True) for k in (3, 4, 5))
    result, product, weight, *_ = body_of(calls, 3, (4,), None, edges=(3,), weights=((1, 2),))(x, y, z)
    assert _depth(weight.node) > _depth(product.node)
    assert torch.autograd.grad(result, [weight], retain_graph=True)[0] == 2 * 12 * 5
    assert torch.autograd.grad(result, [x, z]) == (4 * 25, 2 * 12 * 5)


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def _sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def _counted(traced: Imported, file: str) -> tuple[int, dict[str, Tensor]]:
    """Matrix products of this rank's second step, and the weights after it."""
    model, x, targets = deep()
    step = distribute(model, traced, Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    step.step((x,), targets)
    with _Products() as products:
        step.step((x,), targets)
    return products.count, step.state_dict()


def _data_set(traced: Imported, file: str) -> tuple[list[float], int, int]:
    """Losses of this rank's steps before and after its weights get memory of their own, with other values, and after
    the first values are back; leaves of weights of two steps without a change, and how many of them are the same."""
    model, x, targets = deep()
    step = distribute(model, traced, Strategy.from_file(StrategyFile.model_validate_json(file)))
    leaves: list[dict[int, Tensor]] = []

    def loss() -> float:
        step.engine.context.step = 0  # the same dropout
        seen: dict[int, Tensor] = {}

        def around(instruction: Any, action: Any) -> None:
            action()
            if isinstance(instruction, Load):
                seen[instruction.slot] = step.engine._values[instruction.slot]

        step.engine.around = around
        value = float(step(((x,), targets)).loss)
        leaves.append(seen)
        return value

    losses = [loss(), loss()]
    before = [weight.data for weight in step.engine.weights.values()]
    for weight in step.engine.weights.values():
        weight.data = weight.data * 1.5
    losses.append(loss())
    for weight, data in zip(step.engine.weights.values(), before, strict=True):
        weight.data = data.clone()
    losses.append(loss())
    return losses, len(leaves[0]), sum(leaves[0][slot] is leaves[1][slot] for slot in leaves[0])


def test_a_weight_is_one_leaf_in_all_steps_until_its_data_is_set() -> None:
    graph = imported().graph
    plan = layout(graph, 1, 1, ["head"], ranks=2, topology="ethernet-1g-2", schedule="zero-bubble", microbatches=4)
    for losses, count, same in pool(2).run(_data_set, imported(), plan.to_file().model_dump_json()):
        assert losses[0] == losses[1] == losses[3] != losses[2] and count == same > 0


@pytest.mark.parametrize("border", ["head", "middle"])
def test_halves_of_a_backward_pass_compute_what_the_whole_does(border: str) -> None:
    graph = imported().graph
    if border == "middle":
        norms = [op.name for op in graph.operators if op.name.endswith("norm")]
        border = norms[len(norms) // 2]
    counts, weights = Counter[str](), {}
    for schedule in ("1f1b", "zero-bubble"):
        plan = layout(graph, 1, 1, [border], ranks=2, topology="ethernet-1g-2", schedule=schedule, microbatches=4)
        ranks = pool(2).run(_counted, imported(), plan.to_file().model_dump_json())
        counts[schedule], weights[schedule] = sum(count for count, _ in ranks), ranks[0][1]
    assert counts["zero-bubble"] == counts["1f1b"] > 0
    for name, value in weights["1f1b"].items():
        torch.testing.assert_close(weights["zero-bubble"][name], value, rtol=1e-12, atol=1e-14)
