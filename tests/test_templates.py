"""Templates that compiled code makes are those that lowering makes in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.lower.layout import Layouts
from flexsearch.lower.pieces import Pieces
from flexsearch.lower.split import Splitter
from flexsearch.search.space import Space
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options, States
from flexsearch.topology import Topology
from tests.test_baselines import cnn, mlp, transformer
from tests.test_delta import uneven

TOPOLOGIES = {"GPUs": lambda: Topology.load("p100:2"), "unequal hosts": lambda: uneven(5, "half", 1e-9, 2)}


def walked(graph: OperatorGraph, topology: Topology, seed: int) -> DeltaSimulator:
    """After a walk of random plans, some with weights stored in parts."""
    space, rng = Space(graph, topology), np.random.default_rng(seed)

    def plan() -> tuple[OperatorConfig, ...]:
        drawn = [(c, rng.integers(len(States)) if len(c.devices) > 1 else 0) for c in space.random_plan(rng)]
        return tuple(c.sharded(States(states), int(rng.choice([0, 2]))) for c, states in drawn)

    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(optimizer="adam"), plan())
    for _ in range(4):
        simulator.propose(dict(enumerate(plan())))
        simulator.accept()
    return simulator


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_configs_and_weight_plans_are_those_of_lowering(name: str, seed: int) -> None:
    graph, topology = mlp(), TOPOLOGIES[name]()
    simulator = walked(graph, topology, seed)
    templates, lowering, pools = simulator.templates, simulator.lowering, simulator.templates.pools
    for i, (number, config) in enumerate(zip(simulator.rows.state.config.tolist(), simulator.configs, strict=True)):
        placed, first, last = lowering.placed(i, config), *_rows(pools, "config", number)
        assert templates.config(i, config) == number and templates.configs[number] == config
        assert pools.entry_device[first:last].tolist() == list(config.devices)
        ticks = zip(pools.entry_forward[first:last] * TICK, pools.entry_backward[first:last] * TICK, strict=True)
        pieces = zip(placed.pieces, config.devices, strict=True)
        assert list(ticks) == [simulator.costs.compute(i, piece, device) for piece, device in pieces]
        operands = [layout.number for layout in (*placed.reads, *placed.writes)]
        begin = int(pools.config_reads[number])
        assert pools.layout[begin : begin + len(operands)].tolist() == operands
    lowered = lowering.lower(simulator.configs, simulator.options)
    for w, weight in enumerate(lowered.weights):
        plan, itemsize = weight.plan, graph.tensor[weight.tensor].itemsize
        template = int(simulator.rows.state.plan[w])
        gather = int(pools.plan_gather[template])
        for k, forward in enumerate(plan.forward):
            number = int(pools.gather[gather + k])
            assert (number > 0) == bool(forward.exchanges)
            check_exchanges(pools, number, forward if forward.exchanges else None)
        check_exchanges(pools, int(pools.plan_sync[template]), plan.sync)
        first, last = _rows(pools, "store", template)
        assert pools.store_device[first:last].tolist() == plan.stored.device.tolist()
        assert (pools.store_bytes[first:last] == plan.stored.grid.volume * itemsize).all()


def check_exchanges(pools: Any, template: int, plan: Any) -> None:
    """A template has the exchanges of a reshard; none if there is no reshard."""
    first, last = _rows(pools, "reshard", template)
    assert last - first == (0 if plan is None else len(plan.exchanges))
    for x, exchange in zip(range(first, last), () if plan is None else plan.exchanges, strict=True):
        assert tuple(pools.send[slice(*_rows(pools, "send", x))]) == exchange.senders
        assert tuple(pools.receive[slice(*_rows(pools, "receive", x))]) == exchange.receivers
        assert pools.duration[x] * TICK == exchange.transfer.duration_s


def _rows(pools: Any, name: str, number: int) -> tuple[int, int]:
    return int(getattr(pools, f"{name}_first")[number]), int(getattr(pools, f"{name}_last")[number])


def test_equal_layouts_have_one_number_however_many_there_are() -> None:
    layouts, rng = Layouts(4), np.random.default_rng(0)
    numbers: dict[tuple[bytes, bytes, bytes], int] = {}
    for _ in range(20_000):  # the pool grows several times
        count, rank = int(rng.integers(1, 4)), int(rng.integers(0, 3))
        low = rng.integers(0, 3, (count, rank, 1))
        box = np.concatenate((low, low + rng.integers(1, 3, (count, rank, 1))), axis=2).astype(np.int64)
        term = rng.integers(0, 2, count).astype(np.uint32)
        device = rng.permutation(40)[:count].astype(np.uint32)
        laid = layouts.lay(layouts.grid(box, term), device)
        key = box.tobytes() + bytes([rank]), term.tobytes(), device.tobytes()
        assert numbers.setdefault(key, laid.number) == laid.number
        assert (laid.device == device).all() and (laid.grid.box == box).all() and (laid.grid.term == term).all()
    assert len(set(numbers.values())) == len(numbers)
    for laid in (layouts[number] for number in list(numbers.values())[:500]):
        side, boxes = laid.side, laid.grid.boxes
        assert side.same.tolist() == [boxes.index(box) for box in boxes]
        assert side.volume.tolist() == laid.grid.volume.tolist()
        order = sorted(range(len(laid)), key=lambda k: (laid.grid.term[k], k))
        assert side.copy.tolist() == order
        terms = sorted(set(laid.grid.term.tolist()))
        first = [next(k for k, e in enumerate(order) if laid.grid.term[e] == term) for term in terms]
        assert side.term_first[: len(terms) + 1].tolist() == [*first, len(laid)]


@pytest.mark.parametrize("graph", [cnn(batch=6), transformer(batch=4)], ids=lambda g: g.name)
def test_operators_that_share_regions_have_those_that_each_would_make_alone(graph: OperatorGraph) -> None:
    topology = Topology.load("p100:2")
    pieces, space = Pieces(graph, topology, Costs(graph, topology)), Space(graph, topology)
    rng = np.random.default_rng(0)
    shapes = {tensor.name: tensor.shape for tensor in graph.tensors}
    regions, of_splits = set[int](), set[tuple[int, int]]()
    for i, op in enumerate(graph.operators):
        for _ in range(8):
            config = space.draw(rng, i)
            operands = [shapes[n] for n in op.inputs], [shapes[n] for n in op.outputs]
            alone, shared = Splitter(op, *operands, Layouts(8)).split(config), pieces.split(i, config)
            for one, other in zip((*alone.inputs, *alone.outputs), (*shared.inputs, *shared.outputs), strict=True):
                assert one.boxes(len(config.devices)) == other.boxes(len(config.devices))
                assert one.grid.term.tolist() == other.grid.term.tolist()
                regions.add(id(other))
                of_splits.add((id(shared), id(other)))
    assert len(regions) < len(of_splits)
