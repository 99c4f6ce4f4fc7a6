"""A plan where the cluster is another one: today, the same plan there, and what a new search finds there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexsearch.report.grid import Column, Grid
from flexsearch.report.units import digits, nbytes, percent, seconds
from flexsearch.simulate.staged import Step


@dataclass(frozen=True)
class Outlook:
    """A plan on a cluster. ``step`` is None where the plan is none there; ``reason`` says why. ``plan``: in words."""

    step: Step | None
    plan: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.step is not None and not self.step.missing


@dataclass(frozen=True)
class Changed:
    """``change``: what is different, in words. ``today``: the plan as the cluster is; ``same``: the same plan on the
    changed one; ``anew``: the faster of that and of what a new search found. ``kept``: that is the same plan.
    ``looked_at``: plans that the search simulated. ``length``: tokens of a sample, None for images and the like."""

    change: str
    today: Outlook
    same: Outlook
    anew: Outlook
    kept: bool
    looked_at: int
    length: int | None


def changed_table(told: Changed) -> Grid:
    """The three side by side; red: it does not fit."""
    grid = Grid((
        Column("", "text"), Column("step"), Column("tokens/s" if told.length else "samples/s"), Column("MFU"),
        Column("bubbles", "number below"), Column("exposed\ncomm.", "number below"), Column("peak\nmemory"),
        Column("plan", "below", least=40),
    ))  # fmt: skip
    for name, one in _named(told):
        if one.step is None:
            grid.add(name, "-", "", "", "", "", "", one.reason)
            continue
        step, rate = one.step, one.step.samples * (told.length or 1) / (one.step.makespan_s or 1.0)
        short = f"does not fit: {nbytes(step.missing)} short; " if step.missing else ""
        words = "the same" if one is told.same or (one is told.anew and told.kept) else one.plan
        grid.add(
            name, seconds(step.makespan_s), f"{rate:,.0f}" if rate >= 100 else digits(rate),
            percent(step.utilisation), percent(step.bubbles), percent(step.exposed),
            nbytes(step.fullest.peak) + (" !" if step.missing else ""), short + words,
            style="red" if step.missing else "",
        )  # fmt: skip
    return grid


def _named(told: Changed) -> list[tuple[str, Outlook]]:
    return [("today", told.today), ("this plan", told.same), ("searched anew", told.anew)]


def in_a_sentence(told: Changed) -> str:
    """What the change does to the plan, and what another plan adds to that."""
    return f"With {told.change}, {_same_words(told)}; {_anew_words(told)}."


def _same_words(told: Changed) -> str:
    same, today = told.same, told.today
    if same.step is None:
        return "this plan cannot be used"
    if not same.fits:
        return f"this plan does not fit ({nbytes(same.step.missing)} short)"
    now = seconds(same.step.makespan_s)
    if today.step is None or not today.fits:
        return f"this plan fits and takes {now}"
    return f"this plan takes {_against(same.step, today.step)}"


def _anew_words(told: Changed) -> str:
    anew, same = told.anew, told.same
    if anew.step is None:
        return "and there is no other"
    if not anew.fits:
        return f"no plan that a new search found fits (the nearest is {nbytes(anew.step.missing)} short)"
    if told.kept:
        return "a new search found nothing faster"
    if same.step is not None and same.fits:
        gain = 1.0 - anew.step.makespan_s / same.step.makespan_s
        return f"a new search found {seconds(anew.step.makespan_s)}, {percent(gain)} less: {anew.plan}"
    if told.today.step is not None and told.today.fits:
        return f"a new search found {_against(anew.step, told.today.step)}: {anew.plan}"
    return f"a new search found {seconds(anew.step.makespan_s)}: {anew.plan}"


def _against(new: Step, old: Step) -> str:
    """ "17.1 s instead of 18.0 s (5 % less)"."""
    if seconds(new.makespan_s) == seconds(old.makespan_s):
        return f"{seconds(new.makespan_s)}, as today"
    change = new.makespan_s / old.makespan_s - 1.0
    words = f"{percent(abs(change))} {'more' if change > 0 else 'less'}"
    return f"{seconds(new.makespan_s)} instead of {seconds(old.makespan_s)} ({words})"


def changed_data(told: Changed) -> dict[str, Any]:
    """The three as a JSON object."""
    names = ("today", "this_plan", "searched_anew")
    rows = {name: _data(one) for name, (_, one) in zip(names, _named(told), strict=True)}
    return {
        "change": told.change, **rows, "kept": told.kept, "plans_simulated": told.looked_at,
        "sentence": in_a_sentence(told),
    }  # fmt: skip


def _data(one: Outlook) -> dict[str, Any]:
    if one.step is None:
        return {"fits": False, "reason": one.reason}
    step = one.step
    return {
        "fits": one.fits, "plan": one.plan, "iteration_s": step.makespan_s, "mfu": step.utilisation,
        "bubbles": step.bubbles, "exposed": step.exposed,
        "peak_bytes": step.fullest.peak, "missing_bytes": step.missing, "devices": step.devices,
        "samples_per_s": step.samples / step.makespan_s if step.makespan_s else None,
    }  # fmt: skip
