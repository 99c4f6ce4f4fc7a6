"""Which passes each group of devices runs, in which order: the schedules of pipelines.

A **rank** is a group of devices that holds the same stages. Each function gives the actions of one rank as PyTorch's
``torch.distributed.pipelining`` orders them; ``tests/test_actions.py`` compares them with its classes. The published
schedules are

- ``gpipe``: Huang et al., NeurIPS 2019;
- ``1f1b``: Narayanan et al., SOSP 2019 (PipeDream-Flush);
- ``interleaved-1f1b``: Narayanan et al., SC 2021, section 2.2;
- ``breadth-first``: Lamy-Poirier, MLSys 2023 (looped BFS);
- ``zero-bubble``: Qi et al., ICLR 2024, section 2 (ZB-H1); with several stages on a rank, interleaved;
- ``zero-bubble-v``: the same, section 6 (ZB-V);
- ``dualpipe-v``: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, folded in half.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from flexsearch.errors import FlexsearchError
from flexsearch.strategy.schedule import SPLIT_KINDS, V_KINDS, check_schedule, length_of_a_round
from flexsearch.strategy.stage import ScheduleKind


class Action(NamedTuple):
    """A pass of a stage for a microbatch, written as PyTorch's pipelining writes it (1F0): forward (F), backward (B),
    or the two halves of a backward pass: input gradients (I) and weight gradients (W)."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def read_order(text: str) -> tuple[Action, ...]:
    """The actions of "0F0 0I0 0W0 ..."."""
    kinds: dict[str, Literal["F", "B", "I", "W"]] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    rows = (re.split("([FBIW])", word) for word in text.split())
    return tuple(Action(int(stage), kinds[kind], int(microbatch)) for stage, kind, microbatch in rows)


def check_orders(orders: Sequence[Sequence[Action]], held: Sequence[Sequence[int]], microbatches: int) -> None:
    """Raise FlexsearchError unless each rank runs, for each of its stages and each microbatch, a forward pass and then
    a backward pass or its two halves, those of the last microbatch last: they complete the sums of gradients."""
    if len(orders) != len(held):
        raise FlexsearchError(
            f"orders: {len(orders)} are given for {len(held)} groups of devices",
            "Give one for each group of devices that hold the same stages, in the order of their first stages.",
        )
    for rank, (row, stages) in enumerate(zip(orders, held, strict=True)):
        every = {(stage, m) for stage in stages for m in range(microbatches)}
        run: dict[tuple[int, int], str] = dict.fromkeys(every, "")
        for stage, kind, m in row:
            if (stage, m) not in run:
                raise FlexsearchError(
                    f"orders.{rank}: {stage}{kind}{m} is no action of this group of devices, which holds the stages "
                    f"{', '.join(map(str, stages))} and runs {microbatches} microbatches",
                    "Leave it out.",
                )
            run[stage, m] += kind
            if run[stage, m] not in ("F", "FB", "FI", "FIW"):
                raise FlexsearchError(
                    f"orders.{rank}: {stage}{kind}{m} comes too early or too often",
                    "Give each microbatch F, then B, or I and later W.",
                )
            if kind in "BW" and m == microbatches - 1 and any(run[stage, k][1:] not in ("B", "IW") for k in range(m)):
                raise FlexsearchError(
                    f"orders.{rank}: {stage}{kind}{m} comes before the gradients of other microbatches",
                    "Let the last microbatch complete the gradients of each stage.",
                )
        if unfinished := sorted(key for key, done in run.items() if done not in ("FB", "FIW")):
            stage, m = unfinished[0]
            raise FlexsearchError(
                f"orders.{rank}: stage {stage} does not finish microbatch {m}",
                f"Add its passes: {stage}F{m}, {stage}B{m}.",
            )


def last_microbatch(kind: ScheduleKind, microbatches: int) -> int:
    """The microbatch whose backward pass is every stage's last one: its gradients complete the sums."""
    return 0 if kind == "breadth-first" else microbatches - 1


