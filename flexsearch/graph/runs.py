"""Runs in a list of records: what repeats, but for numbers in names that advance evenly, is written once.

``{start}`` or ``{start+step}`` in a name stands for the number ``start`` the first time, and for ``step`` (or one) more
each further time: ``layers.{0}.norm`` is layers.0.norm, layers.1.norm, ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_COUNTER = re.compile(r"\{(-?[0-9]{1,9})(?:\+([0-9]{1,9}))?\}")
_PERIODS = 64
"""Distances that are tried, the commonest first."""


class Run(NamedTuple):
    """``times`` repetitions of ``period`` records from ``start`` on."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def pattern_of(name: str) -> str:
    """``name`` without its numbers."""
    return _NUMBER.sub("#", name)


def template(first: str, second: str) -> str | None:
    """The template whose first two names these are; None if they differ in more than numbers that grow."""
    if first == second:
        return first
    a, b = _NUMBER.split(first), _NUMBER.split(second)
    if len(a) != len(b) or a[::2] != b[::2]:
        return None
    for k in range(1, len(a), 2):
        step = int(b[k]) - int(a[k])
        if step < 0:
            return None
        a[k] = a[k] if step == 0 else f"{{{a[k]}}}" if step == 1 else f"{{{a[k]}+{step}}}"
    return "".join(a)


def earlier(text: str) -> str:
    """The template that begins one repetition before ``text`` does."""
    return _COUNTER.sub(lambda m: f"{{{int(m[1]) - int(m[2] or 1)}{f'+{m[2]}' if m[2] else ''}}}", text)


@lru_cache(maxsize=65536)
def _parts(text: str) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    pieces = _COUNTER.split(text)
    return tuple(pieces[::3]), tuple((int(s), int(d or 1)) for s, d in zip(pieces[1::3], pieces[2::3], strict=True))


def expanded(text: str, time: int) -> str:
    """The name that a template stands for at repetition ``time``."""
    if "{" not in text:
        return text
    texts, counters = _parts(text)
    numbers = (str(start + step * time) for start, step in counters)
    return "".join(piece for pair in zip(texts, (*numbers, ""), strict=True) for piece in pair)


def runs(tokens: Sequence[Hashable], fits: Callable[[int, int, int], bool]) -> list[Run]:
    """The runs to write once, in order: the longest first, then what is left on both sides.

    ``tokens``: equal for records that may be repetitions. ``fits(start, period, time)``: whether repetition ``time`` (2
    or more: the first two make the templates; 1: the templates exist) is what the templates say.
    """
    numbers: dict[Hashable, int] = {}
    values = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int64)
    candidates: list[Run] = []
    for period in _periods(values):
        same = values[period:] == values[:-period]
        ends = np.flatnonzero(~np.concatenate((same, [False])))
        starts = np.concatenate(([0], ends[:-1] + 1))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if end - start >= period:  # the run may begin at any of its first records
                first = range(start, min(start + period, end - period + 1))
                candidates += [Run(s, period, 1 + (end - s) // period) for s in first]
    candidates.sort(key=lambda run: (-(run.times - 1) * run.period, run.period, run.start))
    return _chosen(candidates, fits, np.zeros(len(tokens), dtype=bool))


def _chosen(candidates: Iterable[Run], fits: Callable[[int, int, int], bool], taken: np.ndarray) -> list[Run]:
    result: list[Run] = []
    for start, period, times in candidates:
        if period * (times - 1) < 2 or taken[start : start + period * times].any():
            continue
        fitting = next((t for t in range(1, times) if not fits(start, period, t)), times)
        if fitting > 1 and period * (fitting - 1) >= 2:
            run = Run(start, period, fitting)
            taken[run.start : run.end] = True
            result.append(run)
    return sorted(result)


def _periods(values: np.ndarray) -> list[int]:
    """Distances between records that are alike, the commonest first."""
    places: dict[int, list[int]] = {}
    for place, value in enumerate(values.tolist()):
        places.setdefault(value, []).append(place)
    gaps = Counter(b - a for positions in places.values() for a, b in pairwise(positions))
    return [gap for gap, _ in gaps.most_common(_PERIODS)]
