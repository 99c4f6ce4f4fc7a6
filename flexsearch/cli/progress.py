"""How far a command is: a bar on a terminal; elsewhere (a log, a pipe) a line every few seconds. On standard error."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

from rich.progress import BarColumn, Progress, TextColumn

from flexsearch.cli.common import stderr

EVERY_S: Final = 5.0
"""Seconds between two lines."""


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
        else:
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
        while not self._over.wait(EVERY_S):
            share = f", {min(1.0, self._done / self._total):.0%}" if self._total and self._done else ""
            state = f"   {self._state}" if self._state else ""
            elapsed = time.monotonic() - self._began
            stderr.print(f"{self._phase} ({elapsed:.0f} s{share}){state}", soft_wrap=True)


def compiling() -> str:
    """What a command that simulates does first, in words; on standard error, too, if it will take long."""
    from flexsearch import compiled  # in this form, or every change here would compile everything anew

    if compiled.is_warm():
        return "getting ready"
    where = f"; the result is kept in {compiled.folder}" if compiled.folder is not None else ""
    stderr.print(f"Compiling for this machine, which takes about 20 seconds, once{where}.", soft_wrap=True)
    return "compiling once for this machine"
