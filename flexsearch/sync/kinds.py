"""The kinds of work on a device that recipes are made of. An amount of work is counted in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

PASSES: Final[Mapping[str, tuple[float, float]]] = {
    "add": (3, 3), "copy": (2, 2), "fill": (1, 1), "select": (3, 17), "sort": (8, 8700), "mark": (10, 38),
    "scatter": (4, 10), "draw": (4, 21), "choose": (4, 1900), "round": (24, 60), "restore": (12, 20), "pack": (12, 27),
    "unpack": (11, 20), "sign": (8, 15), "unsign": (8, 15), "convert": (2, 2), "product": (1, 5),
    "call": (10_000, 60_000),
}  # fmt: skip
"""By kind, how long a byte that is counted takes on a GPU and on a core of a CPU, in bytes of memory that are read or
written meanwhile: the time of kinds that were not measured. On a GPU it is bytes that kernels do read and write, all
tensors in between included; for a CPU, most of whose kinds of work wait for its arithmetic, it was measured on one core
(EPYC, PyTorch 2.13). Counted are the bytes of

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
"""Bytes by kind of work, one of ``PASSES``."""


def work(**bytes_of: float) -> Work:
    """Work of so many bytes, by kind."""
    return Counter({kind: round(count) for kind, count in bytes_of.items() if count})


def times(factor: float, some: Work) -> Work:
    """The same work so often."""
    return Counter({kind: round(factor * count) for kind, count in some.items()})
