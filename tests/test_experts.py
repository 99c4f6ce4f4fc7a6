"""Mixture of experts: models of ``transformers`` token by token, and expert parallelism by all-to-all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsearch.errors import ImportModelError
from flexsearch.graph import Operator, OperatorGraph, chunk, make_piece
from flexsearch.graph.experts import combine, dispatch, expert_linear, grouped_mm, slots
from flexsearch.graph.importer import import_with_constants
from flexsearch.lower import Entry, Layout
from flexsearch.lower.reshard import reshard
from flexsearch.topology import Topology
from tests.interpret import interpret
from tests.test_ops import _cuts as cuts

EXPERTS, CAPACITY = 4, 3


class Capacity(nn.Module):
    """Tokens (groups, tokens, features) at experts that take three of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 5, 6))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.detach().argmax(-1, keepdim=True)
        where = slots(chosen, EXPERTS, CAPACITY)
        y = torch.einsum("gecd,edh->gech", dispatch(x, where, EXPERTS, CAPACITY), self.up).relu()
        y = torch.einsum("gech,ehd->gecd", y, self.down)
        return combine(y, where, weights.amax(-1, keepdim=True)).pow(2).mean()


def _layout(op: Operator, graph: OperatorGraph, tensor: str, axis: str, parts: int) -> Layout:
    """Where a tensor lies if ``axis`` of an operator that makes or reads it is split over devices 0, 1, ..."""
    shapes = [[graph.tensor[name].shape for name in names] for names in (op.inputs, op.outputs)]
    entries = []
    for k in range(parts):
        part = {a: chunk(n, parts, k) if a == axis else (0, n) for a, n in op.sizes.items()}
        piece = make_piece(op, part, *shapes)
        box = [*piece.inputs, *piece.outputs][[*op.inputs, *op.outputs].index(tensor)]
        assert box is not None
        entries.append(Entry(k, box, k))
    return tuple(entries)


def test_tokens_move_to_experts_and_back_by_all_to_all() -> None:
    graph = import_with_constants(Capacity(), torch.randn(4, 6, 5)).graph
    topology, kinds = Topology.load("p100:4"), {op.kind: op for op in graph.operators}
    moved = []
    for start, end in ((kinds["dispatch"], None), (None, kinds["combine"])):
        made = start or next(op for op in graph.operators if set(op.outputs) & set(kinds["combine"].inputs[:1]))
        read = end or next(op for op in graph.operators if set(op.inputs) & set(made.outputs))
        [tensor] = set(made.outputs) & set(read.inputs)
        # An einsum names its axes a, b, ...: the groups and then the experts.
        source, destination = ("g", "b") if start else ("b", "g")
        plan = reshard(
            _layout(made, graph, tensor, source, 4), _layout(read, graph, tensor, destination, 4), 4, topology
        )
        moved.append((plan.form, sum(exchange.nbytes for exchange in plan.exchanges)))
    nbytes = 4 * EXPERTS * CAPACITY * 5 * 4
    assert moved == [("all_to_all", nbytes * 3 // 4)] * 2


def test_tokens_over_the_capacity_are_dropped_in_the_order_of_choices_and_tokens() -> None:
    chosen = torch.tensor([[[0, 1], [0, 2], [0, 3], [1, 0]]])
    assert slots(chosen, 4, 2).tolist() == [[[0, 3], [1, 4], [-1, 6], [2, -1]]]
    x = torch.arange(1.0, 5).reshape(1, 4, 1)
    placed = dispatch(x, slots(chosen, 4, 2), 4, 2)
    assert placed[0, ..., 0].tolist() == [[1, 2], [4, 1], [2, 0], [3, 0]]
    back = combine(placed, slots(chosen, 4, 2), torch.ones(1, 4, 2))
    assert back.flatten().tolist() == [2, 4, 3, 4]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_the_operators_are_those_of_a_loop(transposed: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)
    experts = torch.tensor([3, 0, 0, 2, 3, 7, 0])  # 7: none of them

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return expert_linear(x, weight, experts, transposed)

    def sort(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_mm(x, weight, torch.tensor([1, 1, 4, 6]))

    for function in (call, sort):
        assert torch.autograd.gradcheck(function, (x.requires_grad_(), weight.requires_grad_()))
    rows = [x[n] @ (weight[e].mT if transposed else weight[e]) for n, e in enumerate(experts.tolist()) if e < 4]
    made = expert_linear(x, weight, experts, transposed)
    torch.testing.assert_close(made[experts < 4], torch.stack(rows))
    assert not made[experts == 7].any()


class Sorted(nn.Module):
    """torch.nn.functional.grouped_mm, which takes bfloat16 when traced."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.randn(3, 8, 8)), more

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 6], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends, **self.more).sum()


def test_torchs_grouped_product_is_imported() -> None:
    graph = import_with_constants(Sorted(), torch.randn(6, 8)).graph
    [op] = [op for op in graph.operators if op.kind == "grouped_mm"]
    assert set(op.splittable) == {"s", "o", "i", "e"}
    assert op.roles["e"] == "parameter"
    with pytest.raises(ImportModelError):
        import_with_constants(Sorted(bias=torch.zeros(8)), torch.randn(6, 8))


MODELS = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_experts_of_transformers_compute_the_same_token_by_token(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra that tests install is missing")
    config, model_class, fields = MODELS[name]
    torch.manual_seed(0)
    options = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False, "experts_implementation": "eager",
        "attn_implementation": "eager", **fields,
    }  # fmt: skip
    model = getattr(transformers, model_class)(getattr(transformers, config)(**options)).double()
    ids = torch.randint(40, (3, 6))
    plain = model(input_ids=ids, labels=ids).loss
    imported = import_with_constants(model, {"input_ids": ids, "labels": ids})
    graph = imported.graph
    assert model.config._experts_implementation == "eager"  # as it was
    products = [op for op in graph.operators if op.kind == "expert_linear"]
    assert [op.roles["b0"] for op in products] == ["sample", "sample"]
    assert all(graph.tensor[op.inputs[1]].kind == "parameter" for op in products)
    leaves = {n: p for n, p in model.named_parameters() if n in graph.tensor}
    expected = torch.autograd.grad(plain, list(leaves.values()))
    draw = random.Random(name)
    values = {**imported.constants, **dict(zip(imported.input_names, (ids, ids), strict=True)), **leaves}
    values |= {n: x for n, x in model.named_buffers() if n in graph.tensor}
    loss = interpret(graph, values, cuts=lambda op: cuts(op, draw))[graph.loss]
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)  # parts of these models compute in float32
    torch.testing.assert_close(torch.autograd.grad(loss, list(leaves.values())), expected, rtol=1e-3, atol=1e-5)
