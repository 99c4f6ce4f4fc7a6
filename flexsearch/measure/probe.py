"""``flexsearch probe``: measures the cluster it runs on and describes it as a topology.

Every rank of a process group calls :func:`probe`. Transfers are made as the runtime makes them (see ``transfers``):
direct messages whose receives are posted before anything is sent, and the backend's own all-reduce. What is measured:

1. each device by itself, ranks that share a processor one after the other;
2. each pair of ranks while nothing else moves: the time for a few bytes, and the slope of time over bytes between two
   large sizes, which neither start-up costs nor the buffers of a rate-limited network bias;
3. hosts with several ranks, while all of them talk to other hosts, to see whether the network card is the bottleneck;
4. on gloo, what all-reduces of a few bytes cost ranks that compute, and wait for them or go on;
5. each form of communication among all ranks, while they wait for it; ``fit`` turns the ratio to the ideal time into a
   factor; and on gloo while they compute: what it takes from that, and how much longer an all-reduce takes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.allocator import keep_freed_memory
from flexsearch.errors import RuntimeFailure
from flexsearch.measure.beside import PARTS, Bucket, Network
from flexsearch.measure.fit import PAUSE_BYTES, FormTime, Measured, Pair, fit, messages, processors
from flexsearch.measure.machine import Compute, Facts, facts, measure
from flexsearch.measure.transfers import FINISH, Meanwhile, Transfers
from flexsearch.ranks import prefer_throughput, rendezvous
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS, ONE_CALL

MEBI = 2**20
MOST: Final = {"gloo": 24, "nccl": 256}
"""MiB that a measured transfer moves at most. gloo: about a bucket of gradients."""
MORE: Final = 5
MORE_S: Final = 0.6
"""So many times as often as other things a form is measured, unless that takes longer."""
BESIDE: Final = (2, 8)
"""Ranks compute so many times as long as a communication takes that takes time from it, as it is slower then; the
second where it has not come to its end in that time."""


@dataclass(frozen=True)
class Effort:
    """How long is measured. ``compute_s``: each device; ``transfer_s``: each large transfer; ``pairs``: so many pairs
    of ranks are measured one by one; of more, several at a time."""

    compute_s: float
    transfer_s: float
    repeats: int
    pairs: int


QUICK = Effort(compute_s=1.5, transfer_s=0.12, repeats=3, pairs=16)
THOROUGH = Effort(compute_s=5.0, transfer_s=0.3, repeats=5, pairs=16)


def main_from_env(
    output: str | None, *, quick: bool = False, backend: str | None = None, timeout_s: float = 120.0
) -> Topology:
    """Join the ranks of torchrun's environment, probe, and write the topology to ``output`` on rank 0.

    ``backend``: gloo or nccl; default nccl where there are CUDA devices. Raises RuntimeFailure if the ranks cannot be
    joined or one of them dies.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeFailure(
            f"the probe runs on every rank, but {', '.join(missing)} is not set",
            "Start it on each host with `torchrun --nproc-per-node N -m flexsearch.cli probe -o FILE`, or on this "
            "machine alone with `flexsearch probe -n N -o FILE`.",
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeFailure(
            "nccl connects CUDA devices, and PyTorch sees none here", "Leave out --backend, or give gloo."
        )
    mine = not dist.is_initialized()
    try:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if mine:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **rendezvous())
    except (RuntimeError, ValueError) as error:
        raise RuntimeFailure(
            f"the ranks could not be connected: {error}",
            "Check that every rank was started and can reach MASTER_ADDR at MASTER_PORT.",
        ) from error
    try:
        topology = probe(quick=quick)
        if output is not None and dist.get_rank() == 0:
            topology.save(output)
        return topology
    finally:
        if mine:
            dist.destroy_process_group()


def probe(*, quick: bool = False, name: str = "probed") -> Topology:
    """Measure the ranks of the default process group; all must call it, all get the same topology, rank r is device r.

    Takes about 10 to 30 s if ``quick``, about a minute otherwise. Raises RuntimeFailure if a rank dies meanwhile.
    """
    if not dist.is_initialized():
        raise RuntimeFailure(
            "the probe needs a process group", "Call torch.distributed.init_process_group first, on every rank."
        )
    backend = dist.get_backend()
    if backend not in ("gloo", "nccl"):
        raise RuntimeFailure(
            f"the probe cannot measure backend {backend!r}", "Make the process group with gloo or nccl."
        )
    if backend == "gloo":  # as ranks do that run a plan
        prefer_throughput()
        keep_freed_memory()
    try:
        return _Probe("nccl" if backend == "nccl" else "gloo", QUICK if quick else THOROUGH).run(name)
    except RuntimeError as error:
        raise RuntimeFailure(
            f"rank {dist.get_rank()}: the probe failed, perhaps because another rank died ({error})",
            "Look at the output of the other ranks, then start all ranks again.",
        ) from error


