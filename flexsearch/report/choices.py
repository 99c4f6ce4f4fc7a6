"""The neighbours of one operator's config, as a table: what each would change, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexsearch.lower import Lowered
from flexsearch.report.explain import Told, change_of, relative, table, time_and_change
from flexsearch.report.units import nbytes, seconds
from flexsearch.report.words import device_set, treatment
from flexsearch.simulate import Loads
from flexsearch.simulate.effects import Alternative, Weighed


@dataclass(frozen=True)
class OperatorChoice:
    """Why an operator is as it is. ``alternatives``: all, the best first. ``shown``: those in the table, each
    with how many others do the same at the same cost on other devices. ``follow``: what follows it."""

    lowered: Lowered
    operator: int
    now_s: float
    loads: Loads
    alternatives: tuple[Alternative, ...]
    shown: tuple[tuple[Weighed, int], ...]
    follow: tuple[int, ...]
    follows: int | None
    """The operator that this one follows, if any."""


def alike(alternatives: Sequence[Alternative]) -> list[tuple[Alternative, int]]:
    """Alternatives in order, those that differ in their devices only and cost the same as one, with how many more."""
    rows: dict[tuple[object, ...], list[Alternative]] = {}
    for one in alternatives:
        config = one.config
        key = (
            config.degrees, config.shares, config.replicas, config.sharding,
            f"{one.alone_s:.9e}", None if one.together_s is None else f"{one.together_s:.9e}",
        )  # fmt: skip
        rows.setdefault(key, []).append(one)
    return [(members[0], len(members) - 1) for members in rows.values()]


def operator_choice(choice: OperatorChoice) -> Iterator[Told]:
    """The choice for a terminal: lines and tables."""
    lowered, graph = choice.lowered, choice.lowered.graph
    op = graph.operators[choice.operator]
    words = treatment(graph, lowered.topology, op, lowered.configs[choice.operator])
    yield f"\n{op.name} ({op.kind}): {words}"
    if choice.follow:
        names = [graph.operators[i].name for i in choice.follow]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield f"What follows it: {', '.join(names[:4])}{more}"
    if choice.follows is not None:
        leader = graph.operators[choice.follows].name
        yield f"It follows {leader}; see also --operator {leader}"
    yield (
        f"The plan takes {seconds(choice.now_s)}: the busiest device computes {seconds(choice.loads.compute_s)}, the "
        f"busiest link moves activations for {seconds(choice.loads.activations_s)}, weights and their gradients for "
        f"{seconds(choice.loads.weights_s)}"
    )
    yield from _alternatives(choice)


def _alternatives(choice: OperatorChoice) -> Iterator[Told]:
    if not choice.alternatives:
        yield "There is no other config to try."
        return
    times = [("alone", None), ("with\nfollowers", None)][: 1 + bool(choice.follow)]
    grid = table(("instead", 16), *times, ("compute", None), ("activations", None), ("weights", None))
    for weighed, more in choice.shown:
        one, less = weighed.alternative, weighed.more
        words = _words(choice, one, more)
        if weighed.shortfall:
            words += f"; {nbytes(weighed.shortfall)} too much memory"
        cells = [relative(one.alone_s, choice.now_s)]
        if choice.follow:
            cells.append("-" if one.together_s is None else relative(one.together_s, choice.now_s))
        work = (_signed(s) for s in (less.compute_s, less.activations_s, less.weights_s))
        grid.add(words, *cells, *work)
    yield grid
    devices = _everywhere(choice)
    yield f"(on all {device_set(choice.lowered.topology, devices)} unless it says otherwise)"
    shown = sum(1 + more for _, more in choice.shown)
    if shown < len(choice.alternatives):
        worst = choice.alternatives[-1].best_s
        left = len(choice.alternatives) - shown
        yield f"... and {left} that are worse, up to {time_and_change(worst, choice.now_s)} (--all)"
    yield from _verdict(choice)


def _verdict(choice: OperatorChoice) -> Iterator[str]:
    fitting = [weighed for weighed, _ in choice.shown if not weighed.shortfall]
    if not fitting:
        yield "None of these fits into memory."
        return
    best = fitting[0].alternative
    if best.best_s < choice.now_s:
        yield f"A better one: {_words(choice, best, 0)}, {change_of(best.best_s, choice.now_s)}"
    elif best.best_s == choice.now_s:
        yield "No other config is better; some are as good."
    else:
        yield f"No other config is as good: the next best costs {change_of(best.best_s, choice.now_s)}"


def _words(choice: OperatorChoice, one: Alternative, more: int) -> str:
    lowered = choice.lowered
    op = lowered.graph.operators[choice.operator]
    words = treatment(lowered.graph, lowered.topology, op, one.config)
    if len(one.config.devices) == len(_everywhere(choice)) > 1:  # it goes without saying
        where = device_set(lowered.topology, one.config.devices)
        words = words.replace(f" over {where}", "").replace(f" on {where}", "")
    return words + (f" ({1 + more} alike)" if more else "")


def _everywhere(choice: OperatorChoice) -> tuple[int, ...]:
    """The devices of the operator's stage."""
    stages = choice.lowered.stages
    return stages.devices[stages.of(len(choice.lowered.graph.operators))[choice.operator]]


def _signed(s: float) -> str:
    return "" if abs(s) < 1e-9 else f"{'+' if s > 0 else '-'}{seconds(abs(s))}"


def operator_data(choice: OperatorChoice) -> dict[str, Any]:
    """The choice as a JSON object; ``more_*``: work compared with the plan as it is, s, for those that were weighed."""
    lowered, graph = choice.lowered, choice.lowered.graph
    op = graph.operators[choice.operator]
    weighed = {id(one.alternative): (one, alike) for one, alike in choice.shown}

    def row(one: Alternative) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "treatment": treatment(graph, lowered.topology, op, one.config),
            "degrees": dict(one.config.degrees),
            "shares": {axis: list(row) for axis, row in one.config.shares},
            "devices": list(one.config.devices),
            "replicas": one.config.replicas,
            "states": one.config.states.name.lower(),
            "sharded_over": one.config.sharded_over or None,
            "alone_s": one.alone_s,
            "together_s": one.together_s,
        }
        if id(one) in weighed:
            effect, others = weighed[id(one)]
            fields |= {
                "shortfall_bytes": effect.shortfall, "placements_alike": others,
                "more_compute_s": effect.more.compute_s, "more_activations_s": effect.more.activations_s,
                "more_weights_s": effect.more.weights_s,
            }  # fmt: skip
        return fields

    return {
        "operator": op.name,
        "kind": op.kind,
        "treatment": treatment(graph, lowered.topology, op, lowered.configs[choice.operator]),
        "iteration_s": choice.now_s,
        "followed_by": [graph.operators[i].name for i in choice.follow],
        "follows": graph.operators[choice.follows].name if choice.follows is not None else None,
        "alternatives": [row(one) for one in choice.alternatives],
    }
