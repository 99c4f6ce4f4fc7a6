"""A gradient that was released too early is an error: nothing trains with zeros in its place."""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from flexsearch.cost import Costs
from flexsearch.graph import Box
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent
from flexsearch.lower import Lowered, Move, lower
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.gradients import Gradients
from flexsearch.runtime.program import Finish, Key, Program, Start, compile_program
from flexsearch.runtime.wire import Wire
from flexsearch.search.space import Space
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.baselines import baseline, baselines
from flexsearch.topology import Topology
from tests.small_models import case
from tests.test_numerics import _imported

RANKS = 4
KEY = Key("edge", 1)


def _zero() -> Tensor:
    return torch.zeros(2)


def test_gradients_add_up_until_they_are_read() -> None:
    gradients, one = Gradients(), torch.ones(2)
    gradients.add(KEY, one)
    gradients.add(KEY, one)
    assert gradients.read(KEY, _zero).tolist() == [2, 2] and one.tolist() == [1, 1]
    with pytest.raises(AssertionError, match="grows after it has been used"):
        gradients.add(KEY, one)


def test_a_gradient_that_never_was_is_zero_and_one_that_was_released_an_error() -> None:
    gradients = Gradients()
    assert gradients.read(KEY, _zero).tolist() == [0, 0] and gradients.take(Key("home", "x")) is None
    gradients.release(KEY)
    assert gradients.tensors() == []
    for key in (KEY, Key("home", "x")):
        with pytest.raises(AssertionError, match="read after it has been released"):
            gradients.read(key, _zero)
        with pytest.raises(AssertionError, match="grows after it has been used"):
            gradients.add(key, torch.ones(2))


class Alone(Wire):
    """One rank without the others: it sends nothing, and zeros arrive."""

    def __init__(self, lowered: Lowered, rank: int) -> None:
        self.lowered, self.rank, self.device = lowered, rank, torch.device("cpu")

    def begin(self) -> None: ...

    def start(self, task: int, sources: object) -> None: ...

    def wait(self, task: int) -> None: ...

    def end(self) -> None: ...

    def _zeros(self, task: int, box: Box) -> Tensor:
        what = self.lowered.tasks.communication[task]
        assert what is not None
        key = what.members[0].key
        name = self.lowered.weights[key].tensor if what.purpose == "synchronise" else self.lowered.edges[key].tensor
        return torch.zeros(extent(box), dtype=dtype_of(self.lowered.graph.tensor[name].dtype))

    def reduced(self, task: int, member: int) -> Tensor:
        what = self.lowered.tasks.communication[task]
        assert what is not None
        return self._zeros(task, cast(Box, what.members[member].what.box))

    def arrived(self, task: int, member: int) -> list[tuple[Move, Tensor]]:
        what = self.lowered.tasks.communication[task]
        assert what is not None
        phase = what.members[member].reshard.phases[what.members[member].phase]
        return [
            (move, self._zeros(task, move.box))
            for move in what.members[member].what.moves
            if phase.destination[move.destination].device == self.rank
        ]


def _engine(name: str, program: Program) -> Engine:
    """A rank's engine without its neighbours."""
    lowered, model = program.lowered, case(name).model
    whole = {**_imported(name).constants, **dict(model.named_buffers())}
    weights = {
        w.tensor: torch.nn.Parameter(torch.ones(extent(entry.box), dtype=torch.float64))
        for w in lowered.weights
        for entry in w.plan.storage
        if entry.device == program.device
    }
    fixed = {key: (tuple((0, n) for n in x.shape), x.clone()) for key, x in whole.items()}
    return Engine(
        program, Alone(lowered, program.device), weights, fixed, lambda: None,
        KernelContext(seed=0, device=torch.device("cpu")),
    )  # fmt: skip


def _inputs(name: str) -> dict[str, tuple[Box, Tensor]]:
    imported, made = _imported(name), case(name)
    names = (*imported.input_names, *imported.target_names)
    tensors = (*made.inputs, made.targets)
    return {key: (tuple((0, n) for n in x.shape), x) for key, x in zip(names, tensors, strict=True)}


@cache
def _lowered(name: str) -> list[Lowered]:
    """Baselines, and plans anywhere in the space."""
    graph, topology = _imported(name).graph, Topology.load(f"ethernet-1g:{RANKS}")
    rng, space = np.random.Generator(np.random.PCG64(3)), Space(graph, topology)
    names = [op.name for op in graph.operators]
    plans = list(baselines(graph, topology).values())
    for bucket in (1, 1000, 25 * 2**20):
        chosen = dict(zip(names, space.random_plan(rng), strict=True))
        plans.append(Strategy.make(graph, topology, chosen, Options(bucket_bytes=bucket)))
    return [lower(graph, plan, topology, Costs(graph, topology)) for plan in plans]


NAMES = ["mlp", "decoder"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_live_until_their_last_reader(name: str) -> None:
    for lowered in _lowered(name):
        for device in range(RANKS):
            _engine(name, compile_program(lowered, device)).step(_inputs(name))


@pytest.mark.parametrize("name", NAMES)
def test_one_released_an_instruction_too_early_is_an_error(name: str) -> None:
    tried = 0
    for lowered in _lowered(name):
        program = compile_program(lowered, RANKS - 1)
        for position, keys in program.last_gradient_use.items():
            if isinstance(program.instructions[position], Start):
                early = {**program.last_gradient_use, position: []}
                early[position - 1] = [*early.get(position - 1, []), keys[0]]
                wrong = compile_program(lowered, RANKS - 1)
                wrong.__dict__["last_gradient_use"] = early
                with pytest.raises(AssertionError, match="after it has been"):
                    _engine(name, wrong).step(_inputs(name))
                tried += 1
                break
    assert tried > 3


def test_a_gradient_goes_when_it_has_been_sent_though_a_part_of_it_stays() -> None:
    graph, topology = _imported("mlp").graph, Topology.load(f"ethernet-1g:{RANKS}")
    lowered = lower(graph, baseline("fsdp", graph, topology), topology, Costs(graph, topology))
    for device in range(RANKS):
        program = compile_program(lowered, device)
        released = {key: position for position, keys in program.last_gradient_use.items() for key in keys}
        finished = [k for k, i in enumerate(program.instructions) if isinstance(i, Finish)]
        sharded = [
            Key("edge", edge)
            for weight in lowered.weights
            if len({entry.box for entry in weight.plan.storage}) > 1
            for edge in weight.edges
        ]
        assert sharded
        for key in sharded:
            assert isinstance(program.instructions[released[key]], Start) and released[key] < max(finished)
