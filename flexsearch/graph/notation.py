"""The access notation: how the dimensions of an operator's operands follow from its axes, in the manner of einops.

A pattern reads ``inputs -> outputs``, operands separated by commas, dimensions by spaces:

    linear        "b.. i, o i, +o -> b.. o"
    conv2d        "n (g c) (s*h+d*KH-p) (s*w+d*KW-p), (g o) c KH KW, +(g o) -> n (g o) h w"
    softmax       "b.. D -> b.. D"

- ``h`` is an axis; an upper-case name is a **whole** axis: it is never split (a window, a normalised dimension).
- ``(c h w)`` is one dimension made of several axes, row-major; only the first of them can be split.
- ``(2*h+KH-1)`` is a window: the elements ``2*h + KH - 1`` that the piece's axes reach, clipped to the tensor. Windows
  describe stride, dilation, padding (halos follow), slices ``(h+5)`` and concatenation ``(h-5)``.
- ``1`` or any number is a dimension of which only that element is read (1 stands for element 0 of a broadcast dimension
  and is written ``1``; element 3 of a selected dimension is written ``(3)``).
- ``+o`` marks an operand that is added once: only the first piece along the summed axes reads it.
- ``b..`` (templates only) stands for as many axes b0, b1, ... as the operand's rank leaves.

An axis that no output mentions is summed away; splitting it leaves partial sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from flexsearch.errors import NotationError

Interval = tuple[int, int]
"""Half-open range of indices [low, high)."""

Box = tuple[Interval, ...]
"""One interval per dimension of a tensor: a rectangular region."""


def is_whole(axis: str) -> bool:
    """Whether the axis may never be split, which the notation says by an upper-case first letter."""
    return axis[0].isupper()


def volume(box: Box) -> int:
    """Number of elements in a region."""
    count = 1
    for low, high in box:  # a plain loop: this is called millions of times in a search
        count *= high - low
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """The region common to both, or None if it is empty."""
    result = []
    for (low, high), (other_low, other_high) in zip(a, b, strict=True):
        low, high = max(low, other_low), min(high, other_high)
        if low >= high:
            return None
        result.append((low, high))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of an operand: ``sum(coefficient * axis) + offset``, or (``merged``) axes in row-major order.

    ``plain``: exactly one axis, of the tensor's size. A window of the same form, ``(h)``, may be clipped instead.
    """

    axes: tuple[str, ...]
    coefficients: tuple[int, ...]
    offset: int = 0
    merged: bool = False
    plain: bool = False

    def window(self, piece: Mapping[str, Interval]) -> Interval:
        """Indices that the piece reaches, before clipping to the tensor (negative: padding)."""
        low = high = self.offset
        for axis, coefficient in zip(self.axes, self.coefficients, strict=True):
            low += coefficient * piece[axis][0]
            high += coefficient * (piece[axis][1] - 1)
        return low, high + 1

    def merged_interval(self, piece: Mapping[str, Interval], sizes: Mapping[str, int]) -> Interval:
        """Contiguous range covered by a piece of a merged dimension."""
        low, high, stride = 0, 1, prod(sizes[a] for a in self.axes)
        for position, axis in enumerate(self.axes):
            stride //= sizes[axis]
            first, last = piece[axis]
            if last - first > 1 and any(piece[a] != (0, sizes[a]) for a in self.axes[position + 1 :]):
                raise NotationError(f"a piece splits {axis!r} and a later axis of {self}: its region is not contiguous")
            low += first * stride
            if last - first > 1 or position == len(self.axes) - 1:
                return low, low + (last - first) * stride
            high = low + stride
        return low, high

    def interval(self, piece: Mapping[str, Interval], sizes: Mapping[str, int], size: int) -> Interval | None:
        """Indices of a tensor's dimension of ``size`` that the piece reaches, or None if all of its window is outside.
        ``piece`` needs the axes of this dimension only."""
        if self.merged:
            return self.merged_interval(piece, sizes)
        low, high = self.window(piece)
        low, high = max(low, 0), min(high, size)
        return (low, high) if low < high else None

    def __str__(self) -> str:
        if self.merged:
            return f"({' '.join(self.axes)})"
        if not self.axes:
            return "1" if self.offset == 0 else f"({self.offset})"
        text = "+".join(a if c == 1 else f"{c}*{a}" for a, c in zip(self.axes, self.coefficients, strict=True))
        return text if self.plain else f"({text}{f'{self.offset:+d}' if self.offset else ''})"


@dataclass(frozen=True, slots=True)
class Operand:
    """The dimensions of one operand; ``once``: only the first piece along summed axes reads it (a bias)."""

    dimensions: tuple[Dimension, ...]
    once: bool = False

    def __str__(self) -> str:
        return ("+" if self.once else "") + " ".join(map(str, self.dimensions))

    def names(self) -> set[str]:
        return {axis for dimension in self.dimensions for axis in dimension.axes}


