"""Plans are run for a few steps on the real machine, one after the other, so that the choice between them rests on
measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from flexsearch.graph.loading import load_callable
from flexsearch.runtime.group import join
from flexsearch.runtime.parallel import trace
from flexsearch.runtime.train import WARM_UP, train
from flexsearch.strategy import Strategy
from flexsearch.topology import Topology


def check_model(plan: str, model: str, arguments: Mapping[str, Any]) -> None:
    """Raise ImportModelError or StrategyError unless ``load_callable`` makes of ``model`` and ``arguments`` a model of
    the graph that the strategy file ``plan`` is for."""
    loaded = load_callable(model, **arguments)
    trace(loaded.model, Strategy.load(plan), loaded.loss, loaded.inputs, loaded.targets)


def measured(
    plans: Sequence[str], topology: str, model: str, arguments: Mapping[str, Any], steps: int, timeout_s: float
) -> list[float]:
    """Iteration time (s) of each plan on the ranks of this run: the median of ``steps`` steps after warm-up, each as
    long as on the slowest rank. All ranks call it.

    ``plans``: strategy files; only those of rank 0 count, the others may give none. ``topology``: what they were made
    for, a file or a preset. ``model``, ``arguments``: as for ``load_callable``. ``timeout_s``: for so long the ranks
    wait for each other. Raises what :func:`flexsearch.runtime.train.train` raises."""
    join(Topology.load(topology), timeout_s)
    files: list[Any] = [[Strategy.load(plan).to_file() for plan in plans]] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(files, src=0)
    loaded = load_callable(model, **arguments)
    strategies = [Strategy.from_file(file) for file in files[0]]
    traced = trace(loaded.model, strategies[0], loaded.loss, loaded.inputs, loaded.targets) if strategies else None
    done = (train(s, loaded, steps=WARM_UP + steps, timeout_s=timeout_s, traced=traced) for s in strategies)
    return [training.measured_s for training in done]
