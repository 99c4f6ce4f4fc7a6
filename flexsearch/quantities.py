"""One type for each quantity that a file may hold: what is read is finite and within physical reason.

The limits leave room for every machine and model there is, and for sums: no later sum or product of quantities that
passed here overflows an int64 or becomes infinite. Field names carry the units; the types carry the limits.
"""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

MAX_BYTES: Final = 2**60
MAX_SIZE: Final = 2**48
MAX_MOVED_BYTES: Final = 2**50
"""Of a tensor, and of all weights of a graph together: what one communication may move. Times MAX_DEVICES this is below
2^63."""
MAX_GRAPH_BYTES: Final = 2**56
"""Of all tensors of a graph together: they are only added up, with states of weights and copies."""
MAX_ITERATIONS: Final = 2**59
"""Points of an operator's iteration space: 9 FLOPs a point, the most that any kind counts, are below 2^63."""
MAX_DEVICES: Final = 4096
MAX_PIECES: Final = 2**18
"""Operators times devices: what lowering and searching such a setting takes is bounded."""
MAX_LINKS: Final = 2**19
"""A full mesh of a thousand devices has about so many."""
MAX_OPERATORS: Final = 2**17
MAX_COUNT: Final = 2**53 - 1
MAX_SEED: Final = 2**64
MAX_NAME: Final = 512
MAX_TEXT: Final = 4096
MAX_RANK: Final = 64
MAX_AXES: Final = 256
MAX_OPERANDS: Final = 4096

Bandwidth = Annotated[float, Field(ge=1.0, le=1e15)]
"""B/s, from 1 B/s to 1 PB/s."""
FlopRate = Annotated[float, Field(ge=1.0, le=1e21)]
"""FLOP/s."""
Seconds = Annotated[float, Field(ge=0.0, le=1e6)]
"""A measured time: up to eleven days."""
LatencySeconds = Annotated[float, Field(ge=0.0, le=1000.0)]
"""What starting something costs: a message on a link, a communication, an operator on a device."""
SecondsPerByte = Annotated[float, Field(ge=0.0, le=1.0)]
"""The inverse of a bandwidth."""
PredictedSeconds = Annotated[float, Field(ge=0.0, le=1e60)]
"""An iteration time that was computed, not measured: slow links and large tensors may make it long."""
Factor = Annotated[float, Field(ge=1e-3, le=1e6)]
Share = Annotated[float, Field(ge=1e-3, le=1.0)]
"""Of a peak."""
Elements = Annotated[float, Field(ge=0.0, le=1e6)]
"""A time over an ideal time."""
Capacity = Annotated[int, Field(ge=1, lt=MAX_BYTES)]
"""Bytes of something that cannot be empty: a memory, a bucket."""
Size = Annotated[int, Field(ge=1, lt=MAX_SIZE)]
"""Indices of an axis or of a dimension."""
Amount = Annotated[float, Field(ge=0.0, le=1e24)]
"""FLOPs or bytes of a piece of work."""
Degree = Annotated[int, Field(ge=1, lt=MAX_SIZE)]
"""Parts of an axis, or replicas."""
DeviceIndex = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""Proposals, repeats, processes: exact in JSON everywhere."""
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED)]


_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _printable(value: str) -> str:
    """Names end up in tables, traces and paths: no control characters, no halves of surrogate pairs."""
    if not value.isascii() or not value.isprintable():
        for character in _CONTROL.findall(value):
            raise ValueError(f"must not contain the control character U+{ord(character):04X}")
    return value


Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_printable)]
"""A remark."""
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
"""What something is called."""
Pattern = Annotated[str, Field(min_length=1, max_length=65536), AfterValidator(_printable)]
"""An access pattern; a concatenation of thousands of tensors has a long one."""
Shape = Annotated[tuple[Size, ...], Field(max_length=MAX_RANK)]


def is_finite(value: Any) -> bool:
    """Whether it is a number, no truth value, that is neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _hexadecimal(value: str) -> str:
    if re.fullmatch(r"[0-9a-f]{16}", value) is None:
        raise ValueError("must be 16 hexadecimal digits")
    return value


Digest = Annotated[str, AfterValidator(_hexadecimal)]
"""A content hash."""
