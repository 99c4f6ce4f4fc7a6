"""Ctrl-C, SIGTERM and SIGHUP. The first one raises KeyboardInterrupt, so that the command ends in order; the second one
ends the process at once.

Python handles signals between two instructions of the main thread, and compiling takes seconds between two. So a thread
of our own learns of them as they come: it ends a process that has nothing to save and does not react.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from flexsearch import children, output

PATIENCE_S: Final = 1.0
"""How long the main thread may take to react, if there is nothing to save."""
ONE_EVENT_S: Final = 0.3
"""A terminal that is closed sends two signals or more, one right after the other."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The signals of one command. ``number``: the first that came, 0 if none has. ``words``: how the command ends if
    it is interrupted now."""

    def __init__(self, end: Callable[[str, int], None], words: str) -> None:
        """``end``: says how the process ends (message, exit code)."""
        self.number, self.words = 0, words
        self.saving = False
        """Something is at hand that must not be lost: the main thread is given the time it takes to react."""
        self._held = False
        self._end = end
        self._handled = threading.Event()

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
        first = not self._handled.is_set()
        self.number = self.number or number
        self._handled.set()
        if first and not self._held:
            raise KeyboardInterrupt

    def watch(self, source: int) -> None:
        """A thread: reads the numbers of signals as they come."""
        first_s: float | None = None
        while True:
            waiting = first_s is not None and not self._handled.is_set() and not self.saving
            if not select.select([source], [], [], 0.1 if first_s is not None else None)[0]:
                if waiting and first_s is not None and time.monotonic() - first_s > PATIENCE_S:
                    self._end_now()
                continue
            numbers = os.read(source, 64)
            if not numbers:
                os.close(source)
                return
            for number in numbers:
                if number in ENDING and first_s is None:
                    self.number, first_s = self.number or number, time.monotonic()
                elif number in ENDING and first_s is not None and time.monotonic() - first_s > ONE_EVENT_S:
                    self._end_now()

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
