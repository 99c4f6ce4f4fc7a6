"""Climbs in a process of its own, started by ``workers``.

It reads pickles from its standard input: the arguments of ``Climber``, then climbs; for each it writes pickles (whether
it has ended, what was found) to its standard output.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import Final

from flexsearch.children import end_with
from flexsearch.search.climb import Climbed, Climber

EVERY_S: Final = 0.2
"""Time between two messages about a climb that goes on."""


def main() -> None:
    """Serve until the input ends."""
    end_with(os.getppid())
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr

    def send(ended: bool, climbed: Climbed) -> None:
        pickle.dump((ended, climbed), sink)
        sink.flush()

    said = time.monotonic()

    def watch(climbed: Climbed) -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY_S:
            send(False, climbed)
            said = time.monotonic()

    climber = Climber(*pickle.load(source))
    while True:
        try:
            climb = pickle.load(source)
        except EOFError:
            return
        send(True, climber.climb(climb, watch))


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError):  # the parent has ended the search
        os._exit(0)
