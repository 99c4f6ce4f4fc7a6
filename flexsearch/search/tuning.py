"""How a hand-written plan gets its bucket size, its way to sum gradients, its microbatches and, where memory is short,
its recomputation: the way an expert sets them, by trying a few and keeping the best.

This is the only place where baselines are tuned, so a baseline takes the same time in ``optimize``, ``compare``,
``diff``, ``simulate --baseline`` and in Python. The sizes are those of ``BUCKETS`` and one bucket for all gradients;
ties go to the first, which is the default of ``Options``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Final, get_args

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph, whole_piece
from flexsearch.lower import Lowering
from flexsearch.lower.recompute import recomputations
from flexsearch.search.constants import SYNCHRONISE_BY
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator, by_rank
from flexsearch.simulate.variants import Plan, Variants
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.baselines import Seconds, baseline, baselines
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import SynchroniseBy
from flexsearch.topology import Topology

BUCKETS: Final = (Options().bucket_bytes, *(mib * 2**20 for mib in (1, 2, 4, 10, 100)))
"""Bucket sizes (bytes): small buckets leave early, large ones pay the start-up cost of fewer messages."""

FIRST: Final = (2**20, 10 * 2**20)
"""Sizes with which every way to sum gradients is tried. Measured over 122 plans (docs/search.md): of 23 that gain
0.5 % or more where all of seven sizes are tried, one gains less with these two; nine with 1 and 25 MiB."""

WORSE: Final = 2
"""So many numbers of microbatches in a row that are slower end the search for the best."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A plan with the options that suit it best, and what it then costs."""

    configs: Configs
    options: Options
    evaluation: Evaluation


def candidates(lowering: Lowering, options: Options, *extra: int) -> tuple[Options, ...]:
    """``options`` with each bucket size to try: those of ``BUCKETS``, one bucket for everything, and ``extra``. A size
    that makes the same buckets as an earlier one is left out."""
    whole = sum(tensor.nbytes for tensor in lowering.graph.of_kind("parameter"))
    distinct: dict[tuple[int, ...], int] = {}
    for size in (*BUCKETS, whole, *extra):
        if size > 0:
            distinct.setdefault(tuple(lowering.buckets(size).values()), size)
    return tuple(options.model_copy(update={"bucket_bytes": size}) for size in distinct.values())


def evaluations(
    evaluate: Evaluator, plans: Mapping[str, Configs], choices: Iterable[Options]
) -> Iterator[tuple[str, Options, Evaluation]]:
    """What each plan costs with each of the options, one after the other: the evaluator goes on with the last."""
    for options in choices:
        evaluate.use(options)
        for name, configs in plans.items():
            yield name, options, evaluate(configs)


def best_options(configs: Configs, tried: Iterable[tuple[Options, Evaluation]]) -> Tuned:
    """The best of the options for a plan; the first of those that are as good."""
    options, evaluation = min(tried, key=lambda pair: by_rank(pair[1]))
    return Tuned(configs, options, evaluation)


def tuned_baselines(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options | None = None
) -> dict[str, Tuned]:
    """Every baseline that makes sense here, by name, with the bucket size that suits it best. Of ``options`` only the
    optimizer counts."""
    return tuned_plans(baselines(graph, topology, options, whole_seconds(graph, costs)), graph, topology, costs)


def tuned_baseline(
    name: str, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options | None = None
) -> Tuned:
    """One of ``tuned_baselines``. Raises StrategyError if there is none of this name, or if it makes no sense here."""
    plan = baseline(name, graph, topology, options, whole_seconds(graph, costs))
    return tuned_plans({name: plan}, graph, topology, costs)[name]


