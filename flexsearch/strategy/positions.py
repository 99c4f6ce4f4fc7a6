"""Ordered lists of whole numbers, as strategy files write them: devices of a mesh, positions in it.

A list is either written out, ``[0, 4, 1, 5]``, or as in PyTorch by shape and strides, which is how orders that permute
the axes of a cluster look: ``{"first": 0, "shape": [4, 2], "strides": [1, 4]}`` is ``[0, 4, 1, 5, 2, 6, 3, 7]``, two
hosts with four devices each, read by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer

from flexsearch.quantities import MAX_DEVICES, DeviceIndex

WRITTEN_OUT: Final = 8
"""Up to so many numbers a list is easier to read than its strides."""
_FIELDS: Final = frozenset({"first", "shape", "strides"})


def strided(numbers: Sequence[int]) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """(first, shape, strides) of a list whose number at index (i, j, ...) of ``shape`` is ``first + i * strides[0] + j
    * strides[1] + ...``, the last index running fastest; None if the list is not of that kind."""
    row, shape, strides = list(numbers), list[int](), list[int]()
    while len(row) > 1:
        step, length = row[1] - row[0], 2
        while length < len(row) and row[length] - row[length - 1] == step:
            length += 1
        if len(row) % length or any(n != row[k - k % length] + k % length * step for k, n in enumerate(row)):
            return None
        shape.insert(0, length)
        strides.insert(0, step)
        row = row[::length]
    return (row[0], tuple(shape), tuple(strides)) if row else None


def expanded(first: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The list that :func:`strided` describes."""
    numbers = np.array(first)
    for length, step in zip(shape, strides, strict=True):
        numbers = numbers[..., None] + step * np.arange(length)
    return tuple(int(n) for n in numbers.ravel())


def _read(value: Any) -> Any:
    """What a file gives, as a tuple that pydantic checks. Raises ValueError."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    if set(value) - _FIELDS or not {"shape", "strides"} <= set(value):
        raise ValueError('must be a list, or an object with "shape" and "strides" (and "first", if that is not 0)')
    first, shape, strides = value.get("first", 0), value["shape"], value["strides"]
    if not (isinstance(shape, list) and isinstance(strides, list) and len(shape) == len(strides)):
        raise ValueError("must have as many strides as its shape has axes")
    whole = [n for n in (first, *shape, *strides) if type(n) is int]
    if len(whole) < 1 + 2 * len(shape) or any(abs(n) >= MAX_DEVICES for n in (first, *strides)):
        raise ValueError(f'must have whole numbers below {MAX_DEVICES} in "first", "shape" and "strides"')
    if any(n < 1 for n in shape) or prod(shape) > MAX_DEVICES:
        raise ValueError(f'must have a "shape" of 1 to {MAX_DEVICES} numbers in all')
    return expanded(first, shape, strides)


def _write(numbers: Sequence[int]) -> Any:
    form = strided(numbers) if len(numbers) > WRITTEN_OUT else None
    if form is None or len(form[1]) > 3:
        return list(numbers)
    first, shape, strides = form
    return {"first": first, "shape": list(shape), "strides": list(strides)}


Numbers = Annotated[
    tuple[DeviceIndex, ...],
    Field(min_length=1, max_length=MAX_DEVICES),
    BeforeValidator(_read),
    PlainSerializer(_write),
]
"""A field of a file: a list of devices or positions, written out or by shape and strides."""
