"""Climbs side by side: this process and workers take them in order, and nobody's work depends on who does it.

Workers are processes of our own (``worker``), not of ``multiprocessing``: the user's script is not run again in them,
and nothing is forked under the threads of torch. The search over layouts has such workers too.
"""

from __future__ import annotations

import pickle
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from flexsearch import children
from flexsearch.errors import StrategyError
from flexsearch.search.climb import Climb, Climbed, Climber, climbs_of
from flexsearch.search.constants import LATE_S, WINDOW

NextClimb = Callable[[int, list[Climbed]], Climb | None]
"""(number of a climb, the ended ones in order, with all up to number - WINDOW) -> what to do (of no proposals: only to
be counted); None: nothing is left."""


def pickled(prepare: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """What workers are given first: ``prepare(*arguments)`` answers their requests. Raises StrategyError."""
    try:
        return pickle.dumps((prepare, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StrategyError(
            f"other processes cannot be given what this search is about: {error}",
            "Make the rule a function or a class of a module, or search with processes=1.",
        ) from error


class Worker:
    """One process that answers requests. Where it was killed, by the end of the search or for want of memory, its
    methods raise one of ``LOST``."""

    def __init__(self, setup: bytes) -> None:
        self._process = children.start(
            children.module("flexsearch.search.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._setup = setup

    def ask(self, request: object, watch: Callable[[Any], None]) -> Any:
        """The answer. ``watch``: called with what there is of it, now and then."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        if self._setup:
            sink.write(self._setup)
            self._setup = b""
        pickle.dump(request, sink)
        sink.flush()
        while True:
            ended, answer = pickle.load(source)
            if ended:
                return answer
            watch(answer)

    def kill(self) -> None:
        """End it, whatever it does; another thread may be asking it."""
        self._process.kill()

    def close(self) -> None:
        """End it, and forget it: nobody asks it any more."""
        self._process.kill()
        self._process.communicate()


LOST = (OSError, EOFError, pickle.UnpicklingError)


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
        self._setup = pickled(climbs_of, setup) if self._workers else b""
        self._changed = threading.Condition()
        self._next = 0
        self._again: list[Climb] = []
        self._over = False
        self._processes: list[Worker] = []
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
                    climb = self._next_climb(n, [self.ended[k] for k in sorted(self.ended)])
                    if climb is not None and climb.proposals:
                        self._next += 1
                        return climb
                    if climb is not None:
                        self._next += 1
                        self.ended[n] = Climbed(n, climb.phase, (), climb.options, climb.best)
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
            worker = Worker(self._setup)
            self._processes.append(worker)
        climb: Climb | None = None
        try:
            while (climb := self._take()) is not None:
                self._end(worker.ask(climb, self._so_far))
        except LOST:  # then somebody else does its work
            with self._changed:
                if climb is not None and not self._over:
                    self._again.append(climb)
        finally:
            worker.close()

    def _so_far(self, climbed: Climbed) -> None:
        self.climbs[climbed.index] = climbed
