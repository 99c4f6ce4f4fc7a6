"""What the documents show is so: the example of docs/strategy.md, the figures of docs/schedules.png."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flexsearch.cli.common import stdout
from flexsearch.graph import OperatorGraph
from flexsearch.report.schedules import bars, draw_schedules, makespan
from flexsearch.search.hybrid import Layout, simulate_layout
from flexsearch.simulate.staged import step_of_strategy
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.schedule import placement
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.pipelines import equal

README = Path(__file__).resolve().parents[1] / "README.md"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def example() -> str:
    """The JSON of docs/strategy.md."""
    found = re.search(r"```json\n(.*?)```", (DOCS / "strategy.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_example_of_a_strategy_file_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "example.json"
    path.write_text(example())
    strategy, graph = Strategy.load(path), OperatorGraph.load("mlp")
    pipeline = Pipeline.of(strategy, graph)
    assert (pipeline.replicas, pipeline.devices, pipeline.microbatches) == (2, ((0,), (1, 2)), 4)
    step = step_of_strategy(graph, strategy)
    assert step.devices == 6 and step.samples == 64 and not step.missing
    told = re.search(r"predicts (\d+) ms a step", (DOCS / "strategy.md").read_text())
    assert told and step.makespan_s == pytest.approx(int(told[1]) / 1e3, rel=0.1)


def test_the_example_says_no_more_than_it_must(tmp_path: Path) -> None:
    """Written anew it says the same, and every field that is shown is a field of the file."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(example())
    Strategy.load(first).save(second)
    shown, written = json.loads(example()), json.loads(second.read_text())
    assert set(shown) == set(written)
    assert [shown[key] for key in ("stages", "operators", "schedule")] == [
        written[key] for key in ("stages", "operators", "schedule")
    ]


@pytest.mark.parametrize(
    ("kind", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble-v", 2)]
)
def test_the_picture_of_a_schedule_is_what_the_engine_runs(kind: ScheduleKind, each: int) -> None:
    drawn = makespan(bars(kind, 4, 8, each))
    assert equal(kind, placement(kind, 4, each), 8, 1000).run() == pytest.approx(1000 * each * drawn)


def test_schedules_can_be_drawn() -> None:
    figure = draw_schedules(2, 4, (("1f1b", 1), ("zero-bubble-v", 2)))
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == [
        "1F1B", "zero bubble (ZB-V), 2 stages on each rank",
    ]  # fmt: skip


def test_a_layout_is_simulated_without_a_search() -> None:
    graph, cluster = OperatorGraph.load("mlp"), Topology.load("ethernet-10g:4")
    pipeline, step = simulate_layout(graph, cluster, Layout(2, 1, 2, 4), Options(optimizer="adam"))
    assert (pipeline.replicas, pipeline.devices, pipeline.microbatches) == (2, ((0,), (1,)), 4)
    assert step.makespan_s > 0.0 and step.devices == 4 and not step.missing


def test_the_first_answer_of_the_readme_is_what_the_command_prints(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, but for what the clock says: a budget in proposals gives the same plan everywhere."""
    pattern = r"`flexsearch (optimize [^`]* -b \d+)` prints[^\n]*\n\n((?:    [^\n]*\n|\n)+)"
    found = re.search(pattern, README.read_text())
    assert found
    monkeypatch.setattr(stdout, "width", 84)
    ran = cli(*found[1].split())
    assert ran.code == 0, ran.err
    printed = [untimed(text) for text in (ran.out, re.sub(r"(?m)^    ", "", found[2]))]
    assert printed[0] == printed[1]


def untimed(text: str) -> list[str]:
    """Words of a text, without how long it took."""
    return re.sub(r"proposals in [\d.]+ s \([\d,]+/s\)", "proposals", " ".join(text.split())).split()
