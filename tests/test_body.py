"""Runs of operators as one callable, which torch.compile can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.body import Call, body_of
from flexsearch.runtime.parallel import _compiler
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool
from tests.test_numerics import STEPS, _imported, _parallel, _single, agree

CALLS = (
    Call(lambda x, y: x * y, (0, 1), range(2, 3)),
    Call(lambda x: (x + 1, x + 2), (2,), range(3, 5)),
    Call(lambda x, _: x + torch.rand(()), (3, None), range(5, 6), draws=True),
    Call(lambda x, y: x - y, (5, 4), range(6, 7)),
)
"""Reads two leaves; one call has two results, one draws."""


@pytest.mark.parametrize("compiler", [None, "eager"])
def test_leaves_come_in_their_own_order(compiler: str | None) -> None:
    body = body_of((Call(lambda x, y: x - y, (2, 0), range(3, 4)),), 3, (3,), compiler)  # leaf 1 is not read
    leaves = torch.tensor(3.0), torch.tensor(0.0), torch.tensor(5.0)
    assert [list(body(*leaves)) for _ in range(2)] == [[torch.tensor(2.0)]] * 2


@pytest.mark.parametrize("compiler", [None, "eager"])
@pytest.mark.parametrize("wanted", [(6,), (2, 6), (4, 3), (0, 6, 5), (6, 6)])
def test_a_body_gives_the_values_that_are_wanted(compiler: str | None, wanted: tuple[int, ...]) -> None:
    body = body_of(CALLS, 2, wanted, compiler)
    x, y = torch.tensor(3.0), torch.tensor(4.0)
    for step in range(3):  # the first call of what is compiled is plain
        torch.manual_seed(step)
        at = {0: x, 1: y, 2: x * y, 3: x * y + 1, 4: x * y + 2, 5: x * y + 1 + torch.rand(())}
        at[6] = at[5] - at[4]
        torch.manual_seed(step)
        assert list(body(x, y)) == [at[place] for place in wanted]


def test_all_that_draws_nothing_is_compiled_in_one_piece() -> None:
    seen: list[int] = []

    def counting(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        seen.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward

    torch.compiler.reset()
    torch._dynamo.register_backend(counting, name="counting")
    body = body_of((*CALLS[:2], replace(CALLS[3], places=(3, 4), results=range(5, 6))), 2, (5,), "counting")
    for _ in range(3):
        body(torch.tensor(3.0), torch.tensor(4.0))
    assert seen == [4]  # product, two sums, difference


@pytest.mark.parametrize(("name", "plan"), [("decoder", "megatron"), ("convolutions", "data-parallel")])
def test_what_is_compiled_computes_what_one_device_does(name: str, plan: str) -> None:
    imported = _imported(name)
    topology = Topology.load("ethernet-1g:2")
    file = baseline(plan, imported.graph, topology).to_file().model_dump_json()
    for history in pool(2).run(_parallel, name, imported, file, False, "float64", STEPS, "aot_eager"):
        agree(_single(name), history)


def test_a_backend_that_there_is_not_is_refused() -> None:
    assert _compiler(False) is None and _compiler(True) == "inductor"
    with pytest.raises(RuntimeFailure, match=r"torch\.compile has no backend 'fast'"):
        _compiler("fast")
