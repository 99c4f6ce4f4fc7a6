"""What a chain may propose: alternating classes, renamed devices, halves; and what is made once for a class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.search import Evaluator, search
from flexsearch.search.climb import Climber
from flexsearch.search.constants import MOVES, STEPS_TOGETHER_FROM
from flexsearch.search.move_tables import _partners
from flexsearch.search.moves import UNIFORMS, draw
from flexsearch.search.space import Space
from flexsearch.strategy import OperatorConfig, Options, check_config, make_config
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from tests.test_baselines import cnn, ethernet, mlp, transformer
from tests.test_meshes import two_servers_of_four
from tests.test_search import recurrent


class Drawing:
    """Moves of a chain at one plan, drawn from chosen numbers."""

    def __init__(self, graph: OperatorGraph, topology: Topology, start: Sequence[OperatorConfig], coarse: bool) -> None:
        self.graph, self.count = graph, len(topology.devices)
        climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
        self.space, self.chain, self.start = climber.space, climber.chain, tuple(start)
        now = climber.evaluate(self.start)
        self.chain.begin(self.start, now, now, 0, 1, coarse)
        self.simulator = climber.evaluate.at(self.start)

    def changes(self, uniforms: Sequence[float]) -> dict[int, OperatorConfig]:
        """What the move drawn from ``uniforms`` changes, all legal."""
        chain, simulator = self.chain, self.simulator
        chain._draws.uniform[0], chain._draws.row[0] = uniforms, 0
        change, now = simulator.rows.change, simulator.rows.state.config
        while not draw(chain._moves, chain._draws, now, simulator.templates.tables, change):
            chain._requests.supply(simulator.templates, change)
        number = int(change.number[0])
        operators = change.operator[:number].tolist()
        assert len(set(operators)) == number
        changes = {}
        for operator, config in zip(operators, change.config[:number].tolist(), strict=True):
            new = simulator.templates.configs[config]
            assert new is not None
            check_config(self.graph.operators[operator], new, self.count)
            changes[operator] = new
        return changes

    def of(self, move: str, seed: int = 0) -> Iterator[tuple[list[float], dict[int, OperatorConfig]]]:
        """Random moves of one kind."""
        rng, which = np.random.Generator(np.random.PCG64(seed)), list(MOVES).index(move)
        often = self.chain._moves.often
        while True:
            uniforms = rng.random(self.chain._draws.uniform.shape[1])
            uniforms[0] = ((often[which - 1] if which else 0.0) + often[which]) / 2
            yield uniforms.tolist(), self.changes(uniforms)


def everywhere(graph: OperatorGraph, axis: str, devices: Sequence[int]) -> tuple[OperatorConfig, ...]:
    """Every operator split along one axis, if it has it."""
    return tuple(
        make_config(op, {axis: len(devices)} if axis in op.splittable else {}, devices) for op in graph.operators
    )


@cache
def four_linear_layers() -> OperatorGraph:
    """The model of the case: batch 256, four layers of 4096 features."""
    layers = nn.Sequential(*(nn.Linear(4096, 4096, device="meta") for _ in range(4)))
    x, y = (torch.randn(256, 4096, device="meta") for _ in range(2))
    return import_model(layers, (x,), nn.functional.mse_loss, targets=y, name="mlp_4")


@cache
def repeated_blocks() -> OperatorGraph:
    """Three blocks of two layers of one shape."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    x, y = torch.zeros(8, 16), torch.zeros(8, 16)
    return import_model(model, (x,), nn.functional.mse_loss, targets=y, name="blocks")


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=2), recurrent()], ids=lambda g: g.name)
@pytest.mark.parametrize("move", list(MOVES))
def test_every_move_proposes_legal_configs(graph: OperatorGraph, move: str) -> None:
    topology = two_servers_of_four()
    start = Space(graph, topology).random_plan(np.random.Generator(np.random.PCG64(5)))
    drawing, changed = Drawing(graph, topology, start, coarse=False), 0
    for _, (_, changes) in zip(range(60), drawing.of(move), strict=False):
        changed += any(start[i] != config for i, config in changes.items())
    assert changed > 10


