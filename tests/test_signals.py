"""Ctrl-C, SIGTERM and SIGHUP at any moment: the best plan so far is written, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Strategy
from flexsearch.topology import Topology
from tests.commands import OPTIMIZE, SCRIPT, alive, children, run, start, until
from tests.conftest import Cli

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LONG_SEARCH = ("optimize", "alexnet", "-t", "ethernet-1g-4", "-b", "10m", "-j", "2")


def searching(process: Any) -> list[int]:
    """Wait until the search has a worker, which takes minutes where it is still to be compiled; the workers."""
    workers = until(lambda: [p for p in children(process.pid) if b"search.worker" in _cmdline(p)], 240.0)
    assert isinstance(workers, list)
    return workers


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_search_with_the_best_plan_so_far(here: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:  # the tests run under nohup
        pytest.skip("the signal is ignored")
    process = start(*LONG_SEARCH, "--json", "--exhaustive", "10m")
    workers = searching(process)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == SIGNALS[number], err
    assert json.loads(out)["stopped"].startswith("interrupted") and time.monotonic() - began < 120
    Strategy.load("strategy.json").check(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4"))
    assert until(lambda: not alive(workers)) and os.listdir() == ["strategy.json"]


def test_ctrl_c_at_a_terminal_reaches_the_workers_too_and_they_say_nothing(here: Path) -> None:
    process = start(*LONG_SEARCH, start_new_session=True)
    searching(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err and "Wrote strategy.json" in out, err


def test_of_a_run_that_is_interrupted_one_process_says_so(here: Path) -> None:
    assert run("optimize", "mlp", "-t", "ethernet-1g:2", "-b", "1").code == 0
    process = start("run", "-n", "2", "strategy.json", "--model", "flexsearch.zoo:mlp", "--steps", "1000000")
    for line in process.stdout:
        if line.split()[:1] == ["3"]:
            break
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("interrupted") == 1, err


def test_a_second_signal_ends_it_at_once(here: Path) -> None:
    process = start(*LONG_SEARCH)
    workers = searching(process)
    os.kill(process.pid, signal.SIGSTOP)  # so that both wait for it
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.6)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode in (143, -signal.SIGTERM) and time.monotonic() - began < 60
    assert until(lambda: not alive(workers)) and set(os.listdir()) <= {"strategy.json"}
    if Path("strategy.json").exists():
        Strategy.load("strategy.json")


@pytest.mark.parametrize("delay", [0.4, 0.9, 1.4, 1.9, 2.4])
def test_a_signal_at_any_moment_leaves_a_plan_or_says_that_there_is_none(here: Path, delay: float) -> None:
    process = start("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "300", "--exhaustive", "1s", "-j", "1")
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    if process.returncode == 0:  # it was quicker
        assert "Wrote" in out
    elif Path("strategy.json").exists():
        assert process.returncode in (143, -signal.SIGTERM)  # the latter: nothing was left to do
        Strategy.load("strategy.json").check(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))
    else:
        assert process.returncode in (143, -signal.SIGTERM)  # the latter: Python itself was still starting
        assert process.returncode < 0 or "interrupted before a plan was found; nothing was written" in err
    assert set(os.listdir()) <= {"strategy.json"}


def test_a_signal_while_the_plan_is_written_is_obeyed_after_that(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Strategy.save

    def slowly(self: Strategy, path: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.05)
        save(self, path)

    monkeypatch.setattr(Strategy, "save", slowly)
    ran = cli(*OPTIMIZE)
    assert ran.code == 143 and "Wrote strategy.json" in ran.out, ran.err
    Strategy.load("strategy.json")


def test_a_process_that_has_nothing_to_save_ends_even_if_it_does_not_react(here: Path) -> None:
    """Compiling is such a time, as is waiting for a lock in C: Python learns of a signal only when it is over."""
    script = "import ctypes, flexsearch.cli.optimize as optimize\ndef load(*_):\n    open('stuck', 'w').close()\n"
    script += "    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
    script += "    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)\n"
    script += f"optimize.load_setting = load\n{SCRIPT}"
    (here.parent / "bin" / "flexsearch").write_text(script)
    process = start(*OPTIMIZE, "--json")
    until(lambda: Path("stuck").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "nothing was written" in err
    assert json.loads(out)["error"]["kind"] == "interrupted"


def test_nohup_is_obeyed(here: Path) -> None:
    process = start(*OPTIMIZE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    time.sleep(1.5)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=300)
    assert process.returncode == 0


def test_a_deadline_whose_error_a_destructor_loses_raises_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.cli import signals

    monkeypatch.setattr(signals.current, "graceful", False)  # as commands of other tests leave it
    losses = 0
    with pytest.raises(TimeoutError), signals.deadline(0.01, TimeoutError("late"), lambda: 0.0):
        for _ in range(100):
            try:
                time.sleep(0.1)
            except TimeoutError:  # as in a destructor: it is reported, and the program goes on
                if losses:
                    raise
                losses += 1
    assert losses == 1


def test_a_deadline_leaves_out_what_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.cli import signals

    monkeypatch.setattr(signals.current, "graceful", False)
    began, compiling = time.monotonic(), [5.0]  # seconds before the block do not put it off
    with pytest.raises(TimeoutError), signals.deadline(0.01, TimeoutError("late"), lambda: compiling[0]):
        compiling[0] += 0.3
        time.sleep(30)
    assert 0.3 < time.monotonic() - began < 20


def test_a_deadline_that_is_left_as_it_passes_raises_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.cli import signals

    monkeypatch.setattr(signals.current, "graceful", False)

    def passes_again() -> None:  # the error is raised a second time where the block is left
        signal.raise_signal(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    monkeypatch.setattr(signals, "no_deadline", passes_again)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError, match="the block's own"), signals.deadline(30.0, TimeoutError("late"), lambda: 0.0):
        raise ValueError("the block's own")
    assert signal.getsignal(signal.SIGALRM) == before
