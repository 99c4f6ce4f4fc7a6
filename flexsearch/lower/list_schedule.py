"""An order of passes for stages that take unequally long: list scheduling under a limit of memory.

The named schedules assume equal stages. This one builds each rank's order from the ticks of a plan's own passes: in the
order of time, a rank that is free runs the pass that comes first by a rule, of those that are ready and fit into its
memory (list scheduling: Graham, 1969; for pipelines: Qi et al., ICLR 2024, section 3). Several rules are tried, and the
named schedules too; the fastest order wins.

The model is that of the rows with one device on each rank: a rank runs one pass at a time, transfers delay what waits
for them and nothing else. A microbatch takes memory on a stage from its forward pass to its weight gradients, and more
between the halves of its backward pass; where that does not fit, weight gradients that are put off come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final, NamedTuple, get_args

from flexsearch.errors import FlexsearchError
from flexsearch.lower.actions import Action, actions
from flexsearch.strategy.schedule import SPLIT_KINDS
from flexsearch.strategy.stage import ScheduleKind

Orders = tuple[tuple[Action, ...], ...]
"""What each rank runs."""
RULES: Final = tuple(product(("IFW", "FIW"), (True, False), (True, False)))
"""Rules by which a rank chooses: kinds of passes in the order in which they are preferred; whether the latest stage
comes first among forward passes; whether a rank that could run weight gradients waits for an input gradient that
arrives before they would be half done."""


@dataclass(frozen=True)
class Passes:
    """What the passes of a pipeline take. ``held``: the stages of each rank, ascending. By stage, ticks: ``forward``,
    ``inputs``, ``weights`` (the halves of the backward pass; all of it is the first stage's ``weights``), and
    ``transfer``, to the next stage or from there back, where that is on another rank (of the last stage: unused).
    ``nbytes``: by stage, what a microbatch keeps there, bytes; ``limit``: by rank, bytes; ``between``: by stage, what a
    microbatch keeps besides between the halves of its backward pass, bytes (empty: nothing)."""

    held: tuple[tuple[int, ...], ...]
    forward: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    transfer: tuple[int, ...]
    nbytes: tuple[int, ...]
    limit: tuple[int, ...]
    between: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        columns = self.forward, self.inputs, self.weights, self.transfer, self.nbytes
        stages = sorted(stage for row in self.held for stage in row)
        if any(len(column) != len(stages) for column in columns) or len(self.limit) != len(self.held):
            raise FlexsearchError(
                f"the passes of {len(stages)} stages on {len(self.held)} ranks are not described one by one",
                "Give ticks and bytes of each stage, and a limit for each rank.",
            )
        if stages != list(range(len(stages))):
            raise FlexsearchError("a stage is missing or on two ranks", "Give each stage one rank.")

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """``between`` of every stage."""
        return self.between or (0,) * len(self.forward)

    @cached_property
    def delay(self) -> tuple[int, ...]:
        """Ticks between each stage and the next one."""
        rank = {stage: number for number, row in enumerate(self.held) for stage in row}
        return tuple(0 if rank[s] == rank[s + 1] else ticks for s, ticks in enumerate(self.transfer[:-1]))


class ListSchedule(NamedTuple):
    """The fastest order that was found. ``kind``: of the named schedule that it is; None: it is none, and splits
    backward passes. ``ticks``: how long a step takes in the model."""

    orders: Orders
    kind: ScheduleKind | None
    ticks: int


def list_schedule(passes: Passes, microbatches: int) -> ListSchedule:
    """The fastest order of all named schedules and rules that stays within the limits; of equally fast ones the first,
    in the order of ``ScheduleKind``, named ones before others. It is never slower than a named one that fits.

    Raises FlexsearchError if not even one microbatch fits into the memory of some rank.
    """
    for rank, row in enumerate(passes.held):
        if (least := sum(passes.nbytes[stage] for stage in row)) > passes.limit[rank]:
            raise FlexsearchError(
                f"one microbatch keeps {least} bytes on rank {rank}, which may use {passes.limit[rank]}",
                "Use more microbatches, more stages, or devices with more memory.",
            )
    best: ListSchedule | None = None
    for candidate in _candidates(passes, microbatches):
        if best is None or candidate.ticks < best.ticks:
            best = candidate
    assert best is not None  # every rule gives an order that fits
    return best


def _candidates(passes: Passes, microbatches: int) -> Iterator[ListSchedule]:
    for kind in get_args(ScheduleKind):
        try:
            orders = tuple(map(tuple, actions(kind, passes.held, microbatches)))
        except FlexsearchError:  # it needs another placement, or another number of microbatches
            continue
        if all(used <= limit for used, limit in zip(peaks(passes, orders), passes.limit, strict=True)):
            yield ListSchedule(orders, kind, ticks_of_order(passes, orders, kind not in SPLIT_KINDS))
    for rule in RULES:
        orders = Listing(passes, microbatches, *rule).orders()
        yield ListSchedule(orders, None, ticks_of_order(passes, orders))


def peaks(passes: Passes, orders: Sequence[Sequence[Action]]) -> list[int]:
    """Bytes that each rank keeps at most."""
    rank_peaks = []
    for row in orders:
        most = now = 0
        for action in row:
            now += passes.nbytes[action.stage] * (action.kind == "F")
            now += passes.gradients[action.stage] * (action.kind == "I")
            most = max(most, now)
            now -= passes.nbytes[action.stage] * (action.kind in "BW")
            now -= passes.gradients[action.stage] * (action.kind == "W")
        rank_peaks.append(most)
    return rank_peaks


def ticks_of_order(passes: Passes, orders: Sequence[Sequence[Action]], whole: bool = False) -> int:
    """How long a step takes; as of ``spans_of_order``."""
    return max((end for row in spans_of_order(passes, orders, whole) for _, end in row), default=0)


def spans_of_order(
    passes: Passes, orders: Sequence[Sequence[Action]], whole: bool = False
) -> list[list[tuple[int, int]]]:
    """When each pass of each rank begins and ends, ticks. A backward pass that is ``whole`` hands its gradients on when
    it has ended, else when it has made the input gradients. Raises FlexsearchError if ranks wait for each other
    forever."""
    sent: dict[tuple[int, str, int], int] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in orders]
    last, moved = len(passes.forward) - 1, True
    while moved:
        moved = False
        for row, done in zip(orders, spans, strict=True):
            while len(done) < len(row):
                stage, kind, m = row[len(done)]
                ready = _ready(passes, sent, row[len(done)], last)
                if ready is None:
                    break
                begin, moved = max(done[-1][1] if done else 0, ready), True
                inputs, weights = passes.inputs[stage], passes.weights[stage]
                ticks = {"F": passes.forward[stage], "I": inputs, "W": weights, "B": inputs + weights}[kind]
                done.append((begin, begin + ticks))
                if kind != "W":
                    early = kind == "B" and not whole
                    sent[stage, "F" if kind == "F" else "I", m] = begin + inputs if early else begin + ticks
    if any(len(done) < len(row) for done, row in zip(spans, orders, strict=True)):
        raise FlexsearchError(
            "the ranks wait for each other forever", "Give an order in which each pass can be reached."
        )
    return spans


def _ready(passes: Passes, sent: dict[tuple[int, str, int], int], action: Action, last: int) -> int | None:
    """When what a pass reads is there; None: not known yet. ``sent``: when passes have handed on what they make."""
    stage, kind, m = action
    if kind == "W":
        return sent.get((stage, "I", m))
    before = (stage - 1, "F", m) if kind == "F" else (stage + 1, "I", m)
    if not 0 <= before[0] <= last:
        return 0 if kind == "F" else sent.get((stage, "F", m))
    if before not in sent or (kind != "F" and (stage, "F", m) not in sent):
        return None
    ready = sent[before] + passes.delay[min(before[0], stage)]
    return ready if kind == "F" else max(ready, sent[stage, "F", m])


@dataclass
class Listing:
    """One rule at work. On each stage microbatches keep their order, on each rank weight gradients that of the input
    gradients; so they are complete with the last microbatch."""

    passes: Passes
    microbatches: int
    preferred: str
    deep: bool
    patient: bool
    sent: dict[tuple[int, str, int], int] = field(default_factory=dict)

    def orders(self) -> Orders:
        """The order of each rank."""
        held, stages = self.passes.held, len(self.passes.forward)
        self.count = {kind: [0] * stages for kind in "FIW"}
        self.owed: list[deque[Action]] = [deque() for _ in held]
        self.clock, self.used = [0] * len(held), [0] * len(held)
        self.reserve = [{stage: sum(self.passes.nbytes[s] for s in row if s > stage) for stage in row} for row in held]
        rank_of = {stage: rank for rank, row in enumerate(held) for stage in row}
        self.near = [{rank_of.get(s, rank_of[stage]) for s in (stage - 1, stage, stage + 1)} for stage in range(stages)]
        orders: list[list[Action]] = [[] for _ in held]
        choices = [self._choice(rank) for rank in range(len(held))]
        for _ in range(3 * stages * self.microbatches):
            begin, rank, action = min((choice[0], rank, choice[1]) for rank, choice in enumerate(choices) if choice)
            self._run(rank, action, begin)
            orders[rank].append(action)
            for other in self.near[action.stage]:  # nobody else learns of it
                choices[other] = self._choice(other)
        return tuple(map(tuple, orders))

    def _run(self, rank: int, action: Action, begin: int) -> None:
        """Note that a pass begins."""
        stage, kind, m = action
        passes = self.passes
        ticks = {"F": passes.forward, "I": passes.inputs, "W": passes.weights}[kind][stage]
        self.clock[rank] = begin + ticks
        self.count[kind][stage] += 1
        if kind == "F":
            self.used[rank] += passes.nbytes[stage]
        elif kind == "I":
            self.owed[rank].append(Action(stage, "W", m))
            self.used[rank] += passes.gradients[stage]
        else:
            self.owed[rank].popleft()
            self.used[rank] -= passes.nbytes[stage] + passes.gradients[stage]
        if kind != "W":
            self.sent[stage, kind, m] = self.clock[rank]

    def _choice(self, rank: int) -> tuple[int, Action] | None:
        """When a rank begins its next pass, and which; None: it must wait for what is not known yet."""
        passes, ready = self.passes, list[tuple[int, Action]]()
        for stage in passes.held[rank]:
            if self._fits(rank, stage):
                self._add(ready, Action(stage, "F", self.count["F"][stage]))
            if not self.owed[rank] or self.used[rank] + passes.gradients[stage] <= passes.limit[rank]:
                self._add(ready, Action(stage, "I", self.count["I"][stage]))
        if self.owed[rank]:
            self._add(ready, self.owed[rank][0])
        if not ready:
            return None
        now = max(self.clock[rank], min(at for at, _ in ready))
        _, action = min((self._rank_of(action), action) for at, action in ready if at <= now)
        if action.kind == "W" and self.patient:
            soon = now + passes.weights[action.stage] // 2
            arriving = [(at, other) for at, other in ready if other.kind == "I" and now < at < soon]
            return min(arriving, default=(now, action))
        return now, action

    def _add(self, ready: list[tuple[int, Action]], action: Action) -> None:
        """Add a pass to those that can be run, if there is such a microbatch and it is known when it is ready."""
        if action.microbatch < self.microbatches:
            at = _ready(self.passes, self.sent, action, len(self.passes.forward) - 1)
            if at is not None:
                ready.append((at, action))

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether another microbatch fits into a rank's memory on a stage, with room left for one to pass the later
        stages of the rank: so the oldest one can always go on."""
        more = self.passes.nbytes[stage] + self.reserve[rank][stage]
        return self.used[rank] + more <= self.passes.limit[rank]

    def _rank_of(self, action: Action) -> tuple[int, int, int]:
        """Smaller: sooner."""
        stage = -action.stage if self.deep or action.kind != "F" else action.stage
        place = self.preferred.index(action.kind)
        return (place, stage, action.microbatch) if action.kind == "F" else (place, action.microbatch, stage)
