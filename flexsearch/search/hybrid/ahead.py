"""Requests of the search over layouts, answered by several processes ahead of time.

The search asks for one thing after the other, and what it asks for depends on the answers alone. It says what it will
probably ask for next; idle processes begin with that. So it finds the same whatever the number of processes, as long
as no clock ends it: an answer that it never asks for is wasted, no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final

from flexsearch.search.hybrid.constants import LATE_S
from flexsearch.search.hybrid.ranking import Key
from flexsearch.search.hybrid.trials import Answer, Request, Trials, trials_of
from flexsearch.search.workers import LOST, Worker, pickled

HERE: Final = 0
"""Number of this process; workers have those from 1 on."""

Name = tuple[str, Key]


class Ahead:
    """``trials``: answers in this process. ``setup``: arguments of others like it. ``look``: called now and then with
    what there is of the answer that the search waits for; what it raises goes on to whoever waits."""

    def __init__(
        self, trials: Trials, setup: tuple[Any, ...], workers: int, look: Callable[[Answer], None]
    ) -> None:
        self.trials, self.look = trials, look
        self._changed = threading.Condition()
        self._expected: list[Request] = []
        self._begun: dict[Name, int] = {}
        """By request, the process that works on it."""
        self._answers: dict[Name, Answer] = {}
        self._so_far: dict[Name, Answer] = {}
        self._simulated_by: dict[Key, int] = {}
        """By plan, the process that simulated it, and may still have it at hand."""
        self._over = False
        self._workers: dict[int, Worker] = {}
        self._depth = 2 * workers
        packed = pickled(trials_of, setup) if workers else b""
        self._threads = [
            threading.Thread(target=self._serve, args=(number, packed), daemon=True)
            for number in range(1, workers + 1)
        ]
        self._started = False

    def start(self) -> None:
        """Have workers start, soon. Before, this process answers all."""
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()

    def expect(self, requests: Iterable[Request]) -> None:
        """What will probably be asked for next, most probable first; what was expected before is not any more."""
        if not self._threads or not self._started:
            return
        expected = [request for request in islice(requests, self._depth) if request.name not in self._answers]
        with self._changed:
            self._expected = expected
            self._changed.notify_all()

    def get(self, request: Request) -> Answer:
        """The answer. While another process works on it, this one works on what is expected."""
        with self._changed:
            elsewhere = self._elsewhere(request)
            if elsewhere and request.name not in self._begun and request.name not in self._answers:
                self._expected.insert(0, request)
                self._changed.notify_all()
        while elsewhere and request.name not in self._answers:
            self.look(self._so_far.get(request.name, Answer()))
            with self._changed:
                other = self._next(HERE)
                if other is None:
                    self._changed.wait(0.05)
                elsewhere = self._elsewhere(request)
            if other is not None:
                self._answer_here(other)
        if request.name not in self._answers:
            self._answer_here(request)
        self._so_far.pop(request.name, None)
        return self._answers.pop(request.name)

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            for worker in self._workers.values():
                worker.kill()
        for thread in self._threads if self._started else ():
            thread.join()

    def _elsewhere(self, request: Request) -> bool:
        """Whether a worker answers a request, or has at hand what it is about."""
        if request.what == "step" and self._simulated_by.get(request.key, HERE) in self._workers:
            return True
        return self._begun.get(request.name, HERE) != HERE

    def _next(self, number: int) -> Request | None:
        """What a process is to begin with. Called with the lock held."""
        for request in self._expected:
            asked_of = self._simulated_by.get(request.key, number) if request.what == "step" else number
            if request.name not in self._begun and request.name not in self._answers and asked_of == number:
                self._begun[request.name] = number
                return request
        return None

    def _end(self, request: Request, number: int, answer: Answer) -> None:
        with self._changed:
            self._begun.pop(request.name, None)
            self._answers[request.name] = answer
            if answer.best is not None:
                self._simulated_by[answer.best.key] = number
            self._changed.notify_all()

    def _answer_here(self, request: Request) -> None:
        with self._changed:
            self._begun[request.name] = HERE
        try:
            self._end(request, HERE, self.trials.answer(request, self.look))
        finally:
            with self._changed:
                self._begun.pop(request.name, None)

    def _serve(self, number: int, setup: bytes) -> None:
        """A thread: one worker and what it is asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, LATE_S)
            if self._over:
                return
            worker = self._workers[number] = Worker(setup)
        self._work_with(number, worker, self._wait(number))

    def _work_with(self, number: int, worker: Worker, request: Request | None) -> None:
        """Have a worker answer a request, and others as long as there are any."""
        try:
            while request is not None:
                watch = partial(self._so_far.__setitem__, request.name)
                self._end(request, number, worker.ask(request, watch))
                request = self._wait(number)
        except LOST:  # then this process does its work
            with self._changed:
                del self._workers[number]
                if request is not None:
                    self._begun.pop(request.name, None)
                self._changed.notify_all()
        finally:
            worker.close()

    def _wait(self, number: int) -> Request | None:
        """The next request for a worker; None: the search is over."""
        with self._changed:
            while not self._over and (request := self._next(number)) is None:
                self._changed.wait()
            return None if self._over else request
