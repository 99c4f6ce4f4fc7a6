"""Workers that go by themselves on ranks, and the servers that they meet at."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import Imported
from flexsearch.runtime.parallel import distribute
from flexsearch.runtime.recipes.served import Shard
from flexsearch.sync.record import Staleness
from tests.ranks import pool
from tests.test_recipe_steps import (
    BATCH,
    BETA,
    LR,
    STEPS,
    Net,
    batch,
    groups_of,
    imported,
    plan,
    read,
    replicas_of,
    stepped,
)  # fmt: skip

Answer = tuple[list[float], dict[str, Tensor], int, Staleness | None]


def _served(file: str, traced: Imported, momentum: float, pauses: list[float], in_turn: bool) -> Answer:
    """Losses, weights, bytes sent, and what the server saw; with a pause before each step of a rank, or one rank after
    the other in each round."""
    step, _ = stepped(file, traced, momentum, one_call=True)
    losses, rank, size = [], dist.get_rank(), dist.get_world_size()
    for number in range(STEPS):
        for turn in range(size) if in_turn else (rank,):
            if turn == rank:
                time.sleep(pauses[rank])
                losses.append(step.step(*batch(number)).item())
            if in_turn:
                dist.barrier()
    state = step.state_dict()
    sent = sum(member.sent for member in step.synchronisation.members)
    shards = [member.shard for member in step.synchronisation.members]  # type: ignore[attr-defined]
    step.close()
    return losses, state, sent, next((shard.staleness for shard in shards if shard is not None), None)


def served(recipe: str, momentum: float = 0.0, pauses: tuple[float, ...] = (0, 0, 0, 0), in_turn: bool = False,
           ranks: int = 2, pieces: int = 1, devices: int = 0) -> list[Answer]:  # fmt: skip
    file = plan(recipe, replicas=2, pieces=pieces, devices=devices)
    answers: list[Answer] = pool(ranks).run(_served, file, imported(), momentum, list(pauses), in_turn)
    first = answers[0][1]
    assert all(torch.equal(first[name], other[1][name]) for other in answers for name in first)
    return answers


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [("stale:bound=0+server", 2), ("stale:bound=0+server:shards=2", 2), ("stale:bound=0+server:on=devices", 3),
     ("stale:bound=0+server:shards=2+top-k:density=1", 2), ("stale:bound=0+server+threshold:tau=1e-300", 2),
     ("stale:bound=0+server:on=devices+random-k:density=1", 3)],
)  # fmt: skip
def test_a_bound_of_zero_is_exact_data_parallelism(recipe: str, devices: int) -> None:
    answers = served(recipe, ranks=devices, devices=devices)
    losses, state, _ = replicas_of((), 1, 0.0)
    assert [(a + b) / 2 for a, b in zip(answers[0][0], answers[1][0], strict=True)] == pytest.approx(losses, rel=1e-9)
    for name, value in state.items():
        assert float((answers[0][1][name] - value).abs().max()) <= 1e-9


def test_a_worker_that_wakes_up_late_gets_the_weights_of_the_moment_at_which_it_may_begin() -> None:
    (group,) = groups_of(plan("stale:bound=0+server"))
    shard = Shard(group, 0, lambda weights: torch.optim.SGD(weights, lr=1.0), torch.zeros(1, dtype=torch.float64),
                  timeout_s=30, tolerate=False)  # fmt: skip
    gradient = group.recipe.compression.encode(torch.ones(1, group.sizes.n, dtype=torch.float64), 0, (0,))

    def one_step() -> float:
        weights = shard.push(0, gradient)
        shard.leave(0)
        return float(weights[0])

    with ThreadPoolExecutor() as threads:
        slow = threads.submit(one_step)
        while shard.steps[0] == 0:
            time.sleep(0.001)
        with shard._changed:  # the other thread cannot go on before worker 1 waits in its second step
            shard.push(1, gradient)
            assert float(shard.push(1, gradient)[0]) == -1.5
        assert slow.result() == -1


def test_workers_may_be_split_over_several_ranks() -> None:
    answers = served("stale:bound=0+server", ranks=4, pieces=2)
    _, state, _ = replicas_of((), 1, 0.0)
    for name, value in state.items():
        assert float((answers[0][1][name] - value).abs().max()) <= 1e-9


def test_gradients_update_in_the_order_in_which_they_arrive() -> None:
    """Workers that step in turn: each gradient is of the weights that its worker got a round ago."""
    server = Net()
    optimizer = torch.optim.SGD(server.parameters(), lr=LR, momentum=BETA)
    copies = [Net(), Net()]
    losses: list[list[float]] = [[], []]
    for number in range(STEPS):
        x, target = batch(number)
        for k, copy in enumerate(copies):
            half = slice(k * BATCH // 2, (k + 1) * BATCH // 2)
            value = F.cross_entropy(copy(x[half]), target[half])
            losses[k].append(value.item())
            gradients = torch.autograd.grad(value, list(copy.parameters()))
            for parameter, gradient in zip(server.parameters(), gradients, strict=True):
                parameter.grad = gradient / 2
            optimizer.step()
            copy.load_state_dict(server.state_dict())
    answers = served("async+server", momentum=BETA, in_turn=True)
    for k, (own, state, _, _) in enumerate(answers):
        assert own == pytest.approx(losses[k], rel=1e-9)
        for name, value in server.state_dict().items():
            assert float((state[name] - value).abs().max()) <= 1e-9
    staleness = answers[0][3]
    assert staleness is not None and (staleness.most, staleness.lead) == (1, 1)


@pytest.mark.parametrize(("recipe", "most"), [("stale:bound=2+server", 2), ("stale:bound=1+server", 1)])
def test_no_worker_is_further_ahead_than_its_bound(recipe: str, most: int) -> None:
    staleness = served(recipe, pauses=(0.0, 0.2))[0][3]
    assert staleness is not None and staleness.lead == most


def test_without_a_bound_fast_workers_run_ahead() -> None:
    staleness = served("async+server", pauses=(0.0, 0.2))[0][3]
    assert staleness is not None and staleness.lead > 2


def test_servers_send_and_receive_what_is_told() -> None:
    """A worker pushes 8 (k values, k indices of 4 bytes) and pulls 8 n; on its own rank nothing moves."""
    (group,) = groups_of(plan("async+server"))
    n = group.sizes.n
    answers = served("async+server:shards=1+top-k:k=9")
    assert sum(sent for _, _, sent, _ in answers) == STEPS * (9 * (8 + 4) + 8 * n)
    answers = served("async+server:on=devices", ranks=3, devices=3)
    assert sum(sent for _, _, sent, _ in answers) == STEPS * 2 * (8 * n + 8 * n)


def _refused(file: str, other: str, traced: Imported) -> list[str]:
    refusals = []

    def refused(call: Any) -> None:
        with pytest.raises(RuntimeFailure) as refusal:
            call()
        refusals.append(str(refusal.value))

    refused(lambda: distribute(Net(), traced, read(file)))
    step, _ = stepped(file, traced, one_call=True)
    refused(lambda: step(batch(0)))
    step.close()
    refused(lambda: stepped(other, traced, one_call=True))
    return refusals


def test_what_does_not_fit_workers_that_go_by_themselves_is_refused() -> None:
    mixed = plan({"first.*": "async+server", "last.*": "gossip"})
    for no_optimizer, two_calls, waits in pool(2).run(_refused, plan("async+server"), mixed, imported()):
        assert "the optimizer runs at the server" in no_optimizer and "parallelize(optimizer=" in no_optimizer
        assert "Call step.step(inputs, targets)" in two_calls
        assert "workers wait for each other to synchronise 'last" in waits
    partly: list[str] = pool(2).run(_refused_one, plan({"first.*": "async+server"}), imported())
    assert all("wait for each other in every step" in refusal for refusal in partly)


def _refused_one(file: str, traced: Imported) -> str:
    with pytest.raises(RuntimeFailure) as refusal:
        stepped(file, traced, one_call=True)
    return str(refusal.value)
