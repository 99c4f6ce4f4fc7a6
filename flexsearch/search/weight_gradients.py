"""Splits of their own for the gradients of weights: climbs in the graph in which each is an operator of its own.

They begin where the search has ended, and at the baselines: with every gradient split as the rest of its operator, and
with every device that makes the whole of it. The latter needs no synchronisation, and is what pays where activations of
a batch are smaller than weights. The former pays, too, where gradients of inputs must be moved: they are made first,
and move while those of weights are computed. In the end everything goes that brings nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.weight_gradients import able, owner_of, weight_gradient_of, with_weight_gradients
from flexsearch.lower import lower
from flexsearch.proof.bound import lower_bound
from flexsearch.quantities import MAX_COUNT
from flexsearch.search.climb import Climb, Climbed, Climber
from flexsearch.search.constants import GRADIENT_ONE_BY_ONE, GRADIENT_STARTS, GRADIENT_WORTH
from flexsearch.search.evaluate import Configs, by_rank
from flexsearch.search.outcome import SearchResult, is_faster
from flexsearch.search.pins import parse_pins
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import OperatorConfig, Options, Prediction, States, Strategy, make_config
from flexsearch.topology import Topology


class _Over(Exception):
    """The budget is used up."""


def search_weight_gradients(
    graph: OperatorGraph, topology: Topology, costs: Costs, result: SearchResult, *, budget_s: float | None,
    proposals: int | None, seed: int, pins: Sequence[str], margin: float | None,
) -> SearchResult:  # fmt: skip
    """The result of a search, or a plan with such splits that is faster by ``margin``, if one is found within
    ``budget_s`` seconds or ``proposals`` proposals. Its bound is one for plans with such splits."""
    names = able(graph)
    if not names or len(topology.devices) < 2:
        return result
    began, options = time.monotonic(), result.strategy.options
    divided = with_weight_gradients(graph, names)
    own = Costs(divided, topology, costs.profile)
    climber = Climber(divided, topology, own, options, seed, parse_pins(pins, divided, topology))
    best, tried, interrupted = _climb(climber, _starts(divided, result), began, budget_s, proposals)
    if interrupted:
        result = replace(result, stopped="interrupted")
    configs = dict(zip((op.name for op in divided.operators), _simplified(climber, best), strict=True))
    strategy, simulation = _worth_it(graph, topology, costs, configs, options)
    feasible = all(
        peak <= device.usable_bytes for peak, device in zip(simulation.peak_bytes, topology.devices, strict=True)
    )
    faster = not result.feasible or is_faster(simulation, result.simulation, margin)
    if not strategy.weight_gradients or not feasible or not faster:
        return replace(result, proposals=result.proposals + tried)
    bound_s = min(lower_bound(divided, topology, own, options, None).seconds, result.bound_s)
    before = result.strategy.search
    if result.strategy.prediction is not None and before is not None:
        strategy.prediction = Prediction(
            iteration_s=simulation.makespan_s, interval_s=simulation.estimate.interval_s,
            peak_bytes=max(simulation.peak_bytes),
            data_parallel_s=result.strategy.prediction.data_parallel_s,
        )  # fmt: skip
        strategy.search = before.model_copy(
            update={"locally_optimal": False, "bound_s": bound_s, "proposals": min(before.proposals + tried, MAX_COUNT)}
        )
    return replace(
        result, strategy=strategy, simulation=simulation, feasible=True, locally_optimal=False, bound_s=bound_s,
        proposals=result.proposals + tried, elapsed_s=result.elapsed_s + time.monotonic() - began, baseline="",
        set_aside=None,
    )  # fmt: skip


def _starts(divided: OperatorGraph, result: SearchResult) -> list[Configs]:
    """The answer and the baselines, each with gradients of weights split as the rest, and whole on every device."""
    plans = [result.strategy, *(outcome.strategy for outcome in result.baselines.values())]
    starts: list[Configs] = []
    for plan in plans:
        for whole in (False, True):
            configs: list[OperatorConfig] = []
            for op in divided.operators:
                config = plan.configs[(owner_of(op.name) or op.name) if op.half == "weights" else op.name]
                if op.half == "weights":
                    config = (make_config(op, {}, config.devices) if whole else config).sharded(States.WHOLE)
                configs.append(config)
            starts.append(tuple(configs))
    return list(dict.fromkeys(starts))


def _climb(
    climber: Climber, starts: Sequence[Configs], began: float, budget_s: float | None, proposals: int | None
) -> tuple[Configs, int, bool]:
    """The best plan of climbs from the best starts, how many proposals they made, and whether Ctrl-C ended them."""
    ranked = sorted(
        ((climber.evaluate(configs), configs) for configs in map(climber.space.fixed, starts)),
        key=lambda row: by_rank(row[0]),
    )
    now, best = ranked[0]
    left, tried = proposals if proposals is not None else MAX_COUNT, 0
    for k, (_, start) in enumerate(ranked[:GRADIENT_STARTS]):
        last: list[Climbed] = []

        def watch(climbed: Climbed, last: list[Climbed] = last) -> None:
            last[:] = [climbed]
            if budget_s is not None and time.monotonic() - began >= budget_s:
                raise _Over

        share = left // (min(GRADIENT_STARTS, len(ranked)) - k)
        ended = interrupted = False
        try:
            climber.climb(Climb(k, k, "weight gradients", start, share, now, climber.options), watch)
        except (_Over, KeyboardInterrupt) as end:  # what the climb has reached by then counts
            ended, interrupted = True, isinstance(end, KeyboardInterrupt)
        if last:
            tried, left = tried + last[0].proposals, left - last[0].proposals
            if by_rank(last[0].evaluation) < by_rank(now):
                now, best = last[0].evaluation, last[0].configs
        if ended:
            break
    return best, tried, interrupted


def _simplified(climber: Climber, configs: Configs) -> Configs:
    """The plan with gradients of weights split as the rest of their operators, and with weights kept whole, wherever
    that costs next to nothing; how states of weights are kept is said by the operators that read them."""
    graph = climber.graph
    now = list(configs)
    for i, op in enumerate(graph.operators):
        if op.half == "weights":
            sharding = max(now[i].sharding, now[i + 1].sharding, key=lambda one: one.rank)
            now[i], now[i + 1] = now[i].sharded(States.WHOLE), now[i + 1].sharded(*sharding)
    cost = climber.evaluate(tuple(now)).cost
    for i, op in enumerate(graph.operators):
        config = (now[i + 1] if op.half == "weights" else now[i]).sharded(States.WHOLE)
        if config != now[i]:
            simpler = (*now[:i], config, *now[i + 1 :])
            if (simpler_cost := climber.evaluate(simpler).cost) <= (1.0 + GRADIENT_WORTH) * cost:
                now, cost = list(simpler), min(cost, simpler_cost)
    return tuple(now)


def _worth_it(
    graph: OperatorGraph, topology: Topology, costs: Costs, configs: dict[str, OperatorConfig], options: Options
) -> tuple[Strategy, Simulation]:
    """The plan without those gradients that are split as the rest and gain nothing by coming behind the gradients of
    inputs, whose communication they can hide."""

    def tried(without: Collection[str]) -> tuple[Strategy, Simulation]:
        kept = {name: config for name, config in configs.items() if name not in without}
        strategy = Strategy.make(graph, topology, kept, options)
        return strategy, simulate(lower(graph, strategy, topology, costs))

    pairs = {weight_gradient_of(name): config.sharded(States.WHOLE) for name, config in configs.items()}
    same = [name for name, config in configs.items() if pairs.get(name) == config]
    best = tried(())
    gone: tuple[str, ...] = ()
    # All at once; if that loses something, one by one.
    for more in ((*same,), *((name,) for name in same[:GRADIENT_ONE_BY_ONE])):
        other = tried((*gone, *more))
        if other[1].makespan_s <= (1.0 + GRADIENT_WORTH) * best[1].makespan_s:
            gone, best = (*gone, *more), other
            if len(gone) == len(same):
                break
    return best
