"""The group of a recipe over ``torch.distributed``: this rank holds one row, or serves.

On gloo, what is gathered goes as messages, receives posted first: full duplex, and faster than gloo's own all-gather.
On NCCL it is the backend's call, and parts of unequal lengths are padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.runtime.collectives import all_gather, present
from flexsearch.runtime.faults import lost
from flexsearch.runtime.wire import process_group
from flexsearch.sync import Exchange, Payload
from flexsearch.sync.exchange import INDEX_BYTES, Source

TAG = 1 << 20
"""Of messages; those of a step have the numbers of its tasks."""


class Ranks:
    """Positions are places in ``devices``, the ranks of the replicas; ``servers`` follow them. ``hosts``: by position.
    On a rank that only serves, ``ranks`` is its position behind the replicas, and the row that it passes says no more
    than what payloads look like. All ranks of the run must make it at the same place. ``tolerate``: replicas that have
    died are left out of ``mix``; else, as in everything else, they are a RuntimeFailure."""

    def __init__(
        self, devices: Sequence[int], servers: Sequence[int], hosts: Sequence[int], timeout_s: float,
        tolerate: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.hosts, self._tolerate = len(devices), tuple(hosts), tolerate
        self._devices = (*devices, *servers)
        rank = dist.get_rank()
        timeout = timedelta(seconds=timeout_s)
        everyone = process_group(tuple(sorted(self._devices)), timeout)
        workers = process_group(tuple(sorted(devices)), timeout) if servers else everyone
        self._gloo = dist.get_backend() == "gloo"
        self.ranks: tuple[int, ...] = (self._devices.index(rank),) if rank in self._devices else ()
        self._group, self._workers = everyone, workers
        self.sent = self.messages = 0
        """Bytes and messages that this rank has sent so far, an all-reduce as a ring."""
        self.lost: set[int] = set()
        """Positions that have died."""

    @property
    def serves_only(self) -> bool:
        """Whether this rank has no replica."""
        return self.ranks[0] >= self.size

    # ---- what recipes call

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all positions, (1, n), by one call of the backend."""
        if self.serves_only:
            return x
        self._count(Exchange("all_reduce", self.size, (x.numel() * x.element_size(),)))
        total = x.clone(memory_format=torch.contiguous_format)
        with self._watched("all-reduce"):
            dist.all_reduce(total, group=self._workers)
        return total

    def all_gather(self, payload: Payload) -> Payload:
        """The payloads of all positions, (size, entries)."""
        if self.serves_only:
            return payload
        own = self.ranks[0]
        if self._gloo:
            others = [r for r in range(self.size) if r != own]
            arrived = self._swap(dict.fromkeys(others, payload), dict.fromkeys(others, payload))
            return joined([payload if r == own else arrived[r] for r in range(self.size)])
        return self._gathered(payload)

    def receive(self, payload: Payload, source: Source) -> Payload:
        """What this position gets from its source, of the same size; without one, its own."""
        if self.serves_only:
            return payload
        own = self.ranks[0]
        sender = source[own]
        receivers = [r for r, a in enumerate(source) if a == own != r]
        if sender == own:
            sender = None
        arrived = self._swap(dict.fromkeys(receivers, payload), {} if sender is None else {sender: payload})
        return payload if sender is None else arrived[sender]

    def mix(self, payload: Payload, weights: Any, decode: Callable[[Payload], Tensor]) -> Tensor:
        """What this position has and gets, by its row of ``weights`` (size, size). The share of a replica that has died
        counts as this one's own."""
        own = self.ranks[0]
        if self.serves_only:
            return decode(payload)
        to = [r for r in range(self.size) if r != own and weights[r][own] and r not in self.lost]
        of = [r for r in range(self.size) if r != own and weights[own][r] and r not in self.lost]
        arrived = self._swap(dict.fromkeys(to, payload), dict.fromkeys(of, payload))
        share = sum(weights[own][r] for r in range(self.size) if r != own and r not in arrived)
        total: Tensor = (weights[own][own] + share) * decode(payload)
        for r, other in sorted(arrived.items()):
            total = total + weights[own][r] * decode(other)
        return total

    def serve(
        self, shards: Sequence[Payload], owners: Sequence[int], merge: Callable[[int, Payload], Tensor],
        like: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Push payload j to position ``owners[j]``, which merges those of all, and pull what it has made of them."""
        own, workers = self.ranks[0], range(self.size)
        mine = [j for j, owner in enumerate(owners) if owner == own]
        # Pairs have at most one shard each: a position owns one.
        there = {} if self.serves_only else {o: shards[j] for j, o in enumerate(owners) if o != own}
        pushed = self._swap(there, {r: shards[j] for j in mine for r in workers if r != own})
        merged = {j: merge(j, joined([shards[j] if r == own else pushed[r] for r in workers])) for j in mine}
        back = {r: Payload((merged[j],)) for j in mine for r in workers if r != own}
        wanted = {} if self.serves_only else {o: Payload((like[j],)) for j, o in enumerate(owners) if o != own}
        pulled = self._swap(back, wanted)
        return [
            merged[j] if o == own else like[j] if self.serves_only else pulled[o].parts[0]
            for j, o in enumerate(owners)
        ]  # fmt: skip

    # ---- messages

    def _swap(self, there: Mapping[int, Payload], wanted: Mapping[int, Payload]) -> dict[int, Payload]:
        """Send payloads to positions, and receive some, which look like those of ``wanted``."""
        counts = dict.fromkeys(wanted, 0)
        if any(payload.length is not None for payload in (*there.values(), *wanted.values())):
            sent = {r: count_of(payload) for r, payload in there.items()}
            arrived = self._messages(sent, dict.fromkeys(wanted, INDEX_BYTES))
            counts = {r: int(flat.view(torch.int32)) for r, flat in arrived.items()}
        once = {id(payload): packed(payload) for payload in there.values()}
        flat_of = {r: once[id(payload)] for r, payload in there.items()}
        templates = {r: wanted[r] for r in counts}
        lengths = {r: nbytes_of(template, counts[r]) for r, template in templates.items()}
        flat = self._messages(flat_of, lengths)
        return {r: unpacked(flat[r], templates[r], counts[r]) for r in templates if r in flat}

    def _messages(self, there: Mapping[int, Tensor], wanted: Mapping[int, int]) -> dict[int, Tensor]:
        """One message of bytes to each position, and from others: so many bytes of each. With ``tolerate`` those of the
        dead are missing."""
        device = torch.device("cpu" if self._gloo else torch.cuda.current_device())
        buffers = {r: torch.empty(size, dtype=torch.uint8, device=device) for r, size in wanted.items()}
        there = {r: flat for r, flat in there.items() if flat.numel() and r not in self.lost}
        for flat in there.values():
            self.sent, self.messages = self.sent + flat.numel(), self.messages + 1
        coming = {r: buffer for r, buffer in buffers.items() if buffer.numel()}
        if self._gloo:
            works: list[tuple[int, dist.Work]] = []
            for call, tensors in ((dist.irecv, coming), (dist.isend, there)):
                for r, tensor in tensors.items():
                    with self._watched("a message", r):
                        works.append((r, present(call(tensor, self._devices[r], group=self._group, tag=TAG))))
            for r, work in works:
                with self._watched("a message", r):
                    work.wait()
        elif coming or there:
            operations = [dist.P2POp(dist.irecv, x, self._devices[r], self._group) for r, x in coming.items()]
            operations += [dist.P2POp(dist.isend, x, self._devices[r], self._group) for r, x in there.items()]
            with self._watched("messages"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return {r: buffer for r, buffer in buffers.items() if r not in self.lost}

    def _gathered(self, payload: Payload) -> Payload:
        """As ``all_gather``, by one call of the backend."""
        device, size = payload.parts[0].device, self.size
        counts = torch.zeros(size, dtype=torch.int32, device=device)
        with self._watched("all-gather"):
            if payload.length is not None:
                all_gather(counts.view(torch.uint8), count_of(payload).to(device), group=self._workers)
            lengths = [nbytes_of(payload, int(count)) for count in counts.tolist()]
            flat, most = packed(payload), max(lengths)
            self._count(Exchange("all_gather", size, (most,) * size))
            padded = torch.cat((flat, flat.new_empty(most - flat.numel())))
            everything = flat.new_empty(size * most)
            all_gather(everything, padded, group=self._workers)
        rows = zip(everything.view(size, most), lengths, counts.tolist(), strict=True)
        return joined([unpacked(row[:length], payload, count) for row, length, count in rows])

    def _count(self, exchange: Exchange) -> None:
        """Count this rank's part of what all send."""
        for name, total in (("sent", exchange.sent), ("messages", exchange.count)):
            setattr(self, name, getattr(self, name) + (total + self.ranks[0]) // self.size)

    @contextmanager
    def _watched(self, what: str, position: int | None = None) -> Iterator[None]:
        """An error that names the peers; with ``tolerate``, note that ``position`` has died instead."""
        try:
            yield
        except RuntimeError as error:
            if position is not None and self._tolerate:
                self.lost.add(position)
                return
            peers = set(self._devices) - {dist.get_rank()} if position is None else {self._devices[position]}
            raise lost(f"{what} of a recipe", peers, error) from error


def joined(payloads: Sequence[Payload]) -> Payload:
    """Rows one below the other; those of different lengths are filled up."""
    if len(payloads) == 1:
        return payloads[0]
    parts = []
    for k in range(len(payloads[0].parts)):
        own = [payload.parts[k] for payload in payloads]
        most = max(part.shape[1] for part in own)
        gaps = [most - part.shape[1] for part in own]
        filled = [torch.nn.functional.pad(x, (0, gap)) if gap else x for x, gap in zip(own, gaps, strict=True)]
        parts.append(torch.cat(filled))
    lengths = [payload.length for payload in payloads if payload.length is not None]
    return replace(payloads[0], parts=tuple(parts), length=torch.cat(lengths) if lengths else None)


def count_of(payload: Payload) -> Tensor:
    """The number of its entries, as it is sent."""
    assert payload.length is not None
    return payload.length.to(torch.int32).view(torch.uint8)


def packed(payload: Payload) -> Tensor:
    """The entries that count, as bytes."""
    last = None if payload.length is None else int(payload.length)
    flat = [part[0].reshape(-1)[:last].contiguous().view(torch.uint8) for part in payload.parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _sizes(template: Payload, count: int) -> list[int]:
    """By part, the number of entries."""
    return [part[0].numel() if template.length is None else count for part in template.parts]


def nbytes_of(template: Payload, count: int) -> int:
    return sum(n * part.element_size() for n, part in zip(_sizes(template, count), template.parts, strict=True))


def unpacked(flat: Tensor, template: Payload, count: int) -> Payload:
    """The inverse of ``packed``, for a payload like ``template``; with ``count`` entries, where that is not fixed."""
    parts, at = [], 0
    for n, part in zip(_sizes(template, count), template.parts, strict=True):
        data = flat[at : at + n * part.element_size()]
        at += n * part.element_size()
        aligned = data if data.storage_offset() % part.element_size() == 0 else data.clone()
        parts.append(aligned.view(part.dtype).view(1, n))
    length = None if template.length is None else template.length.new_full((1,), count)
    return replace(template, parts=tuple(parts), length=length)