def warm_up(kind: ScheduleKind, rank: int, ranks: int, each: int, microbatches: int) -> int:
    """Forward passes that a rank with ``each`` stages runs before it begins to run a backward pass behind each one,
    under ``1f1b``, ``interleaved-1f1b`` or ``zero-bubble``: under the second one, two more than the next rank."""
    hops = (2 if kind == "interleaved-1f1b" else 1) * (ranks - 1 - rank)
    return min(each * microbatches, (each - 1) * length_of_a_round(ranks, microbatches) + hops)


def in_flight(kind: ScheduleKind, ranks: int, each: int, microbatches: int) -> list[float]:
    """By rank with ``each`` stages (under ``1f1b``: one): the most microbatches that have passed it forward and not
    backward at a time, mean over its stages."""
    count = each * microbatches
    if kind in ("gpipe", "breadth-first"):
        passes = [count] * ranks
    elif kind in V_KINDS:  # equally many on all ranks; dualpipe-v runs one forward before it runs one backward
        passes = [min(count, 2 * ranks + (kind == "dualpipe-v"))] * ranks
    else:
        passes = [min(count, 1 + warm_up(kind, rank, ranks, each, microbatches)) for rank in range(ranks)]
    return [number / each for number in passes]


def actions(kind: ScheduleKind, held: Sequence[Sequence[int]], microbatches: int) -> list[list[Action]]:
    """What each rank runs. ``held``: the stages of each rank, ascending; ranks in the order of their first stage.

    Raises StrategyError where a schedule does not fit (``strategy.schedule``)."""
    if kind == "gpipe" or (microbatches == 1 and kind not in SPLIT_KINDS):
        return [_gpipe(row, microbatches) for row in held]
    check_schedule(kind, held, microbatches)
    ranks, stages = len(held), sum(map(len, held))
    if kind == "1f1b":
        return [_one_by_one(row, stages, microbatches) for row in held]
    if kind == "breadth-first":
        return [_breadth_first(row, microbatches) for row in held]
    if kind == "zero-bubble-v":
        return [_zero_bubble_v(rank, ranks, microbatches) for rank in range(ranks)]
    if kind == "dualpipe-v":
        return [_dualpipe_v(rank, ranks, microbatches) for rank in range(ranks)]
    order = _zero_bubble if kind == "zero-bubble" else _interleaved
    return [order(rank, row, ranks, microbatches) for rank, row in enumerate(held)]


# ---- whole backward passes


def _gpipe(held: Sequence[int], microbatches: int) -> list[Action]:
    """All forward passes, then all backward ones."""
    forward = [Action(stage, "F", m) for stage in held for m in range(microbatches)]
    return forward + [Action(stage, "B", m) for stage in reversed(held) for m in range(microbatches)]


def _breadth_first(held: Sequence[int], microbatches: int) -> list[Action]:
    """All microbatches through a rank's first stage, then all through the next; then all the way back."""
    forward = [Action(stage, "F", m) for stage in held for m in range(microbatches)]
    return forward + [Action(stage, "B", m) for stage in reversed(held) for m in reversed(range(microbatches))]


def _one_by_one(held: Sequence[int], stages: int, microbatches: int) -> list[Action]:
    """So many microbatches ahead as stages lie behind, then one backward pass for each forward pass."""
    ahead = warm_up("1f1b", held[-1], stages, 1, microbatches)
    forward = [[Action(stage, "F", m) for stage in held] for m in range(microbatches)]
    order = [action for row in forward[:ahead] for action in row]
    for m in range(microbatches):
        if m + ahead < microbatches:
            order += forward[m + ahead]
        order += (Action(stage, "B", m) for stage in reversed(held))
    return order


def _in_rounds(held: Sequence[int], per_round: int) -> Callable[[int, Literal["F", "B", "I", "W"]], Action]:
    """The k-th pass of a kind on a rank: rounds of microbatches pass its stages in turn, backward in reverse."""

    def at(k: int, kind: Literal["F", "B", "I", "W"]) -> Action:
        local = k // per_round % len(held)
        microbatch = k // (per_round * len(held)) * per_round + k % per_round
        return Action(held[local if kind == "F" else len(held) - 1 - local], kind, microbatch)

    return at