class _Probe:
    """One run. Every method is called by all ranks, in the same order, and all see the same gathered figures."""

    def __init__(self, backend: Literal["gloo", "nccl"], effort: Effort) -> None:
        self.backend, self.effort = backend, effort
        self.transfers = Transfers(backend)
        self.rank, self.size = self.transfers.rank, self.transfers.size
        self.gather = self.transfers.gather
        self.network = Network()

    def run(self, name: str) -> Topology:
        """Measure everything and fit it."""
        all_facts = self.gather(facts(self.transfers.device))
        compute = self.measure_compute(all_facts)
        latency: dict[Pair, float] = {}
        bandwidth: dict[Pair, float] = {}
        together: dict[str, float] = {}
        forms: dict[str, FormTime] = {}
        ring = pause = overlapped = 0.0
        if self.size > 1:
            self.transfers.all_reduce(8)  # connections are made on first use
            for pairs in schedule([f.place for f in all_facts], self.effort.pairs):
                latency |= self.pair_latency(pairs)
                bandwidth |= self.pair_bandwidth(pairs)
            together = self.all_places(all_facts, bandwidth)
            ring = _undisturbed([self.transfers.all_reduce(8) for _ in range(20)])
            pause, overlapped = self.pause() if self.backend == "gloo" else (0.0, 0.0)
            forms = {form: self.form(form, all_facts, min(bandwidth.values())) for form in FORMS}
        tensor_s = self.tensors() if self.size > 1 and self.backend == "gloo" else {}
        measured = Measured(
            self.backend, all_facts, compute, latency, bandwidth, together, ring, pause, overlapped, forms, tensor_s
        )
        boxed = [fit(measured, name, _source(measured)).model_dump_json() if self.rank == 0 else None]
        dist.broadcast_object_list(boxed, 0, group=self.transfers.control)
        assert boxed[0] is not None
        return Topology.model_validate_json(boxed[0])

    def measure_compute(self, all_facts: Sequence[Facts]) -> list[Compute]:
        """Each device alone on its processor, as the simulator takes it, but beside the other processors of its
        machine, as it will work."""
        shared = processors(all_facts)
        turn = [shared[:rank].count(shared[rank]) for rank in range(self.size)]
        mine: Compute | None = None
        for t in range(max(turn) + 1):
            self.transfers.barrier()
            if turn[self.rank] == t:
                mine = measure(self.transfers.device, self.effort.compute_s)
        assert mine is not None
        return self.gather(mine)

    # ---- what is measured between ranks

    def pair_latency(self, pairs: Sequence[Pair], rounds: int = 40) -> dict[Pair, float]:
        """Seconds from the start of sending a few bytes both ways to their arrival, by pair."""
        peer = _peers(pairs).get(self.rank)
        peers, taken = [] if peer is None else [peer], []
        for _ in range(rounds):
            small = torch.zeros(8, dtype=torch.uint8, device=self.transfers.device)
            taken.append(self.transfers.move(dict.fromkeys(peers, small), dict.fromkeys(peers, 8)))
        seconds = self.gather(_undisturbed(taken))
        return {(i, j): max(seconds[i], seconds[j]) for i, j in pairs}

    def pair_bandwidth(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """B/s of each pair in each direction, both at once: the slope of time over bytes from a quarter of a large size
        to the whole of it."""
        rate = {pair: MEBI / seconds for pair, seconds in self.transfers.swap(dict.fromkeys(pairs, MEBI)).items()}
        for share in (4, 1):  # approach the size that takes the wanted time; the first guess is mostly start-up
            large = {pair: _size(b * self.effort.transfer_s / share, MOST[self.backend]) for pair, b in rate.items()}
            rate = {pair: large[pair] / seconds for pair, seconds in self.transfers.swap(large).items()}
        whole = {pair: n / rate[pair] for pair, n in large.items()}
        quarter = {pair: float("inf") for pair in pairs}
        for _ in range(self.effort.repeats):
            for sizes, best in (({p: n // 4 for p, n in large.items()}, quarter), (large, whole)):
                for pair, seconds in self.transfers.swap(sizes).items():
                    best[pair] = min(best[pair], seconds)
        result = {}
        for pair, n in large.items():
            mean, more = n / whole[pair], whole[pair] - quarter[pair]
            slope = (n - n // 4) / more if more > 0 else 0.0
            # Start-up and buffers are a few hundredths of a large transfer; what is beyond is disturbance.
            result[pair] = min(max(slope, 0.95 * mean), 1.05 * mean)
        return result

    def all_places(self, all_facts: Sequence[Facts], bandwidth: Mapping[Pair, float]) -> dict[str, float]:
        """B/s out of each place of several ranks while each of its ranks sends to the next place."""
        places: dict[str, list[int]] = {}
        for rank, fact in enumerate(all_facts):
            places.setdefault(fact.place, []).append(rank)
        if len(places) < 2 or len(places) == self.size:
            return {}
        across = min(b for (i, j), b in bandwidth.items() if all_facts[i].place != all_facts[j].place)
        nbytes = _size(across * self.effort.transfer_s / max(map(len, places.values())), MOST[self.backend])
        order = list(places.values())
        moves = [
            (rank, after[k % len(after)], nbytes)
            for place, after in zip(order, [*order[1:], order[0]], strict=True)
            for k, rank in enumerate(place)
        ]
        best = [float("inf")] * self.size
        for _ in range(self.effort.repeats):
            best = [min(b, s) for b, s in zip(best, self.gather(self.transfers.send(moves)), strict=True)]
        return {
            place: nbytes * len(ranks) / max(best[r] for r in ranks)
            for place, ranks in places.items()
            if len(ranks) > 1
        }

    def form(self, form: str, all_facts: Sequence[Facts], slowest: float) -> FormTime:
        """Time of one form of communication among all ranks, as the runtime carries it out."""
        wanted = slowest * self.effort.transfer_s
        if form == "all_reduce":
            nbytes = _size(wanted / 2, min(64, MOST[self.backend]))
            return self.timed(nbytes, lambda meanwhile: self.transfers.all_reduce(nbytes, True, meanwhile))
        crowd = [f.place for f in all_facts]
        crossing = max(max(n * (self.size - n) for n in map(crowd.count, crowd)), self.size - 1)
        nbytes = _size(wanted / (1 if form == "exchange" else crossing), MOST[self.backend] / (self.size - 1))
        if form in ONE_CALL[self.backend]:
            calls = [self.transfers.call(form, nbytes) for _ in range(self.effort.repeats)]
            return FormTime(nbytes, _undisturbed(calls))
        moves, finish = messages(form, self.size, nbytes), FINISH.get(form)
        return self.timed(nbytes, lambda meanwhile: max(self.gather(self.transfers.send(moves, finish, meanwhile))))

    def timed(self, nbytes: int, move: Callable[[Meanwhile], float]) -> FormTime:
        """What a form usually takes, of several times that ``move`` carries it out on all ranks: gloo's threads and
        those of ranks get into each other's way in some of them, in steps of training, too."""
        taken: list[tuple[float, ...]] = []
        while len(taken) < self.effort.repeats or (
            len(taken) < MORE * self.effort.repeats and sum(seconds for seconds, *_ in taken) < MORE_S
        ):
            seconds, copies = move(_nothing), self.gather((self.transfers.copying_s, self.transfers.packing_s))
            taken.append((seconds, *map(median, zip(*copies, strict=True))))
        seconds, copying, packing = map(median, zip(*taken, strict=True))
        if self.backend == "nccl":  # its kernels take no processor time
            return FormTime(nbytes, seconds)
        for times in BESIDE:
            late, busy, waited = self.beside(seconds, move, times)
            if waited <= seconds:
                break
        return FormTime(nbytes, seconds, late, busy, copying, packing)

    def beside(
        self, seconds: float, move: Callable[[Meanwhile], object], times: int
    ) -> tuple[float, float, float]:  # fmt: skip
        """How much later ranks are done that compute, for so many ``times`` of ``seconds``, while ``move``
        communicates, which takes ``seconds`` alone; what it takes then, if it is an all-reduce; and for how long it
        goes on when they have computed; s."""
        self.transfers.barrier()
        count = math.ceil(4 * times * seconds / min(self.gather(self.network.steps_s(4))))
        taken = []
        for _ in range(self.effort.repeats):  # in turn, as the machine may be slower later
            spent: list[float] = []
            self.transfers.barrier()
            spent.append(self.network.steps_s(count))
            move(lambda spent=spent: spent.append(self.network.steps_s(count)))  # type: ignore[misc]
            alone, beside = map(max, zip(*self.gather(spent), strict=True))
            busy, waited = map(max, zip(*self.gather((self.transfers.busy_s, self.transfers.waited_s)), strict=True))
            taken.append((beside - alone, busy, waited))
            self.transfers.busy_s = 0.0
        late, busy, waited = map(median, zip(*taken, strict=True))
        return max(0.0, late), busy, waited

    def tensors(self) -> dict[str, float]:
        """Processor seconds, by form, in which a rank puts one more tensor in its place."""
        bucket, taken = Bucket(), []
        for _ in range(4 * self.effort.repeats):
            taken.append((bucket.summed_s(self.network.step), bucket.moved_s(self.network.step)))
        summed, moved = (median(self.gather(_undisturbed(list(column)))) for column in zip(*taken, strict=True))
        return {form: summed if form == "all_reduce" else moved for form in FORMS if form != "exchange"}

    def pause(self) -> tuple[float, float]:
        """Seconds that an all-reduce of a few bytes costs ranks that compute, if they wait for it and if they go on: it
        cuts a run of operators in two, of which each is a call of autograd, and wakes gloo's threads and this one
        beside what they have in the caches."""

        def step(cut: bool, waits: bool = False) -> float:
            works: list[dist.Work] = []
            self.transfers.barrier()
            began = time.perf_counter()
            self.network.step((lambda tensor: _interrupted(tensor, works, waits)) if cut else None)
            for work in works:
                work.wait()
            return time.perf_counter() - began

        ways, taken = ((False, False), (True, True), (True, False)), []
        for _ in range(8 * self.effort.repeats):  # in turn, as the machine may be slower later
            taken.append([max(self.gather(step(*way))) for way in ways])
        whole, waiting, going_on = (_undisturbed(list(column)) for column in zip(*taken, strict=True))
        return max(0.0, waiting - whole) / PARTS, max(0.0, going_on - whole) / PARTS


def schedule(places: Sequence[str], alone: int) -> list[list[Pair]]:
    """Rounds of pairs to measure. ``places``: by rank. Up to ``alone`` pairs have a round each. Of more, those inside
    one place and those of neighbours in rank are taken, and disjoint ones share a round."""
    pairs = list(combinations(range(len(places)), 2))
    if len(pairs) <= alone:
        return [[pair] for pair in pairs]
    size = len(places)
    first = {place: places.index(place) for place in places}
    heads = list(first.values())
    ring = {(min(a, b), max(a, b)) for a, b in zip(heads, [*heads[1:], heads[0]], strict=True) if a != b}
    kept = [p for p in pairs if places[p[0]] == places[p[1]] and (p[1] - p[0] < 16 or size <= 16)] + sorted(ring)
    rounds: list[tuple[set[object], list[Pair]]] = []
    for i, j in kept:
        uses: set[object] = {i, j} if places[i] == places[j] else {i, j, places[i], places[j]}
        for taken, members in rounds:
            if not taken & uses:
                taken |= uses
                members.append((i, j))
                break
        else:
            rounds.append((uses, [(i, j)]))
    return [members for _, members in rounds]


def _interrupted(tensor: Tensor, works: list[dist.Work], waits: bool) -> Tensor:
    """The tensor, after ranks have begun to sum up a few of its elements and, if one ``waits``, have done so."""
    few = torch.empty(PAUSE_BYTES // 4)
    few.copy_(tensor.detach().view(-1)[: len(few)])
    work = dist.all_reduce(few, async_op=True)
    assert work is not None
    if waits:
        work.wait()
    else:
        works.append(work)
    return tensor.detach()


def _nothing() -> None:
    """Nothing."""


def _undisturbed(seconds: Sequence[float]) -> float:
    """Lower quartile: other work on the machine only slows, and the very fastest is luck."""
    return sorted(seconds)[len(seconds) // 4]


def _peers(pairs: Sequence[Pair]) -> dict[int, int]:
    return {a: b for i, j in pairs for a, b in ((i, j), (j, i))}


def _size(nbytes: float, most: float) -> int:
    """A size in bytes that splits into elements, between 64 KiB and ``most`` MiB."""
    return int(min(max(nbytes, 2**16), max(1, most) * MEBI)) // 64 * 64


def _source(measured: Measured) -> str:
    places = len({f.place for f in measured.facts})
    across = [b for (i, j), b in measured.bandwidth.items() if measured.facts[i].place != measured.facts[j].place]
    text = (
        f"Measured by 'flexsearch probe' on {time.strftime('%Y-%m-%d')} with PyTorch {torch.__version__}: "
        f"{len(measured.facts)} ranks on {places} host{'s' * (places > 1)}, {measured.backend}, "
        f"threads per rank: {measured.facts[0].threads}."
    )
    if across:
        text += f" One pair of ranks on different hosts: {median(across) / 1e6:.4g} MB/s each way"
        if measured.together:
            text += f"; all ranks of a host at once: {median(measured.together.values()) / 1e6:.4g} MB/s"
        text += "."
    return text
