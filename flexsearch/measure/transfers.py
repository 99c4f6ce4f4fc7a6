"""Transfers between the ranks of a process group, timed, as the runtime makes them (see ``runtime.wire``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.directions import Directions
from flexsearch.measure.fit import Pair, processors
from flexsearch.measure.machine import facts

T = TypeVar("T")
TIMEOUT: Final = timedelta(minutes=2)
Meanwhile = Callable[[], object]
Finish = Callable[[list[Tensor]], Tensor]


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


FINISH: Final[Mapping[str, Finish]] = {"reduce_scatter": _sum, "all_gather": torch.cat, "all_to_all": torch.cat}
"""What a rank does with its own part and the others when they are there; gathered parts are put into one tensor."""


class Transfers:
    """Of one probe. Every method is called by all ranks, in the same order; what is gathered is the same on all."""

    def __init__(self, backend: Literal["gloo", "nccl"]) -> None:
        self.backend = backend
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        # NCCL's barrier and gathering would run on the device; figures go round by CPU.
        self.control = dist.new_group(backend="gloo") if backend == "nccl" else dist.group.WORLD
        everyone = self.gather(facts(self.device))
        apart = backend == "gloo" and len(set(processors(everyone))) == self.size
        self.ways = Directions([fact.place for fact in everyone] if apart else None, TIMEOUT)
        self.tag = 0
        self.packing_s = self.copying_s = 0.0
        """Of the last ``move`` or ``all_reduce``: processor seconds for which this thread put together what it sent,
        and with them those for what came."""
        self.busy_s = self.waited_s = 0.0
        """Of the last communication beside computations, on this rank: seconds of an all-reduce, and for which it
        waited after it had computed."""

    def gather(self, value: T) -> list[T]:
        """The value of every rank."""
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.control)
        return everyone  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def synchronize(self) -> None:
        """Wait for the device, if it works by itself."""
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def swap(self, sizes: Mapping[Pair, int]) -> dict[Pair, float]:
        """Send so many bytes both ways between the ranks of each pair; seconds by pair."""
        mine = self.send([(a, b, n) for (i, j), n in sizes.items() for a, b in ((i, j), (j, i))])
        seconds = self.gather(mine)
        return {(i, j): max(seconds[i], seconds[j]) for i, j in sizes}

    def send(
        self, moves: Sequence[tuple[int, int, int]], finish: Finish | None = None, meanwhile: Meanwhile | None = None
    ) -> float:  # fmt: skip
        """Carry out the messages (source, destination, bytes) at once; seconds that it takes this rank, with ``finish``
        of what it receives. ``meanwhile``: what it does until it waits for them."""
        outgoing = {j: torch.ones(n // 4, device=self.device) for i, j, n in moves if i == self.rank}
        return self.move(outgoing, {i: n for i, j, n in moves if j == self.rank}, finish, meanwhile)

    def move(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], finish: Finish | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> float:  # fmt: skip
        """Send tensors and receive so many bytes, by peer; seconds. Receives are posted before the clock starts, as a
        step of the runtime posts its receives at its start. What is sent is put together before, too, in a form that is
        made of messages: that takes no time from the network."""
        self.tag += 1
        # Filled, as memory that was never written to is none yet: a rank's buffers have been used in earlier steps.
        received = {i: torch.ones(n // 4, device=self.device) for i, n in incoming.items()}
        own = torch.ones(max(incoming.values(), default=0) // 4, device=self.device) if finish else torch.empty(0)
        works: list[dist.Work | None] = []
        if self.backend == "gloo":
            works = [
                dist.irecv(tensor, peer, self.ways.group(peer, self.rank, tensor.nbytes), tag=self.tag)
                for peer, tensor in received.items()
            ]
        self.synchronize()
        self.packing_s = self.copying_s = 0.0
        if finish:
            outgoing = self.packed(outgoing)
        self.barrier()
        began = time.perf_counter()
        if self.backend == "gloo":
            works += [
                dist.isend(tensor, peer, self.ways.group(self.rank, peer, tensor.nbytes), tag=self.tag)
                for peer, tensor in outgoing.items()
            ]
        elif outgoing or received:
            works += dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received.items()]
                + [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in outgoing.items()]
            )
        if meanwhile is not None:
            meanwhile()
        computed = time.perf_counter()
        for work in works:
            if work is not None:
                work.wait()
        self.waited_s, arrived = time.perf_counter() - computed, time.thread_time()
        if finish and received:
            finish([own, *received.values()])
            self.copying_s += time.thread_time() - arrived
        self.synchronize()
        return time.perf_counter() - began

    def packed(self, outgoing: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies of tensors in memory that is new, as ranks put together what they send."""
        began = time.thread_time()
        copies = {peer: tensor.clone() for peer, tensor in outgoing.items()}
        self.packing_s = self.copying_s = time.thread_time() - began
        return copies

    def all_reduce(self, nbytes: int, pack: bool = False, meanwhile: Meanwhile | None = None) -> float:
        """Seconds of the backend's all-reduce of so many bytes, on the slowest rank. ``pack`` them before;
        ``meanwhile``: what ranks do until they wait for it."""
        tensor = torch.ones(max(1, nbytes // 4), device=self.device)
        if pack:
            tensor = self.packed({0: tensor})[0]
        self.barrier()
        began = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if meanwhile is not None:
            ended: list[float] = []
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
            meanwhile()
            computed = time.perf_counter()
            work.wait()
            self.waited_s = time.perf_counter() - computed
            self.busy_s = max(ended, default=time.perf_counter()) - began
        work.wait()
        self.synchronize()
        return max(self.gather(time.perf_counter() - began))

    def call(self, form: str, nbytes: int) -> float:
        """Seconds of the backend's own collective, which brings so many bytes from each rank to each, on the slowest
        rank."""
        part, whole = (torch.ones(n * max(1, nbytes // 4), device=self.device) for n in (1, self.size))
        # torch 2.13 gave two of them other names.
        gather_all: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter_sums: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self.synchronize()
        self.barrier()
        began = time.perf_counter()
        if form == "all_gather":
            gather_all(whole, part)
        elif form == "reduce_scatter":
            scatter_sums(part, whole)
        else:
            dist.all_to_all_single(torch.empty_like(whole), whole)
        self.synchronize()
        return max(self.gather(time.perf_counter() - began))
