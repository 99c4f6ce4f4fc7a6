"""Commands as processes of their own, and what may be left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexsearch.graph import OperatorGraph
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.conftest import SOURCE, Ran

SCRIPT = "from flexsearch.cli import main\nmain()\n"
SIMULATE = ("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "single")
OPTIMIZE = ("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "20")
ROOT = os.geteuid() == 0


def start(*arguments: object, how: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any) -> Any:
    """A command as a process of its own, in the current folder."""
    top = Path.cwd().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(top / "site"), SOURCE)), **(env or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(
        [sys.executable, *(how or (str(top / "bin" / "flexsearch"),)), *map(str, arguments)], env=environment, **streams
    )


def run(*arguments: object, **options: Any) -> Ran:
    """The same, to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return Ran(process.returncode, out or "", err or "")


def plan(graph: str = "lenet", topology: str = "ethernet-1g-2", path: str = "plan.json") -> None:
    """Write a strategy."""
    baseline("data-parallel", OperatorGraph.load(graph), Topology.load(topology)).save(path)


def clean(ran: Ran, code: int = 2) -> None:
    """A message and nothing else: no traceback, no file left behind."""
    assert ran.code == code, (ran.out, ran.err)
    assert "Traceback" not in ran.err and "Error ignored" not in ran.err and "Exception ignored" not in ran.err, ran.err
    assert not [path for path in Path().rglob(".flexsearch-*")]


HOSTILE = (
    "random",
    "json",
    "numpy",
    "typing",
    "enum",
    "logging",
    "torch",
    "typer",
    "rich",
    "pathlib",
    "numba",
    "pickle",
)


def hostile(*names: str) -> None:
    """Files that say that they were executed."""
    for name in names or HOSTILE:
        Path(f"{name}.py").write_text(f"open('executed', 'a').write({name!r})\nraise RuntimeError('hostile')\n")


def children(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait for something; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [p for p in pids if Path(f"/proc/{p}/stat").exists() and ") Z" not in Path(f"/proc/{p}/stat").read_text()]
