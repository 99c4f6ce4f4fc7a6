"""``plot``: pictures of a plan. It does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexsearch.cli.common import (
    BatchOption,
    JsonOption,
    ProfileOption,
    SequenceOption,
    Size,
    check_outputs,
    setting_of,
    show,
    stdout,
)
from flexsearch.cli.explain import GraphOption
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexsearch.api import Setting
    from flexsearch.report import PlanRow
    from flexsearch.strategy import Strategy

What = Literal["timeline", "memory", "comparison", "scaling"]
_EVERY: tuple[What, ...] = ("timeline", "memory", "comparison", "scaling")
_HEADINGS = {
    "timeline": "One training step: data parallel above the plan",
    "memory": "Memory at its peak on each device",
    "comparison": "Iteration times",
    "scaling": "Throughput as hosts are added",
}


def plot(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .png, .svg or .pdf picture, or an .html page with all of them.")
    ] = Path("plan.png"),
    what: Annotated[
        What | None,
        typer.Option("--what", help="What to draw; default: the timeline, and on an .html page everything."),
    ] = None,
    graph: GraphOption = None,
    profile: ProfileOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    hosts: Annotated[
        int | None, typer.Option("--hosts", min=1, max=4096, help="The most hosts of --what scaling.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", "-b", metavar="10s|500", help="For scaling: also search, for each number of hosts."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a plan: its timeline below that of data parallelism, its memory, its time beside the baselines', or how it
    scales.

    An .html page holds all of these and the plan in words, in one file that needs no network.
    """
    from flexsearch.report.plots import FORMATS

    kind = output.suffix.removeprefix(".")
    if kind not in (*FORMATS, "html"):
        raise typer.BadParameter(f"{output} must end in .png, .svg, .pdf or .html", param_hint="--output")
    check_outputs({"--output": output}, strategy, graph, profile)
    from flexsearch.output import write
    from flexsearch.strategy import Strategy

    plan = Strategy.load(strategy)
    setting = setting_of(strategy, plan, graph, None, profile, Size(batch, seq), "--graph GRAPH")
    if budget is not None:
        from flexsearch.api import parse_budget

        parse_budget(budget)
    chosen: tuple[What, ...] = (what,) if what is not None else _EVERY if kind == "html" else ("timeline",)
    with Live(compiling()) as live:
        drawing = _Drawing(setting, plan, strategy, hosts, budget, live)
        content = drawing.page(chosen) if kind == "html" else drawing.file(chosen[0], kind)
    write(output, content)
    times = {row.name: row.simulation.makespan_s for row in drawing.rows}
    data = {
        "graph": setting.graph.name, "topology": setting.topology.name, "strategy": str(strategy),
        "plan": drawing.baseline or "found", "path": str(output), "drawn": list(chosen),
        "iteration_s": drawing.plan.simulation.makespan_s, "data_parallel_s": times["data-parallel"],
    }  # fmt: skip
    show(as_json, data, lambda: stdout.print(f"Wrote {output}.", soft_wrap=True))


class _Drawing:
    """A plan and what it is drawn beside."""

    def __init__(
        self, setting: Setting, plan: Strategy, path: Path, hosts: int | None, budget: str | None, live: Live
    ) -> None:
        from flexsearch.report import device_set

        self.setting, self.strategy, self.hosts, self.budget, self.live = setting, plan, hosts, budget, live
        self.baseline = setting.name_of(plan)
        """Name of the baseline that the plan is; empty if it is none."""
        self.plan: PlanRow = setting.row(self.baseline or path.name, plan)
        self.rows = [setting.row("data-parallel", setting.baseline("data-parallel", plan.options)), self.plan]
        where = device_set(setting.topology, range(len(setting.topology.devices)))
        self.title = f"{setting.graph.name}, batch {setting.graph.batch}, on {setting.topology.name} ({where})"

    def file(self, what: What, kind: str) -> bytes:
        """One picture as the contents of a file."""
        from flexsearch.report.plots import rendered

        return rendered(self.figure(what), kind)

    def figure(self, what: What) -> Figure:
        """One picture."""
        from flexsearch.report.plots import memory_bars, plan_bars, scaling_curve, timelines

        if what == "timeline":
            alone = self.baseline == "data-parallel"
            return timelines([self.plan] if alone else self.rows, self.title)
        if what == "memory":
            return memory_bars(self.plan, f"{self.title}: {self.plan.name}")
        if what == "comparison":
            return plan_bars(self.compared(), self.title)
        devices = self.setting.topology.devices
        several = len(devices) > len({device.host for device in devices})
        unit = "hosts" if not several else "GPUs" if all(d.kind == "cuda" for d in devices) else "devices"
        return scaling_curve(self._scaling(), self.setting.graph.batch, self.title, unit)

    def compared(self) -> list[PlanRow]:
        """The plan and every baseline, fastest first."""
        from flexsearch.api import by_time

        known = self.setting.baselines(self.strategy.options)
        rows = [self.setting.row(name, plan) for name, plan in known.items() if name != self.baseline]
        return by_time([self.plan, *rows])

    def _scaling(self) -> dict[str, dict[int, float]]:
        from flexsearch.api import scaling

        self.live.show("simulating other numbers of hosts")
        return scaling(
            self.setting, self.strategy, most=self.hosts, budget=self.budget,
            on_progress=lambda count: self.live.show(f"simulating other numbers of hosts: {count} done"),
        )  # fmt: skip

    def page(self, chosen: tuple[What, ...]) -> str:
        """The HTML page. What cannot be drawn here is left out, with the reason."""
        from flexsearch.cli.details import headline
        from flexsearch.errors import TopologyError
        from flexsearch.report.page import page
        from flexsearch.report.units import seconds

        pictures, remarks = [], [f"{headline(self.setting)}."]
        now_s = self.plan.simulation.makespan_s
        kind = f"It is the baseline {self.baseline}." if self.baseline else "It was found by a search."
        remarks.append(f"The plan takes {seconds(now_s)} an iteration. {kind}")
        for what in chosen:
            try:
                pictures.append((_HEADINGS[what], self.file(what, "svg")))
            except TopologyError as error:
                remarks.append(f"Scaling is not drawn: {error.message}.")
        return page(self.title, remarks, self.plan, self.compared(), pictures)