@dataclass(frozen=True)
class Access:
    """A parsed, concrete pattern: the operands of an operator in terms of its axes."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs)) + " -> " + ", ".join(map(str, self.outputs))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes: first those of the outputs, then the summed and whole ones, each in order of appearance."""
        seen: dict[str, None] = {}
        for operand in self.outputs + self.inputs:
            for dimension in operand.dimensions:
                seen.update(dict.fromkeys(dimension.axes))
        return tuple(seen)

    @cached_property
    def summed(self) -> frozenset[str]:
        """Axes that no output mentions (whole axes included)."""
        kept = set().union(*(operand.names() for operand in self.outputs)) if self.outputs else set()
        return frozenset(set(self.axes) - kept)

    def splittable(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Axes that may have a degree above 1: not whole, longer than 1, and first in each merged dimension."""
        blocked = set()
        for operand in self.inputs + self.outputs:
            for dimension in operand.dimensions:
                if dimension.merged:
                    long = [a for a in dimension.axes if sizes[a] > 1]
                    blocked.update(long[1:])
        return tuple(a for a in self.axes if not is_whole(a) and sizes[a] > 1 and a not in blocked)

    def skips(self, operand: Operand, piece: Mapping[str, Interval]) -> bool:
        """Whether ``operand`` is added once and this is not the first piece along the summed axes that it knows."""
        return operand.once and any(piece[a][0] > 0 for a in self.summed if a in piece)

    def region(
        self, operand: Operand, piece: Mapping[str, Interval], sizes: Mapping[str, int], shape: Sequence[int]
    ) -> Box | None:
        """Region of ``operand`` (a tensor of ``shape``) that ``piece`` (an interval per axis) reads or writes.

        None if the piece touches nothing of it: all its window lies outside (a concatenated part), or the operand is
        added once and this is not the first piece along the summed axes.
        """
        if self.skips(operand, piece):
            return None
        box = []
        for dimension, size in zip(operand.dimensions, shape, strict=True):
            interval = dimension.interval(piece, sizes, size)
            if interval is None:
                return None
            box.append(interval)
        return tuple(box)


_DIMENSION = re.compile(r"\s*(\([^()]*\)|[A-Za-z]\w*(?:\.\.)?|\d+)", re.ASCII)
_TERM = re.compile(r"\s*([+-]?)\s*(?:(\w+)\s*\*\s*)?(\w+)\s*", re.ASCII)
_DIGITS = 15
"""Of a number in a pattern: tensors have no dimensions longer than 2^48."""


@lru_cache(maxsize=65536)
def parse(pattern: str) -> Access:
    """Parse a concrete pattern (no ``..``). Raises NotationError that quotes the pattern."""
    if pattern.count("->") != 1:
        raise NotationError(f'pattern "{pattern}" must have exactly one "->" between inputs and outputs')
    left, right = pattern.split("->")
    inputs = tuple(_operand(text, pattern, {}) for text in left.split(","))
    outputs = tuple(_operand(text, pattern, {}) for text in right.split(","))
    return Access(inputs, outputs)


def instantiate(
    template: str,
    inputs: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    parameters: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[str, dict[str, int]]:
    """Concrete pattern and axis sizes of a template for operands of the given shapes.

    ``parameters`` replaces names in windows by numbers (stride, dilation, padding); ``sizes`` gives axes whose size the
    shapes leave open (groups of a convolution). Raises NotationError where pattern and shapes disagree.
    """
    if template.count("->") != 1:
        raise NotationError(f'pattern "{template}" must have exactly one "->" between inputs and outputs')
    left, right = (side.split(",") for side in template.split("->"))
    ranks = [len(shape) for shape in (*inputs, *outputs)]
    texts = [*left[: len(inputs)], *right]  # optional trailing inputs (a bias) may be absent
    if len(left) < len(inputs) or len(texts) != len(ranks):
        raise NotationError(
            f'pattern "{template}" has {len(left)} inputs and {len(right)} outputs, '
            f"but {len(inputs)} and {len(outputs)} tensors were given"
        )
    spread = _spread(texts, ranks, template)
    operands = [_operand(_expand(text, spread), template, dict(parameters or {})) for text in texts]
    access = Access(tuple(operands[: len(inputs)]), tuple(operands[len(inputs) :]))
    return str(access), infer_sizes(access, inputs, outputs, sizes or {})


def infer_sizes(
    access: Access, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], explicit: Mapping[str, int]
) -> dict[str, int]:
    """Size of every axis from the operands' shapes. Raises NotationError on a conflict or an axis left open."""
    sizes = dict(explicit)
    pairs = [
        (dimension, size)
        for operand, shape in zip(access.inputs + access.outputs, (*inputs, *outputs), strict=True)
        for dimension, size in _dimensions(operand, shape, access)
    ]
    for dimension, size in pairs:
        if dimension.plain and sizes.setdefault(dimension.axes[0], size) != size:
            axis = dimension.axes[0]
            raise NotationError(f'axis {axis!r} of "{access}" is {sizes[axis]} in one operand and {size} in another')
    for _ in range(len(pairs)):
        before = len(sizes)
        for dimension, size in pairs:
            unknown = [a for a in dimension.axes if a not in sizes]
            if dimension.merged and len(unknown) == 1:
                sizes[unknown[0]] = size // max(1, prod(sizes[a] for a in dimension.axes if a in sizes))
        if len(sizes) == before:
            break
    for axis in access.axes:
        if axis not in sizes:
            raise NotationError(f'the size of axis {axis!r} of "{access}" does not follow from the shapes; give it')
    for dimension, size in pairs:
        if dimension.merged and prod(sizes[a] for a in dimension.axes) != size:
            raise NotationError(f'"{dimension}" of "{access}" cannot have size {size} with {sizes}')
    return {axis: sizes[axis] for axis in access.axes}


def _dimensions(operand: Operand, shape: Sequence[int], access: Access) -> list[tuple[Dimension, int]]:
    if len(operand.dimensions) != len(shape):
        raise NotationError(
            f'operand "{operand}" of "{access}" has {len(operand.dimensions)} dimensions, '
            f"the tensor has shape {tuple(shape)}"
        )
    return list(zip(operand.dimensions, shape, strict=True))


def _spread(texts: Sequence[str], ranks: Sequence[int], template: str) -> dict[str, int]:
    """How many axes each ``name..`` stands for."""
    spread: dict[str, int] = {}
    for _ in range(2):  # a second round: an operand with two spreads is settled once one of them is known
        for text, rank in zip(texts, ranks, strict=True):
            tokens = _DIMENSION.findall(text)
            open_names = [t[:-2] for t in tokens if t.endswith("..") and t[:-2] not in spread]
            settled_rank = sum(spread[t[:-2]] if t.endswith("..") and t[:-2] in spread else 1 for t in tokens)
            if len(open_names) == 1:
                count = rank - (settled_rank - 1)
                if count < 0:
                    raise NotationError(f'operand "{text.strip()}" of "{template}" needs more than {rank} dimensions')
                spread[open_names[0]] = count
    return spread


def _expand(text: str, spread: Mapping[str, int]) -> str:
    return re.sub(r"([A-Za-z]\w*)\.\.", lambda m: " ".join(f"{m[1]}{i}" for i in range(spread[m[1]])), text)


def _operand(text: str, pattern: str, parameters: Mapping[str, int]) -> Operand:
    text = text.strip()
    once = text.startswith("+")
    rest, position, dimensions = text[once:].strip(), 0, []
    while position < len(rest):
        match = _DIMENSION.match(rest, position)
        if match is None or match[1].endswith(".."):
            raise NotationError(f'cannot read "{rest[position:]}" in operand "{text}" of pattern "{pattern}"')
        dimensions.append(_dimension(match[1], pattern, parameters))
        position = match.end()
        while position < len(rest) and rest[position].isspace():
            position += 1
    return Operand(tuple(dimensions), once)


def _number(digits: str, pattern: str) -> int:
    if len(digits) > _DIGITS:
        raise NotationError(f'a number of {len(digits)} digits in pattern "{pattern}" is too large')
    return int(digits)


def _dimension(token: str, pattern: str, parameters: Mapping[str, int]) -> Dimension:
    if token[0] != "(":
        if token.isdigit():
            return Dimension((), (), 0 if token == "1" else _number(token, pattern))
        return Dimension((token,), (1,), plain=True)
    inner = token[1:-1].strip()
    names = inner.split()
    if len(names) > 1 and all(re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) for name in names):
        return Dimension(tuple(names), (1,) * len(names), merged=True)
    axes, coefficients, offset, position = [], [], 0, 0
    while position < len(inner):
        match = _TERM.match(inner, position)
        if match is None or (position > 0 and not match[1]):
            raise NotationError(f'cannot read window "{token}" of pattern "{pattern}"')
        factor, axis = 1 if match[1] != "-" else -1, None
        for name in (match[2], match[3]):
            if name is None:
                continue
            if name.isdigit() or name in parameters:
                factor *= _number(name, pattern) if name.isdigit() else parameters[name]
            elif axis is None and name[0].isalpha():
                axis = name
            elif axis is None:
                raise NotationError(f'"{name}" in window "{token}" of pattern "{pattern}" is not the name of an axis')
            else:
                raise NotationError(f'window "{token}" of pattern "{pattern}" multiplies two axes')
        if axis is None:
            offset += factor
        elif factor < 1:
            raise NotationError(f'window "{token}" of pattern "{pattern}" needs positive coefficients on axes')
        else:
            axes.append(axis)
            coefficients.append(factor)
        position = match.end()
    return Dimension(tuple(axes), tuple(coefficients), offset)
