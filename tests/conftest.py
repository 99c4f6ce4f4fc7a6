"""The command line as a function, and where subprocesses find flexsearch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flexsearch
from flexsearch.cli import streams as command_streams

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOURCE = str(Path(flexsearch.__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Ran:
    """How a command ended: exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one JSON object that it must be."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Cli = Callable[..., Ran]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="Every model of families.py and own_models.py.")


@pytest.fixture(autouse=True, scope="session")
def _subprocesses_find_flexsearch() -> Iterator[None]:
    """A process started in another folder imports the flexsearch under test, installed or not."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@contextmanager
def streams_restored() -> Iterator[None]:
    """What a command does to the standard streams, the path and the signals of its process, undone."""
    streams, path, descriptor = (sys.stdout, sys.stderr), list(sys.path), os.dup(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        if command_streams._result is not None:  # a process that ends does not need to
            os.close(command_streams._result.fileno())
            command_streams._result = None


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """``cli("optimize", "lenet", ...)`` in an empty folder."""
    from flexsearch.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["flexsearch", *map(str, arguments)])
        capfd.readouterr()
        with streams_restored(), pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return Ran(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and beside it a console script and a log of the Python processes that are started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flexsearch").write_text("from flexsearch.cli import main\nmain()\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import sys\nwith open({str(tmp_path / 'started')!r}, 'a') as log:\n    print(sys.orig_argv, file=log)\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here
