"""The search for the fastest plan: climbs from the baselines, from random plans and from the best, side by side.

What each climb does depends on the seed and on numbers of proposals, never on the clock or on the number of processes:
with a budget of proposals the same inputs give the same plan everywhere. The clock ends a search; where there is a
budget in seconds alone, it also says when to polish the best plan.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from flexsearch import children, compiled  # in this form, or every change here would compile everything anew
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import MAX_SEED
from flexsearch.search.budget import Budget, cores
from flexsearch.search.garbage import rare_collections
from flexsearch.search.outcome import Progress, SearchResult
from flexsearch.search.pins import parse_pins
from flexsearch.search.run import Run, Stop
from flexsearch.search.space import Rule
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Topology


def search(
    graph: OperatorGraph,
    topology: Topology,
    costs: Costs,
    options: Options | None = None,
    *,
    budget_s: float | None = None,
    proposals: int | None = None,
    seed: int = 0,
    start: Strategy | None = None,
    pins: Sequence[str] = (),
    rule: Rule | None = None,
    margin: float | None = 0.0,
    processes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_phase: Callable[[str], None] | None = None,
    on_end: Callable[[], None] | None = None,
) -> SearchResult:
    """The best plan that is found within ``budget_s`` seconds or ``proposals`` proposals, whichever ends first (at
    least one must be given). The search also stops when half of the budget brought nothing better (FlexFlow, MLSys
    2019, section 6.2) and it has not hardly begun (``SearchResult.few``); with seconds alone it may then still look for
    single changes that make the best plan better.

    ``start``: a plan to go on from; if a search with this seed found it, that search is continued. ``pins``: what is
    fixed (:mod:`flexsearch.search.pins`). ``rule``: another restriction, to the configs that it leaves as they are.
    ``margin``: the share of the time by which a plan must beat the best baseline to be preferred to it, as that is
    simpler; None: by so much that their predictions tell them apart. ``processes``: at most so many; None: one for
    each core. Ctrl-C ends the search with the best plan so far. ``on_phase``: called with what is done before the
    climbs and, unless Ctrl-C ended them, after them, in words, as soon as there is a plan. ``on_end``: called once,
    when the search itself is over: a KeyboardInterrupt after that loses the result. The plan is never slower than the
    best baseline that fits into memory (and obeys the pins), and fits if any known plan does. Raises StrategyError if
    ``start`` is not legal, a pin cannot be obeyed or no budget is given."""
    if budget_s is None and proposals is None:
        raise StrategyError("the search needs a budget: seconds, or a number of proposals")
    if not (isinstance(seed, int) and 0 <= seed < MAX_SEED):
        raise StrategyError(f"seed {seed!r} is not between 0 and 2^64 - 1", "Give a whole number.")
    if start is not None:
        _check_start(start, graph, topology, options or Options())
    budget, rule = Budget(budget_s, proposals), parse_pins(pins, graph, topology) or rule
    processes = cores() if processes is None else processes
    if processes > 1 and compiled.compiles_for_all() and not compiled.is_warm():
        none = subprocess.DEVNULL
        children.start(children.module("flexsearch.search.ahead"), stdin=none, stdout=none, stderr=none)
    run = Run(graph, topology, costs, options or Options(), seed, rule, budget, on_progress, on_phase)
    over = on_end or (lambda: None)
    with rare_collections():
        try:
            try:
                run.begin(start)
                reason = run.go(processes)
            except Stop as stop:
                reason = str(stop)
            over()
        except KeyboardInterrupt as interrupt:
            if "data-parallel" not in run.outcomes:
                raise
            over()
            reason = str(interrupt) or "interrupted"
            run.on_phase = lambda phase: None  # what it calls may tell of the same interrupt again
        return run.result(reason, margin, tuple(pins))


def _check_start(start: Strategy, graph: OperatorGraph, topology: Topology, options: Options) -> None:
    start.check_supported(graph, topology)
    for what in ("precision", "gradients"):
        if (own := getattr(start.options, what)) != getattr(options, what):
            raise StrategyError(
                f"the strategy to start from is in {what} {own}, and the search is not",
                "Search with the options of that strategy.",
            )
