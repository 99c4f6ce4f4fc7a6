"""A plan where the cluster is another one: today, the same plan there, and what a new search finds there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexsearch.report.grid import Grid
from flexsearch.report.layouts import step_table
from flexsearch.report.units import nbytes, seconds
from flexsearch.simulate.staged import Step


@dataclass(frozen=True)
class PlanOnCluster:
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
    today: PlanOnCluster
    same: PlanOnCluster
    anew: PlanOnCluster
    kept: bool
    looked_at: int
    length: int | None


def changed_table(changed: Changed) -> Grid:
    """The three side by side; red: it does not fit."""
    rows = []
    for name, one in _named(changed):
        again = one is changed.same or (one is changed.anew and changed.kept)
        rows.append((name, one.step, "the same" if again and one.step is not None else one.plan or one.reason))
    return step_table(rows, changed.length, names="", words="plan")


def _named(changed: Changed) -> list[tuple[str, PlanOnCluster]]:
    return [("today", changed.today), ("this plan", changed.same), ("new search", changed.anew)]


def in_a_sentence(changed: Changed) -> str:
    """What the change does to the plan, and what another plan adds to that."""
    today, same, anew = changed.today, changed.same, changed.anew
    if same.step is None:
        this = "this plan cannot be used"
    elif not same.fits:
        this = f"this plan does not fit ({nbytes(same.step.missing)} short)"
    else:
        this = f"this plan {'takes' if today.fits else 'fits and takes'} {_against(same.step, today)}"
    if anew.step is None:
        other = "and there is no other"
    elif not anew.fits:
        other = f"no plan that a new search found fits (the nearest is {nbytes(anew.step.missing)} short)"
    elif changed.kept:
        other = "a new search found nothing faster"
    elif same.step is not None and same.fits:
        gain = _difference(anew.step, same.step)
        other = f"a new search found {seconds(anew.step.makespan_s)}, {gain}: {anew.plan}"
    else:
        other = f"a new search found {_against(anew.step, today)}: {anew.plan}"
    return f"With {changed.change}, {this}; {other}."


def _against(new: Step, before: PlanOnCluster) -> str:
    """ "17.1 s instead of 18.0 s (5 % less)"; the new time alone where the plan before does not fit."""
    if before.step is None or not before.fits:
        return seconds(new.makespan_s)
    if seconds(new.makespan_s) == seconds(before.step.makespan_s):
        return f"{seconds(new.makespan_s)}, as today"
    words = _difference(new, before.step)
    return f"{seconds(new.makespan_s)} instead of {seconds(before.step.makespan_s)} ({words})"


def _difference(new: Step, old: Step) -> str:
    """ "5 % less", "0.4 % more", "hardly less"."""
    change = new.makespan_s / old.makespan_s - 1.0
    size = f"{100 * abs(change):.{0 if abs(change) >= 0.0095 else 1}f}"
    return f"{'hardly' if float(size) == 0.0 else f'{size} %'} {'more' if change > 0 else 'less'}"


def changed_data(changed: Changed) -> dict[str, Any]:
    """The three as a JSON object."""
    names = ("today", "this_plan", "searched_anew")
    rows = {name: _data(one) for name, (_, one) in zip(names, _named(changed), strict=True)}
    return {
        "change": changed.change, **rows, "kept": changed.kept, "plans_simulated": changed.looked_at,
        "sentence": in_a_sentence(changed),
    }  # fmt: skip


def _data(one: PlanOnCluster) -> dict[str, Any]:
    if one.step is None:
        return {"fits": False, "reason": one.reason}
    step = one.step
    return {
        "fits": one.fits, "plan": one.plan, "iteration_s": step.makespan_s, "mfu": step.utilisation,
        "bubbles": step.bubbles, "exposed": step.exposed,
        "peak_bytes": step.fullest.peak, "missing_bytes": step.missing, "devices": step.devices,
        "samples_per_s": step.samples / step.makespan_s if step.makespan_s else None,
        "interval_s": step.estimate.interval_s,
    }  # fmt: skip
