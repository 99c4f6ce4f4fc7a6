"""When messages move, as far as the backend lets one know.

gloo does not say when a message has arrived unless somebody waits for it. So for each peer one thread waits for what
comes from it, in the order in which ranks issue communications, and notes when it is there; the rank itself waits only
for what that thread has not come to. An all-reduce says itself when it is done. With NCCL the device waits, not the
rank: its clock says for how long. Where it finds data that nobody has waited for, the end is an upper bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from flexsearch.clocks import Clock
from flexsearch.lower import Communication
from flexsearch.runtime.instructions import Instruction, Post, Start
from flexsearch.runtime.parts import Action, Arrival
from flexsearch.runtime.wire import Wire

WAITED_S = 20e-6
"""A wait shorter than this found its data there."""
COLLECTIVE = -1
"""In the place of the peer, where there is none."""


class Receipt(NamedTuple):
    """What a communication has brought here from ``peer``. ``posted``: since when it could come; ``arrived``: when it
    was there (s, this rank's clock); ``late``: nobody waited when it came, so that it may have come before."""

    task: int
    peer: int
    posted: float
    arrived: float
    late: bool

    def shifted(self, by: float) -> Receipt:
        """On another clock."""
        return self._replace(posted=self.posted + by, arrived=self.arrived + by)


Connection = tuple[int, int]
"""(sender, receiver)."""


def free_since(receipts: Mapping[int, Mapping[Connection, Receipt]]) -> dict[tuple[int, Connection], float]:
    """(task, connection) -> when the message before that of the task had arrived on the connection. ``receipts``: by
    task."""
    arrivals: dict[Connection, list[tuple[float, int]]] = {}
    for task, row in receipts.items():
        for connection, receipt in row.items():
            arrivals.setdefault(connection, []).append((receipt.arrived, task))
    free: dict[tuple[int, Connection], float] = {}
    for connection, order in arrivals.items():
        order.sort()
        for (before, _), (_, task) in pairwise(order):
            free[task, connection] = before
    return free


def flows_from(
    what: Communication, issued: Iterable[float], got: Mapping[Connection, Receipt],
    free: Mapping[tuple[int, Connection], float],
) -> float:  # fmt: skip
    """When the bytes of a communication can flow: all senders have ``issued`` it, all receivers have room for it, and
    one of its connections is free."""
    ready = max(issued)
    if what.form == "all_reduce":
        return ready
    ready = max(ready, *(receipt.posted for receipt in got.values()))
    return max(ready, min(free.get((receipt.task, c), ready) for c, receipt in got.items()))


class Message:
    """A message that is to come: one thread waits for it, others wait for that thread."""

    def __init__(self, task: int, peer: int) -> None:
        self.task, self.peer = task, peer
        self._posted: Future[tuple[dist.Work, float]] = Future()
        self._done: Future[Receipt] = Future()
        self._taken = threading.Lock()

    def post(self, work: dist.Work) -> None:
        """It can come from now on."""
        self._posted.set_result((work, time.perf_counter()))

    def cancel(self) -> None:
        """Let go of who waits for it to be posted."""
        self._posted.cancel()

    def wait(self) -> Receipt:
        """Block until it is here. Raises what waiting for the backend raises."""
        if self._taken.acquire(blocking=False):
            try:
                work, posted = self._posted.result()
                began = time.perf_counter()
                work.wait()
                arrived = time.perf_counter()
                self._done.set_result(Receipt(self.task, self.peer, posted, arrived, arrived - began < WAITED_S))
            except BaseException as error:
                self._done.set_exception(error)
        return self._done.result()


class Watched(Wire):
    """A wire that notes what arrives when. ``clock``: that of the rank's device."""

    def __init__(self, wire: Wire, instructions: Iterable[Instruction], clock: Clock) -> None:
        vars(self).update(vars(wire))  # the same groups, plans and buffers
        self.clock, program = clock, list(instructions)
        self._order = [x.task for x in program if isinstance(x, Start)]
        self._posts = {x.task for x in program if isinstance(x, Post)}
        self._receipts: list[Receipt] = []
        self._waits: list[tuple[int, Any, Any]] = []
        self._messages: dict[tuple[int, int], Message] = {}
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Before each step."""
        self._receipts, self._waits = [], []
        self._messages = {
            (task, peer): Message(task, peer)
            for task in (self._order if self.eager else ())
            if task in self._posts
            for peer in self.plans[task].receive_length
        }
        peers = {peer for _, peer in self._messages}
        rows = [[m for (_, peer), m in self._messages.items() if peer == each] for each in sorted(peers)]
        self._threads = [threading.Thread(target=_listen, args=(row,), daemon=True) for row in rows]
        for thread in self._threads:
            thread.start()

    def receipts(self, when: Callable[[Any], float]) -> list[Receipt]:
        """Of the step at hand. ``when``: a mark of the clock in seconds (``Clock.when``)."""
        waits = [(task, when(began), when(ended)) for task, began, ended in self._waits]
        return self._receipts + [Receipt(task, COLLECTIVE, a, b, b - a < WAITED_S) for task, a, b in waits]

    def close(self) -> None:
        """Behind each step, also one that failed."""
        for message in self._messages.values():
            message.cancel()

    def post(self, values: list[Any], instruction: Post) -> Action:
        """As ``Wire.post``."""
        task, slot, run = instruction.task, instruction.slot, super().post(values, instruction)
        if not self.eager:
            return run

        def post() -> None:
            run()
            works, buffers = values[slot].works, values[slot].buffers
            messages = [self._messages[task, peer] for peer in self.plans[task].receive_length]
            for message, work in zip(messages, works, strict=True):
                message.post(work)
            values[slot] = Arrival(cast(list[dist.Work], messages), buffers)

        return post

    def start(self, values: list[Any], instruction: Start) -> Action:
        """As ``Wire.start``."""
        task, slot, run = instruction.task, instruction.slot, super().start(values, instruction)
        if not self.eager or not self.plans[task].what.one_call:
            return run

        def start() -> None:
            began = time.perf_counter()
            run()
            (work,) = values[slot].works
            work.get_future().add_done_callback(self._noting(task, began))

        return start

    def _noting(self, task: int, began: float) -> Callable[[Any], None]:
        receipts = self._receipts
        return lambda _: receipts.append(Receipt(task, COLLECTIVE, began, time.perf_counter(), False))

    def wait(self, task: int, works: Sequence[Any]) -> None:
        """As ``Wire.wait``."""
        for work in works:
            if isinstance(work, Message):
                self._receipts.append(work.wait())
                continue
            began = self.clock.mark()
            work.wait()
            if not self.eager or self.plans[task].what.one_call:
                self._waits.append((task, began, self.clock.mark()))


def _listen(messages: Sequence[Message]) -> None:
    """Wait for the messages of a step that come from one peer."""
    for message in messages:
        try:
            message.wait()
        except (RuntimeError, CancelledError):  # the rank meets it, too, or has failed
            return
