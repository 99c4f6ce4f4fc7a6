"""Ctrl-C, SIGTERM and SIGHUP. A command that has nothing to save ends at once. One that has (``graceful``) is told of
the first signal by a KeyboardInterrupt, and ends in order; the second one ends it at once.

Python handles signals between two instructions of the main thread, and compiling takes seconds between two; nor may
libraries be interrupted anywhere. So a thread of our own learns of signals as they come, and ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from flexsearch import children, output

ONE_EVENT_S: Final = 0.3
"""A terminal that is closed sends two signals or more, one right after the other."""
LEAST_S: Final = 0.01
"""A deadline is not put off by less."""
REPEATED_S: Final = 1.0
"""A deadline raises its error again so long as its block runs: what a destructor raises is lost."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The signals of one command. ``number``: the first that came, 0 if none has. ``words``: how the command ends if
    it is interrupted."""

    def __init__(self, end: Callable[[str, int], None], words: str) -> None:
        """``end``: says how the process ends (message, exit code)."""
        self.number, self.words = 0, words
        self.graceful = False
        """Something is at hand that must not be lost, or is to be taken down in order."""
        self._held = self._raised = False
        self._end = end

    @property
    def code(self) -> int:
        """The exit code, 0 if there was no signal."""
        return 128 + self.number if self.number else 0

    def hold(self) -> None:
        """From now on the first signal is only noted: what was found is being written."""
        self._held = True

    @contextmanager
    def released(self) -> Iterator[None]:
        """Meanwhile the first signal raises KeyboardInterrupt after all."""
        self._held = False
        try:
            yield
        finally:
            self._held = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the main thread does when it learns of a signal."""
        self.number = self.number or number
        if self.graceful and not self._held and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def poll(self) -> None:
        """Raise KeyboardInterrupt if a signal came, but what it raised got lost: in a destructor, say."""
        if self.number and not self._held:
            raise KeyboardInterrupt

    def watch(self, source: int) -> None:
        """A thread: reads the numbers of signals as they come."""
        first_s: float | None = None
        while numbers := os.read(source, 64):
            for number in numbers:
                if number not in ENDING:
                    continue
                self.number = self.number or number
                if not self.graceful or (first_s is not None and time.monotonic() - first_s > ONE_EVENT_S):
                    self._end_now()
                first_s = first_s or time.monotonic()
        os.close(source)

    def _end_now(self) -> None:
        children.kill_all()
        output.discard_unfinished()
        with suppress(Exception):
            if sys.stderr.isatty():
                os.write(2, b"\r\x1b[?25h\x1b[K")  # a progress bar hides the cursor
            self._end(self.words, self.code)
        os._exit(self.code)


current = Signals(lambda message, code: None, "")
"""Those of the command that runs."""


@contextmanager
def handled(end: Callable[[str, int], None], words: str) -> Iterator[Signals]:
    """Signals are handled as above until the end of the block, but for those that are ignored (``nohup``). After it
    they end the process as they end any other: nothing is left to do."""
    global current
    state = current = Signals(end, words)
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    ours = [number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    threading.Thread(target=state.watch, args=(source,), daemon=True).start()
    try:
        for number in ours:
            signal.signal(number, state.handle)
        yield state
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(sink)


@contextmanager
def deadline(seconds: float | None, error: Exception, besides: Callable[[], float]) -> Iterator[None]:
    """Raise ``error`` in the block when so many seconds have passed; if the command is graceful by then,
    KeyboardInterrupt with its message. ``besides``: seconds so far that do not count. None: never. The block ends it,
    and so does ``no_deadline``."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    left_out, over = besides(), False

    def late(number: int, frame: FrameType | None) -> None:
        nonlocal left_out
        if over:
            return
        if (more := besides() - left_out) > LEAST_S:
            left_out += more
            signal.setitimer(signal.ITIMER_REAL, more, REPEATED_S)
            return
        if current.graceful:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt(str(error))
        raise error

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED_S)
    try:
        yield
    finally:
        over = True  # first of all: the error could be raised again in what follows, and the timer would go on
        no_deadline()
        signal.signal(signal.SIGALRM, before)


def no_deadline() -> None:
    """What was to be done in time has been done."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
