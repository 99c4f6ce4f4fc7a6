"""Constants: what an exported program computes from no input and no parameter is no operator of the graph.

While importing only their shapes are worked out; values are computed when somebody asks, which for the masks of a model
on the meta device may be nobody. A constant is stored in its smallest form: a dimension along which it must be the same
(because it was expanded, or filled) has size 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexsearch.graph.ops.builder import bind
from flexsearch.graph.ops.calls import dtype_name
from flexsearch.graph.ops.value import Value

Tensor = torch.Tensor


@dataclass(eq=False, slots=True)
class Folded:
    """A constant of ``shape``, which the program lays out in memory by ``stride``.

    ``small``: its smallest form, on the meta device. One of ``leaf``, the value of one that the program has, and
    ``source``, the call that makes it and which of the tensors that returns. ``buffer``: of a leaf, the buffer that it
    is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    small: Tensor
    leaf: Tensor | None = None
    source: tuple[Call, int] | None = None
    buffer: Value | None = None

    @property
    def compact(self) -> bool:
        """Whether some dimension is left out."""
        return tuple(self.small.shape) != self.shape


@dataclass(eq=False, slots=True)
class Call:
    """A call of a torch operator on constants."""

    target: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def operands(self) -> list[Folded]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Folded)]


class Constant(Value):
    """A constant as an operand, in its smallest form; ``data`` is computed at each reading."""

    __slots__ = ("folded",)

    def __init__(self, folded: Folded, name: str) -> None:
        self.folded = folded
        super().__init__(tuple(folded.small.shape), dtype_name(folded.small.dtype), "constant", name, weight=True)

    @property
    def data(self) -> Tensor | None:
        """The value: on the CPU; on the meta device where it depends on a buffer without one."""
        return derive(self.folded, {})

    @data.setter
    def data(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError("a folded constant has the value that it is computed to have")


class Expanded(Value):
    """What an operator makes of a constant's smallest form: the constant as large as the program has it."""

    __slots__ = ("folded",)

    def __init__(self, folded: Folded, whole: Value) -> None:
        self.folded = folded
        super().__init__(whole.shape, whole.dtype, whole.kind, whole.name, whole.sample, weight=whole.weight)

    @property
    def data(self) -> Tensor | None:
        """The value, as that of a :class:`Constant`."""
        return derive(self.folded, {}).expand(self.folded.shape)

    @data.setter
    def data(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError("a folded constant has the value that it is computed to have")


class Constants(Mapping[str, Tensor]):
    """Values of constants by name, computed when they are first read, or ``computed`` already."""

    def __init__(self, folded: Mapping[str, Folded], computed: Mapping[str, Tensor]) -> None:
        self.folded, self.computed = dict(folded), dict(computed)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.computed:
            self.computed[name] = derive(self.folded[name], {})
        return self.computed[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.folded, **self.computed})

    def __len__(self) -> int:
        return len({**self.folded, **self.computed})


def sources(constant: Folded) -> frozenset[str]:
    """Names of the buffers that a constant was computed from."""
    names: set[str] = set()
    seen: set[Folded] = set()
    pending = [constant]
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.buffer is not None:
            names.add(x.buffer.name)
        elif x.source is not None:
            pending += x.source[0].operands()
    return frozenset(names)


def derive(constant: Folded, buffers: Mapping[str, Tensor]) -> Tensor:
    """The constant's value, in its smallest form, for these values of its ``sources``, by name: CPU tensors.

    Buffers that are not given have the values they had; the result is a meta tensor if one of them has none.
    """
    done: dict[Call, list[Tensor]] = {}

    def value(x: Folded) -> Tensor:
        if x.buffer is not None and x.buffer.name in buffers:
            return buffers[x.buffer.name]
        if x.source is None:
            assert x.leaf is not None
            return x.leaf if x.leaf.is_meta else x.leaf.cpu()
        call, position = x.source
        if call not in done:
            operands = {y: value(y) for y in call.operands()}
            device = "meta" if any(y.is_meta for y in operands.values()) else "cpu"
            done[call] = _run(call, operands, device)
        result = done[call][position]
        return result[tuple(slice(size) for size in x.small.shape)].contiguous()

    return value(constant)


_FILLED: dict[str, float | None] = {
    "zeros_like": 0, "new_zeros": 0, "zeros": 0, "empty_like": 0, "new_empty": 0, "ones_like": 1, "new_ones": 1,
    "ones": 1, "full_like": None, "new_full": None, "full": None, "empty": 0, "empty_strided": 0,
    "new_empty_strided": 0,
}  # fmt: skip
"""Operators of which only the shape depends on their operand, and what they fill with (None: an argument says)."""
_COPIES = frozenset(("_to_copy", "to", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "lift_fresh"))
"""Operators besides those that torch calls pointwise whose elements depend on one element each."""


def elementwise(target: torch._ops.OpOverload) -> bool:
    """Whether each element of a call's result depends on the corresponding elements of its operands alone."""
    return torch.Tag.pointwise in target.tags or target._schema.name.removeprefix("aten::") in _COPIES


@dataclass
class Folder:
    """The constants of a program; equal ones, computed by equal calls, are one."""

    constants: dict[Hashable, Any] = field(default_factory=dict)

    def leaf(self, tensor: Tensor, buffer: Value | None = None) -> Folded:
        """A tensor of the program: a buffer, or a literal, which is one with others of the same value."""
        shape = tuple(tensor.shape)
        folded = Folded(shape, tensor.stride(), torch.empty_like(tensor, device="meta"), leaf=tensor, buffer=buffer)
        if buffer is not None or tensor.is_meta or tensor.numel() > 1 << 16:
            return folded
        key = (
            "literal",
            shape,
            tensor.stride(),
            tensor.dtype,
            tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        literal: Folded = self.constants.setdefault(key, folded)
        return literal

    def fold(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``node`` evaluates to, Folded or a tuple of them; None if it depends on more than constants, or is
        random."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        value, name = node.meta["val"], target._schema.name.removeprefix("aten::")
        if name in _FILLED:
            fill = _FILLED[name]
            fill = bind(target, args, kwargs)["fill_value"] if fill is None else fill
            if isinstance(fill, int | float | bool):
                return self._filled(value, fill)
        if isinstance(value, Tensor) and not value.numel():
            return self._filled(value, 0)  # whatever it was made from
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Value) for x in leaves) or is_random(target, bind(target, args, kwargs)):
            return None
        key = (target, _frozen((args, dict(kwargs))))
        try:
            hash(key)
        except TypeError:
            return self._called(Call(target, args, kwargs), value)
        if key not in self.constants:
            self.constants[key] = self._called(Call(target, args, kwargs), value)
        return self.constants[key]

    def _filled(self, value: Tensor, fill: float) -> Folded:
        shape = tuple(value.shape)
        key = ("filled", shape, value.stride(), value.dtype, type(fill), repr(fill))
        if key not in self.constants:
            sizes = [1] * len(shape) if value.numel() else shape
            small = torch.full(sizes, fill, dtype=value.dtype)
            self.constants[key] = Folded(shape, value.stride(), small.to("meta"), leaf=small)
        folded: Folded = self.constants[key]
        return folded

    def _called(self, call: Call, value: Any) -> Any:
        """The results of a call, whose full shapes are those of ``value``."""
        try:
            results = iter(_run(call, {x: x.small for x in call.operands()}, "meta"))
        except (RuntimeError, NotImplementedError):  # not every operator can run without values
            results = iter(pytree.tree_leaves(pytree.tree_map_only(Tensor, _bare, value)))
        position = count()

        def folded(full: Tensor) -> Folded:
            small = next(results)
            sizes = [1 if stride == 0 else size for size, stride in zip(small.shape, small.stride(), strict=True)]
            form = torch.empty(sizes, dtype=full.dtype, device="meta")
            return Folded(tuple(full.shape), full.stride(), form, source=(call, next(position)))

        result = pytree.tree_map_only(Tensor, folded, value)
        return tuple(result) if isinstance(result, list) else result


def _bare(x: Tensor) -> Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")


def _frozen(value: Any) -> Hashable:
    """Arguments as a key: constants by identity, numbers by type and value."""
    if isinstance(value, Folded):
        return ("constant", id(value))
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(x)) for name, x in value.items())
    return (type(value), repr(value) if isinstance(value, float) else value)