def _interleaved(rank: int, held: Sequence[int], ranks: int, microbatches: int) -> list[Action]:
    """As ``1f1b``, in rounds."""
    at, count = _in_rounds(held, length_of_a_round(ranks, microbatches)), len(held) * microbatches
    warm = warm_up("interleaved-1f1b", rank, ranks, len(held), microbatches)
    order = [at(k, "F") for k in range(warm)]
    for k in range(count):
        if k + warm < count:
            order.append(at(k + warm, "F"))
        order.append(at(k, "B"))
    return order


# ---- backward passes in two halves


def _zero_bubble(rank: int, held: Sequence[int], ranks: int, microbatches: int) -> list[Action]:
    """As ``interleaved-1f1b``, but a rank runs ahead by only one more pass than the next one, and its weight gradients
    fall behind by as many passes as there are ranks before it, so that they fill what would be idle at the end."""
    at, count = _in_rounds(held, length_of_a_round(ranks, microbatches)), len(held) * microbatches
    warm = warm_up("zero-bubble", rank, ranks, len(held), microbatches)
    order = [at(k, "F") for k in range(warm)]
    for k in range(count):
        if k + warm < count:
            order.append(at(k + warm, "F"))
        order.append(at(k, "I"))
        if k >= rank:
            order.append(at(k - rank, "W"))
    return order + [at(k, "W") for k in range(max(0, count - rank), count)]


class _Rank:
    """The actions of a rank, written one after the other: each is for the next microbatch of its stage and kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self._owed: deque[Action] = deque()
        """Weight gradients of the input gradients so far."""

    def add(self, stage: int, kinds: str) -> None:
        """Passes of a stage, a letter each. ``w``: the weight gradients that have been owed for longest, of any
        stage, if there are some."""
        for kind in kinds:
            if kind == "w":
                if self._owed:
                    self._write(self._owed.popleft())
            elif kind == "F":
                self._write(Action(stage, "F", self.count[stage, "F"]))
            elif kind == "B":
                self._write(Action(stage, "B", self.count[stage, "I"]))
                self.count[stage, "I"] += 1
                self.count[stage, "W"] += 1
            elif kind == "I":
                self._owed.append(Action(stage, "W", self.count[stage, "I"]))
                self._write(Action(stage, "I", self.count[stage, "I"]))
            else:
                self._write(Action(stage, "W", self.count[stage, "W"]))

    def _write(self, action: Action) -> None:
        self.actions.append(action)
        self.count[action.stage, action.kind] += 1


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Both stages of a rank in turn, so that every rank holds equally much. With fewer microbatches than fill the
    pipeline, the actions of the others are left out."""
    first, second, total, row = rank, 2 * ranks - 1 - rank, max(2 * ranks - 1, microbatches), _Rank()
    row.add(first, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        row.add(second, "F")
        row.add(first, "F")
    row.add(second, "FIW" * (ranks - rank))
    while row.count[second, "F"] < total:
        row.add(first, "FIW" if row.count[first, "F"] < total else "IW")
        row.add(second, "FIW")
    for _ in range(rank):
        row.add(first, "I")
        row.add(second, "I")
    row.add(first, "IW" * (ranks - rank))
    row.add(second, "W" * (total - row.count[second, "W"]))
    row.add(first, "W" * (total - row.count[first, "W"]))
    return [action for action in row.actions if action.microbatch < microbatches]


def _dualpipe_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """A forward pass of one stage beside a backward pass of the other. PyTorch overlaps the two; here the forward pass
    comes first. Backward passes are split only while the pipeline fills and drains."""
    first, second, after, row = rank, 2 * ranks - 1 - rank, ranks - 1 - rank, _Rank()
    row.add(first, "FF" * after)
    for _ in range(rank + 1):
        row.add(first, "F")
        row.add(second, "F")
    row.add(second, "IwF" * after)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        for ahead, behind in ((first, second), (second, first)):
            row.add(ahead, "F")
            row.add(behind, "B")
    for _ in range(after):
        row.add(second, "BF")
        row.add(first, "B")
    half = (rank + 1) // 2
    for k in range(rank + 1):
        row.add(second, "B" if k < half or (k == half and rank % 2 == 0) else "I")
        row.add(first, "B" if k < half else "I")
    row.add(first, "wI" * after + "w" * (rank + 1))
    return row.actions
