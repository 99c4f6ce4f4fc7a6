"""``flexsearch plot``: every picture in every format, and a page that needs nothing but itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flexsearch.graph import OperatorGraph
from flexsearch.report import PlanRow
from flexsearch.report.page import page
from flexsearch.report.plots import memory_bars, plan_bars, rendered, timelines
from flexsearch.report.units import ratio
from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.strategy import Strategy, make_config
from flexsearch.topology import Topology
from tests.conftest import Cli

BEGIN = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def strategy(cli: Cli) -> str:
    """A plan of LeNet that is no baseline."""
    setting = lenet()
    configs = dict(setting.baseline("data-parallel").configs)
    for op in setting.graph.operators[7:]:
        configs[op.name] = make_config(op, {}, [1])
    Strategy.make(setting.graph, setting.topology, configs).save("mine.json")
    return "mine.json"


def lenet(topology: str = "ethernet-1g-2") -> Setting:
    return Setting.of(OperatorGraph.load("lenet"), Topology.load(topology))


@pytest.mark.parametrize("what", ["timeline", "memory", "memory-over-time", "comparison"])
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_picture_is_drawn_in_every_format(cli: Cli, strategy: str, what: str, kind: str) -> None:
    ran = cli("plot", strategy, "-o", f"plan.{kind}", "--what", what, "--json")
    assert ran.code == 0, ran.err
    content = Path(f"plan.{kind}").read_bytes()
    assert content.startswith(BEGIN[kind]) and len(content) > 1000
    assert ran.json["drawn"] == [what] and ran.json["path"] == f"plan.{kind}"
    if kind == "svg":
        ElementTree.fromstring(content)


def test_the_timeline_is_drawn_by_default_and_is_the_same_every_time(cli: Cli, strategy: str) -> None:
    for name in ("a.svg", "b.svg"):
        assert cli("plot", strategy, "-o", name).code == 0
    assert cli("plot", strategy, "-o", "c.svg", "--what", "timeline").out == "Wrote c.svg.\n"
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes() == Path("c.svg").read_bytes()
    assert cli("plot", strategy).out == "Wrote plan.png.\n" and Path("plan.png").exists()


def test_data_parallelism_stands_above_the_plan_on_the_same_axis() -> None:
    setting = lenet()
    rows = [setting.row(name, setting.baseline(name)) for name in ("data-parallel", "megatron")]
    figure = timelines(rows, "LeNet")
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() and "data-parallel" in above.get_title(loc="left")
    gain = ratio(rows[0].simulation.makespan_s / rows[1].simulation.makespan_s)
    assert f"{gain} the speed of data-parallel" in below.get_title(loc="left")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == len(set(labels))


def test_links_show_communication_to_its_end() -> None:
    setting = lenet()
    row = setting.row("data-parallel", setting.baseline("data-parallel"))
    tasks = [t for t, c in enumerate(row.lowered.tasks.communication) if c is not None and c.transfer.links]
    faint = [bars for bars in timelines([row]).axes[0].collections if bars.get_alpha() not in (None, 1.0)]
    ends = [path.vertices[:, 0].max() for bars in faint for path in bars.get_paths()]
    assert max(ends) == pytest.approx(max(row.simulation.end[t] for t in tasks) * 1e3)  # drawn in ms


def test_a_measured_plan_has_its_measured_gain_beside_the_predicted_one() -> None:
    setting = lenet()
    rows = [setting.row(name, setting.baseline(name)) for name in ("data-parallel", "megatron")]
    figure = timelines(rows, "LeNet", measured={"data-parallel": ({}, 6.0), "megatron": ({}, 2.0)})
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0].endswith("; measured 6.00 s") and titles[1].endswith("; measured 2.00 s, 3.00x")


class Page(HTMLParser):
    """Tags and the attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "xlink:href", "data", "action") and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}={value}")


def test_the_page_holds_everything_and_loads_nothing(cli: Cli, strategy: str) -> None:
    ran = cli("plot", strategy, "-o", "plan.html", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["drawn"] == ["timeline", "memory", "memory-over-time", "comparison"]
    text = Path("plan.html").read_text()
    read = Page()
    read.feed(text)
    assert read.tags.count("svg") == 4 and "table" in read.tags and not read.loads
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(read.tags)
    assert not re.search(r"@import|url\((?!#)", text)
    for words in ("on host1", "vs one device", "single", "predictions", "lenet, batch 64"):
        assert words in text


def test_names_are_text_and_neither_markup_nor_mathematics() -> None:
    lowered = lenet().lower(lenet().baseline("data-parallel"))
    row = PlanRow("<b>$\\x_$[bold]", simulate(lowered), lowered)
    text = page("<title>", ["<p>"], row, [row], [])
    assert "<b>" not in text and "&lt;b&gt;$\\x_$[bold]" in text
    bad = "$\\frac{$ [/x]"  # no mathematics that matplotlib could read
    for figure in (timelines([row], bad), plan_bars([row], bad), memory_bars(row, bad)):
        assert rendered(figure, "png").startswith(BEGIN["png"])


def test_memory_over_the_limit_is_said() -> None:
    setting = lenet()
    lowered = setting.lower(setting.baseline("data-parallel"))
    texts = [t.get_text() for t in memory_bars(PlanRow("x", simulate(lowered), lowered)).axes[0].texts]
    assert len(texts) == 2 and all(" of 8.59 GB" in t and "does not fit" not in t for t in texts)
    small = tuple(d.model_copy(update={"memory_bytes": 10**5}) for d in lowered.topology.devices)
    from dataclasses import replace

    cramped = replace(lowered, topology=lowered.topology.model_copy(update={"devices": small}))
    texts = [t.get_text() for t in memory_bars(PlanRow("x", simulate(lowered), cramped)).axes[0].texts]
    assert all("does not fit" in t for t in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "plan.txt"), ".html"),
        (("-o", "plan"), ".png"),
        (("--what", "magic"), "magic"),
        (("--graph", "mlp"), "mlp"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_drawn(
    cli: Cli, strategy: str, arguments: tuple[str, ...], words: str
) -> None:
    ran = cli("plot", strategy, *arguments)
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err
    assert [path.name for path in Path().iterdir()] == ["mine.json"]
