"""Data x tensor x pipeline plans for people: the layout in words, a table of plans, memory by what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flexsearch.graph import OperatorGraph
from flexsearch.graph.sequence import sequence_length
from flexsearch.report.grid import Column, Grid
from flexsearch.report.uncertainty import INTERVAL, time_words
from flexsearch.report.units import digits, nbytes, percent
from flexsearch.simulate.breakdown import KINDS
from flexsearch.simulate.memory import PARTS, Memory
from flexsearch.simulate.staged import Step
from flexsearch.simulate.usage import SORTS, WORK, DeviceTime
from flexsearch.strategy import Options, Sharding, States
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import Blocks

UNSHARDED: Final = Sharding()

SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B", "breadth-first": "breadth-first",
    "zero-bubble": "zero bubble (ZB-H1)", "zero-bubble-v": "zero bubble (ZB-V)", "dualpipe-v": "DualPipeV",
}  # fmt: skip
WAYS: Mapping[str, str] = {
    "bandwidth": "gradients summed by what takes least for their bytes",
    "all-reduce": "gradients summed by all-reduces",
    "reduce-scatter": "gradients summed by reduce-scatters and all-gathers",
}
"""Ways to sum gradients that are not the usual one, ``strategy.records.SynchroniseBy``."""


@dataclass(frozen=True)
class StagedRow:
    """One plan of a comparison. ``sharding``: of weights over the replicas. ``changed``: sorts
    of operators that are split otherwise than Megatron's rules say. ``within``: replicas inside each stage, whose
    devices share out its samples; 0: the plan has one stage and is split in its own way."""

    name: str
    pipeline: Pipeline
    options: Options
    step: Step
    sharding: Sharding = UNSHARDED
    changed: int = 0
    within: int = 1


def layout_words(row: StagedRow) -> str:
    """The layout as people say it: "pipeline 2 x tensor 4 x data 8, 16 microbatches of 2, 1F1B"."""
    return pipeline_words(row.pipeline, row.options, row.step.samples, row.sharding, row.within)


def pipeline_words(pipeline: Pipeline, options: Options, batch: int, sharding: Sharding, within: int = 1) -> str:
    """The same of a plan that has not been simulated."""
    sizes = [len(devices) for devices in dict.fromkeys(pipeline.devices)]
    ranks, alike = len(sizes), len(set(sizes)) == 1
    tensor, data = sizes[0] // max(1, within) if alike else 1, pipeline.replicas * (max(1, within) if alike else 1)
    numbers = [("pipeline", ranks), ("tensor", tensor), ("data", data)]
    words = [" x ".join(f"{name} {number}" for name, number in numbers if number > 1) or "one device"]
    if not within:
        words[0] = f"one stage on {sizes[0]} devices"
    if not alike:
        words[0] += f" on {' + '.join(map(str, sizes))} devices"
    size = batch // pipeline.replicas // pipeline.microbatches
    if pipeline.microbatches > 1:
        words.append(f"{pipeline.microbatches} microbatches of {size}")
    if ranks > 1:
        chunks = len(pipeline.devices) // ranks
        each = f", {chunks} stages on each device" if chunks > 1 else ""
        words.append(("a schedule of its own" if pipeline.orders else SCHEDULES[pipeline.schedule]) + each)
    if sharding.states:
        twice = options.reshard_after_forward and sharding.states == States.WEIGHTS
        again = " and gathered again in the backward pass" if twice else ""
        over = f" over {data}" if alike and data > 1 else ""
        if 0 < sharding.over < sum(sizes) * pipeline.replicas:
            over = f" over {max(1, sharding.over // sum(sizes))} of {pipeline.replicas}" if alike else " inside hosts"
        words.append(f"{sharding.states.name.lower()} sharded{over}{again}")
        if options.prefetch != Options().prefetch:
            words.append(f"gathered {options.prefetch} buckets ahead")
    return ", ".join([*words, *_option_words(options)])


def _option_words(options: Options) -> list[str]:
    wide = " and gradients" if options.gradients == "float32" else ""
    words = [] if options.precision == "as-is" else [f"{options.precision} with float32 masters{wide}"]
    return words + changed_words(options)


def changed_words(options: Options) -> list[str]:
    """How gradients are summed, where that is not as usual, and what is computed again in the backward pass."""
    words = [WAYS[options.synchronise_by]] if options.synchronise_by in WAYS else []
    if options.recompute != "none":
        what = "everything" if options.recompute == "full" else options.recompute
        words.append(f"recompute {what}{_where(options.recompute_blocks)}")
    return words


def _where(blocks: Blocks | None) -> str:
    """What part of each stage is computed again."""
    if not isinstance(blocks, tuple):
        return "" if blocks is None else f" in {blocks} blocks of each stage"
    first = [count for count in blocks if count]
    if len({*first}) == 1 and blocks[: len(first)] == tuple(first):
        return f" in up to {first[0]} blocks of the first {len(first)} of {len(blocks)} stages"
    return f" in up to {', '.join(map(str, blocks))} blocks of the stages"


def rate_words(graph: OperatorGraph, step: Step) -> str:
    """Samples or tokens a second."""
    length = sequence_length(graph)
    return f"{_rate(step, length)} {'tokens' if length else 'samples'}/s" if step.makespan_s > 0.0 else "-"


def _rate(step: Step, length: int | None) -> str:
    if step.makespan_s <= 0.0:
        return "-"
    rate = step.samples * (length or 1) / step.makespan_s
    return f"{rate:,.0f}" if rate >= 100 else digits(rate)


def staged_table(graph: OperatorGraph, rows: list[StagedRow]) -> Grid:
    """Plans side by side. The fastest that fits is bold; plans that do not fit are red and say so."""
    best = min((row.step.makespan_s for row in rows if not row.step.missing), default=None)
    cells = [(row.name, row.step, layout_words(row)) for row in rows]
    return step_table(cells, sequence_length(graph), names="plan", words="layout", best_s=best)


def step_table(
    rows: Iterable[tuple[str, Step | None, str]], length: int | None, *, names: str, words: str,
    best_s: float | None = None,
) -> Grid:  # fmt: skip
    """Steps side by side, with half of the 80 % interval of each time. ``rows``: a name, the step, None where there is
    none, and the plan in words, or why there is none. ``length``: tokens of a sample. ``names``, ``words``: headings.
    ``best_s``: makespan of the bold row (s)."""
    grid = Grid((
        Column(names, "text"), Column(f"step,\n{INTERVAL}"), Column("tokens/s" if length else "samples/s"),
        Column("MFU"), Column("bubbles", "number below"), Column("exposed\ncomm.", "number below"),
        Column("peak\nmemory"), Column(words, "below", least=40),
    ))  # fmt: skip
    for name, step, text in rows:
        if step is None:
            grid.add(name, "-", "", "", "", "", "", text)
            continue
        short = f"does not fit: {nbytes(step.missing)} short; " if step.missing else ""
        grid.add(
            name, time_words(step.estimate), _rate(step, length), percent(step.utilisation), percent(step.bubbles),
            percent(step.exposed), nbytes(step.fullest.peak) + (" !" if step.missing else ""), short + text,
            style="red" if step.missing else "bold" if step.makespan_s == best_s else "",
        )  # fmt: skip
    return grid


USES: Final[dict[str, str]] = {
    **{str(kind): words for kind, words in KINDS.items() if kind in WORK}, **SORTS,
    "host": "waiting for launches (host)", "bubbles": "bubbles",
}  # fmt: skip
"""What a device does during a step, in words."""


def use_seconds(time: DeviceTime) -> dict[str, float]:
    """Seconds by what a device does (``USES``)."""
    return {**time.work_s, **time.exposed_s, "host": time.host_s, "bubbles": time.idle_s}


def usage(step: Step) -> dict[str, float]:
    """Shares of the step by what devices do, on average (``USES``), the largest first."""

    def share(use: str) -> float:
        return step.share(lambda time: use_seconds(time).get(use, 0.0))

    shares = {use: share(use) for use in USES}
    return {use: share for use, share in sorted(shares.items(), key=lambda row: -row[1]) if share > 0.0}


def usage_words(step: Step) -> str:
    """ "computing 88 % (backward pass 56 %, forward pass 28 %), bubbles 9 %, ..."; what is below half a percent is left
    out."""
    shares = usage(step)
    work = {use: share for use, share in shares.items() if use in WORK}
    parts = ", ".join(f"{USES[use]} {percent(share)}" for use, share in work.items() if share >= 0.005)
    rows = [(sum(work.values()), "computing {} (" + parts + ")")]
    rows += [(share, USES[use] + " {}") for use, share in shares.items() if use not in WORK]
    return ", ".join(text.format(percent(share)) for share, text in sorted(rows, reverse=True) if share >= 0.005)


def memory_parts(use: Memory) -> str:
    """Memory by what it holds."""
    return ", ".join(f"{part} {nbytes(held)}" for part in PARTS if (held := getattr(use, part)))


def memory_words(step: Step) -> str:
    """Memory of the fullest device at its peak, by what it holds, against what it has."""
    return f"{memory_parts(step.fullest)}: {nbytes(step.fullest.peak)} of {nbytes(min(step.capacity))}"


def staged_data(graph: OperatorGraph, row: StagedRow) -> dict[str, Any]:
    """A plan as a JSON object."""
    step, pipeline = row.step, row.pipeline
    length = sequence_length(graph)
    rate = step.samples / step.makespan_s if step.makespan_s else None
    return {
        "name": row.name, "layout": layout_words(row), "iteration_s": step.makespan_s,
        "interval_s": step.estimate.interval_s, "samples_per_s": rate,
        "tokens_per_s": rate * length if rate and length else None, "mfu": step.utilisation,
        "bubbles": step.bubbles, "exposed": step.exposed, "usage": usage(step),
        "fits": not step.missing, "missing_bytes": step.missing, "peak_bytes": step.fullest.peak,
        **{f"{part}_bytes": getattr(step.fullest, part) for part in PARTS},
        "data": pipeline.replicas, "pipeline": len(set(pipeline.devices)), "stages": len(pipeline.devices),
        "tensor": max(map(len, pipeline.devices)), "microbatches": pipeline.microbatches,
        "schedule": "auto" if pipeline.orders else pipeline.schedule, "states": row.sharding.states.name.lower(),
        "sharded_over": row.sharding.over or None,
        "resplit": row.changed,
    }  # fmt: skip