@pytest.mark.parametrize("graph", [cnn(), transformer(layers=2), recurrent()], ids=lambda g: g.name)
def test_a_move_asks_once_for_a_candidate_and_all_that_follows_it(graph: OperatorGraph) -> None:
    topology = two_servers_of_four()
    start = Space(graph, topology).random_plan(np.random.Generator(np.random.PCG64(5)))
    drawing, asked = Drawing(graph, topology, start, coarse=False), list[int]()
    requests = drawing.chain._requests
    supply, deep = requests.supply, 0

    def counted(*arguments: Any) -> None:
        asked.append(1)
        supply(*arguments)

    requests.supply = counted  # type: ignore[method-assign]
    for _, (_, changes) in zip(range(40), drawing.of("group"), strict=False):
        assert len(asked) <= 1
        deep += len(asked) == 1 and len(changes) > 2
        asked.clear()
    assert deep > 0


def test_members_of_a_class_get_configs_in_turn() -> None:
    graph, topology = four_linear_layers(), two_servers_of_four()
    start = everywhere(graph, "o", range(8))
    drawing = Drawing(graph, topology, start, coarse=True)
    (members,) = drawing.space.parts
    patterns = set()
    for _, (_, changes) in zip(range(400), drawing.of("repeated"), strict=False):
        plan = [changes.get(i, start[i]) for i in members]
        letters = {config: chr(ord("A") + k) for k, config in enumerate(dict.fromkeys(plan))}
        patterns.add("".join(letters[config] for config in plan))
    assert patterns == {"AAAA", "ABAB", "ABBA", "ABAA", "AABA", "ABCA"}


def test_layers_of_one_shape_exchange_their_configs() -> None:
    graph, topology = recurrent(), two_servers_of_four()
    space, plan = Space(graph, topology), list(everywhere(graph, "", range(8)))
    layers = [members for members in space.classes if len({space._layers[i] for i in members}) == 1]
    assert len(layers) == 2
    for members, device in zip(layers, (0, 5), strict=True):
        for i in members:
            plan[i] = make_config(graph.operators[i], {}, (device,))
    exchanged = 0
    for _, (_, changes) in zip(range(400), Drawing(graph, topology, plan, coarse=True).of("repeated"), strict=False):
        places = [{changes.get(i, plan[i]).devices for i in members} for members in layers]
        exchanged += places == [{(5,)}, {(0,)}]
    assert exchanged > 5


def test_layers_of_one_shape_lie_side_by_side() -> None:
    """The plan of the language model on 4 GPUs: each layer on two of them is 6 % faster than both on all, and either
    layer alone a third slower."""
    graph, topology = recurrent(), two_servers_of_four()
    start = everywhere(graph, "h", range(8))
    drawing, rng, seen = Drawing(graph, topology, start, coarse=True), np.random.Generator(np.random.PCG64(1)), set()
    one, two = (members for members in drawing.space.classes if len({drawing.space._layers[i] for i in members}) == 1)
    parts = drawing.space.parts
    for first, second in (one, two), (two, one):
        for _ in range(100):
            uniforms = rng.random(UNIFORMS)
            uniforms[0], uniforms[1], uniforms[5] = 0.9, (parts.index(first) + 0.5) / len(parts), 0.0
            uniforms[19], uniforms[21] = 1.0, 0.0  # not exchanged
            changes = drawing.changes(uniforms.tolist())
            (a,), (b,) = ({changes[i] for i in members} for members in (first, second))
            assert b == a.on(_next(a.devices))
            seen.add(len(a.devices))
    assert seen >= {1, 2, 4, 8}


def _next(devices: Sequence[int]) -> tuple[int, ...]:
    """The next of 8 devices: those after the last one of neighbours, else the neighbour of each."""
    by = len(devices) if max(devices) - min(devices) + 1 == len(devices) else 1
    return tuple((d + by) % 8 for d in devices)


def test_classes_that_change_together_have_no_operators_in_common() -> None:
    space = Space(four_linear_layers(), two_servers_of_four())
    a, b, c, d = space.leaders
    partners = _partners(space, [(a,), (b,), (a, b), (c, d), (b, c), (a, d)])
    those = [partners.all[first:last].tolist() for first, last in zip(partners.first, partners.last, strict=True)]
    assert those == [[1], [0], [3], [2], [5], [4]]
    partners = _partners(space, [(a, b), (c, d), (d, c)])
    assert partners.all[partners.first[0] : partners.last[0]].tolist() == [1]  # not the third: it is the second


