"""How far a command is: a bar on a terminal; elsewhere (a log, a pipe) a line every few seconds. On standard error."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn

from flexsearch.cli import signals
from flexsearch.cli.common import stderr

if TYPE_CHECKING:
    from flexsearch.proof.exhaustive import Step
    from flexsearch.search.outcome import Progress as Searched

FIRST_S, EVERY_S = 1.0, 5.0
"""Seconds before the first line, and between two."""
COMPILING = "compiling once for this machine"


class Live:
    """What is done now (``phase``), how much of it (``done`` of ``total``), and more in words (``state``)."""

    def __init__(self, phase: str, total: float | None = None) -> None:
        self._phase, self._state, self._done, self._total = phase, "", 0.0, total
        self._began = time.monotonic()
        self._over = threading.Event()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False), console=stderr, transient=True,
            disable=not stderr.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(phase, total=total, state="")
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Self:
        if stderr.is_terminal:
            self._bar.start()
        self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._bar.stop()

    def show(self, phase: str, done: float = 0.0, total: float | None = None, state: str = "") -> None:
        """Say where the command is."""
        self._phase, self._done, self._state = phase, done, state
        self._total = total if total is not None else self._total
        self._bar.update(self._task, description=phase, completed=done, total=self._total, state=state)

    def _print_lines(self) -> None:
        wait_s = FIRST_S
        while not self._over.wait(wait_s):
            wait_s = EVERY_S
            phase = COMPILING if _is_compiling() else self._phase
            if stderr.is_terminal:
                self._bar.update(self._task, description=phase)
                continue
            share = f", {min(1.0, self._done / self._total):.0%}" if self._total and self._done else ""
            state = f"   {self._state}" if self._state else ""
            elapsed = time.monotonic() - self._began
            stderr.print(f"{phase} ({elapsed:.0f} s{share}){state}", soft_wrap=True)


def compiling() -> str:
    """What a command that simulates does first, in words; on standard error, too, if it will take long."""
    from flexsearch import compiled  # in this form, or every change here would compile everything anew

    if compiled.is_warm():
        return "getting ready"
    where = f"; the result is kept in {compiled.folder}" if compiled.folder is not None else ""
    stderr.print(f"Compiling for this machine, which takes about 12 seconds, once{where}.", soft_wrap=True)
    return COMPILING


def _is_compiling() -> bool:
    """Also where other commands have compiled before, but not all that this one needs."""
    compiled = sys.modules.get("flexsearch.compiled")  # importing it takes long, and may be under way
    return compiled is not None and hasattr(compiled, "is_compiling") and bool(compiled.is_compiling())


class SearchLive(Live):
    """The search: phase, how far, best so far, proposals per second, acceptance."""

    def __init__(self, budget: str) -> None:
        from flexsearch.setting import parse_budget

        self.budget_s, self.limit = parse_budget(budget)
        super().__init__(compiling(), self.budget_s or self.limit)

    def prepare(self, phase: str) -> None:
        """Show what is done before the climbs. From now on there is a plan, which no signal may lose."""
        signals.current.graceful = True
        signals.current.poll()
        self.show(phase)

    def update(self, now: Searched) -> None:
        """Show where the search is."""
        from flexsearch.report.units import seconds

        signals.current.poll()
        rate = now.proposals / now.elapsed_s if now.elapsed_s else 0.0
        self.show(
            now.phase,
            now.elapsed_s if self.budget_s is not None else now.proposals,
            state=f"best {seconds(now.best_s)}   {rate:,.0f} proposals/s   {now.accepted / now.proposals:.0%} accepted",
        )

    def proving(self, now: Step) -> None:
        """Show where an exhaustive search is."""
        from flexsearch.report.units import seconds

        signals.current.poll()
        self.show(
            "proving",
            now.elapsed_s if self.budget_s is not None else now.nodes,
            state=f"best {seconds(now.best_s)}   nothing below {seconds(now.bound_s)}   {now.nodes:,} partial plans",
        )
