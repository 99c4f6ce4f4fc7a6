"""Python processes of our own: search workers, ranks, busy neighbours. How they are started, and how they end.

They import from where this process does, never from the current folder merely because it is the current one: a file
called ``random.py`` that lies there is data. Ctrl-C reaches them through this process alone, which ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_running: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()


def module(name: str, *arguments: str) -> list[str]:
    """Arguments for Python that run a module without the current folder on its path."""
    return ["-P", "-m", name, *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, with our ``sys.path`` and ``extra``. Where flexsearch was found comes last, unless it is on the path."""
    package = str(Path(__file__).resolve().parent.parent)
    path = [place for place in sys.path if place]
    if package not in path:
        path.append(package)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(extra or {})}


def start(arguments: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """``python ARGUMENTS``, with ``environment(env)`` and other ``options`` of Popen. Ctrl-C does not reach it."""
    with _held(signal.SIGINT):
        process = subprocess.Popen([sys.executable, *arguments], env=environment(env), **options)
    _running.add(process)
    return process


def kill_all() -> None:
    """Kill all that still run, and wait for none: this process ends at once."""
    for process in list(_running):
        if process.returncode is None:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


def end_with(parent: int) -> None:
    """In a child: end when the process ``parent`` does, even if it is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was quicker


def before_exec() -> Callable[[], None] | None:
    """The same as a ``preexec_fn``, for programs that are not ours; None where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_DEATH_SIGNAL, signal.SIGKILL) and None


@contextmanager
def _held(which: signal.Signals) -> Iterator[None]:
    """Hold a signal back in this thread, and for good in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {which})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
