"""Data x tensor x pipeline plans for people: the layout in words, a table of plans, memory by what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from flexsearch.graph import OperatorGraph
from flexsearch.graph.sequence import sequence_length
from flexsearch.report.grid import Column, Grid
from flexsearch.report.units import nbytes, percent, seconds
from flexsearch.simulate.breakdown import KINDS, Kind
from flexsearch.simulate.memory import PARTS
from flexsearch.simulate.staged import Step
from flexsearch.simulate.usage import SORTS, DeviceTime, Sort, Work
from flexsearch.strategy import Options
from flexsearch.strategy.pipeline import Pipeline

SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B", "breadth-first": "breadth-first",
    "zero-bubble": "zero bubble (ZB-H1)", "zero-bubble-v": "zero bubble (ZB-V)", "dualpipe-v": "DualPipeV",
}  # fmt: skip


@dataclass(frozen=True)
class StagedRow:
    """One plan of a comparison. ``sharded``: weights are sharded over the replicas. ``changed``: sorts of operators
    that are split otherwise than Megatron's rules say."""

    name: str
    pipeline: Pipeline
    options: Options
    step: Step
    sharded: bool = False
    changed: int = 0


def layout_words(row: StagedRow) -> str:
    """The layout as people say it: "pipeline 2 x tensor 4 x data 8, 16 microbatches of 2, 1F1B"."""
    pipeline, batch = row.pipeline, row.step.samples
    group = max(map(len, pipeline.devices))
    ranks = len(set(pipeline.devices))
    numbers = [("pipeline", ranks), ("tensor", group), ("data", pipeline.replicas)]
    words = [" x ".join(f"{name} {number}" for name, number in numbers if number > 1) or "one device"]
    size = batch // pipeline.replicas // pipeline.microbatches
    if pipeline.microbatches > 1:
        words.append(f"{pipeline.microbatches} microbatches of {size}")
    if ranks > 1:
        chunks = len(pipeline.devices) // ranks
        each = f", {chunks} stages on each device" if chunks > 1 else ""
        words.append(("a schedule of its own" if pipeline.orders else SCHEDULES[pipeline.schedule]) + each)
    if row.sharded:
        again = " and gathered again in the backward pass" if row.options.reshard_after_forward else ""
        words.append(f"weights sharded over {pipeline.replicas}{again}")
    return ", ".join([*words, *_option_words(row.options)])


def _option_words(options: Options) -> list[str]:
    words = [] if options.precision == "as-is" else [f"{options.precision} with float32 masters"]
    if options.recompute != "none":
        what = "everything" if options.recompute == "full" else options.recompute
        where = f" in {options.recompute_blocks} blocks of each stage" if options.recompute_blocks is not None else ""
        words.append(f"recompute {what}{where}")
    return words


def rate_words(graph: OperatorGraph, step: Step) -> str:
    """Samples or tokens a second."""
    length = sequence_length(graph)
    if step.makespan_s <= 0.0:
        return "-"
    per_s = step.samples * (length or 1) / step.makespan_s
    return f"{per_s:,.0f} {'tokens' if length else 'samples'}/s"


def staged_table(graph: OperatorGraph, rows: list[StagedRow]) -> Grid:
    """Plans side by side. The fastest that fits is bold; plans that do not fit are red and say so."""
    unit = "tokens/s" if sequence_length(graph) else "samples/s"
    grid = Grid((
        Column("plan", "text"), Column("step"), Column(unit), Column("MFU"), Column("bubbles", "number below"),
        Column("exposed\ncomm.", "number below"),
        Column("peak\nmemory"), Column("layout", "below", least=40),
    ))  # fmt: skip
    best = min((row.step.makespan_s for row in rows if not row.step.missing), default=None)
    for row in rows:
        step, layout = row.step, layout_words(row)
        if step.missing:
            layout = f"does not fit: {nbytes(step.missing)} short; {layout}"
        grid.add(
            row.name, seconds(step.makespan_s), rate_words(graph, step).split(" ")[0], percent(step.utilisation),
            percent(step.bubbles), percent(step.exposed), nbytes(step.fullest.peak) + (" !" if step.missing else ""), layout,
            style="red" if step.missing else "bold" if step.makespan_s == best else "",
        )  # fmt: skip
    return grid


def usage(step: Step) -> dict[str, float]:
    """Shares of the step by what devices do, on average, largest first: computing by kind, communication that nothing
    hides by sort, bubbles."""

    def work(kind: Work) -> Callable[[DeviceTime], float]:
        return lambda time: time.work_s.get(kind, 0.0)

    def exposed(sort: Sort) -> Callable[[DeviceTime], float]:
        return lambda time: time.exposed_s.get(sort, 0.0)

    shares: dict[str, float] = {kind: step.share(work(kind)) for kind in get_args(Work)}
    shares |= {sort: step.share(exposed(sort)) for sort in SORTS} | {"bubbles": step.bubbles}
    return {name: share for name, share in sorted(shares.items(), key=lambda row: -row[1]) if share > 0.0}


def usage_words(step: Step) -> str:
    """ "computing 88 % (backward pass 56 %, forward pass 28 %), bubbles 9 %, ..."; what is below half a percent is left out."""
    shares, names = usage(step), {**SORTS, "bubbles": "bubbles"}
    work = [(name, share) for name, share in shares.items() if name in get_args(Work)]
    parts = ", ".join(f"{KINDS[cast(Kind, name)]} {percent(share)}" for name, share in work if share >= 0.005)
    rows = [(f"computing {{}} ({parts})", sum(share for _, share in work))]
    rows += [(f"{names[name]} {{}}", share) for name, share in shares.items() if name in names]
    rows.sort(key=lambda row: -row[1])
    return ", ".join(text.format(percent(share)) for text, share in rows if share >= 0.005)


def memory_words(step: Step) -> str:
    """Memory of the fullest device at its peak, by what it holds, against what it has."""
    use = [(part, getattr(step.fullest, part)) for part in PARTS]
    parts = ", ".join(f"{part} {nbytes(value)}" for part, value in use if value)
    return f"{parts}: {nbytes(step.fullest.peak)} of {nbytes(min(step.capacity))}"


def staged_data(graph: OperatorGraph, row: StagedRow) -> dict[str, Any]:
    """A plan as a JSON object."""
    step, pipeline = row.step, row.pipeline
    length = sequence_length(graph)
    rate = step.samples / step.makespan_s if step.makespan_s else None
    return {
        "name": row.name, "layout": layout_words(row), "iteration_s": step.makespan_s, "samples_per_s": rate,
        "tokens_per_s": rate * length if rate and length else None, "mfu": step.utilisation,
        "bubbles": step.bubbles, "exposed": step.exposed, "usage": usage(step),
        "fits": not step.missing, "missing_bytes": step.missing, "peak_bytes": step.fullest.peak,
        **{f"{part}_bytes": getattr(step.fullest, part) for part in PARTS},
        "data": pipeline.replicas, "pipeline": len(set(pipeline.devices)), "stages": len(pipeline.devices),
        "tensor": max(map(len, pipeline.devices)), "microbatches": pipeline.microbatches,
        "schedule": "auto" if pipeline.orders else pipeline.schedule, "sharded": row.sharded, "resplit": row.changed,
    }  # fmt: skip
