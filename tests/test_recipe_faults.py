"""A worker or a server that dies: the others end with a message, or go on where that is tolerated."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection, wait

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexsearch.errors import FlexsearchError, RuntimeFailure
from flexsearch.graph.importer import Imported
from flexsearch.runtime.launch import free_port
from flexsearch.runtime.parallel import distribute
from tests.ranks import context, pool
from tests.test_recipe_steps import Net, batch, imported, plan, read

STEPS, DIES = 6, 2
TIMEOUT_S, PAUSE_S = 60.0, 0.5


def _lose(rank: int, port: int, file: str, traced: Imported, who: int, tolerate: bool, answer: Connection) -> None:
    """Train; rank ``who`` dies after two steps. The others answer with how far they came, and why no further."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    step = distribute(
        Net(), traced, read(file), make, example=(*batch(0, 6), F.cross_entropy), timeout_s=TIMEOUT_S, tolerate=tolerate
    )
    steps, why = 0, ""
    try:
        for number in range(STEPS):
            if rank == who and number == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            step.step(*batch(number, 6))
            time.sleep(0 if rank == who else PAUSE_S)  # so that those that go by themselves have not done all before
            steps += 1
        step.close()
        assert all(torch.isfinite(p).all() for p in step.parameters())
    except RuntimeFailure as error:
        why = str(error)
    answer.send((rank, steps, why))
    os._exit(0)  # as soon as there is something to say: nobody waits for this one


def lose(recipe: str, who: int, tolerate: bool, replicas: int = 3) -> dict[int, tuple[int, str]]:
    """By rank that is left: steps, and why no more."""
    traced, file = imported(6), plan(recipe, replicas, devices=3, samples=6)
    port, (ours, theirs) = free_port(), context.Pipe()
    ranks = [
        context.Process(target=_lose, args=(rank, port, file, traced, who, tolerate, theirs)) for rank in range(3)
    ]
    answers: dict[int, tuple[int, str]] = {}
    try:
        for process in ranks:
            process.start()
        while len(answers) < 2:
            assert wait([ours], 2 * TIMEOUT_S), f"only {sorted(answers)} answered"
            rank, steps, why = ours.recv()
            answers[rank] = steps, why
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return answers


@pytest.mark.parametrize(
    ("recipe", "replicas", "who"),
    [
        ("gossip", 3, 1), ("top-k:density=0.5", 3, 2), ("async+server", 3, 1), ("async+server", 3, 0),
        ("server:on=devices", 2, 2), ("async+server:on=devices", 2, 2),
    ],
)  # fmt: skip
def test_a_worker_or_a_server_that_dies_ends_the_others_with_a_message(recipe: str, replicas: int, who: int) -> None:
    for steps, why in lose(recipe, who, False, replicas).values():
        assert why and "rank" in why and steps < STEPS


@pytest.mark.parametrize("recipe", ["gossip", "ring:what=weights", "async+server"])
def test_where_it_is_tolerated_the_others_go_on(recipe: str) -> None:
    assert lose(recipe, 2, True) == {0: (STEPS, ""), 1: (STEPS, "")}


def _refused(file: str, traced: Imported) -> str:
    with pytest.raises(FlexsearchError) as refusal:
        distribute(Net(), traced, read(file), tolerate=True)
    return str(refusal.value)


def test_what_needs_the_mean_of_all_tolerates_nothing() -> None:
    for recipe in ("top-k:density=0.5", "local-sgd:period=2"):
        for refusal in pool(2).run(_refused, plan(recipe), imported()):
            assert "it needs the mean of all" in refusal and "gossip" in refusal
