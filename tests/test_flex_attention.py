"""flex_attention: what PyTorch's own definition computes, by operators that can be split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_with_constants
from tests.interpret import interpret, whole
from tests.test_ops import _cuts as cuts

BATCH, HEADS, LENGTH = 2, 4, 16


class Flexible(nn.Module):
    """flex_attention of its parameters, with what the case says; ``anchor`` is the batch."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        heads = 2 if "grouped" in case else HEADS
        self.q = nn.Parameter(torch.randn(BATCH, HEADS, LENGTH, 8, dtype=torch.float64))
        self.k = nn.Parameter(torch.randn(BATCH, heads, LENGTH, 8, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(BATCH, heads, LENGTH, 8, dtype=torch.float64))
        self.slope = nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH, dtype=torch.float64))
        self.register_buffer("lengths", torch.tensor([16, 9]))

    def score(self) -> Callable[..., Tensor] | None:
        def slope(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.slope[h] * (q - k)

        def table(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.table[h, q - k + LENGTH]

        def cap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return 5 * torch.tanh(s / 5)

        return {"slope": slope, "table": table, "cap": cap}.get(self.case.split()[0])

    def mask(self) -> Callable[..., Tensor] | None:
        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < 5)

        def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k < self.lengths[b]  # type: ignore[index]

        def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q >= k

        def blind(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q > 3) & (k > 2)

        every = {"window": window, "padding": padding, "causal": causal, "blind": blind}
        return next((every[word] for word in self.case.split() if word in every), None)

    def forward(self, anchor: Tensor) -> Tensor:
        made = self.mask()
        how: dict[str, Any] = {
            "block_mask": made and create_block_mask(made, BATCH, HEADS, LENGTH, LENGTH, device="cpu"),
            "scale": 0.4 if "scaled" in self.case else None,
            "enable_gqa": "grouped" in self.case,
            "return_lse": "lse" in self.case,
        }
        both: Any = flex_attention(self.q, self.k, self.v, self.score(), **how)
        y: Tensor = both[0] + both[1][..., None] if "lse" in self.case else both
        return y.sin().sum() + anchor.sum()

    def expected(self) -> Tensor:
        """By PyTorch's definition in eager mode."""
        mask = self.mask() or (lambda b, h, q, k: q.new_ones((), dtype=torch.bool))
        scale = 0.4 if "scaled" in self.case else 8**-0.5
        y, lse, _ = math_attention(self.q, self.k, self.v, self.score() or (lambda s, *_: s), (None, mask), scale, {})
        return ((y + lse[..., None] * math.log(2)) if "lse" in self.case else y).sin().sum()


CASES = (
    "plain", "plain scaled grouped", "causal", "causal grouped", "window", "padding", "blind", "slope", "slope window",
    "table causal scaled", "cap", "cap causal", "slope grouped lse", "window lse",
)  # fmt: skip


def _values(model: Flexible, imported: Imported) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**imported.constants, "input": torch.zeros(BATCH, dtype=torch.float64), **named}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_pytorch_defines(case: str) -> None:
    torch.manual_seed(0)
    model, draw = Flexible(case), random.Random(case)
    imported = import_with_constants(model, torch.zeros(BATCH, dtype=torch.float64))
    graph: OperatorGraph = imported.graph
    leaves = [p for n, p in model.named_parameters() if n in graph.tensor]
    expected = torch.autograd.grad(plain := model.expected(), leaves)
    for attempt in range(3):
        tensors = interpret(graph, _values(model, imported), cuts=(lambda op: cuts(op, draw)) if attempt else whole)
        result = tensors[graph.loss]
        torch.testing.assert_close(result, plain, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(result, leaves), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if "cap" not in c and "lse" not in c])
def test_a_score_that_is_only_added_to_stays_one_attention(case: str) -> None:
    graph = import_with_constants(Flexible(case), torch.zeros(BATCH, dtype=torch.float64)).graph
    [op] = [op for op in graph.operators if op.kind == "attention"]
    assert {"b", "q", "v"} < set(op.splittable)
    assert bool(op.attributes["causal"]) == (case.split()[0] == "causal")


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers_that_asks_for_it(padded: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra that tests install is missing")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    models = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attn_implementation=how)).double()
        for how in ("flex_attention", "sdpa")
    ]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(50, (2, 10))
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": (ids > 5).long()} if padded else {})
    imported = import_with_constants(models[0], batch)
    assert [op.kind for op in imported.graph.operators].count("attention") == 1
    tensors = [*models[0].named_parameters(), *models[0].named_buffers()]
    values = {**imported.constants, **dict(zip(imported.input_names, batch.values(), strict=True)), **dict(tensors)}
    loss = interpret(imported.graph, values)[imported.graph.loss]
    torch.testing.assert_close(loss, models[1](**batch).loss, rtol=1e-9, atol=1e-9)
