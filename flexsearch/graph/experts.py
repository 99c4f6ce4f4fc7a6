"""Experts of ``transformers`` models, token by token; and the operators of :mod:`flexsearch.experts`, which models call
under this name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from flexsearch.experts import (
    collected,
    combine,
    dispatch,
    expert_linear,
    grouped_mm,
    grouped_product,
    placed,
    places,
    rows_by_expert,
    slots,
)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a ``transformers`` model, token by token; (tokens, D), (tokens, K), (tokens, K) -> (tokens, D)."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = expert_linear(x, weight, experts, transposed=not self.is_transposed)
        return y if bias is None else y + bias[experts]

    tokens, choices = top_k_index.shape
    experts = top_k_index.reshape(-1)
    first, bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    x = hidden_states[:, None].expand(-1, choices, -1).reshape(tokens * choices, -1)
    x = product(x, getattr(self, first), getattr(self, bias) if self.has_bias else None)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = product(x, self.down_proj, self.down_proj_bias if self.has_bias else None)
    x = self.post_expert_norm(x) if self.has_post_expert_norm else x
    x = x * top_k_weights.reshape(-1, 1)
    return x.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


_NAME = "flexsearch"


@contextmanager
def experts_by_token(model: nn.Module) -> Iterator[None]:
    """Within it, experts of a ``transformers`` model compute the same token by token, for importing."""
    library = sys.modules.get("transformers.integrations.moe")
    own = [m for m in model.modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "config")]
    functions: Any = getattr(library, "ALL_EXPERTS_FUNCTIONS", None)
    if functions is None or not own:
        yield
        return
    functions.register(_NAME, experts_forward)
    configs: dict[int, Any] = {id(m.config): m.config for m in own if not m._is_expert_parallel}
    before = {i: config._experts_implementation_internal for i, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation_internal = _NAME
        yield
    finally:
        for i, config in configs.items():
            config._experts_implementation_internal = before[i]


__all__ = [
    "collected", "combine", "dispatch", "expert_linear", "experts_by_token", "experts_forward", "grouped_mm",
    "grouped_product", "placed", "places", "rows_by_expert", "slots",
]  # fmt: skip
