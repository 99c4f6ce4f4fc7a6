"""Attention with dropout: computed in blocks, it is attention with those probabilities dropped, and keeps little."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexsearch.graph.ops import attention_blocks
from flexsearch.graph.ops.attention_blocks import Settings, blockwise_attention


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor, s: Settings) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if s.scale is None else s.scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if s.causal is not None:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(s.causal), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return weights * keep * s.factor @ v


@given(
    lead=st.lists(st.integers(1, 4), max_size=3),
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    causal=st.none() | st.integers(0, 6),
    mask=st.sampled_from(["none", "bool", "float"]),
    cut=st.integers(0, 31),
    p=st.sampled_from([0.3, 1.0]),
    block=st.sampled_from([1, 20, 10**6]),
)
@settings(max_examples=60, deadline=None)
def test_blocks_compute_what_the_whole_computes(
    lead: list[int], queries: int, keys: int, causal: int | None, mask: str, cut: int, p: float, block: int
) -> None:
    generator = torch.Generator().manual_seed(cut)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    keep = torch.rand(*lead, queries, keys, generator=generator) >= p
    q, k, v = (rand(*lead, n, f).requires_grad_() for n, f in ((queries, 3), (keys, 3), (keys, 2)))
    shape = [1 if cut >> i & 1 else n for i, n in enumerate((*lead, queries, keys))]
    added = {"none": None, "bool": rand(*shape) > 0, "float": rand(*shape).requires_grad_()}[mask]
    how = Settings(0.7, p, causal, lambda part, seen, device: keep[part][..., :seen])
    leaves = [x for x in (q, k, v, added) if x is not None and x.requires_grad]
    old = attention_blocks.BLOCK, attention_blocks.ROWS
    try:
        attention_blocks.BLOCK, attention_blocks.ROWS = block, 2
        result = blockwise_attention(q, k, v, added, how)
        weights = rand(*result.shape)
        gradients = torch.autograd.grad((result * weights).sum(), leaves)
    finally:
        attention_blocks.BLOCK, attention_blocks.ROWS = old
    plain = _written_out(q, k, v, added, keep, how)
    torch.testing.assert_close(result, plain, rtol=1e-10, atol=1e-12)
    expected = torch.autograd.grad((plain * weights).sum(), leaves)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_the_backward_is_linear_in_the_sequence(dtype: torch.dtype) -> None:
    sizes = []
    for length in (64, 512):
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        q = torch.randn(1, 2, length, 8, dtype=dtype, requires_grad=True)
        how = Settings(None, 0.5, 0, lambda part, seen, device: torch.ones((), dtype=torch.bool))
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            blockwise_attention(q, q, q, None, how)
        sizes.append(total)
    assert sizes[1] == 8 * sizes[0]
