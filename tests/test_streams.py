"""Standard output and error: closed, full, of any encoding and width; names are printed as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexsearch.strategy import Strategy
from flexsearch.topology import Topology
from tests.commands import OPTIMIZE, SIMULATE, clean, plan, run
from tests.conftest import SOURCE, Cli, Ran


def shell(command: str, *arguments: object, **env: str) -> Ran:
    """A shell's pipeline; ``F`` is the command line of flexsearch."""
    top = Path.cwd().parent
    words = [sys.executable, str(top / "bin" / "flexsearch"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": SOURCE, **env}
    done = subprocess.run(
        ["bash", "-c", f'F() {{ "$@"; echo "code $?" >> code; }}; {command}', "bash", *words],
        env=environment, capture_output=True, timeout=300,
    )  # fmt: skip
    return Ran(int(Path("code").read_text().split()[-1]), done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ('F "$@" >&-', 0), ('F "$@" > /dev/full', 2), ('F "$@" | head -c0', 141), ('F "$@" 2>&-', 0),
        ('F "$@" 2> /dev/full', 0), ('F "$@" >&- 2>&- <&-', 0), ('F "$@" --json > /dev/full', 2),
    ],
)  # fmt: skip
def test_a_stream_that_fails_ends_nothing_but_the_printing(here: Path, command: str, code: int) -> None:
    ran = shell(command, *OPTIMIZE)
    clean(ran, code)
    Strategy.load("strategy.json")
    if code == 2:
        assert "standard output" in ran.err
    if code == 141:  # a slow machine prints a line of progress every 5 s; nobody is told of the pipe
        assert all(re.search(r" \(\d+ s[,)]", line) for line in ran.err.splitlines()), ran.err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_will_do(here: Path, encoding: str) -> None:
    (here / "r\u00easeau \u2192.json").write_text(Topology.load("ethernet-1g-2").model_dump_json(exclude_none=True))
    plan(path="plan \u00b5 \u2192 \u754c.json")
    command = ("compare", "lenet", "-s", "plan \u00b5 \u2192 \u754c.json", "-t", "r\u00easeau \u2192.json")
    ran = run(*command, env={"PYTHONIOENCODING": encoding}, encoding="utf-8" if encoding == "utf-8" else "latin-1")
    clean(ran, 0)
    assert "data-parallel" in ran.out and "ms" in ran.out
    if encoding != "utf-8":
        assert "->" in ran.out and "\u2503" not in ran.out and "+--" in ran.out
    if encoding == "ascii":
        assert ran.out.isascii() and "plan u -> ?.json" in ran.out


@pytest.mark.parametrize("columns", ["0", "80", "9" * 30])
def test_any_width_will_do(here: Path, columns: str) -> None:
    ran = run(*SIMULATE, env={"COLUMNS": columns})
    clean(ran, 0)
    assert "single" in ran.out and "The plan:" in ran.out
    if columns == "80":
        assert max(map(len, ran.out.splitlines()[1:6])) <= 80


def test_names_are_printed_as_they_are(cli: Cli) -> None:
    topology = Topology.load("ethernet-1g-2").model_dump(mode="json", exclude_none=True)
    text = json.dumps(topology).replace("host0/cpu", "[/x][bold]host0").replace("ethernet-1g:2", "[red]name[/y]")
    Path("[x].json").write_text(text)
    ran = cli("simulate", "lenet", "-t", "[x].json", "--baseline", "data-parallel")
    assert ran.code == 0, ran.err
    assert "[/x][bold]host0" in ran.out and "[red]name[/y]" in ran.out
    ran = cli("optimize", "lenet", "-t", "[x].json", "-b", "5", "-o", "[bold].json")
    assert ran.code == 0 and "Wrote [bold].json" in ran.out and "[red]name[/y]" in ran.out
    for command in (("explain", "[bold].json"), ("explain", "[bold].json", "--operator", "conv1")):
        assert "[red]name[/y]" in cli(*command).out
    assert "[x].json" in cli("explain", "[x].json").err


def test_nothing_that_is_named_steers_the_terminal(cli: Cli) -> None:
    evil = "evil\x1b[2J\x07\x9b\u202e.json"
    plan(path=evil)
    ran = cli("compare", "lenet", "-t", "ethernet-1g-2", "-s", evil)
    assert ran.code == 0 and "evil?[2J?" in ran.out
    wrong = cli("explain", f"no such {evil}")
    assert r"evil\x1b[2J\x07\x9b\u202e.json" in wrong.err
    for text in (ran.out, wrong.err):
        assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_progress_is_told_without_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch import compiled
    from flexsearch.cli import progress

    monkeypatch.setattr(progress, "FIRST_S", 0.05)
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    ran = cli("optimize", "alexnet", "-t", "ethernet-1g-4", "-b", "4000", "-j", "1", "--json")
    assert ran.code == 0 and "proposals/s" in ran.err and " s, " in ran.err and "%)" in ran.err
    assert "Compiling" not in ran.err
    monkeypatch.setattr(compiled, "is_warm", lambda: False)
    assert "Compiling for this machine" in cli(*OPTIMIZE).err


def test_a_baseline_is_compiled_for_in_sight(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch import compiled
    from flexsearch.errors import StrategyError
    from flexsearch.setting import Setting

    def baseline(*_: object) -> None:
        raise StrategyError("what is simulated here compiles")

    monkeypatch.setattr(Setting, "baseline", baseline)
    monkeypatch.setattr(compiled, "is_warm", lambda: False)
    ran = cli("simulate", "alexnet", "-t", "ethernet-1g-4", "--baseline", "fsdp")
    assert ran.code == 2 and "Compiling for this machine" in ran.err


def test_compiling_is_told_where_other_commands_have_compiled_before(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch import compiled
    from flexsearch.cli import progress

    monkeypatch.setattr(progress, "FIRST_S", 0.02)
    monkeypatch.setattr(compiled, "is_compiling", lambda: True)
    ran = cli("simulate", "alexnet", "-t", "ethernet-1g-4", "--baseline", "fsdp")
    assert ran.code == 0 and "compiling once for this machine (" in ran.err
