"""Starts the ranks of a run on this machine, as torchrun would, and ends them together. Needs no torch itself.

A rank that dies takes the others with it: they would wait for it until their time-out. What it said last is in the
error. Processes that torchrun started are ranks already; :func:`call` then just calls.

Ranks that are started here talk to each other over the loopback interface, and meet in a file of a private folder:
nothing listens to the network.
"""

from __future__ import annotations

import contextlib
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

from flexsearch import children, errors, output
from flexsearch.errors import FlexsearchError, RuntimeFailure
from flexsearch.ranks import FOLDER, is_rank

_PIPE_CLOSED = 128 + signal.SIGPIPE


def report(result: Any) -> bool:
    """Leave the result (JSON) of a rank for the process that started it, if :func:`launch` did; only rank 0's counts.
    Whether it was left."""
    return _leave("result", result)


def report_error(error: FlexsearchError) -> bool:
    """The same for an error: :func:`launch` raises it again."""
    return _leave("error", {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy})


def call(target: str, arguments: Mapping[str, Any], count: int, **options: Any) -> Any:
    """Result of rank 0 of ``module:function`` called with keyword ``arguments`` on ``count`` local ranks.

    Arguments and result must be JSON. In a process that is a rank already, the function is simply called. ``options``
    as for :func:`launch`. Raises what :func:`launch` raises.
    """
    if is_rank():
        return _resolve(target)(**arguments)
    command = children.module("flexsearch.runtime.launch", target, json.dumps(dict(arguments)))
    return launch(command, count, **options)


def launch(
    arguments: Sequence[str],
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    pin: bool = False,
    timeout_s: float | None = None,
    grace_s: float = 2.0,
    tolerate: bool = False,
) -> Any:
    """Run ``python ARGUMENTS`` as ranks 0 to ``count - 1`` until all have ended. Rank 0 has our stdout and stderr. The
    result is what rank 0 gave to :func:`report`, or None.

    ``env`` is added to the environment. ``pin``: rank r runs on the r-th of our cores only, starting over where there
    are fewer. ``timeout_s``: after which all are ended. ``grace_s``: what ranks have to end by themselves after one has
    failed. ``tolerate``: others than rank 0 may fail. Raises the error of the first rank that failed, if it gave one to
    :func:`report_error`; else RuntimeFailure that names the rank and how its stderr ended; BrokenPipeError if nobody
    reads our stdout. However this is left, no rank is left behind.
    """
    if count < 1:
        raise RuntimeFailure(f"cannot start {count} ranks", "Give a number from 1.")
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(output.temporary_folder())
        environment = _environment(count, folder) | dict(env or {})
        said = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank in range(count):
            process = children.start(
                arguments,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE if rank == 0 else said[rank],
                preexec_fn=children.before_exec(),
            )
            ranks.append(process)
            if cores:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
        pump = threading.Thread(target=_pass_on, args=(ranks[0].stderr, said[0]), daemon=True)
        pump.start()
        failed = _first_failure(ranks, timeout_s, grace_s, tolerate)
        if failed is not None:
            code = ranks[failed].poll()
            _end(ranks)
            pump.join(1.0)
            raise _failure(folder, failed, code, said[failed], timeout_s)
        pump.join(1.0)
        return _read(folder / "result-0")


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


def _environment(count: int, folder: Path) -> dict[str, str]:
    """Of every rank. MASTER_ADDR and MASTER_PORT are for code that makes a process group of its own."""
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    return {
        # One thread each, as torchrun does: ranks of one machine share its cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback,
        FOLDER: str(folder),
    }  # fmt: skip


def _leave(what: str, value: Any) -> bool:
    if not is_rank() or (folder := os.environ.get(FOLDER)) is None:
        return False
    (Path(folder) / f"{what}-{os.environ['RANK']}").write_text(json.dumps(value), encoding="utf-8")
    return True


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _first_failure(
    ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float | None, grace_s: float, tolerate: bool
) -> int | None:
    """Wait until all have ended well (None), or until one fails or runs out of time: that one. Peers of a rank that was
    killed fail within moments, so a signal tells more than what stands first."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    first: int | None = None
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        bad = [rank for rank, code in enumerate(codes) if code and not (tolerate and rank)]
        if bad and first is None:
            first, deadline = bad[0], min(deadline, time.monotonic() + grace_s)
        killed = [rank for rank in bad if (codes[rank] or 0) < 0]
        if killed:
            return killed[0]
        if None not in codes:
            return first
        time.sleep(0.05)
    return first if first is not None else [process.poll() for process in ranks].index(None)


def _failure(folder: Path, rank: int, code: int | None, said: IO[bytes], timeout_s: float | None) -> Exception:
    """What to raise because of a rank that failed."""
    if code == _PIPE_CLOSED:
        return BrokenPipeError("nobody reads standard output")
    if (told := _read(folder / f"error-{rank}")) is not None:
        kind = getattr(errors, told["kind"], FlexsearchError)
        error: FlexsearchError = kind(told["message"], told["remedy"])
        placed = rank == 0 or _read(folder / "error-0") == told or error.message.startswith(f"rank {rank}")
        return error if placed else error.at(f"rank {rank}")
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    words = "\n".join(lines[-15:]) or "(it said nothing)"
    if code is None:
        ending = f"did not end in {timeout_s:g} s"
    elif code < 0:
        ending = f"was killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    else:
        ending = f"ended with exit code {code}"
    return RuntimeFailure(f"rank {rank} {ending}; the other ranks were ended too. Its last words:\n{words}")


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


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _main(target: str, arguments: str) -> None:
    try:
        report(_resolve(target)(**json.loads(arguments)))
    except FlexsearchError as error:  # a user's mistake: its message alone
        report_error(error)
        end(2)
    end(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
