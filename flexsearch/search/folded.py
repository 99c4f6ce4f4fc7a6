"""Plans in which equal blocks of devices do the same, as starts of climbs."""

from __future__ import annotations

from collections.abc import Sequence

from flexsearch.errors import StrategyError, TopologyError
from flexsearch.search.climb import Climber
from flexsearch.search.climbs import Start
from flexsearch.search.constants import FOLD_FROM, FOLDED_STARTS, FOLDS, FULL
from flexsearch.search.tuning import whole_seconds
from flexsearch.strategy.baselines import baselines
from flexsearch.topology.classes import foldings


def folded_starts(climber: Climber, whole: Sequence[Start]) -> tuple[tuple[int, ...], list[Start]]:
    """Into how many blocks plans can be folded, those with the smallest blocks first (but whole hosts, as far as these
    have no more than FULL devices); and the best starts for each of them: the given plans that can be folded, and every
    baseline of one block."""
    folds: list[int] = []
    starts: list[Start] = []
    if len(climber.topology.devices) < FOLD_FROM:
        return (), []
    devices, hosts = len(climber.topology.devices), len(climber.topology.hosts)
    least = max(2, min(FULL, devices // hosts))
    for replicas in (n for n in reversed(foldings(climber.topology)) if devices // n >= least):
        try:
            inner = climber.folded(replicas)
        except (StrategyError, TopologyError):  # the batch cannot be divided among so many
            continue
        starts += _starts(inner, whole, replicas)
        folds.append(replicas)
        if len(folds) == FOLDS:
            break
    return tuple(folds), starts


def _starts(inner: Climber, whole: Sequence[Start], replicas: int) -> list[Start]:
    parts = inner.fold
    assert parts is not None
    own = {start.name: parts.folded(start.configs) for start in whole}
    named = baselines(parts.part, parts.folding.block, inner.options, whole_seconds(parts.part, inner.costs))
    for name, strategy in named.items():
        own.setdefault(f"{replicas} x {name}", strategy.in_order(parts.part))
    distinct = {configs: name for name, configs in reversed(own.items()) if configs is not None}
    starts = [
        Start(f"{name}, folded", parts.unfold(configs), inner.evaluate.options, inner.evaluate(configs), replicas)
        for configs, name in distinct.items()
    ]
    return sorted(starts, key=lambda start: start.rank)[:FOLDED_STARTS]
