"""Climbs side by side: this process and workers take them in order, and nobody's work depends on who does it.

Workers are processes of our own (``worker``), not of ``multiprocessing``: the user's script is not run again in them,
and nothing is forked under the threads of torch.
"""

from __future__ import annotations

import pickle
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from flexsearch import children
from flexsearch.errors import StrategyError
from flexsearch.search.climb import Climb, Climbed, Climber
from flexsearch.search.constants import LATE_S, WINDOW

NextClimb = Callable[[int, list[Climbed]], Climb | None]
"""(number of a climb, the ended ones up to number - WINDOW, in order) -> what to do (of no proposals: only to be
counted); None: nothing is left."""


def _pickled(setup: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(setup)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StrategyError(
            f"other processes cannot be given what this search is about: {error}",
            "Make the rule a function or a class of a module, or search with processes=1.",
        ) from error


class Turn(Exception):
    """Raised by ``look``: this process leaves its climb as it is, and does what ``plan`` makes of the next number."""

    def __init__(self, plan: Callable[[int], Climb]) -> None:
        self.plan = plan


class Workers:
    """``next_climb``: says what each climb does. ``look``: called now and then in the main thread, with what came of
    all climbs so far, and the number of its own (None: it waits); what it raises ends the work, but for a ``Turn``.
    ``setup``: arguments of ``Climber``."""

    def __init__(
        self, climber: Climber, setup: tuple[Any, ...], workers: int, next_climb: NextClimb,
        look: Callable[[dict[int, Climbed], int | None], None],
    ) -> None:  # fmt: skip
        self._climber, self._next_climb, self._look = climber, next_climb, look
        self._workers = min(workers, WINDOW - 1)
        self._setup = _pickled(setup) if self._workers else b""
        self._changed = threading.Condition()
        self._next = 0
        self._again: list[Climb] = []
        self._over = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, Climbed] = {}
        self.climbs: dict[int, Climbed] = {}
        """What came of each climb, so far."""

    def work(self) -> None:
        """Climb until ``next_climb`` says that nothing is left, or ``look`` raises."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._workers)]
        try:
            for thread in threads:
                thread.start()
            self._climb_here()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
                for process in self._processes:
                    process.kill()
            for thread in threads:
                thread.join()

    def _climb_here(self) -> None:
        climb: Climb | None = None
        while True:
            try:
                climb = climb or self._take(waiting=self._glance)
                if climb is None:
                    return
                self._end(self._climber.climb(climb, self._watch))
                climb = None
            except Turn as turn:
                if climb is not None:
                    self.climbs[climb.index].polishing = False
                    self._end(self.climbs[climb.index])
                climb = self._number(turn.plan)

    def _glance(self) -> None:
        self._look(self.climbs, None)

    def _watch(self, climbed: Climbed) -> None:
        self.climbs[climbed.index] = climbed
        self._look(self.climbs, climbed.index)

    def _number(self, plan: Callable[[int], Climb]) -> Climb:
        with self._changed:
            self._next += 1
            return plan(self._next - 1)

    def _take(self, waiting: Callable[[], None] | None = None) -> Climb | None:
        """The next climb, as soon as those it builds on have ended. ``waiting`` is called meanwhile."""
        while True:
            with self._changed:
                if self._over:
                    return None
                if self._again:
                    return self._again.pop()
                n = self._next
                if all(k in self.ended for k in range(n - WINDOW + 1)):
                    climb = self._next_climb(n, [self.ended[k] for k in range(n - WINDOW + 1)])
                    if climb is not None and climb.proposals:
                        self._next += 1
                        return climb
                    if climb is not None:
                        self._next += 1
                        self.ended[n] = Climbed(n, climb.phase, (), climb.best)
                        continue
                    if len(self.ended) == n:
                        return None
                self._changed.wait(0.05)
            if waiting is not None:
                waiting()

    def _end(self, climbed: Climbed) -> None:
        with self._changed:
            self.climbs[climbed.index] = self.ended[climbed.index] = climbed
            self._changed.notify_all()

    def _serve(self) -> None:
        """A thread: one worker and its climbs."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, LATE_S)
            if self._over:
                return
            process = children.start(
                children.module("flexsearch.search.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        climb: Climb | None = None
        try:
            process.stdin.write(self._setup)
            while (climb := self._take()) is not None:
                pickle.dump(climb, process.stdin)
                process.stdin.flush()
                ended = False
                while not ended:
                    ended, climbed = pickle.load(process.stdout)
                    if not ended:
                        self.climbs[climbed.index] = climbed
                self._end(climbed)
        except (OSError, EOFError, pickle.UnpicklingError):
            # It was killed: by the end of the search, or for want of memory; then somebody else does its work.
            with self._changed:
                if climb is not None and not self._over:
                    self._again.append(climb)
        finally:
            process.kill()
            process.communicate()
