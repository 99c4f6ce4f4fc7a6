"""``plot``: pictures of a plan. It does not import torch."""

from __future__ import annotations

from functools import cached_property
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
    load_strategy,
    setting_of,
    show,
    stdout,
)
from flexsearch.cli.explain import GraphOption
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexsearch.report import PlanRow
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy

What = Literal["timeline", "memory", "memory-over-time", "comparison"]
_EVERY: tuple[What, ...] = ("timeline", "memory", "memory-over-time", "comparison")
_OF_LAYOUTS: tuple[What, ...] = ("timeline", "memory", "memory-over-time")
"""What is drawn of a plan with stages or microbatches."""
_DEVICES = 4
"""Devices of ``memory-over-time``."""
_HEADINGS = {
    "timeline": "One training step: data parallel above the plan",
    "memory": "Memory at its peak on each device",
    "memory-over-time": "Memory as a step goes on",
    "comparison": "Iteration times",
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
    beside: Annotated[
        list[Path] | None,
        typer.Option("--beside", metavar="S", help="For memory-over-time: another strategy of the same graph."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a plan: its timeline below that of data parallelism, its memory (at its peak or as a step goes on), or its
    time beside the baselines'.

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
    if beside and what != "memory-over-time":
        raise typer.BadParameter("goes with --what memory-over-time", param_hint="--beside")
    if not plan.is_plain and what is not None and what not in _OF_LAYOUTS:
        raise typer.BadParameter(
            f"{what} is drawn of plans with one stage and one microbatch; `flexsearch compare` shows it for others",
            param_hint="--what",
        )
    others = {str(path): load_strategy(path, setting, staged=True) for path in beside or []}
    chosen: tuple[What, ...] = (what,) if what is not None else ("timeline",)
    if kind == "html" and what is None:
        chosen = _EVERY if plan.is_plain else _OF_LAYOUTS
    with Live(compiling()):
        drawing = _Drawing(setting, plan, strategy, others)
        content = drawing.page(chosen) if kind == "html" else drawing.file(chosen[0], kind)
    write(output, content)
    from flexsearch.simulate import makespan

    data_parallel = drawing.data_parallel
    data = {
        "graph": setting.graph.name, "topology": setting.topology.name, "strategy": str(strategy),
        "plan": drawing.baseline or "found", "path": str(output), "drawn": list(chosen),
        "iteration_s": makespan(drawing.lowered),
        "data_parallel_s": data_parallel.simulation.makespan_s if data_parallel is not None else None,
    }  # fmt: skip
    show(as_json, data, lambda: stdout.print(f"Wrote {output}.", soft_wrap=True))


class _Drawing:
    """A plan and what it is drawn beside."""

    def __init__(self, setting: Setting, plan: Strategy, path: Path, others: dict[str, Strategy]) -> None:
        from flexsearch.report import device_set

        self.setting, self.strategy, self.others = setting, plan, others
        self.baseline = setting.name_of(plan)
        """Name of the baseline that the plan is; empty if it is none."""
        self.name = self.baseline or path.name
        self.lowered = setting.lower(plan)
        where = device_set(setting.topology, range(len(setting.topology.devices)))
        self.title = f"{setting.graph.name}, batch {setting.graph.batch}, on {setting.topology.name} ({where})"

    @cached_property
    def plan(self) -> PlanRow:
        """The plan, simulated."""
        from flexsearch.report import PlanRow
        from flexsearch.simulate import simulate

        return PlanRow(self.name, simulate(self.lowered), self.lowered)

    @cached_property
    def data_parallel(self) -> PlanRow | None:
        """What a plan with one stage is drawn beside."""
        if not self.strategy.is_plain:
            return None
        return self.setting.row("data-parallel", self.setting.baseline("data-parallel", self.strategy.options))

    def file(self, what: What, kind: str) -> bytes:
        """One picture as the contents of a file."""
        from flexsearch.report.plots import rendered

        return rendered(self.figure(what), kind)

    def figure(self, what: What) -> Figure:
        """One picture."""
        from flexsearch.report.plots import memory_bars, plan_bars, timelines

        if what == "timeline":
            self._refuse_many_tasks()
            if self.data_parallel is None or self.baseline == "data-parallel":
                return timelines([self.plan], self.title)
            return timelines([self.data_parallel, self.plan], self.title)
        if what == "memory":
            return memory_bars(self.plan, f"{self.title}: {self.plan.name}")
        if what == "memory-over-time":
            return self._memory_over_time()
        return plan_bars(self.compared(), self.title)

    def _memory_over_time(self) -> Figure:
        """Of some devices of the plan; beside others, of the fullest device of each."""
        from flexsearch.report.gantt import chosen_devices
        from flexsearch.report.plots import memory_over_time
        from flexsearch.simulate.memory import memory_curves
        from flexsearch.simulate.simulation import times_of

        plans = {self.name: self.lowered} | {Path(n).name: self.setting.lower(p) for n, p in self.others.items()}
        panels = []
        for name, lowered in plans.items():
            devices, curves = lowered.topology.devices, memory_curves(lowered, times_of(lowered.rows))
            fullest = max(range(len(devices)), key=lambda d: curves[d].peak.peak / devices[d].usable_bytes)
            for d in [fullest] if self.others else chosen_devices(lowered, _DEVICES):
                words = f"{name}, {devices[d].name}" if self.others else devices[d].name
                panels.append((words, curves[d], devices[d].usable_bytes))
        return memory_over_time(panels, self.title if self.others else f"{self.title}: {self.name}")

    def _refuse_many_tasks(self) -> None:
        from flexsearch.errors import StrategyError
        from flexsearch.report.trace import MOST_TASKS
        from flexsearch.simulate.usage import count_tasks

        if (tasks := count_tasks(self.plan.simulation.times)) > MOST_TASKS:
            raise StrategyError(
                f"a step of this plan has {tasks:,} tasks; a timeline shows at most {MOST_TASKS:,}",
                "Draw --what memory-over-time, or write the passes with `flexsearch simulate --trace`.",
            )

    def compared(self) -> list[PlanRow]:
        """The plan and every baseline, fastest first."""
        from flexsearch.api import by_time

        if not self.strategy.is_plain:
            return [self.plan]
        baselines = self.setting.baselines(self.strategy.options)
        rows = [self.setting.row(name, plan) for name, plan in baselines.items() if name != self.baseline]
        return by_time([self.plan, *rows])

    def page(self, chosen: tuple[What, ...]) -> str:
        """The HTML page. What cannot be drawn here is left out, with the reason."""
        from flexsearch.cli.details import headline
        from flexsearch.errors import StrategyError
        from flexsearch.report.page import page
        from flexsearch.report.units import seconds

        remarks, pictures = [f"{headline(self.setting)}."], list[tuple[str, bytes]]()
        now_s = self.plan.simulation.makespan_s
        kind = f"It is the baseline {self.baseline}." if self.baseline else "It was found by a search."
        remarks.append(f"The plan takes {seconds(now_s)} per iteration. {kind}")
        for what in chosen:
            try:
                pictures.append((_HEADINGS[what], self.file(what, "svg")))
            except StrategyError as error:
                remarks.append(f"{what.capitalize()} is not drawn: {error.message}.")
        return page(self.title, remarks, self.plan, self.compared(), pictures)
