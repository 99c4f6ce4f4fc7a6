"""Recipes on real ranks: what a process of a gloo group computes and sends is what simulating all rows does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.runtime.recipes.ranks import Ranks
from flexsearch.sync import Group, Simulated, parse_recipe
from tests.ranks import pool
from tests.test_sync import SIZES, START, N, gradient

STEPS, LR = 12, 0.05
HOSTS = {2: (0, 1), 3: (0, 1, 2), 4: (0, 0, 1, 1)}
EVERY = [
    "all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "all-reduce:form=halving-doubling",
    "all-reduce:form=everyone", "server:shards=2", "local-sgd:period=4", "local-sgd:period=2+server", "diloco:period=3",
    "gossip", "ring:what=weights", "gossip:grow=one+threshold:tau=0.6", "local-sgd:period=2+gossip+top-k:k=20",
    "threshold:tau=0.6", "threshold:tau=60", "adaptive-threshold:density=0.1",
    "top-k:density=0.1+momentum-correction:momentum=0.9+warm-up:steps=3", "gtop-k:k=12", "random-k:k=30",
    "server+random-k:k=30", "server+threshold:tau=0.6", "qsgd:bits=3", "gossip+16-bit:type=bf16", "sign",
    "sign:feedback=on", "powersgd:rank=2",
]  # fmt: skip


def trained(text: str, group: Group) -> tuple[Tensor, list[int]]:
    """Weights of the rows of a group after some steps of SGD, and bytes sent in each, of all."""
    recipe = parse_recipe(text)
    weights = torch.from_numpy(START).expand(len(group.ranks), N).clone()
    state, sent = recipe.start(weights, SIZES), []
    for t in range(STEPS):
        rows = [torch.from_numpy(gradient(min(r, 7), weights[k].numpy(), t)) for k, r in enumerate(group.ranks)]
        update, state = recipe.before_update(state, group, torch.stack(rows), SIZES)
        weights, state = recipe.after_update(state, group, weights - LR * update, SIZES)
        sent.append(sum(e.sent for e in group.exchanges) if isinstance(group, Simulated) else group.sent)
    return weights, sent


def _trained(texts: list[str], hosts: tuple[int, ...], workers: int) -> list[tuple[list[float], list[int]]]:
    devices, servers = range(workers), range(workers, dist.get_world_size())
    results = []
    for text in texts:
        weights, sent = trained(text, Ranks(devices, servers, hosts, 60.0))
        results.append((weights[0].tolist(), sent))
    return results


def compare(texts: list[str], size: int, servers: int = 0, tolerance: float = 1e-12) -> None:
    ranks: list[Any] = pool(size + servers).run(_trained, texts, HOSTS[size], size)
    for k, text in enumerate(texts):
        together, sent = trained(text, Simulated(size, HOSTS[size]))
        rows = torch.tensor([rank[k][0] for rank in ranks[:size]], dtype=torch.float64)
        assert float((rows - together).abs().max()) <= tolerance, text
        assert [sum(step) for step in zip(*(rank[k][1] for rank in ranks), strict=True)] == sent, text


def fits(text: str, size: int) -> bool:
    return "halving" not in text or size != 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_computes_and_sends_what_the_simulation_of_all_rows_does(size: int) -> None:
    compare([text for text in EVERY if fits(text, size)], size)


def test_hosts_form_rings_of_their_own() -> None:
    compare(["all-reduce:form=hierarchical"], 4)


def test_dedicated_servers_are_ranks_without_a_replica() -> None:
    texts = ["server:on=devices", "local-sgd:period=2+server:on=devices", "diloco:period=3+server:on=devices",
             "server:on=devices+top-k:k=9", "server:on=devices+threshold:tau=0.6", "server:on=devices+random-k:k=30",
             "server:on=devices+16-bit:type=bf16+warm-up:steps=3"]  # fmt: skip
    compare(texts, 3, servers=1)
    compare([text.replace("on=devices", "shards=2,on=devices") for text in texts], 2, servers=2)


def test_sixteen_bits_are_summed_by_the_backend() -> None:
    """In the order of positions where there are two; in another one where there are more, hence other rounding."""
    compare(["16-bit", "16-bit:type=bf16", "16-bit:feedback=on"], 2)
    compare(["16-bit"], 4, tolerance=STEPS * LR * 4 * 2.0**-10)
