"""A rank's values, arrivals and gradients take at the update what the account of memory says, and no more.

Not counted: buffers of sends, which gloo keeps to the end of the step, and the peak within the step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexsearch.cost import Costs
from flexsearch.graph.importer import Imported
from flexsearch.lower import lower
from flexsearch.runtime.parallel import distribute
from flexsearch.runtime.parts import Arrival
from flexsearch.search.space import Space
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.baselines import baselines
from flexsearch.strategy.files import StrategyFile
from flexsearch.topology import Topology
from tests.memory_spans import spans_of
from tests.ranks import pool
from tests.small_models import case
from tests.test_numerics import _imported, _sgd

RANKS = 2


def _held(name: str, imported: Imported, file: str) -> int:
    """Bytes that the step holds on this rank when the optimizer runs, besides the weights as they are stored."""
    made = case(name, "float64")
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(made.model, imported, strategy, _sgd)
    engine, held = parallel.engine, list[int]()
    update = engine.update

    def look() -> None:
        tensors = [value for value in engine._values if isinstance(value, torch.Tensor)]
        tensors += [flat for value in engine._values if isinstance(value, Arrival) for flat in value.buffers]
        tensors += [w.grad for w in engine.weights.values() if w.grad is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for tensor in (*engine.weights.values(), *(tensor for _, tensor in engine.fixed.values())):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        held.append(sum(storages.values()))
        update()

    engine.update = look
    parallel.step(made.inputs, made.targets)
    return sum(held)  # a rank without weights has no update


def _strategies(name: str) -> list[Strategy]:
    """Baselines, and plans anywhere in the space."""
    graph, topology = _imported(name).graph, Topology.load(f"ethernet-1g:{RANKS}")
    rng, space = np.random.Generator(np.random.PCG64(1)), Space(graph, topology)
    found = list(baselines(graph, topology).values())
    names = [op.name for op in graph.operators]
    for _ in range(4):
        chosen = dict(zip(names, space.random_plan(rng), strict=True))
        found.append(Strategy.make(graph, topology, chosen, Options(bucket_bytes=1000)))
    return found


@pytest.mark.parametrize("name", ["convolutions", "decoder"])
def test_ranks_hold_no_more_at_the_update_than_the_account_says(name: str) -> None:
    graph, topology = _imported(name).graph, Topology.load(f"ethernet-1g:{RANKS}")
    for strategy in _strategies(name):
        lowered = lower(graph, strategy, topology, Costs(graph, topology))
        spans = spans_of(lowered)
        update = max(s.last for s in spans) - 1
        counted = [0] * RANKS
        for s in spans:
            if s.part != "optimizer" and s.first > 0 and s.last >= update:
                counted[s.device] += s.nbytes
        held = pool(RANKS).run(_held, name, _imported(name), strategy.to_file().model_dump_json())
        # A rank adds its own part of the loss to the others' after the update.
        assert all(a <= b + 8 for a, b in zip(held, counted, strict=True)), (
            held,
            counted,
            strategy.to_file().model_dump_json(),
        )
        assert max(held) > 0
