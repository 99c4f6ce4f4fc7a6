"""Intervals of predicted times for people: how wide they are, what makes them so, and which plans are too near."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flexsearch.cost.uncertainty import Estimate
from flexsearch.report.units import percent, seconds, spread

INTERVAL: Final = "80 % interval"
"""Heading of times with half of their intervals, in which 8 of 10 measured times lie."""


def time_words(estimate: Estimate) -> str:
    """A time with half of its interval: "1.02 s ± 0.08"."""
    return spread(estimate.seconds, estimate.half) if estimate.seconds else seconds(0.0)


def basis_words(estimate: Estimate) -> str:
    """What the interval means, and what makes most of it."""
    source = estimate.weightiest()
    if source is None:
        return ""
    return (
        f"In 8 of 10 cases the measured time lies in this interval. Most of the uncertainty comes from {source.name} "
        f"({source.kind}, {percent(estimate.shares[source] / estimate.seconds)} of the time)."
    )


def near(estimate: Estimate, others: Mapping[str, Estimate]) -> list[str]:
    """Names of those times that cannot be told apart from ``estimate``, the nearest first."""
    order = sorted(others, key=lambda name: abs(others[name].seconds - estimate.seconds))
    return [name for name in order if estimate.is_near(others[name])]


def near_words(estimate: Estimate, others: Mapping[str, Estimate]) -> str:
    """Which plans predictions cannot tell apart from this one; empty if there is none."""
    names = near(estimate, others)
    told = ", ".join(f"{name} ({seconds(others[name].seconds)})" for name in names)
    return f"Predictions cannot tell it apart from {told}." if names else ""


def apart_words(one: Estimate, other: Estimate) -> str:
    """Whether predictions tell which of two plans, A and B, is faster."""
    least = seconds(one.apart(other))
    told = f"A takes {time_words(one)}, B {time_words(other)}. Predictions"
    if one.is_near(other):
        return f"{told} cannot tell which is faster: the two would have to differ by {least} or more."
    return f"{told} tell them apart from a difference of {least} on."


def aside_words(answer: Estimate, aside: Estimate) -> str:
    """Why a faster plan is not the answer."""
    gain = 1.0 - aside.seconds / answer.seconds
    less = percent(gain) if gain >= 0.005 else "hardly"
    text = f"A plan predicted to take {seconds(aside.seconds)} ({less} less) was not chosen"
    if answer.is_near(aside):
        least = percent(answer.apart(aside) / answer.seconds)
        return f"{text}: predictions tell these two apart only if they differ by {least} or more (--margin)."
    return f"{text}: it gains less than --margin."


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    """As JSON: the interval, and what the time rests on."""
    rests_on = [
        {"source": source.name, "kind": source.kind, "error": source.error, "seconds": share}
        for source, share in sorted(estimate.shares.items(), key=lambda row: -row[0].error * row[1])
    ]
    return {"interval_s": estimate.interval_s, "rests_on": rests_on}