@pytest.mark.parametrize(("devices", "alternate"), [(4, True), (STEPS_TOGETHER_FROM, False)])
def test_steps_of_a_layer_alternate_in_chains_on_few_devices(devices: int, alternate: bool) -> None:
    space = Space(recurrent(), ethernet(devices))
    steps = {i for members in space.classes for i in members if i in space._layers}
    several = [members for members in space.classes if steps & set(members)]
    assert several and all(space.may_alternate(members) is alternate for members in several)
    assert not any(steps & set(members) for members in space.alternating)


def test_layers_of_repeated_blocks_are_classes_of_their_own() -> None:
    graph = repeated_blocks()
    space = Space(graph, ethernet(4))
    named = [{graph.operators[i].name for i in members} for members in space.classes]
    linear = [{op.name for op in graph.operators if op.kind == "linear" and op.name.endswith(end)} for end in "02"]
    assert linear[0] | linear[1] in named and len(linear[0]) == 3
    assert all(len({space.shape(i) for i in members}) == 1 for members in space.classes)


def test_every_second_and_third_member_can_be_polished_together() -> None:
    space = Space(four_linear_layers(), two_servers_of_four())
    (members,) = space.classes
    assert set(space.alternating) == {members[0::2], members[1::2]}


@pytest.mark.parametrize("seed", range(3))
def test_a_split_puts_operators_on_halves_of_their_devices(seed: int) -> None:
    graph, topology = cnn(batch=32, hidden=512), two_servers_of_four()
    axis = graph.operators[0].axes_of("sample")[0]
    start = everywhere(graph, axis, range(8))
    drawing, sides = Drawing(graph, topology, start, coarse=False), set()
    for _, (_, changes) in zip(range(50), drawing.of("split", seed), strict=False):
        for i, config in changes.items():
            if config != start[i]:
                sides.add(config.devices)
                assert len(config.devices) == 4 and config.parts * config.replicas == 4
    assert sides == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_halving_halves_replicas_first_then_the_outermost_degree() -> None:
    graph, topology = four_linear_layers(), two_servers_of_four()
    space, op = Space(graph, topology), graph.operators[0]
    split = make_config(op, {"o": 2, "i": 4}, range(8))
    assert space.half(0, split, 1) == make_config(op, {"i": 4}, range(4, 8))
    replicated = make_config(op, {"o": 4}, range(8))
    assert replicated.replicas == 2 and space.half(0, replicated, 0) == make_config(op, {"o": 4}, range(4))
    single = make_config(op, {}, (3,))
    assert space.half(0, single, 0) == single


def test_devices_are_renamed_along_the_axes_of_the_machine() -> None:
    graph, topology = four_linear_layers(), two_servers_of_four()
    start = everywhere(graph, "o", range(8))
    drawing, seen = Drawing(graph, topology, start, coarse=False), set()
    for _, (_, changes) in zip(range(200), drawing.of("swap"), strict=False):
        seen |= {config.devices for i, config in changes.items() if graph.operators[i].kind == "linear"}
    assert (0, 4, 1, 5, 2, 6, 3, 7) in seen and (1, 0, 2, 3, 4, 5, 6, 7) in seen
    alternatives = {config.devices for config in drawing.space.alternatives(0, start)}
    assert (0, 4, 1, 5, 2, 6, 3, 7) in alternatives and (0, 4) in alternatives


@pytest.mark.parametrize("seed", range(2))
def test_four_wide_layers_on_two_servers_beat_the_plan_of_an_integer_program(seed: int) -> None:
    """An exact integer program (of another tool) splits layers by output features on the transposed mesh and by input
    features on the plain one, in turn. Devices are those of the case, whatever a preset has learned since."""
    graph, topology = four_linear_layers(), two_servers_of_four()
    usual = tuple(device.model_copy(update={"efficiency_full": None}) for device in topology.devices)
    topology = edited(topology, devices=usual)
    op = graph.operators[0]
    transposed = make_config(op, {"o": 4, "i": 2}, (0, 4, 1, 5, 2, 6, 3, 7))
    plain = make_config(op, {"o": 2, "i": 4}, range(8))
    space, costs = Space(graph, topology), Costs(graph, topology)
    plan: dict[int, OperatorConfig] = {}
    linear = [i for i, operator in enumerate(graph.operators) if operator.kind == "linear"]
    for k, i in enumerate(linear):
        plan |= space.follow(i, (transposed, plain)[k % 2])
    integer = Evaluator(graph, topology, costs, Options())(tuple(plan[i] for i in range(len(graph.operators))))
    found = search(graph, topology, costs, proposals=40_000, seed=seed, processes=2)
    assert found.simulation.makespan_s <= 0.98 * integer.time_s
