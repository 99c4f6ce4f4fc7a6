"""Floor 5: what training code and notebooks call. Nothing here imports torch until a model is handed over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from flexsearch.cost import Profile
from flexsearch.errors import StrategyError, UsageError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import is_finite
from flexsearch.ranks import is_rank
from flexsearch.search.hybrid import HybridResult
from flexsearch.search.outcome import SearchResult
from flexsearch.setting import Setting, parse_budget
from flexsearch.simulate import Simulation, over_memory
from flexsearch.simulate import simulate as simulate_lowered
from flexsearch.spaces import Space, prefers_layout, search_both
from flexsearch.strategy import Options, Prediction, Strategy, StrategyFile
from flexsearch.topology import Topology

if TYPE_CHECKING:
    from torch import nn

    from flexsearch.report import PlanRow
    from flexsearch.runtime.parallel import Loss

LONGER_S = 600.0
"""How much longer than the budget other ranks wait for what the first one finds: it may have to compile."""


def optimize(
    model: nn.Module | OperatorGraph,
    inputs: Any = None,
    topology: Topology | str = "ethernet-1g-4",
    *,
    loss: Loss | None = None,
    targets: Any = None,
    profile: Profile | None = None,
    budget: str | float = "30s",
    seed: int = 0,
    start: Strategy | None = None,
    pins: Sequence[str] = (),
    margin: float | None = None,
    options: Options | None = None,
    processes: int | None = None,
    space: Space = "free",
    weight_gradients: bool = False,
    allow: Sequence[str] = (),
) -> Strategy:
    """The fastest strategy found for training ``model`` on ``topology`` (a Topology, a file or a preset).

    ``inputs``, ``loss``, ``targets``: as for ``import_model``, so that ``inputs`` can be a batch as a data loader gives
    it; it is the global one. ``parallelize`` takes them from the strategy. A graph may be given instead of a model.
    ``budget``: "30s", "2m", or a number of proposals, with which the same arguments give the same strategy everywhere.
    Under torchrun, and where a process group is there, rank 0 searches and the others get its strategy; elsewhere give
    a number of proposals on several ranks, or optimize once and save. ``start``: a strategy to go on from. ``pins``:
    what is fixed, as ``"encoder.*: batch=4, devices=0-3"``. ``processes``: at most so many search at once; None: one
    for each core. ``weight_gradients``: also plans in which gradients of weights have splits of their own. ``space``:
    "splits": plans of one stage with any splits; "layouts": with stages and microbatches; "free": both, layouts only
    with a budget of time and neither ``start`` nor ``pins``. ``margin``: a baseline is kept unless a plan is faster by
    this share of its time; None: by so much that their predictions tell them apart. ``allow``: recipes of
    synchronisation that change the mathematics and may be chosen, by name ("local-sgd"), whole, or "all": the best plan
    with one is the answer if it is faster.
    Raises RecipeError, ImportModelError, TopologyError, ProfileError; UsageError for an argument that makes no sense;
    StrategyError if no plan was found that fits into memory."""
    _check(margin, processes, start, options, {"pins": pins, "allow": allow})
    graph, example = _graph_and_example(model, inputs, loss, targets)
    cluster = topology if isinstance(topology, Topology) else Topology.load(topology)
    setting = Setting.of(graph, cluster, profile)
    _check_space(space, budget)
    space = "splits" if space == "free" and (start is not None or pins) else space  # both are about splits

    def search_layouts(share: str | float) -> HybridResult:
        return setting.search_layouts(share, options=options, processes=processes, margin=margin)

    def search_splits(share: str | float) -> SearchResult:
        return setting.search(
            share, seed=seed, start=start, pins=pins, margin=margin, options=options, processes=processes,
            weight_gradients=weight_gradients,
        )  # fmt: skip

    def search() -> Strategy:
        splits, layouts = _searched(setting, space, budget, search_splits, search_layouts)
        strategy = _preferred(splits, layouts, margin, cluster)
        return _with_recipe(setting, strategy, allow) if allow else strategy

    asked = graph.content_hash(), cluster.content_hash(), budget, seed, pins, margin, options, space, weight_gradients
    strategy = _of_first_rank(search, repr((*asked, allow)), budget)
    strategy.example = example
    return strategy


def _of_first_rank(search: Callable[[], Strategy], asked: str, budget: str | float) -> Strategy:
    """What ``search`` finds: on one of several ranks, what it finds on the first."""
    if not is_rank() and "torch" not in sys.modules:
        return search()
    from flexsearch.runtime.sharing import of_first_rank

    own: list[Strategy] = []

    def make() -> str:
        own.append(search())
        return own[0].to_file().model_dump_json()

    text = of_first_rank(make, asked, LONGER_S + (parse_budget(budget)[0] or 0.0))
    return own[0] if own else Strategy.from_file(StrategyFile.model_validate_json(text))


def _graph_and_example(
    model: nn.Module | OperatorGraph, inputs: Any, loss: Loss | None, targets: Any
) -> tuple[OperatorGraph, Any]:
    """The graph of a model, and without values what it was made from (``Strategy.example``); a graph as it is."""
    if isinstance(model, OperatorGraph):
        return model, None
    from flexsearch.graph.importer import import_model, inputs_and_targets
    from flexsearch.runtime.retrace import on_meta

    inputs, targets = inputs_and_targets(inputs, targets, loss)
    graph = import_model(model, inputs, loss, targets=targets)
    return graph, (*on_meta((inputs, targets)), loss)


def _searched(
    setting: Setting, space: Space, budget: str | float, splits: Callable[[str | float], SearchResult],
    layouts: Callable[[str | float], HybridResult],
) -> tuple[SearchResult | None, HybridResult | None]:  # fmt: skip
    """What the searches of a space find; those of both share a budget of time."""
    if space == "layouts":
        return None, layouts(budget)
    if space == "free" and (seconds := parse_budget(budget)[0]) is not None:
        return search_both(seconds, setting.graph, len(setting.topology.devices), splits, layouts)
    return splits(budget), None


def _with_recipe(setting: Setting, strategy: Strategy, allow: Sequence[str]) -> Strategy:
    """The plan with the fastest recipe that is allowed, if that is faster; else the plan itself."""
    from flexsearch.search.recipes import best_allowed

    best = best_allowed(setting.graph, setting.topology, setting.costs, [strategy], allow)[:1]
    if not best or best[0].simulation.makespan_s >= setting.step(strategy).makespan_s:
        return strategy
    strategy = best[0].strategy
    strategy.prediction = Prediction(iteration_s=best[0].simulation.makespan_s)
    return strategy


def _check_space(space: str, budget: str | float) -> None:
    """Raise StrategyError if there is no such search, or the budget is none."""
    seconds = parse_budget(budget)[0]
    if space not in get_args(Space) or (space == "layouts" and seconds is None):
        raise StrategyError(
            f"there is no search with space={space!r} and budget={budget!r}",
            'Give "free", "splits" or "layouts"; for layouts a budget of time, as "60s".',
        )


def _check(
    margin: float | None, processes: int | None, start: Strategy | None, options: Options | None,
    texts: dict[str, object],
) -> None:  # fmt: skip
    """Raise UsageError for arguments that no search can use. ``texts``: those that are lists of texts, by name."""
    if margin is not None and not (is_finite(margin) and margin >= 0):
        raise UsageError(f"margin={margin!r} is not a share", "Give a number from 0 (0.05: by 5 %), or None.")
    if processes is not None and not (isinstance(processes, int) and processes >= 1):
        raise UsageError(f"cannot search in processes={processes!r}", "Give a number from 1, or None: one a core.")
    if not isinstance(start, Strategy | None):
        raise UsageError(f"start= is a Strategy, not a {type(start).__name__}", "Read a file by Strategy.load(PATH).")
    if not isinstance(options, Options | None):
        raise UsageError(f"options= is an Options, not a {type(options).__name__}", "Give Options(optimizer='adam').")
    for name, value in texts.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name}= is a list of texts, not a {type(value).__name__}", f"Give {name}=[...].")


def _preferred(
    splits: SearchResult | None, layouts: HybridResult | None, margin: float | None, topology: Topology
) -> Strategy:
    """The plan of the searches that were made. Raises StrategyError if it does not fit into memory."""
    if splits is not None and not prefers_layout(layouts, splits, margin):
        refuse_what_does_not_fit(splits, topology)
        return splits.strategy
    assert layouts is not None
    if not layouts.best.feasible:
        raise StrategyError(
            f"no layout was found that fits into memory: the nearest lacks {layouts.step.missing / 1e9:.3g} GB on a "
            "device", "Use more or larger devices, or a smaller batch.",
        )  # fmt: skip
    return layouts.strategy


def refuse_what_does_not_fit(result: SearchResult, topology: Topology) -> None:
    """Raise StrategyError if no plan was found that fits into the devices' memory."""
    if not result.feasible:
        device, missing = max(over_memory(result.simulation, topology), key=lambda pair: pair[1])
        raise StrategyError(
            f"no plan was found that fits into memory: the nearest lacks {missing / 1e9:.3g} GB on device "
            f"{topology.devices[device].name!r}. Search longer, use more or larger devices, or a smaller batch."
        )


def simulate(
    graph: OperatorGraph, topology: Topology, strategy: Strategy, profile: Profile | None = None
) -> Simulation:
    """One simulated training step of a strategy. Raises StrategyError if it was made for something else."""
    return simulate_lowered(Setting.of(graph, topology, profile).lower(strategy))


def compare(
    graph: OperatorGraph,
    topology: Topology,
    strategies: dict[str, Strategy] | None = None,
    *,
    profile: Profile | None = None,
) -> list[PlanRow]:
    """The given strategies by name, fastest first, then every baseline, likewise; for ``report.plan_table``."""
    setting = Setting.of(graph, topology, profile)
    own = [setting.named_row(name, strategy) for name, strategy in (strategies or {}).items()]
    options = next((strategy.options for strategy in (strategies or {}).values()), None)
    others = [setting.row(name, strategy) for name, strategy in setting.baselines(options).items()]
    return by_time(own) + by_time(others)


def by_time(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Plans that fit into memory first, then the fastest first."""
    return sorted(rows, key=lambda row: (bool(row.shortfall), row.simulation.makespan_s, row.name))
