"""Starts the ranks of a run on this machine, as torchrun would, and ends them together. Needs no torch itself.

A rank that dies takes the others with it: they would wait for it until their time-out. What it said last is in the
error. Processes that torchrun started are ranks already; :func:`call` then just calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from flexsearch.errors import FlexsearchError, RuntimeFailure

RESULT = "FLEXSEARCH_RESULT"
"""Environment variable that tells rank 0 of :func:`call` in which file its result is expected."""
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun or by :func:`launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def call(target: str, arguments: Mapping[str, Any], count: int, **options: Any) -> Any:
    """Result of rank 0 of ``module:function`` called with keyword ``arguments`` on ``count`` local ranks.

    Arguments and result must be JSON. In a process that is a rank already, the function is simply called. ``options``
    as for :func:`launch`. Raises RuntimeFailure if a rank fails.
    """
    if is_rank():
        return _resolve(target)(**arguments)
    with tempfile.TemporaryDirectory(prefix="flexsearch-") as folder:
        result = Path(folder) / "result.json"
        environment = {**options.pop("env", {}), RESULT: str(result)}
        command = ["-m", "flexsearch.runtime.launch", target, json.dumps(dict(arguments))]
        launch(command, count, env=environment, **options)
        return json.loads(result.read_text(encoding="utf-8"))


def launch(
    arguments: Sequence[str],
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    pin: bool = False,
    timeout_s: float | None = None,
    grace_s: float = 2.0,
) -> None:
    """Run ``python ARGUMENTS`` as ranks 0 to ``count - 1`` until all have ended. Rank 0 has our stdout and stderr.

    ``env`` is added to the environment. ``pin``: rank r runs on the r-th of our cores only, starting over where there
    are fewer. ``timeout_s``: after which all are ended. ``grace_s``: what ranks have to end by themselves after one has
    failed. Raises RuntimeFailure that names the first rank that failed and how its stderr ended. However this is left,
    no rank is left behind.
    """
    if count < 1:
        raise RuntimeFailure(f"cannot start {count} ranks; give a number from 1")
    common = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    # One thread each, as torchrun does: ranks of one machine share its cores.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | common | dict(env or {})
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    die_with_us = _die_with_parent()
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank in range(count):
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE if rank == 0 else said[rank],
                preexec_fn=die_with_us,
            )
            ranks.append(process)
            if cores:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
        pump = threading.Thread(target=_pass_on, args=(ranks[0].stderr, said[0]), daemon=True)
        pump.start()
        failed = _first_failure(ranks, timeout_s, grace_s)
        if failed is not None:
            code = ranks[failed].poll()
            _end(ranks)
            pump.join(1.0)
            raise RuntimeFailure(_obituary(failed, code, said[failed], timeout_s))
        pump.join(1.0)


def end(code: int) -> NoReturn:
    """End this rank at once. The interpreter's own end could wait for peers that hang, and now and then aborts: a
    worker thread of gloo that drops its last tensor then finds no interpreter (pytorch/pytorch#179291)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port() -> int:
    """A TCP port on this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float | None, grace_s: float) -> int | None:
    """Wait until all have ended well (None), or until one fails or runs out of time: that one. Peers of a rank that was
    killed fail within moments, so a signal tells more than what stands first."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    first: int | None = None
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad and first is None:
            first, deadline = bad[0], min(deadline, time.monotonic() + grace_s)
        killed = [rank for rank in bad if (codes[rank] or 0) < 0]
        if killed:
            return killed[0]
        if None not in codes:
            return first
        time.sleep(0.05)
    return first if first is not None else [process.poll() for process in ranks].index(None)


def _obituary(rank: int, code: int | None, said: IO[bytes], timeout_s: float | None) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    words = "\n".join(lines[-15:]) or "(it said nothing)"
    if code is None:
        ending = f"did not end in {timeout_s:g} s"
    elif code < 0:
        ending = f"was killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    else:
        ending = f"ended with exit code {code}"
    return f"rank {rank} {ending}; the other ranks were ended too. Its last words:\n{words}"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all that still run: politely, then not."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + 2.0
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def _pass_on(source: IO[bytes] | None, keep: IO[bytes]) -> None:
    """Rank 0's stderr, to ours and to a file for its last words."""
    assert source is not None
    for line in source:
        keep.write(line)
        keep.flush()
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def _die_with_parent() -> Any:
    """What a rank does before it starts, so that it ends even if we are killed; None where the system has no such
    thing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork

    def before_exec() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGKILL)

    return before_exec


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _main(target: str, arguments: str) -> None:
    try:
        result = _resolve(target)(**json.loads(arguments))
    except FlexsearchError as error:  # a user's mistake: its message alone
        print(f"flexsearch: {error}", file=sys.stderr)
        end(2)
    if os.environ.get("RANK") == "0" and (path := os.environ.get(RESULT)):
        Path(path).write_text(json.dumps(result), encoding="utf-8")
    end(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
