"""The kinds of work on a device that recipes are made of. An amount of work is counted in bytes."""

from __future__ import annotations

from collections import Counter
from typing import Final

KINDS: Final = (
    "add", "copy", "fill", "select", "sort", "mark", "scatter", "draw", "choose", "round", "restore", "pack", "unpack",
    "sign", "unsign", "convert", "product", "call",
)
"""Counted are the bytes of

- ``add``: a vector to which another is added; ``copy``: that is copied, or multiplied by a number; ``fill``: of zeros
- ``select``: a vector in which the largest entry is looked for; ``sort``: more entries that are kept, the largest ones
- ``mark``: a vector of which those above a threshold are selected
- ``scatter``: entries that are put, or added, to their places
- ``draw``: a vector for which random numbers are drawn; ``choose``: entries whose places are drawn
- ``round``: a vector that is rounded to levels of the norms of its parts; ``restore``: that levels are turned into
- ``pack``, ``unpack``: the units of codes that bytes are made of
- ``sign``: a vector whose signs are taken and packed; ``unsign``: that packed signs are turned into
- ``convert``: a vector that is converted to another type
- ``product``: matrices that are multiplied by one of a few columns, once for each of these
- ``call``: not bytes, but calls on tensors so small that it is calls that take time"""

Work = Counter[str]
"""Bytes by kind of work, one of ``KINDS``."""


def work(**bytes_of: float) -> Work:
    """Work of so many bytes, by kind."""
    return Counter({kind: round(count) for kind, count in bytes_of.items() if count})


def times(factor: float, some: Work) -> Work:
    """The same work so often."""
    return Counter({kind: round(factor * count) for kind, count in some.items()})
