"""Floor 5: hybrid plans on a grid of devices, P_r x P_c: P_c model groups of P_r devices share out the batch."""

from __future__ import annotations

from typing import Literal

from flexsearch.errors import StrategyError
from flexsearch.search.tuning import tuned_plans
from flexsearch.setting import Setting
from flexsearch.strategy import OperatorConfig, Strategy, make_config
from flexsearch.strategy.baselines import baseline, in_rows

Inside = Literal["megatron", "one-weird-trick"]
"""How a model group splits a step: all layers by features, or linear layers alone, and convolutions by samples."""


def grid_plans(setting: Setting, inside: Inside = "megatron") -> dict[tuple[int, int], Strategy]:
    """The plan of every factorisation P_r * P_c of the number of devices, by (P_r, P_c), with the gradient buckets that
    suit it best. (1, P) is data parallelism, (P, 1) the baseline ``inside`` on all devices. Model groups are devices
    that follow each other. A factorisation that the model or the batch has too few features or samples for is left out.
    """
    graph, topology = setting.graph, setting.topology
    count = len(topology.devices)
    plans: dict[str, Strategy] = {}
    grids: dict[str, tuple[int, int]] = {}
    for model in (n for n in range(1, count + 1) if count % n == 0):
        batch = count // model
        if batch > graph.batch:
            continue
        try:
            inner = _inside(setting, model, inside)
        except StrategyError:
            continue
        configs = in_rows(graph, topology, inner, model, batch)
        named = {op.name: config for op, config in zip(graph.operators, configs, strict=True)}
        name = f"{model} x {batch}"
        plans[name], grids[name] = Strategy.make(graph, topology, named), (model, batch)
    tuned = tuned_plans(plans, graph, topology, setting.costs) if plans else {}
    return {
        grids[name]: Strategy.make(graph, topology, plans[name].configs, plan.options) for name, plan in tuned.items()
    }


def _inside(setting: Setting, count: int, inside: Inside) -> list[OperatorConfig]:
    """The plan of one model group, on the first devices. Raises StrategyError if it makes no sense for so many."""
    if count == 1:
        return [make_config(op, {}, (0,)) for op in setting.graph.operators]
    group = setting.topology.subset(range(count))
    return list(baseline(inside, setting.graph, group).in_order(setting.graph))