def tuned_plans(
    plans: Mapping[str, Strategy], graph: OperatorGraph, topology: Topology, costs: Costs
) -> dict[str, Tuned]:  # fmt: skip
    """Plans of one stage, whose other options are the same, each with the bucket size that suits it best. There must be
    one."""
    options = next(iter(plans.values())).options
    evaluate = Evaluator(graph, topology, costs, options)
    configs = {name: strategy.in_order(graph) for name, strategy in plans.items()}
    table: dict[str, list[tuple[Options, Evaluation]]] = {name: [] for name in plans}
    for name, choice, evaluation in evaluations(evaluate, configs, candidates(evaluate.lowering, options)):
        table[name].append((choice, evaluation))
    best = {name: best_options(configs[name], tried) for name, tried in table.items()}
    return {name: fitted(plan, evaluate) for name, plan in synchronised(best, evaluate).items()}


def synchronised(
    plans: Mapping[str, Tuned], evaluate: Evaluator, worth: float = SYNCHRONISE_BY
) -> dict[str, Tuned]:  # fmt: skip
    """Plans of one stage, whose options differ in their bucket sizes, each with the way to sum gradients and the bucket
    size that suit it best, if that gains ``worth`` of its cost; else as it is, and if its options say already which
    way. All ways are tried with two sizes, the best one of a plan with all of them, if it gains there."""
    options, usual = next(iter(plans.values())).options, Options().synchronise_by
    if options.synchronise_by != usual:
        return dict(plans)
    before, sizes = evaluate.options, candidates(evaluate.lowering, options, options.bucket_bytes)
    first = [size for size in sizes if size.bucket_bytes in FIRST]
    first = first if len(first) == len(FIRST) else list(dict.fromkeys((sizes[0], *first)))
    tried = {name: [(plan.options, plan.evaluation)] for name, plan in plans.items()}
    best = dict(plans)
    for some in (first, [size for size in sizes if size not in first]):
        for size, way in product(some, get_args(SynchroniseBy)):  # in this order, the next one is soon there
            ways = {name: best[name].options.synchronise_by for name in plans}
            chosen = {name: plan.configs for name, plan in plans.items() if some is first or ways[name] == way}
            if way != usual and chosen:
                choice = size.model_copy(update={"synchronise_by": way})
                for name, _, cost in evaluations(evaluate, chosen, (choice,)):
                    tried[name].append((choice, cost))
        best = {name: best_options(plan.configs, tried[name]) for name, plan in plans.items()}
    evaluate.use(before)
    gains = {n: best[n].evaluation.cost < (1.0 - worth) * plan.evaluation.cost for n, plan in plans.items()}
    return {name: best[name] if gains[name] else plan for name, plan in plans.items()}


def fitted(plan: Tuned, evaluate: Evaluator) -> Tuned:
    """A plan of one stage with what makes it fit (``with_room``)."""
    before = evaluate.options

    def attempt(options: Options) -> Evaluation:
        evaluate.use(options)
        return evaluate(plan.configs)

    sharded = any(config.states == States.WEIGHTS for config in plan.configs)
    options, evaluation = with_room(evaluate.graph, plan.options, plan.evaluation, sharded, attempt)
    evaluate.use(before)
    return Tuned(plan.configs, options, evaluation)


def with_room(
    graph: OperatorGraph, options: Options, evaluation: Evaluation, sharded: bool,
    attempt: Callable[[Options], Evaluation | None],
) -> tuple[Options, Evaluation]:  # fmt: skip
    """The options of a plan, and what it costs. If it lacks memory: with the recomputation, or its ``sharded`` weights
    gathered again, with which it fits; the fastest of these. As it is if none does, or if the options say already what
    is computed again. ``attempt``: what other options cost; None if they are not legal."""
    if evaluation.feasible or options.recompute != "none":
        return options, evaluation
    tried = [(options, evaluation)]
    for again in dict.fromkeys((options.reshard_after_forward, sharded)):
        for recompute in recomputations(graph):
            other = options.model_copy(update={"recompute": recompute, "reshard_after_forward": again})
            if other != options and (cost := attempt(other)) is not None:
                tried.append((other, cost))
    best = min(tried, key=lambda pair: by_rank(pair[1]))
    return best if best[1].feasible else tried[0]


