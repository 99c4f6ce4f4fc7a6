"""The answer of a search over layouts: the best plan or the baseline that it does not beat, as a file has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from flexsearch.cost.uncertainty import Estimate
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import MAX_PIECES
from flexsearch.search.hybrid.constants import EQUAL, PLAINER
from flexsearch.search.hybrid.outcome import Candidate
from flexsearch.search.hybrid.ranking import Key
from flexsearch.search.hybrid.trials import Trials
from flexsearch.search.outcome import is_faster
from flexsearch.simulate.staged import Step
from flexsearch.strategy import Prediction, Search, Strategy
from flexsearch.topology import Topology


class Choice(NamedTuple):
    """``baseline``, ``set_aside``: as of ``HybridResult``."""

    best: Candidate
    step: Step
    baseline: str
    set_aside: Estimate | None


def choose(
    best: Candidate, step: Step, baselines: Mapping[str, tuple[Candidate, Step]], margin: float | None
) -> Choice:
    """The best plan, or the fastest baseline that fits, if the best plan is not faster by the margin (as of
    ``search.search``)."""
    same = next((name for name, (candidate, _) in baselines.items() if candidate == best), "")
    fitting = [name for name, (candidate, _) in baselines.items() if candidate.feasible]
    if not same and fitting and best.feasible:
        name = min(fitting, key=lambda name: baselines[name][1].makespan_s)
        if not is_faster(step, baselines[name][1], margin):
            return Choice(*baselines[name], name, step.estimate)
    return Choice(best, step, same, None)


def with_least_memory(kept: Mapping[str, Candidate], simulated: Iterable[Candidate]) -> dict[str, Candidate]:
    """Of plans that are about as fast as the best one (its name is empty), and as that of each family by name, those
    that take least memory. No baseline is faster than the first."""
    plans = [candidate for candidate in simulated if candidate.feasible]

    def instead(best: Candidate, limit: float, among: Iterable[Candidate]) -> Candidate:
        near = (plan for plan in among if plan.seconds <= min(limit, (1.0 + EQUAL) * best.seconds))
        return min((best, *near), key=lambda plan: (plan.used, plan.seconds)) if best.feasible else best

    families = {
        name: instead(best, inf, (plan for plan in plans if name in plan.families))
        for name, best in kept.items()
        if name
    }
    limit = min((one.seconds for one in families.values() if one.feasible), default=inf)
    return {"": instead(kept[""], max(limit, kept[""].seconds), [*plans, *families.values()]), **families}


def plain_options(candidate: Candidate, prefetch: int) -> Key:
    """The same plan, with as many buckets gathered ahead as is usual."""
    return candidate.key._replace(options=candidate.options.model_copy(update={"prefetch": prefetch}))


def simplified(candidate: Candidate, simulated: Mapping[Key, Candidate | None], prefetch: int) -> Candidate:
    """The plan of ``plain_options`` in the place of a candidate, if it has been simulated and is hardly slower."""
    if simulated.get(candidate.key) != candidate:  # its splits or orders are its own
        return candidate
    plain = simulated.get(plain_options(candidate, prefetch))
    if plain is None or not plain.feasible or plain.seconds > (1.0 + PLAINER) * candidate.seconds:
        return candidate
    return plain


def nothing_suits(graph: OperatorGraph, topology: Topology, refusals: str | None) -> StrategyError:
    """The error where no layout is legal. ``refusals``: of those that PyTorch's modules do not express, if only these
    were looked for, why not."""
    if refusals is not None:
        return StrategyError(
            f"no layout that PyTorch's modules express suits {graph.name} on {topology.name}{refusals}",
            "Search with --space native, whose plans have one stage. Of a plan of --space layouts, "
            "`flexsearch export` says what they cannot express.",
        )
    return StrategyError(
        f"no layout of {len(topology.devices)} devices of {topology.name} suits {graph.name}: its batch of "
        f"{graph.batch} can be divided among none",
        "Give another --batch, or fewer devices.",
    )


def strategy_of(trials: Trials, best: Candidate, step: Step, plans: int, bound_s: float) -> Strategy:
    """The plan as a file has it: without stages and replicas where configs alone say it, so that it can be run.
    ``plans``: so many were simulated; ``bound_s``: none takes less (s)."""
    graph, topology, pipeline, configs = trials.graph, trials.topology, best.pipeline, best.configs
    devices = len(topology.devices)
    stages = pipeline.stages(graph, devices // pipeline.replicas)
    parts = trials.simulators.share(pipeline.replicas, pipeline.microbatches)[0].fold
    plain = len(stages) == pipeline.microbatches == 1 and len(configs) * devices <= MAX_PIECES
    if plain and parts is not None:
        configs, stages = parts.unfold(configs), ()
    named = {op.name: config for op, config in zip(graph.operators, configs, strict=True)}
    return Strategy.make(
        graph, topology, named, best.options,
        Prediction(
            iteration_s=best.seconds, interval_s=step.estimate.interval_s,
            peak_bytes=max(m.peak for m in step.memory),
        ),
        Search(seed=0, proposals=plans, start="layouts", bound_s=bound_s),
        stages=stages, microbatches=pipeline.microbatches, schedule=pipeline.schedule, orders=pipeline.orders,
    )  # fmt: skip