def is_random(target: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; recurrent layers do so only if they have dropout and are trained."""
    drops = arguments.get("dropout", 1) != 0 and arguments.get("train", True) is not False
    return torch.Tag.nondeterministic_seeded in target.tags and drops


def _run(call: Call, operands: Mapping[Folded, Tensor], device: str) -> list[Tensor]:
    """The tensors that a call returns, for smallest forms of its operands; on ``device``, whatever one it names."""
    small, target = elementwise(call.target), call.target
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        target = torch.ops.aten.reshape.default  # the smallest form may have other strides than the program's tensor

    def operand(x: Folded) -> Tensor:
        value = operands[x].to(device)
        if target._schema.name == "aten::as_strided":
            laid_out = torch.empty_strided(x.shape, x.stride, dtype=value.dtype, device=device)
            return laid_out.copy_(value) if 0 not in x.stride else value.expand(x.shape)
        return value if small else value.expand(x.shape)

    args, kwargs = pytree.tree_map_only(Folded, operand, (list(call.args), dict(call.kwargs)))
    args = pytree.tree_map_only(torch.device, lambda _: torch.device(device), args)
    if any(argument.name == "device" for argument in target._schema.arguments) and (
        "device" in kwargs or not call.operands()
    ):
        kwargs["device"] = torch.device(device)
    with torch.no_grad():
        result = target(*args, **kwargs)
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
