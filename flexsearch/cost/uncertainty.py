"""How far off a predicted time may be, and whether two of them can be told apart.

A prediction rests on sources: what matrix products reach on a device, the bandwidth of the links between hosts, and so
on. Of each, a relative standard error is taken: by whether its figures were measured, published or guessed, or, where a
fit left residuals, from those. An iteration time T of which ``a_k`` seconds scale with source k has the variance

    sum_k (error_k a_k)^2 + (NOISE T)^2

(errors of one source are the same everywhere, those of different sources independent; NOISE is what belongs to no
source). The errors of sources are common to two plans, so the variance of the difference of two times is

    sum_k (error_k (a_k - b_k))^2 + NOISE^2 (T_a^2 + T_b^2)

and plans that rest on the same sources alike are told apart better than either time is known. An interval is 80 %: 1.28
standard deviations to each side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Final

from flexsearch.topology import SourceKind

ERRORS: Final[Mapping[SourceKind, float]] = {"measured": 0.1, "published": 0.16, "guessed": 0.3}
"""Relative standard errors. ``benchmarks.truth`` says which share of published steps the intervals cover."""
NOISE: Final = 0.01
"""Relative standard error of every time, whatever it rests on: two runs of one plan differ by so much."""
DEVIATIONS: Final = 1.2816
"""Standard deviations to each side of a normal distribution that hold 80 % of it."""
UNEQUAL: Final = DEVIATIONS * sqrt(2.0) * NOISE
"""Share by which two times must differ to be told apart if what they rest on is taken as it is: ``Estimate.apart`` with
no source of errors. For questions that are about the same assumptions: would more devices help?"""
TYPICAL: Final = 0.6745
"""Median of |error| of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Source:
    """What predictions rest on. ``name``: of equal ones equal, and in words; ``error``: relative standard error."""

    name: str
    kind: SourceKind
    error: float

    @classmethod
    def of(cls, name: str, kind: SourceKind) -> Source:
        """With the error of figures of this kind."""
        return cls(name, kind, ERRORS[kind])


@dataclass(frozen=True)
class Estimate:
    """A predicted time. ``seconds``: of an iteration; ``shares``: of each source, how many of them scale with it."""

    seconds: float
    shares: Mapping[Source, float]

    @property
    def half(self) -> float:
        """From the time to either end of its interval, s."""
        parts = [NOISE * self.seconds, *(source.error * share for source, share in self.shares.items())]
        return DEVIATIONS * _length(parts)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Ends of the 80 % interval, s."""
        return max(0.0, self.seconds - self.half), self.seconds + self.half

    def apart(self, other: Estimate) -> float:
        """By how many seconds this time and another must differ to be told apart: where they do, the one that is
        predicted to be faster is so in 9 cases of 10."""
        parts = [NOISE * self.seconds, NOISE * other.seconds]
        for source in dict.fromkeys((*self.shares, *other.shares)):
            parts.append(source.error * (self.shares.get(source, 0.0) - other.shares.get(source, 0.0)))
        return DEVIATIONS * _length(parts)

    def is_near(self, other: Estimate) -> bool:
        """Whether two times cannot be told apart."""
        return abs(self.seconds - other.seconds) < self.apart(other)

    def weightiest(self) -> Source | None:
        """The source that makes most of the interval."""
        return max(self.shares, key=lambda source: source.error * self.shares[source], default=None)


def _length(parts: Sequence[float]) -> float:
    """Root of the sum of squares, in operations that IEEE 754 fixes: it decides which plan is the answer."""
    return sqrt(fsum(part * part for part in parts))
