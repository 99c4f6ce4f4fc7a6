"""Tables and texts at any width: nothing too wide, nothing cut into fragments, names as they are."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flexsearch.api import compare
from flexsearch.graph import OperatorGraph
from flexsearch.report import Column, Grid, PlanRow, plan_table
from flexsearch.report.grid import SHORTEST, hanging, wrapped
from flexsearch.setting import Setting
from flexsearch.strategy import Strategy, make_config
from flexsearch.topology import Topology
from tests.conftest import SOURCE
from tests.test_baselines import Builder

LONG = "encoder.blocks.3.self_attention.output_projection[bold].lora_a[/x]"


def shown(thing: object, width: int) -> list[str]:
    """The lines that a terminal of this width shows."""
    file = io.StringIO()
    Console(width=width, file=file, highlight=False).print(thing)
    return [line.rstrip() for line in file.getvalue().splitlines()]


# ---- texts


@given(st.text(st.sampled_from("ab1 ./->_%sMB"), max_size=120), st.integers(1, 40), st.integers(1, 40))
def test_a_wrapped_text_is_the_text(text: str, width: int, later: int) -> None:
    lines = wrapped(text, width, later)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    if width >= 12 and later >= 12 and not re.search(r"\d \S", text):
        assert all(cell_len(line) <= (later if k else width) for k, line in enumerate(lines)) or text[:1] == " "


def test_a_number_stays_with_its_unit_and_a_name_breaks_at_its_points() -> None:
    assert wrapped("all_reduce takes 903 MB 86 %, link", 20) == ["all_reduce takes", "903 MB 86 %, link"]
    assert wrapped("lstm.layers.2", 13) == ["lstm.layers.2"]
    assert wrapped("encoder.blocks.self_attention", 20) == ["encoder.blocks.self_", "attention"]
    assert all(len(piece) >= SHORTEST for piece in wrapped("x" * 41, 20))
    assert [str(t) for t in hanging("one two three", 9)] == ["one two", "  three"]


# ---- tables


def grid(*names: str) -> Grid:
    made = Grid((Column("name", "text"), Column("time"), Column("peak", "number below"), Column("why", "below")))
    for name in names:
        made.add(name, "12.3 ms", "903 MB", "all_reduce of the gradient of something 86 %")
    return made


def test_what_is_too_wide_goes_below_and_then_becomes_a_list() -> None:
    wide, wrapped_, narrow, list_ = (shown(grid("data-parallel"), width) for width in (100, 50, 40, 20))
    assert len(wide) == 3 and wide[2].endswith("86 %")
    assert len(wrapped_) == 5 and wrapped_[0].split() == wide[0].split()
    assert wide[0].split() == ["name", "time", "peak", "why"]
    assert narrow[0].split() == ["name", "time", "peak"] and "Why:" in narrow
    assert narrow[-1].startswith("  ") and "data-parallel: all_reduce of the" in "\n".join(narrow)
    assert "text/html" in grid("x")._repr_mimebundle_((), ())  # notebooks
    assert list_[0].startswith("data-parallel:") and all(len(line) <= 20 for line in list_)


@pytest.mark.parametrize("width", [120, 80, 60])
def test_long_names_and_markup_leave_a_table_whole(width: int) -> None:
    lines = shown(grid(LONG, "[red]x[/red]", "[/]"), width)
    assert all(cell_len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "[red]x[/red]" in text and "[/]" in text
    column = [line[: line.index("12.3")].strip() if "12.3" in line else line for line in lines[2:]]
    assert LONG in "".join(piece.split("  ")[0].strip() for piece in column)


@pytest.mark.parametrize("width", [200, 132, 100, 80, 72, 60, 40, 20])
def test_the_table_of_plans_reads_at_every_width(width: int) -> None:
    rows = compare(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4"))
    rows[0] = PlanRow(f"folder/{LONG}.json", rows[0].simulation, rows[0].lowered)
    lines = shown(plan_table(rows), width)
    assert all(cell_len(line) <= width for line in lines)
    if width < 60:
        return
    numbers = [line for line in lines if re.search(r"\d s ± \d\S*  ", line)]
    assert len(numbers) == len(rows)  # each plan has its times on one line
    assert lines[0].count("vs") == 2 and "parallel" in lines[1] and "device" in lines[1]
    words = [word for line in lines for word in line.split() if word.isalpha()]
    assert {"data", "compute", "reduce"} & set(words)


# ---- the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with long names and markup, and a strategy for it on 8 GPUs."""
    made = tmp_path_factory.mktemp("wide")
    b = Builder("names[bold]")
    x = b.source("x", 64, 256)
    for k in range(3):
        x = b.linear(f"{k}.{LONG}", x, 256)
    graph, topology = b.finish(x), Topology.load("p100:2")
    graph.save(made / "graph.json")
    setting = Setting.of(graph, topology)
    configs = dict(setting.baseline("data-parallel").configs)
    configs[graph.operators[1].name] = make_config(graph.operators[1], {"o": 4}, range(4))
    Strategy.make(graph, topology, configs).save(made / "mine[x].json")
    return made


COMMANDS = {
    "optimize": ("optimize", "graph.json", "-t", "p100:2", "--budget", "20"),
    "compare": ("compare", "graph.json", "-t", "p100:2", "-s", "mine[x].json"),
    "simulate": ("simulate", "graph.json", "-t", "p100:2", "-s", "mine[x].json"),
    "explain": ("explain", "mine[x].json", "--graph", "graph.json", "--tries", "20"),
    "explain an operator": ("explain", "mine[x].json", "--graph", "graph.json", "--operator", f"1.{LONG}"),
    "diff": ("diff", "mine[x].json", "megatron", "--graph", "graph.json"),
}


@pytest.mark.parametrize(("command", "width"), [*zip(COMMANDS, itertools.cycle((60, 80)), strict=False)])
def test_commands_keep_to_the_width_and_break_no_word_into_fragments(folder: Path, command: str, width: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "flexsearch.cli", *COMMANDS[command]], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"COLUMNS": str(width), "PYTHONPATH": SOURCE}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("  flexsearch run")]  # to be copied
    assert not [line for line in lines if cell_len(line.rstrip()) > width]
    assert "…" not in ran.stdout
    for word in ("batch", "GPUs"):
        assert word in ran.stdout
    alone = {line.strip() for line in lines if re.fullmatch(r"\s*[a-z]{1,3}\s*", line)}
    assert alone <= {"of", "on", "in", "to", "and", "the"}  # a word cut into pieces leaves lines of a few letters
