"""A rank that holds one row computes with the same functions what the simulation of all rows does: here each rank is a
thread, which knows of the others only what is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsearch.sync import Group, Payload, Simulated, parse_recipe
from flexsearch.sync.exchange import Source
from tests.test_sync import HOSTS, SIZES, START, N, P, gradient

STEPS, LR = 15, 0.05


class Mail:
    """What all ranks put in, for all to take out."""

    def __init__(self) -> None:
        self._barrier, self._put = threading.Barrier(P), [None] * P

    def swap(self, rank: int, thing: Any) -> list[Any]:
        self._put[rank] = thing
        self._barrier.wait(60)
        everything = list(self._put)
        self._barrier.wait(60)
        return everything


class OneRank:
    """The group as one of its ranks sees it."""

    size, hosts = P, HOSTS

    def __init__(self, rank: int, mail: Mail) -> None:
        self.ranks, self._mail = (rank,), mail

    def _swap(self, thing: Any) -> list[Any]:
        return self._mail.swap(self.ranks[0], thing)

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._swap(x)
        if x.element_size() > 2:
            return torch.cat([first, *others]).sum(0, keepdim=True)
        for other in others:
            first = first + other
        return first

    def all_gather(self, payload: Payload) -> Payload:
        return joined(self._swap(payload))

    def receive(self, payload: Payload, source: Source) -> Payload:
        sender, everything = source[self.ranks[0]], self._swap(payload)
        return payload if sender is None else everything[sender]

    def mix(self, payload: Payload, weights: Any, decode: Callable[[Payload], Tensor]) -> Tensor:
        everything, own = self._swap(payload), weights[self.ranks[0]]
        return sum((share * decode(everything[a]) for a, share in enumerate(own) if share), torch.zeros(1, 1))

    def serve(
        self, shards: Sequence[Payload], owners: Sequence[int], merge: Callable[[int, Payload], Tensor],
        like: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        pushed, rank = self._swap(shards), self.ranks[0]
        merged = {j: merge(j, joined([s[j] for s in pushed])) for j, o in enumerate(owners) if o % P == rank}
        everything = self._swap(merged)
        return [everything[owner % P][j] for j, owner in enumerate(owners)]


def joined(payloads: Sequence[Payload]) -> Payload:
    """All rows; those of different lengths are filled up."""
    most = [max(p.parts[k].shape[1] for p in payloads) for k in range(len(payloads[0].parts))]
    parts = tuple(
        torch.cat([torch.nn.functional.pad(p.parts[k], (0, size - p.parts[k].shape[1])) for p in payloads])
        for k, size in enumerate(most)
    )
    lengths = [p.length for p in payloads if p.length is not None]
    return replace(payloads[0], parts=parts, length=torch.cat(lengths) if lengths else None)


def trained(recipe: str, group: Group) -> Tensor:
    """Weights of the rows of a group after some steps of SGD."""
    parsed = parse_recipe(recipe)
    weights = torch.from_numpy(START).expand(len(group.ranks), N).clone()
    state = parsed.start(weights, SIZES)
    for t in range(STEPS):
        rows = [torch.from_numpy(gradient(r, weights[k].numpy(), t)) for k, r in enumerate(group.ranks)]
        update, state = parsed.before_update(state, group, torch.stack(rows), SIZES)
        weights, state = parsed.after_update(state, group, weights - LR * update, SIZES)
    return weights


@pytest.mark.parametrize(
    "recipe",
    [
        "all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "all-reduce:form=halving-doubling",
        "all-reduce:form=everyone", "all-reduce:form=hierarchical", "server:shards=3", "server:shards=2,on=devices",
        "local-sgd:period=4", "diloco:period=3", "gossip", "ring:what=weights", "gossip:grow=one+threshold:tau=0.6",
        "local-sgd:period=2+gossip+top-k:k=20", "threshold:tau=0.6", "adaptive-threshold:density=0.1",
        "top-k:density=0.1+momentum-correction:momentum=0.9+warm-up:steps=3", "gtop-k:k=12", "random-k:k=30",
        "server+random-k:k=30", "qsgd:bits=3", "16-bit", "gossip+16-bit:type=bf16", "sign", "sign:feedback=on",
        "powersgd:rank=2",
    ],
)  # fmt: skip
def test_one_row_on_each_rank_is_all_rows_in_one_process(recipe: str) -> None:
    mail = Mail()
    with ThreadPoolExecutor(P) as pool:
        rows = list(pool.map(lambda rank: trained(recipe, OneRank(rank, mail)), range(P)))
    together = trained(recipe, Simulated(P, HOSTS))
    assert float((torch.cat(rows) - together).abs().max()) <= 1e-10
