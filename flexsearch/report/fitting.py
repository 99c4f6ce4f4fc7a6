"""What would help where no plan fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flexsearch.report.units import nbytes, seconds
from flexsearch.simulate.staged import Step


@dataclass(frozen=True)
class Attempt:
    """The best plan of a search under a change, in words. ``step`` is None where there is no plan."""

    change: str
    step: Step | None
    plan: str = ""

    @property
    def fits(self) -> bool:
        return self.step is not None and not self.step.missing


@dataclass(frozen=True)
class Fitting:
    """What was tried. ``states``: bytes of weights, gradients and what the optimizer keeps, which no plan can do
    without; ``half_states``: the same in half precision, None where that was asked for; ``room``: memory of all
    devices. ``hosts``: number of hosts -> attempt, in the order of trying; ``least``: so many hosts the states alone
    need. ``half``: in half precision, if that was tried. ``grows``: whether there may be more hosts of this sort."""

    states: int
    half_states: int | None
    room: int
    least: int
    grows: bool
    hosts: dict[int, Attempt] = field(default_factory=dict)
    half: Attempt | None = None

    @property
    def fewest(self) -> int | None:
        """The fewest hosts on which a plan fits, of those that were tried."""
        return min((count for count, attempt in self.hosts.items() if attempt.fits), default=None)


def fitting_words(fitting: Fitting, one_sample: bool) -> str:
    """What would help, in sentences. ``one_sample``: the nearest plan runs one sample at a time."""
    return " ".join(_sentences(fitting, one_sample))


def _sentences(fitting: Fitting, one_sample: bool) -> Iterator[str]:
    yield "The search has tried recomputation, sharded states and more microbatches."
    if fitting.states > fitting.room:
        yield (
            f"Weights, gradients and the optimizer's states alone take {nbytes(fitting.states)}, and plans "
            f"may use {nbytes(fitting.room)} of all devices together, so a smaller --batch cannot help."
        )
        if fitting.half_states is not None and fitting.half_states > fitting.room:
            yield f"Nor can --precision bf16: they take {nbytes(fitting.half_states)} then, with float32 masters."
    elif one_sample:
        yield "The nearest plan runs one sample at a time, so a shorter --seq helps rather than a smaller --batch."
    else:
        yield "A smaller --batch or a shorter --seq may help."
    if fitting.half is not None:
        yield f"Also tried: {_tried(fitting.half)}."
    yield from _hosts(fitting)


def _hosts(fitting: Fitting) -> Iterator[str]:
    if not fitting.grows:
        yield "The topology is no preset, so more hosts were not tried; give more devices, or devices with more memory."
    elif not fitting.hosts:
        yield f"The states need at least {fitting.least} hosts; there was no time to search there (--budget)."
    elif (fewest := fitting.fewest) is not None:
        others = f" of {_counts(list(fitting.hosts))}" if len(fitting.hosts) > 1 else " that were tried"
        yield f"The fewest hosts{others} on which a plan fits: {_tried(fitting.hosts[fewest])}."
    else:
        last = _tried(fitting.hosts[max(fitting.hosts)])
        yield f"Nothing fits on {_counts(list(fitting.hosts))} hosts either: {last}. A longer --budget tries more."


def _counts(hosts: list[int]) -> str:
    *most, last = [str(count) for count in sorted(hosts)]
    return f"{', '.join(most)} and {last}" if most else last


def _tried(attempt: Attempt) -> str:
    if attempt.step is None:
        return f"with {attempt.change} there is no plan"
    if attempt.fits:
        return f"with {attempt.change} a step takes {seconds(attempt.step.makespan_s)}: {attempt.plan}"
    return f"with {attempt.change} the nearest plan is {nbytes(attempt.step.missing)} short on the fullest device"
