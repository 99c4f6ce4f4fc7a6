"""A plan explained: where its time goes, what holds it up, what would help, and what its choices bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flexsearch.graph.ops import kind_of
from flexsearch.report.grid import Column, Grid
from flexsearch.report.layouts import SCHEDULES, USES, memory_parts, use_seconds
from flexsearch.report.path import by_layer, folded, kinds_in_words, stretches
from flexsearch.report.reading import reading
from flexsearch.report.summary import Group
from flexsearch.report.tables import PlanRow
from flexsearch.report.units import nbytes, percent, seconds
from flexsearch.report.words import device_set, treatment
from flexsearch.simulate import Step, by_kind, by_resource, device_times
from flexsearch.simulate.effects import SingleChanges
from flexsearch.simulate.usage import count_tasks, stage_seconds
from flexsearch.simulate.variants import PARTS, Part
from flexsearch.simulate.whatif import WhatIf

DEVICES: Final = 8
"""Most rows of devices; devices that do the same are one row."""
LINKS: Final = 4
NO_EFFECT: Final = 0.0005
"""Changes of less than this share of the iteration are told together."""
Told = Grid | str


@dataclass(frozen=True)
class Choice:
    """A part of a plan that differs from data parallelism. ``otherwise_s``: iteration time (s) with this part alone as
    data parallelism has it."""

    group: Group
    otherwise_s: float


@dataclass(frozen=True)
class LayoutChoice:
    """A ``part`` of a layout (``variants.PARTS``) as it is ``now``, and with another value ``instead``: iteration time
    (s), and bytes missing on the fullest device."""

    part: Part
    now: str
    instead: str
    seconds: float
    missing: int


@dataclass(frozen=True)
class Explanation:
    """Everything that ``flexsearch explain`` tells of a plan. ``steps``: the critical path; none where it would be too
    long to follow. ``layouts``: of one with stages or microbatches, in place
    of ``choices``. ``mean_s``: of one with recipes, whose steps may differ, the mean step (s); ``row`` is about the one
    in which most is exchanged, and changes are not weighed."""

    row: PlanRow
    steps: tuple[Step, ...]
    what_ifs: tuple[WhatIf, ...]
    choices: tuple[Choice, ...]
    changes: SingleChanges
    layouts: tuple[LayoutChoice, ...] = ()
    mean_s: float | None = None


def explanation(explained: Explanation) -> Iterator[Told]:
    """The explanation for a terminal: lines and tables."""
    yield "\nWhere the time goes (communication counts only while the device computes nothing)"
    yield _device_table(explained)
    if not explained.row.lowered.is_whole:
        yield from _pipeline(explained)
    yield from _path(explained)
    yield from _bottleneck(explained)
    if (read := reading(explained.row.lowered, explained.row.simulation.makespan_s)) is not None:
        yield read.words()
    if explained.mean_s is not None:
        yield from _recipes(explained, explained.mean_s)
        return
    yield "\nWhat would help (the same plan, simulated again)"
    yield from _what_if_table(explained)
    yield from _choices(explained) if explained.row.lowered.is_whole else _layouts(explained)
    yield from _locally(explained)


def _recipes(explained: Explanation, mean_s: float) -> Iterator[Told]:
    now = explained.row.simulation.makespan_s
    if abs(mean_s - now) > NO_EFFECT * now:
        yield (
            f"\nThis is the step in which most is exchanged, {seconds(now)}; a step takes {seconds(mean_s)} on average."
        )
    yield "What would help is not worked out for plans with recipes."


def table(*columns: tuple[str, int | None]) -> Grid:
    """A table. A text column has a number, the cells it needs at least; others hold figures."""
    return Grid([Column(name) if least is None else Column(name, "text", least) for name, least in columns])


def change_of(new: float, old: float) -> str:
    """ "+12.3 ms (+4.1 %)"."""
    if new == old:
        return "0"
    sign = "+" if new > old else "-"
    return f"{sign}{seconds(abs(new - old))} ({_percent(new, old)})"


def relative(new: float, old: float) -> str:
    """ "+13.7 %", or "same"."""
    return "same" if new == old else _percent(new, old)


def _percent(new: float, old: float) -> str:
    """ "+13.7 %", or "under 0.1 %" where that would be rounded to nothing."""
    change = 100 * (new - old) / old
    return f"{change:+.1f} %" if abs(change) >= 0.05 else "under 0.1 %"


def time_and_change(new: float, old: float) -> str:
    """ "1.14 s +13.7 %"."""
    return f"{seconds(new)} {relative(new, old)}"


# where the time goes


def _device_table(explained: Explanation) -> Grid:
    simulation, lowered = explained.row.simulation, explained.row.lowered
    total = simulation.makespan_s or 1.0
    rows: dict[tuple[str, ...], list[int]] = {}
    times = device_times(lowered.rows, simulation.times)
    hosts = any(time.host_s > 0.0 for time in times)
    for d, time in enumerate(times):
        parts = [time.compute_s, time.communicate_s, *([time.host_s] if hosts else []), time.idle_s]
        cells = tuple(f"{seconds(s)} ({percent(s / total)})" for s in parts)
        rows.setdefault(cells, []).append(d)
    rest = "idle" if lowered.is_whole else "bubbles"
    heads = ["compute", "communication", *(["waiting\nfor host"] if hosts else []), rest, "peak\nmemory"]
    grid = table(("device", 12), *((head, None) for head in heads))
    ordered = sorted(rows.items(), key=lambda item: (-times[item[1][0]].compute_s, item[1]))
    shown = ordered if len(ordered) <= DEVICES else [*ordered[: DEVICES - 1], ordered[-1]]
    for k, (cells, members) in enumerate(shown):
        if k == DEVICES - 1 and len(ordered) > DEVICES:
            left = sum(len(members) for _, members in ordered[DEVICES - 1 : -1])
            grid.add(f"... {left} more between", *[""] * len(heads))
        peak = max(simulation.peak_bytes[d] for d in members)
        grid.add(_device_names(explained, members), *cells, nbytes(peak))
    return grid


def _device_names(explained: Explanation, members: Sequence[int]) -> str:
    devices = explained.row.lowered.topology.devices
    first = devices[members[0]].name
    if len(members) == len(devices) > 1:
        return f"each of {len(devices)}"
    return first if len(members) == 1 else f"{first} and {len(members) - 1} like it"


def _path(explained: Explanation) -> Iterator[Told]:
    lowered, total = explained.row.lowered, explained.row.simulation.makespan_s or 1.0
    if not explained.steps:
        tasks = count_tasks(explained.row.simulation.times)
        yield f"\nThe critical path is left out: {tasks:,} tasks take too long to follow (give fewer microbatches)"
        return
    yield f"\nThe critical path: {kinds_in_words(by_kind(lowered.tasks, explained.steps), total)}"
    grid = table(("", 11), ("what", 20), ("on", 16), ("time", None), ("share", None), ("waited for", 10))
    for row in stretches(lowered, explained.steps):
        grid.add(row.phase, row.what, row.where, seconds(row.seconds), percent(row.seconds / total), row.waited_for)
    yield grid
    yield "The layers that take most of it:"
    for layer, kinds in list(by_layer(lowered, explained.steps, repeated=True).items())[:4]:
        yield f"  {layer}: {kinds_in_words(kinds, total, 3)}"


def _bottleneck(explained: Explanation) -> Iterator[Told]:
    lowered, simulation, topology = explained.row.lowered, explained.row.simulation, explained.row.lowered.topology
    total = simulation.makespan_s or 1.0
    on_path = by_resource(lowered.tasks, explained.steps) if explained.steps else {}
    by_share = sorted(
        range(len(topology.resources)), key=lambda r: (-float(simulation.link_busy_s[r]), -on_path.get(r, 0.0), r)
    )
    wires = [r for r in by_share if topology.resources[r].kind == "link" and simulation.link_bytes[r]]
    processors = [r for r in by_share if topology.resources[r].kind == "processor"]
    ways = [r for r in by_share if topology.resources[r].kind == "storage"]
    pairs = [(kind, row) for kind, row in zip(_BUSY, (processors, wires, ways), strict=True) if row]
    shares = {kind: sum(on_path.get(r, 0.0) for r in row) / total for kind, row in pairs}
    kind, row = max(
        pairs,
        key=lambda pair: shares[pair[0]] if explained.steps else float(simulation.link_busy_s[pair[1][0]]),
    )
    busiest = topology.resources[row[0]].name
    name = _BUSY[kind] + busiest
    share = f"; {percent(shares[kind])} of the critical path is on {kind}" if explained.steps else ""
    launching = sum(step.seconds for step in explained.steps if step.launches) / total
    head = "\nThe bottleneck"
    if launching > max(shares.values()):
        yield f"\nThe bottleneck: hosts, which launch operators for {percent(launching)} of the critical path"
        head = "The busiest of the others"
    yield f"{head}: {name}, busy {percent(float(simulation.link_busy_s[row[0]]) / total)} of the time{share}"
    first = "link, processor or storage" if ways else "link or processor"
    grid = table((first, 16), ("busy", None), ("bytes", None), ("on the\ncritical path", None))
    for r in [*processors[:1], *wires[:LINKS], *ways[:1]]:
        busy = float(simulation.link_busy_s[r])
        moved, path_s = int(simulation.link_bytes[r]), on_path.get(r, 0.0)
        grid.add(
            topology.resources[r].name, f"{seconds(busy)} ({percent(busy / total)})", nbytes(moved) if moved else "",
            f"{seconds(path_s)} ({percent(path_s / total)})" if path_s else "",
        )  # fmt: skip
    yield grid


_BUSY: Final = {"processors": "the processor of ", "links": "link ", "storage": ""}
"""What a bottleneck may be, and the words before its name."""


# stages


def _pipeline(explained: Explanation) -> Iterator[Told]:
    """The sorts of what devices do, the stages, and the memory of the fullest device."""
    simulation, lowered = explained.row.simulation, explained.row.lowered
    total, times = simulation.makespan_s or 1.0, device_times(lowered.rows, simulation.times)
    uses = [use_seconds(time) for time in times]
    names = [device.name for device in lowered.topology.devices]
    yield "\nWhat devices do: bubbles are when they neither compute nor communicate"
    grid = table(("", 18), ("on average", None), ("most", None), ("on", 12))
    for use, words in USES.items():
        row = [one.get(use, 0.0) for one in uses]
        if any(row):
            most = max(range(len(row)), key=row.__getitem__)
            mean = sum(row) / len(row)
            grid.add(words, *(f"{seconds(s)} ({percent(s / total)})" for s in (mean, row[most])), names[most])
    yield grid
    yield from _stage_table(explained)
    rooms = [device.usable_bytes for device in lowered.topology.devices]
    fullest = max(range(len(rooms)), key=lambda d: simulation.memory[d].peak / rooms[d])
    held = memory_parts(simulation.memory[fullest])
    yield f"\nMemory of the fullest device, {names[fullest]}: {held}: {nbytes(simulation.peak_bytes[fullest])} of " + (
        nbytes(rooms[fullest])
    )


def _stage_table(explained: Explanation) -> Iterator[Told]:
    lowered = explained.row.lowered
    if len(lowered.stages) == 1:
        return
    passes = stage_seconds(lowered.rows, lowered.stages)
    slowest = max(range(len(passes)), key=lambda s: sum(passes[s]))
    ends = [*lowered.stages.first[1:], len(lowered.graph.operators)]
    # What prepares the targets comes first, but belongs to the loss.
    end = lowered.graph.operators[lowered.graph.producer[lowered.graph.loss]].module
    yield f"\nThe stages: computing of one microbatch on its busiest device; stage {slowest} is the slowest"
    grid = table(("stage", 5), ("layers", 20), ("devices", 12), ("forward", None), ("backward", None))
    for s, (first, last) in enumerate(zip(lowered.stages.first, ends, strict=True)):
        ops = lowered.graph.operators[first:last]
        own = [op for op in ops if not kind_of(op).bookkeeping and (op.module != end or s == len(passes) - 1)]
        names = [op.module or op.name for op in own or ops]
        devices = device_set(lowered.topology, lowered.stages.devices[s])
        grid.add(str(s), folded(list(dict.fromkeys(names))), devices, *map(seconds, passes[s]),
                 style="bold" if s == slowest else "")  # fmt: skip
    yield grid


# what would help


def _what_if_table(explained: Explanation) -> Iterator[Told]:
    base, *others = explained.what_ifs
    now = base.seconds or 1.0
    grid = table(("if", 24), ("iteration", None), ("change", None))
    silent, impossible = [], []
    for one in sorted(others, key=lambda one: one.seconds if one.seconds is not None else now):
        if one.seconds is None:
            impossible.append(f"{one.words}: not possible here, {one.remark}")
        elif abs(one.seconds - now) < NO_EFFECT * now and not one.shortfall:
            silent.append(one.words)
        else:
            remark = f"; {nbytes(one.shortfall)} too much memory" if one.shortfall else ""
            grid.add(one.words + remark, seconds(one.seconds), change_of(one.seconds, now))
            if one.remark:
                impossible.append(f"{one.words}: {one.remark}")
    if grid.row_count:
        yield grid
    if silent:
        yield f"No effect (below 0.05 %): {'; '.join(silent)}"
    yield from impossible


# the choices


def _choices(explained: Explanation) -> Iterator[Told]:
    now = explained.row.simulation.makespan_s
    yield "\nWhat each choice brings: the change if only these layers were split over the batch (data parallel)"
    if explained.choices:
        grid = table(("layers", 14), ("now", 20), ("change", None))
        for choice in sorted(explained.choices, key=lambda choice: -choice.otherwise_s):
            grid.add(choice.group.layers, choice.group.treatment, change_of(choice.otherwise_s, now))
        yield grid
    else:
        yield "  The whole plan is data parallel."


def _layouts(explained: Explanation) -> Iterator[Told]:
    now = explained.row.simulation.makespan_s
    if not explained.layouts:
        return
    yield "\nWhat each choice brings: the change with another in its place"
    grid = table(("choice", 14), ("now", 12), ("instead", 12), ("change", None), ("memory", None))
    for one in sorted(explained.layouts, key=lambda one: one.seconds):
        values = (SCHEDULES.get(value, value) for value in (one.now, one.instead))
        short = f"{nbytes(one.missing)} short" if one.missing else "fits"
        grid.add(PARTS[one.part], *values, change_of(one.seconds, now), short)
    yield grid


def _locally(explained: Explanation) -> Iterator[Told]:
    changes, lowered = explained.changes, explained.row.lowered
    if not changes.possible:
        yield "\nThere are no other configs: there is only one device."
        return
    if not changes.tried:
        return
    of = f"all {changes.possible:,}" if changes.tried == changes.possible else (
        f"{changes.tried:,} of {changes.possible:,}"
    )  # fmt: skip
    head = f"\nChanges to a single operator, with or without those that follow it: {of} tried; "
    if not changes.improvements:
        yield head + (
            "none is better: the plan is locally optimal" if changes.tried == changes.possible else "none is better"
        )
        return
    graph, topology, now = lowered.graph, lowered.topology, explained.row.simulation.makespan_s
    count = len(changes.improvements)
    yield f"{head}{count} operator{' has' if count == 1 else 's have'} a better config"
    grid = table(("operator", 16), ("instead", 20), ("change", None))
    for one in changes.improvements[:3]:
        op = graph.operators[one.operator]
        also = ", and what follows it" if one.together else ""
        grid.add(op.name + also, treatment(graph, topology, op, one.config), change_of(one.seconds, now))
    yield grid
