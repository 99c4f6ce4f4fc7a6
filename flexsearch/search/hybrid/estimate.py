"""Step time and memory of a layout by formulas, in microseconds of computing: what the search ranks layouts by before
it simulates any, and corrects by what the simulator said of others.

A stage takes the sum of its operators; the order of passes decides how many microbatches of it stand in a row, what
the pipeline takes to fill and to drain, and how many microbatches a rank keeps (the sources are those of
``lower.actions``). Where ranks answer late, a rank under 1F1B waits for the round trip of what it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost.communication import Transfer
from flexsearch.graph.piece import chunks
from flexsearch.lower.actions import in_flight
from flexsearch.search.constants import PENALTY
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.work import Works
from flexsearch.strategy import Options, States
from flexsearch.strategy.schedule import SPLIT_KINDS, V_KINDS, has_halves
from flexsearch.strategy.shares import speeds

Values = npt.NDArray[np.float64]
PROBES = 1 << 16, 1 << 24
"""Bytes at which communication is priced; between and beyond it is taken as linear."""


class Estimate(NamedTuple):
    """``seconds``: of a step. ``used``: share of its memory that the fullest device needs."""

    seconds: float
    used: float

    @property
    def cost(self) -> float:
        """As of a candidate."""
        return self.seconds * (1.0 + PENALTY * max(0.0, self.used - 1.0))


@dataclass(frozen=True)
class Parts:
    """By stage, of one microbatch, s: ``forward``, ``backward`` (with what is computed again), of a backward pass in
    two halves ``weight`` (gradients of weights) and by how much it is ``longer``, ``hop`` (to the next stage; 0 to the
    same rank and behind the last), ``host`` (launching what it computes; ``launch_s``: one operator). Bytes on a
    device: ``weights``, ``states``, ``kept`` (by a microbatch), ``again`` (made again by a microbatch), ``region``
    (made again at a time). ``tensors``: parameters."""

    forward: Values
    backward: Values
    weight: Values
    longer: Values
    hop: Values
    host: Values
    launch_s: Values
    weights: Values
    states: Values
    kept: Values
    again: Values
    region: float
    tensors: Values


class Estimates:
    """Estimates of layouts of one graph on one topology."""

    def __init__(self, works: Works, cuts: Cuts) -> None:
        self.works, self.cuts, self.topology = works, cuts, works.topology
        self.memory = np.array([device.usable_bytes for device in self.topology.devices], np.float64)
        self._kinds, self.speeds = works.costs.kinds, speeds(works.topology)
        self._cuts: dict[Hashable, tuple[int, ...]] = {}
        self._parts: dict[Hashable, Parts] = {}
        self._lines: dict[Hashable, tuple[float, float]] = {}
        self._ranks: dict[Hashable, list[tuple[int, int]]] = {}

    # ---- what a layout is made of

    def samples(self, layout: Layout) -> int:
        """Of a microbatch."""
        return self.works.graph.batch // layout.data // layout.microbatches

    def ranks(self, layout: Layout) -> list[tuple[int, int]]:
        """By rank, of the device that computes longest: its samples of a microbatch, and its kind."""
        key = layout.tensor, layout.each, layout.speed, self.samples(layout)
        if key not in self._ranks:
            self._ranks[key] = self._slowest(layout)
        return self._ranks[key]

    def _slowest(self, layout: Layout) -> list[tuple[int, int]]:
        samples, tensor, slowest, begin = self.samples(layout), layout.tensor, list[tuple[int, int]](), 0
        for width in layout.each:
            end = begin + width * tensor
            kinds = self._kinds[begin:end]
            parts = np.full(width, ceil(samples / width))
            if layout.speed:
                speed = np.array(self.speeds[layout.speed - 1][begin:end]).reshape(width, tensor).min(axis=1)
                parts = np.array([b - a for a, b in chunks(samples, width, speed.tolist())])
            each = set(zip(parts.repeat(tensor).tolist(), kinds.tolist(), strict=True))
            slowest.append(each.pop() if len(each) == 1 else max(
                each, key=lambda row: float(self.works.work(tensor, row[0], "none", row[1]).forward[-1])
            ))  # fmt: skip
            begin = end
        return slowest

    def first(self, layout: Layout) -> tuple[int, ...]:
        """First operator of each stage, so that the slowest takes as short as possible."""
        ranks, rank_of = self.ranks(layout), layout.rank_of()
        key = layout.tensor, tuple(ranks), rank_of
        if key not in self._cuts:
            rows = {}
            for share, kind in ranks:
                work = self.works.work(layout.tensor, share, "none", kind)
                rows[share, kind] = np.diff(work.forward) + np.diff(work.backward)
            each = [rows[ranks[rank]] for rank in rank_of] if len(rows) > 1 else next(iter(rows.values()))
            self._cuts[key] = self.cuts.balanced(each, layout.stages)
        return self._cuts[key]

    def parts(self, layout: Layout, options: Options, first: tuple[int, ...]) -> Parts:
        """What its stages take. Where only some blocks are computed again, a mean of none and all of them."""
        if options.recompute != "none" and options.recompute_blocks is not None:
            every, none = (
                self.parts(layout, options.model_copy(update={"recompute": again, "recompute_blocks": None}), first)
                for again in (options.recompute, "none")
            )
            share = np.minimum(1.0, np.array(options.recompute_blocks) / self.blocks(layout, options))
            mean = {
                name: share * getattr(every, name) + (1.0 - share) * getattr(none, name)
                for name in ("backward", "weight", "longer", "host", "kept", "again")
            }
            return replace(every, **mean)
        rank_of, samples = layout.rank_of(), self.samples(layout)
        key = layout.tensor, layout.each, layout.speed, samples, options.recompute, first, rank_of
        if key not in self._parts:
            self._parts[key] = self._take_apart(layout, options, first, rank_of)
        return self._parts[key]

    def blocks(self, layout: Layout, options: Options) -> int:
        """Blocks of a stage that can be computed again, about."""
        return max(1, -(-(1 + max(self.works.regions[options.recompute])) // layout.stages))

    def _take_apart(self, layout: Layout, options: Options, first: tuple[int, ...], rank_of: tuple[int, ...]) -> Parts:
        works, tensor, recompute = self.works, layout.tensor, options.recompute
        ranks, low, high = self.ranks(layout), np.array(first), np.array([*first[1:], works.count])
        stages, columns, launch_s = len(first), np.zeros((5, len(first))), np.zeros(len(first))
        for key in set(ranks):
            here = np.array([ranks[rank] == key for rank in rank_of])
            work = works.work(tensor, key[0], recompute, key[1])
            columns[:, here] = [column[high[here]] - column[low[here]] for column in work]
            launch_s[here] = works.launch_s(key[1])
        forward, backward, weight, longer, again = columns
        launches = works.launches[:, high] - works.launches[:, low]
        host = launch_s * (launches[0] * np.where(again > 0.0, 2.0, 1.0) + launches[1])
        shares = np.array([ranks[rank][0] for rank in rank_of])
        stored, plain = works.stored(tensor, recompute), works.stored(tensor, "none")
        weights, states, kept, tensors = (column[high] - column[low] for column in stored)
        regions = 1 + max(works.regions[recompute])
        repeated = np.maximum(plain.kept[high] - plain.kept[low] - kept, 0.0) * shares
        region = float(repeated.sum()) / regions if regions else 0.0
        hop = np.zeros(stages)
        nbytes = self.cuts.crossing[low[1:]] * (self.samples(layout) / works.graph.batch)
        groups = layout.groups()
        for s in range(stages - 1):
            if rank_of[s] != rank_of[s + 1]:
                start, each = self.between(groups[s], groups[s + 1], tensor)
                hop[s] = start + each * nbytes[s]
        whole = np.array([not has_halves(stage) for stage in range(stages)])
        weight, longer = np.where(whole, backward, weight), np.where(whole, 0.0, longer)
        return Parts(
            forward, backward + again, weight, longer, hop, host, launch_s, weights, states, kept * shares, repeated,
            region, tensors,
        )  # fmt: skip

    def between(self, source: tuple[int, ...], destination: tuple[int, ...], tensor: int) -> tuple[float, float]:
        """Seconds, and seconds a byte, of activations from one group to another: every ``tensor`` devices get all."""
        key = source, destination
        if key not in self._lines:
            share = tensor / len(destination)
            self._lines[key] = self._line(lambda nbytes: self.works.pricing.transfer("exchange", [
                (source[k % len(source)], device, max(1, int(nbytes * share))) for k, device in enumerate(destination)
            ]).duration_s)  # fmt: skip
        return self._lines[key]

    def agreement(self, layout: Layout, rank: int, first: int = 0, step: int = 1) -> tuple[float, float]:
        """Seconds, and seconds a byte, of an all-reduce among the devices that have the same weights of a rank: among
        the ``first`` of them (0: all); or among every one in so many (``step``), all of these at the same time."""
        tensor, width, block = layout.tensor, layout.each[rank], layout.block
        if layout.data * width == 1:
            return 0.0, 0.0
        begin = tensor * sum(layout.each[:rank])
        key = layout.data, block, begin, width, tensor, first, step
        if key not in self._lines:
            pricing = self.works.pricing
            devices = [k * block + begin + j * tensor for k in range(layout.data) for j in range(width)]
            rows = [devices[k : first or None : step] for k in range(step)]
            self._lines[key] = self._line(lambda nbytes: _together([pricing.all_reduce(row, nbytes) for row in rows]))
        return self._lines[key]

    def _line(self, seconds: Callable[[int], float]) -> tuple[float, float]:
        low, high = (seconds(nbytes) for nbytes in PROBES)
        each = max(0.0, (high - low) / (PROBES[1] - PROBES[0]))
        return max(0.0, low - each * PROBES[0]), each

    # ---- time and memory

    def estimate(self, layout: Layout, options: Options, first: tuple[int, ...] = ()) -> Estimate:
        """Of a layout that suits graph and batch. ``first``: of its stages, if it is not cut as ``first`` says."""
        parts = self.parts(layout, options, first or self.first(layout))
        ranks = np.array(layout.rank_of())
        copies = np.array(layout.each, np.float64) * layout.divided
        weights = _by_rank(ranks, parts.weights)
        gather, agree = self._agree(layout, options, weights)
        forward, backward = parts.forward, parts.backward
        if layout.schedule in SPLIT_KINDS:
            backward = backward + parts.longer
        lead, again = 0.0, layout.states == States.WEIGHTS and options.reshard_after_forward
        if layout.states:
            of_stage = parts.weights / np.maximum(weights[ranks], 1.0)
            share, summing = gather[ranks] * of_stage, agree[ranks] * of_stage
            sums = layout.states >= States.GRADIENTS and layout.microbatches > 1
            if again:
                forward = np.maximum(forward, share)
            else:
                lead = float(np.maximum(gather - _by_rank(ranks, forward), 0.0).max())
            backward = np.maximum(backward, int(again) * share + int(sums) * summing)
        running = _running(layout, parts, forward, backward)
        per_byte, per_tensor = self.works.costs.update_rates(0, options.optimizer, options.precision)
        tensors = _by_rank(ranks, parts.tensors)
        update = weights / (copies if layout.states else 1) * per_byte + tensors * per_tensor
        buckets = np.maximum(1.0, np.ceil(self.works.wider * weights / options.bucket_bytes))
        last = _by_rank(ranks, backward)
        exposed = np.maximum(agree - last * (1.0 - 1.0 / buckets), agree / buckets)
        earlier = np.cumsum(last) - last if layout.pipeline > 1 else np.zeros(1)
        tail = float((exposed + update - earlier).max())
        # Hosts launch ahead and wait for nothing, so that the longer of the two counts.
        updates = self.works.costs.update_launches(options.optimizer, options.precision)
        launching = _by_rank(ranks, layout.microbatches * parts.host + updates * parts.tensors * parts.launch_s)
        seconds = max(lead + running + max(tail, 0.0), float(launching.max()))
        return Estimate(seconds, self._used(layout, options, parts, ranks, weights, copies))

    def _agree(self, layout: Layout, options: Options, weights: Values) -> tuple[Values, Values]:
        """By rank, seconds of gathering its ``weights`` (bytes), and of summing up their gradients."""

        def seconds(nbytes: Values, first: int = 0, step: int = 1) -> Values:
            ranks = range(layout.pipeline if layout.widths else 1)
            lines = [self.agreement(layout, rank, first, step) for rank in ranks]
            start, each = np.array(lines).T
            buckets = np.ceil(nbytes / options.bucket_bytes)
            agreement_s: Values = np.where(nbytes > 0.0, start * buckets + each * nbytes, 0.0)
            return agreement_s

        gradients = self.works.wider * weights
        if not layout.over:
            half = 2 if layout.states else 1  # a gather or a reduce-scatter is half an all-reduce
            return seconds(weights) / half, seconds(gradients) / half
        inside = seconds(gradients, first=layout.divided) / 2
        between = seconds(gradients, step=layout.divided) / layout.divided
        return seconds(weights, first=layout.divided) / 2, inside + between

    def _used(
        self, layout: Layout, options: Options, parts: Parts, ranks: npt.NDArray[np.int64], weights: Values,
        copies: Values,
    ) -> float:  # fmt: skip
        """Share of its memory that the fullest device needs."""
        states = _by_rank(ranks, parts.states)
        if layout.states:
            copies_of = {States.OPTIMIZER: 1 + self.works.wider, States.GRADIENTS: 1, States.WEIGHTS: 0}
            whole = copies_of[layout.states] * weights
            gathered = layout.states == States.WEIGHTS and not options.reshard_after_forward
            under_way = np.minimum(weights, 2.0 * options.bucket_bytes)
            states = whole + (states - whole) / copies + (weights if gathered else under_way)
        flight = _in_flight(layout)
        use = states + _by_rank(ranks, parts.kept) * flight + parts.region
        if layout.schedule in SPLIT_KINDS and layout.pipeline > 1:  # until the gradients of weights are made
            use += _by_rank(ranks, parts.again) * flight
        ends = layout.tensor * np.cumsum(layout.each)
        room = np.minimum.reduceat(self.memory[: layout.block], ends - layout.tensor * np.array(layout.each))
        return float((use / room).max())


def _together(transfers: list[Transfer]) -> float:
    """Seconds of transfers at the same time: of the longest, or of the link that several share."""
    shared = Counter[int]()
    for transfer in transfers:
        shared.update(dict(transfer.links))
    return max([one.duration_s for one in transfers] + [*shared.values()])


def _by_rank(ranks: npt.NDArray[np.int64], values: Values) -> Values:
    """Sums over the stages of each rank."""
    return np.bincount(ranks, values).astype(np.float64)


def _running(layout: Layout, parts: Parts, forward: Values, backward: Values) -> float:
    """Seconds of all passes of all microbatches."""
    count, ranks, kind, hops = layout.microbatches, layout.pipeline, layout.schedule, 2.0 * float(parts.hop.sum())
    each = forward + backward
    if ranks == 1:
        return count * float(each.sum())
    if kind == "gpipe" and layout.chunks == 1:
        slowest = max(forward.max(), parts.hop.max()) + max(backward.max(), parts.hop.max())
        return float(each.sum() + hops + (count - 1) * slowest)
    busiest = float(np.bincount(layout.rank_of(), each).max())
    split = np.maximum(each - 2.0 * parts.weight, 0.0)  # F + I - W
    if layout.chunks == 1:  # 1F1B, ZB-H1
        trip = each if kind == "1f1b" else each - parts.weight
        back = np.cumsum((trip + 2.0 * parts.hop)[::-1])[::-1] / np.minimum(count, np.arange(ranks, 0, -1))
        period = max(busiest, float(back.max()), float(parts.hop.max()))
        idle = each if kind == "1f1b" else split
        filling = float(idle.sum() - idle[int(each.argmax())])
        return busiest + (count - 1) * period + filling + hops
    waiting = forward if kind in V_KINDS else split if kind == "zero-bubble" else each
    return count * busiest + (ranks - 1) * float(waiting.max() + 2.0 * parts.hop.max())


def _in_flight(layout: Layout) -> Values:
    """By rank, microbatches whose activations it keeps at a time, in those of all its stages."""
    if layout.pipeline == 1:
        return np.ones(1)
    return np.array(in_flight(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches))
