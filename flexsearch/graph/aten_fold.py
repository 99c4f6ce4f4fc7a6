"""Constants: what an exported program computes from no input and no parameter is evaluated while importing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexsearch.graph.aten import Value, bind


@dataclass(eq=False, slots=True)
class Folded:
    """A constant: its value (on the CPU; on the meta device if not even that is known), or the ``buffer`` it is."""

    data: torch.Tensor
    buffer: Value | None = None


_FILLED: dict[str, float | None] = {
    "zeros_like": 0, "new_zeros": 0, "empty_like": 0, "new_empty": 0, "ones_like": 1, "new_ones": 1,
    "full_like": None, "new_full": None, "empty": 0, "empty_strided": 0, "new_empty_strided": 0,
}  # fmt: skip
"""Operators of which only the shape depends on their operand, and what they fill with (None: an argument says)."""


def fold(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``node`` evaluates to, Folded or a tuple of them; None if it depends on more than constants, or is random.

    On the meta device, too, everything is computed on the CPU; only what depends on a meta buffer remains a shape.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Value | Folded)]
    value, name = node.meta["val"], target._schema.name.removeprefix("aten::")
    if name in _FILLED:
        fill = _FILLED[name]
        fill = bind(target, args, kwargs)["fill_value"] if fill is None else fill
        if isinstance(fill, int | float | bool):
            return Folded(torch.full(tuple(value.shape), fill, dtype=value.dtype))
    if isinstance(value, torch.Tensor) and not value.numel():
        return Folded(torch.empty(tuple(value.shape), dtype=value.dtype))  # whatever it was made from
    if any(isinstance(x, Value) for x in leaves) or is_random(target, bind(target, args, kwargs)):
        return None
    return pytree.tree_map_only(torch.Tensor, Folded, _evaluate(target, value, args, dict(kwargs)))


def is_random(target: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; recurrent layers do so only if they have dropout and are trained."""
    drops = arguments.get("dropout", 1) != 0 and arguments.get("train", True) is not False
    return torch.Tag.nondeterministic_seeded in target.tags and drops


def _evaluate(target: torch._ops.OpOverload, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = pytree.tree_map_only(Folded, lambda x: x.data, (args, kwargs))
    operands = [x for x in pytree.tree_leaves((real_args, real_kwargs)) if isinstance(x, torch.Tensor)]
    if any(x.is_meta for x in operands):
        return pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta"), value
        )
    real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (real_args, real_kwargs))
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    with torch.no_grad():
        result = target(*real_args, **real_kwargs)
    return tuple(result) if isinstance(result, list) else result
