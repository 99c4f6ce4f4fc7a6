"""Mixture of experts as operators that a model can call, so that flexsearch knows what it splits.

``expert_linear`` is a linear layer of which each token has one of several weights. No token depends on another, whereas
sorting tokens by expert and multiplying group by group mixes the whole batch. Its experts can be split: a piece
computes the tokens of its experts and adds nothing to the others.

``slots``, ``dispatch`` and ``combine`` give each expert a fixed number of places for tokens of each group (GShard,
Lepikhin et al., 2020). With groups split before and experts split after ``dispatch``, tokens move by all-to-all. Tokens
for which an expert has no place left are dropped: that is part of the model, and never a choice of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def grouped_product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Rows of ``x`` (S, I) up to each of ``ends`` times one matrix of ``weight`` (E, I, O) after the other: (S, O).

    ``ends`` has E + 1 numbers: rows before the first and after the last of them give 0.
    """
    bounds = list(accumulate((min(max(end, 0), len(x)) for end in ends), max))
    parts = [x[a:b] @ matrix for a, b, matrix in zip(bounds[:-1], bounds[1:], weight, strict=True) if a < b]
    before, after = bounds[0], len(x) - bounds[-1]
    zeros = [x.new_zeros(n, weight.shape[-1]) for n in (before, after)]
    return torch.cat([*zeros[: before > 0], *parts, *(zeros[1:] if after or not (parts or before) else [])])


def rows_by_expert(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool, first: int = 0) -> Tensor:
    """``x[..., n, :] @ weight[experts[..., n] - first]``; 0 where that is none of the weights.

    Shapes: x (..., I), weight (E, I, O), or (E, O, I) if ``transposed``, experts (...) integers; result (..., O).
    """
    weight = weight.mT if transposed else weight
    flat, count = experts.reshape(-1).long() - first, len(weight)
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=count + 1).cumsum(0).tolist()[:count]
    rows = x.reshape(-1, x.shape[-1])[order]
    products = grouped_product(rows, weight, [0, *ends])
    return products[order.argsort()].reshape(*x.shape[:-1], weight.shape[-1])


def places(experts: Tensor, count: int, capacity: int) -> Tensor:
    """Place of each choice (G, S, K) of an expert: ``expert * capacity + position`` among the choices of its group that
    came before (first all first choices, then all second ones), or -1 where the expert has no place left."""
    order = experts.mT.flatten(1).long()
    one_hot = order[..., None] == torch.arange(count, device=experts.device)
    position = (one_hot.cumsum(1) * one_hot).sum(-1) - 1
    fits = (position < capacity) & (order >= 0) & (order < count)
    place = torch.where(fits, order * capacity + position, -1).to(experts.dtype)
    return place.reshape(len(experts), experts.shape[2], experts.shape[1]).mT.contiguous()


def placed(x: Tensor, slots: Tensor, experts: tuple[int, int], part: tuple[int, int], capacity: int) -> Tensor:
    """Tokens x (G, S, D) in their places, (G, experts, part of the capacity, D), those of these experts and positions.

    ``slots`` (G, S, K) as :func:`places` gives them; places that no token has are 0.
    """
    index, inside = _local(slots, experts, part, capacity)
    size = (experts[1] - experts[0]) * (part[1] - part[0])
    rows = torch.where(inside[..., None], x[:, :, None], 0).flatten(1, 2)
    index = torch.where(inside, index, size).flatten(1)  # one row more, for what is not placed
    into = x.new_zeros(len(x), size + 1, x.shape[-1])
    into = into.scatter_add(1, index[..., None].expand_as(rows), rows)
    return into[:, :size].reshape(len(x), experts[1] - experts[0], part[1] - part[0], -1)


def collected(
    y: Tensor, slots: Tensor, weights: Tensor, experts: tuple[int, int], part: tuple[int, int], capacity: int
) -> Tensor:
    """``sum over K of weights * what lies in the place``: (G, S, D) from y (G, experts, part of the capacity, D)."""
    index, inside = _local(slots, experts, part, capacity)
    rows = y.flatten(1, 2)
    index = torch.where(inside, index, 0).flatten(1)
    taken = rows.gather(1, index[..., None].expand(-1, -1, y.shape[-1])).reshape(*slots.shape, -1)
    return (taken * torch.where(inside, weights, 0).to(y.dtype)[..., None]).sum(2)


