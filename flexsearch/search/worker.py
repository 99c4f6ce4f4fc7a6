"""Work of a search in a process of its own, started by ``workers``.

It reads pickles from its standard input: a function with its arguments, which returns what answers requests, then
requests; for each it writes pickles (whether that is all, the answer so far) to its standard output.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
from typing import Any, Final

from flexsearch.children import end_with

EVERY_S: Final = 0.2
"""Time between two messages about work that goes on."""


def main() -> None:
    """Serve until the input ends."""
    gc.set_threshold(20_000, 20, 20)  # as in the command that starts it (``cli.process``)
    end_with(os.getppid())
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr

    def send(ended: bool, answer: Any) -> None:
        pickle.dump((ended, answer), sink)
        sink.flush()

    said = time.monotonic()

    def watch(answer: Any) -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY_S:
            send(False, answer)
            said = time.monotonic()

    prepare, arguments = pickle.load(source)
    answer_to = prepare(*arguments)
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        send(True, answer_to(request, watch))


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError):  # the parent has ended the search
        os._exit(0)
