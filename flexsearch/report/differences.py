"""Two plans of one graph: what differs, in words, and what each difference costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flexsearch.lower import Lowered
from flexsearch.report.explain import Told, relative, table
from flexsearch.report.path import folded
from flexsearch.report.tables import PlanRow
from flexsearch.report.units import nbytes, seconds, signed
from flexsearch.report.words import treatment
from flexsearch.simulate import KINDS, Step, by_kind
from flexsearch.simulate.effects import Difference
from flexsearch.simulate.variants import PARTS

MOST: Final = 10
"""Rows of differences; JSON has all."""
LINKS: Final = 4


@dataclass(frozen=True)
class OptionEffect:
    """An option of the whole step that differs, with its values in both plans; times as in ``Difference``."""

    words: str
    a: str
    b: str
    a_changed_s: float
    b_changed_s: float


@dataclass(frozen=True)
class Comparison:
    """Two plans, their critical paths, and what differs."""

    a: PlanRow
    b: PlanRow
    a_steps: tuple[Step, ...]
    b_steps: tuple[Step, ...]
    differences: tuple[Difference, ...]
    options: tuple[OptionEffect, ...]
    baselines: tuple[str, str] = ("", "")
    """The baselines that split every operator as the plans do; empty where there is none."""


def comparison(compared: Comparison) -> Iterator[Told]:
    """The comparison for a terminal: lines and tables."""
    names = (compared.a.name, compared.baselines[0]), (compared.b.name, compared.baselines[1])
    a, b = (f"{name} (the baseline {baseline})" if baseline not in ("", name) else name for name, baseline in names)
    yield f"A: {a}\nB: {b}\n"
    if not compared.differences and not compared.options:
        yield "The plans are the same."
        return
    if not compared.differences:
        yield "Both split every operator alike; they differ in options of the whole step only.\n"
    yield _totals(compared)
    yield "\nWhat differs: how A changes if it adopts this difference alone, and B if it drops it"
    yield from _effects(compared)


def _totals(compared: Comparison) -> Any:
    grid = table(("", 16), ("A", None), ("B", None), ("difference", None))
    for words, a, b, words_of in _rows(compared):
        grid.add(words, words_of(a), words_of(b), signed(b - a, words_of))
    return grid


def _rows(compared: Comparison) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    a, b = compared.a.simulation, compared.b.simulation
    yield "iteration", a.makespan_s, b.makespan_s, seconds
    ours = by_kind(compared.a.lowered.tasks, compared.a_steps)
    theirs = by_kind(compared.b.lowered.tasks, compared.b_steps)
    for kind, words in KINDS.items():
        pair = ours.get(kind, 0.0), theirs.get(kind, 0.0)
        if max(pair) >= 0.001 * max(a.makespan_s, b.makespan_s):
            yield f"  {words}", *pair, seconds
    yield "peak memory", max(a.peak_bytes), max(b.peak_bytes), nbytes
    yield "bytes moved", a.moved_bytes, b.moved_bytes, nbytes
    resources = compared.a.lowered.topology.resources
    links = [r for r, resource in enumerate(resources) if resource.kind == "link"]
    links.sort(key=lambda r: (-max(int(a.link_bytes[r]), int(b.link_bytes[r])), r))
    for r in links[:LINKS]:
        if max(int(a.link_bytes[r]), int(b.link_bytes[r])):
            yield f"  over {resources[r].name}", int(a.link_bytes[r]), int(b.link_bytes[r]), nbytes


def _effects(compared: Comparison) -> Iterator[Told]:
    now_a, now_b = compared.a.simulation.makespan_s, compared.b.simulation.makespan_s
    grid = table(("layers", 14), ("in A", 16), ("in B", 16), ("A\nwith it", None), ("B\nwithout it", None))
    ordered = sorted(compared.differences, key=lambda d: (-_size(compared, d), d.leader))
    for one in ordered[:MOST]:
        old, new = (_treated(lowered, one.leader) for lowered in (compared.a.lowered, compared.b.lowered))
        effects = relative(one.a_changed_s, now_a), relative(one.b_changed_s, now_b)
        grid.add(layers(compared.a.lowered, one), old, new, *effects)
    for option in compared.options:
        effects = relative(option.a_changed_s, now_a), relative(option.b_changed_s, now_b)
        grid.add(option.words, _value(option, option.a), _value(option, option.b), *effects)
    yield grid
    if len(ordered) > MOST:
        yield f"... and {len(ordered) - MOST} differences that matter less (--json lists all)"
    changed = [one.a_changed_s for one in compared.differences] + [option.a_changed_s for option in compared.options]
    alone, together = sum(s - now_a for s in changed), now_b - now_a
    if len(changed) > 1:
        text = (
            f"Applied to A one at a time, these changes add up to {signed(alone, seconds)}; together they give "
            f"{signed(together, seconds)}. "
        )
        if abs(together - alone) > 0.02 * max(abs(together), abs(alone)):
            text += (
                f"The other {signed(together - alone, seconds)} is interaction: what a layer costs depends on how its "
                f"neighbours are split."
            )
        yield text


def _size(compared: Comparison, one: Difference) -> float:
    now_a, now_b = compared.a.simulation.makespan_s, compared.b.simulation.makespan_s
    return max(abs(one.a_changed_s - now_a), abs(one.b_changed_s - now_b))


def _treated(lowered: Lowered, operator: int) -> str:
    graph = lowered.graph
    return treatment(graph, lowered.topology, graph.operators[operator], lowered.configs[operator])


def layers(lowered: Lowered, one: Difference) -> str:
    """The layers that change, those that only follow left out where there are others."""
    operators = lowered.graph.operators
    kind = operators[one.leader].kind
    leading = [i for i in one.operators if operators[i].kind == kind] or one.operators
    rest = len(one.operators) - len(leading)
    words = folded([operators[i].module or operators[i].name for i in leading])
    return words + (f" and {rest} that follow" if rest else "")


def _value(option: OptionEffect, value: str) -> str:
    if option.words == PARTS["bucket_bytes"]:
        return f"{int(value) / 2**20:.3g} MiB"
    return "all at the start" if value == "None" else value


def comparison_data(compared: Comparison) -> dict[str, Any]:
    """The comparison as a JSON object; times in seconds."""
    graph, topology = compared.a.lowered.graph, compared.a.lowered.topology
    return {
        "plans": [
            _plan_data(row, steps) | {"baseline": baseline or None}
            for row, steps, baseline in zip(
                (compared.a, compared.b), (compared.a_steps, compared.b_steps), compared.baselines, strict=True
            )
        ],
        "differences": [
            {
                "layers": layers(compared.a.lowered, one),
                "operators": [graph.operators[i].name for i in one.operators],
                "treatments": [_treated(lowered, one.leader) for lowered in (compared.a.lowered, compared.b.lowered)],
                "first_with_it_s": one.a_changed_s,
                "second_without_it_s": one.b_changed_s,
            }
            for one in compared.differences
        ],
        "options": [
            {
                "option": one.words, "values": [one.a, one.b], "first_with_it_s": one.a_changed_s,
                "second_without_it_s": one.b_changed_s,
            }
            for one in compared.options
        ],
        "topology": topology.name,
        "graph": graph.name,
    }  # fmt: skip


def _plan_data(row: PlanRow, steps: Sequence[Step]) -> dict[str, Any]:
    simulation, resources = row.simulation, row.lowered.topology.resources
    return {
        "name": row.name,
        "iteration_s": simulation.makespan_s,
        "peak_bytes": max(simulation.peak_bytes),
        "moved_bytes": simulation.moved_bytes,
        "critical_path": by_kind(row.lowered.tasks, steps),
        "links": [
            {"name": x.name, "moved_bytes": int(simulation.link_bytes[r]), "busy_s": float(simulation.link_busy_s[r])}
            for r, x in enumerate(resources)
            if x.kind == "link"
        ],
    }