def whole_seconds(graph: OperatorGraph, costs: Costs) -> Seconds:
    """Seconds of a whole operator on a device, forward and backward: what balances pipeline stages."""
    shape = {t.name: t.shape for t in graph.tensors}
    pieces = [whole_piece(op, [shape[n] for n in op.inputs], [shape[n] for n in op.outputs]) for op in graph.operators]

    @cache
    def of_kind(operator: int, device: int) -> float:
        return sum(costs.compute(operator, pieces[operator], device))

    kinds = costs.kinds.tolist()
    first = [kinds.index(kind) for kind in kinds]
    return lambda operator, device: of_kind(operator, first[device])


def pipelined(variants: Variants, placement: Strategy, stage_of: Sequence[int]) -> Strategy:
    """The stages of a placement (``stage_of``: by operator) with the number of microbatches (two or more), the schedule
    (1F1B or zero bubble) and what makes it fit (``with_room``) that suit them best. Raises StrategyError where the
    model has no microbatches, with the reason."""
    graph, plan, reason = variants.graph, _in_stages(placement, variants.graph, stage_of), ""
    tried: list[tuple[Plan, Evaluation]] = []

    def attempt(other: Plan) -> Evaluation | None:
        nonlocal reason
        outcome = variants.outcome(other)
        reason = reason or outcome.remark
        return None if outcome.seconds is None else Evaluation(outcome.seconds, outcome.shortfall)

    def is_best(other: Plan) -> bool:
        if (evaluation := attempt(other)) is not None:
            tried.append((other, evaluation))
        return evaluation is not None and min(tried, key=lambda pair: by_rank(pair[1])) is tried[-1]

    worse = 0
    for count in range(2, graph.batch + 1) if len(plan.pipeline.first) > 1 else ():
        if graph.batch % count == 0 and worse < WORSE:
            better = is_best(replace(plan, pipeline=replace(plan.pipeline, microbatches=count)))
            worse = 0 if better else worse + bool(tried)
    if not tried:
        why = reason or "there is one stage"
        raise StrategyError(f"a pipeline does not apply to {graph.name} on {variants.topology.name}: {why}")
    best = min(tried, key=lambda pair: by_rank(pair[1]))[0]
    is_best(replace(best, pipeline=replace(best.pipeline, schedule="zero-bubble")))
    best, evaluation = min(tried, key=lambda pair: by_rank(pair[1]))
    options, _ = with_room(graph, best.options, evaluation, False, lambda own: attempt(replace(best, options=own)))
    configs = {op.name: config for op, config in zip(graph.operators, best.placed(), strict=True)}
    return Strategy.make(
        graph, variants.topology, configs, options,
        stages=best.pipeline.stages(graph, len(variants.topology.devices)),
        microbatches=best.pipeline.microbatches, schedule=best.pipeline.schedule,
    )  # fmt: skip


def _in_stages(placement: Strategy, graph: OperatorGraph, stage_of: Sequence[int]) -> Plan:
    """A placement as a plan of stages."""
    configs = placement.in_order(graph)
    first = [i for i, stage in enumerate(stage_of) if i == 0 or stage != stage_of[i - 1]]
    runs = list(zip(first, [*first[1:], len(configs)], strict=True))
    meshes = [tuple(sorted({d for config in configs[a:b] for d in config.devices})) for a, b in runs]
    positions = tuple(
        config.on(mesh.index(d) for d in config.devices).sharded(States.WHOLE)
        for mesh, (a, b) in zip(meshes, runs, strict=True)
        for config in configs[a:b]
    )
    shardings = tuple(config.sharding for config in configs)
    return Plan(Pipeline(1, tuple(first), tuple(meshes)), positions, shardings, placement.options)