def _local(slots: Tensor, experts: tuple[int, int], part: tuple[int, int], capacity: int) -> tuple[Tensor, Tensor]:
    """Number of each place among those of a piece, and whether it is one of them."""
    slots = slots.long()
    expert, position = slots.div(capacity, rounding_mode="floor"), slots % capacity
    inside = (slots >= 0) & (expert >= experts[0]) & (expert < experts[1])
    inside = inside & (position >= part[0]) & (position < part[1])
    return (expert - experts[0]) * (part[1] - part[0]) + position - part[0], inside


_library: Any = torch.library.Library("flexsearch", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(schema: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    """Define an operator of torch: ``run`` computes it, ``shape`` gives an empty result."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsearch::{name}", shape, lib=_library)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plain = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [
                p if x is None else x.detach().requires_grad_(need)
                for x, p, need in zip(ctx.saved_tensors, ctx.plain, ctx.needs_input_grad, strict=True)
            ]
            wanted = [x for x, need in zip(inputs, ctx.needs_input_grad, strict=True) if need]
            gradients = iter(torch.autograd.grad(run(*inputs), wanted, grad))
        return tuple(next(gradients) if need else None for need in ctx.needs_input_grad)

    torch.library.register_autograd(f"flexsearch::{name}", backward, setup_context=save, lib=_library)
    return getattr(torch.ops.flexsearch, name)


_grouped_mm = _operator(
    "grouped_mm(Tensor input, Tensor weight, Tensor offs) -> Tensor",
    lambda input, weight, offs: grouped_product(input, weight, [0, *offs.long().tolist()]),
    lambda input, weight, offs: input.new_empty(len(input), weight.shape[-1]),
)
_expert_linear = _operator(
    "expert_linear(Tensor x, Tensor weight, Tensor experts, bool transposed) -> Tensor",
    rows_by_expert,
    lambda x, weight, experts, transposed: x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 2]),
)
_slots = _operator(
    "expert_slots(Tensor experts, int count, int capacity) -> Tensor",
    places,
    lambda experts, count, capacity: torch.empty_like(experts, memory_format=torch.contiguous_format),
)
_dispatch = _operator(
    "dispatch(Tensor x, Tensor slots, int count, int capacity) -> Tensor",
    lambda x, slots, count, capacity: placed(x, slots, (0, count), (0, capacity), capacity),
    lambda x, slots, count, capacity: x.new_empty(len(x), count, capacity, x.shape[-1]),
)
_combine = _operator(
    "combine(Tensor y, Tensor slots, Tensor weights) -> Tensor",
    lambda y, slots, weights: collected(y, slots, weights, (0, y.shape[1]), (0, y.shape[2]), y.shape[2]),
    lambda y, slots, weights: y.new_empty(*slots.shape[:2], y.shape[-1]),
)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """As torch.nn.functional.grouped_mm of rows x (S, I) and weight (E, I, O), for any dtype: (S, O).

    ``offs`` (E), int32 or int64: where the rows of each expert end. Rows after the last give 0.
    """
    result: Tensor = _grouped_mm(x, weight, offs)
    return result


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool = False) -> Tensor:
    """A linear layer of which each token has one of several weights: ``x[n] @ weight[experts[n]]``.

    Shapes: x (..., I), weight (E, I, O), or (E, O, I) as those of nn.Linear if ``transposed``, experts (...) integers;
    result (..., O), 0 where the expert is none of E.
    """
    result: Tensor = _expert_linear(x, weight, experts, transposed)
    return result


def slots(experts: Tensor, count: int, capacity: int) -> Tensor:
    """Places of tokens at ``count`` experts that take ``capacity`` tokens of each group.

    ``experts`` (groups, tokens, choices), int64: what a router chose. Returns as many numbers, -1 for a choice that is
    dropped, because its expert has no place left. First choices come first, in the order of tokens.
    """
    result: Tensor = _slots(experts, count, capacity)
    return result


def dispatch(x: Tensor, slots: Tensor, count: int, capacity: int) -> Tensor:
    """Tokens x (groups, tokens, D) at their places: (groups, count, capacity, D), 0 where no token is."""
    result: Tensor = _dispatch(x, slots, count, capacity)
    return result


def combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """What experts made of the tokens, y (groups, experts, capacity, D), back at the tokens: (groups, tokens, D).

    ``weights`` (groups, tokens, choices): factor of each choice in the sum; dropped ones add nothing.
    """
    result: Tensor = _combine(y, slots, weights)
    return result
