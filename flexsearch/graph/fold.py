"""Constants: what an exported program computes from no input and no parameter is evaluated while importing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexsearch.graph.aten import Value, bind


@dataclass(eq=False, slots=True)
class Folded:
    """A constant: its value (on the CPU; on the meta device if not even that is known), or the ``buffer`` it is.

    ``source``: of what was computed from buffers, the call and which of the tensors it returns.
    """

    data: torch.Tensor
    buffer: Value | None = None
    source: tuple[Call, int] | None = None


@dataclass(eq=False, slots=True)
class Call:
    """A call of a torch operator on constants."""

    target: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def operands(self) -> list[Folded]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Folded)]


def sources(constant: Folded) -> frozenset[str]:
    """Names of the buffers that a constant was computed from."""
    if constant.buffer is not None:
        return frozenset((constant.buffer.name,))
    if constant.source is None:
        return frozenset()
    return frozenset[str]().union(*(sources(x) for x in constant.source[0].operands()))


def derive(constant: Folded, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The constant's value for these values of its ``sources``, by name: CPU tensors."""
    done: dict[Call, list[torch.Tensor]] = {}

    def value(x: Folded) -> torch.Tensor:
        if x.buffer is not None:
            return buffers[x.buffer.name]
        if x.source is None:
            return x.data
        call, position = x.source
        if call not in done:
            done[call] = _tensors(_run(call.target, *pytree.tree_map_only(Folded, value, (call.args, call.kwargs))))
        return done[call][position]

    return value(constant)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


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
    result = _evaluate(target, value, args, kwargs)
    if not any(isinstance(x, Folded) and (x.buffer or x.source) for x in leaves):
        return pytree.tree_map_only(torch.Tensor, Folded, result)
    call, positions = Call(target, args, kwargs), count()
    return pytree.tree_map_only(torch.Tensor, lambda x: Folded(x, source=(call, next(positions))), result)


def is_random(target: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; recurrent layers do so only if they have dropout and are trained."""
    drops = arguments.get("dropout", 1) != 0 and arguments.get("train", True) is not False
    return torch.Tag.nondeterministic_seeded in target.tags and drops


def _evaluate(target: torch._ops.OpOverload, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    real_args, real_kwargs = pytree.tree_map_only(Folded, lambda x: x.data, (args, kwargs))
    if any(x.is_meta for x in _tensors((real_args, real_kwargs))):
        return pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta"), value
        )
    return _run(target, real_args, real_kwargs)


def _run(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call on the CPU, wherever its operands are and whatever device it names."""
    cpu_args, cpu_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (list(args), dict(kwargs)))
    if "device" in cpu_kwargs:
        cpu_kwargs["device"] = torch.device("cpu")
    with torch.no_grad():
        result = target(*cpu_args, **cpu_kwargs)
    return tuple(result) if isinstance(result, list) else result
