"""From when to when the values of a program live: receives are posted, and values let go of, where the program says so.

A receive is posted where its task stands at the latest: in the order of tasks, all ranks then have posted what others
send before they wait for anything later, so that a rank may wait for its sends. It is posted as long before as all that
are posted ahead stay below ``ahead_bytes`` together, so that data can arrive while the rank computes. A value is let go
of behind its last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from flexsearch.graph import volume
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import (
    Assemble,
    Backward,
    Empty,
    Forward,
    Free,
    Instruction,
    Key,
    Post,
    Slot,
    Start,
    Wait,
)

AHEAD_BYTES = 32 * 2**20
"""Of messages that a rank holds beyond the account of memory, at most; one may be larger."""
AHEAD_PART = 1 / 40
"""Likewise, as a part of its weights with their gradients, so that it does not matter."""
_GRADIENTS = ("home gradient", "edge gradient")


def with_lifetimes(
    lowered: Lowered, device: int, instructions: Sequence[Instruction], slots: Sequence[Key]
) -> list[Instruction]:
    """The program without what nobody reads, with receives, and with values let go of. Raises AssertionError if a
    gradient would grow after it has been used."""
    _check_gradients(instructions, slots)
    program = _with_posts(lowered, device, list(_without_unread(instructions)))
    return _with_frees(_with_empties(program))


def _check_gradients(instructions: Iterable[Instruction], slots: Sequence[Key]) -> None:
    """The loss may not depend on a piece, so a missing gradient is a legitimate zero, and one that comes too late would
    look the same."""
    used: set[Slot] = set()
    for instruction in instructions:
        if isinstance(instruction, Backward | Assemble):
            late = [slot for slot in instruction.writes if slot in used and slots[slot].kind in _GRADIENTS]
            if late:
                raise AssertionError(f"{slots[late[0]]} grows after it has been used")
        used.update(instruction.reads)


def _without_unread(instructions: Sequence[Instruction]) -> Iterable[Instruction]:
    """Segments export only what somebody reads."""
    read = {slot for instruction in instructions for slot in instruction.reads}
    for instruction in instructions:
        if isinstance(instruction, Forward):
            exports = tuple((r, slot) for r, slot in instruction.exports if slot in read)
            yield replace(instruction, exports=exports)
        else:
            yield instruction


def ahead_bytes(lowered: Lowered, device: int) -> int:
    """Bytes of receives that may be posted before their tasks, and of sends that may still be under way behind them."""
    stored = 0
    for weight in lowered.weights:
        itemsize = lowered.graph.tensor[weight.tensor].itemsize
        stored += sum(itemsize * volume(entry.box) for entry in weight.plan.storage if entry.device == device)
    return min(AHEAD_BYTES, int(2 * stored * AHEAD_PART))


def _with_posts(lowered: Lowered, device: int, instructions: Sequence[Instruction]) -> list[Instruction]:
    starts = {x.task: k for k, x in enumerate(instructions) if isinstance(x, Start)}
    waits = [(min(k, starts[x.task]), x) for k, x in enumerate(instructions) if isinstance(x, Wait)]
    waits.sort(key=lambda row: row[0])
    posts: dict[int, list[Instruction]] = {}
    # The first ones once others need not wait for this rank: it waits itself, or has sent something.
    pauses = (k + sends for k, x in enumerate(instructions) if (sends := _sends(x)) or isinstance(x, Wait))
    for at, wait in _posted(lowered, device, waits, ahead_bytes(lowered, device), next(pauses, 0)):
        posts.setdefault(at, []).append(Post(wait.task, wait.slot))
    return [x for k, instruction in enumerate(instructions) for x in (*posts.get(k, ()), instruction)]


def _posted(
    lowered: Lowered, device: int, waits: Sequence[tuple[int, Wait]], limit: int, at: int
) -> Iterator[tuple[int, Wait]]:
    """Before which instructions receives are posted, the first one before number ``at`` or where it has to be.
    ``waits``: with the latest places, ascending."""
    ahead: deque[tuple[int, int]] = deque()
    total = 0
    for latest, wait in waits:
        nbytes = received_bytes(lowered, device, wait.task)
        if not nbytes:
            continue  # a collective makes its own room
        while ahead and total + nbytes > limit:
            at, released = ahead.popleft()
            total -= released
        early = at < latest and nbytes <= limit
        if early:
            ahead.append((latest, nbytes))
            total += nbytes
        yield (at if early else latest), wait


def _sends(instruction: Instruction) -> bool:
    return isinstance(instruction, Start) and any(instruction.sources)


def received_bytes(lowered: Lowered, device: int, task: int) -> int:
    """Bytes of messages that a task brings to a device."""
    what = lowered.tasks.communication[task]
    assert what is not None
    if what.one_call:
        return 0
    return sum(
        nbytes for member in what.members for _, receiver, nbytes in member.what.messages if receiver == device
    )


def _with_empties(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Weights that are gathered again give their memory back behind the last use before."""
    last: dict[Slot, int] = {}
    empty: dict[int, list[Instruction]] = {}
    for k, instruction in enumerate(instructions):
        if isinstance(instruction, Assemble) and instruction.refills:
            for slot in instruction.results.values():
                empty.setdefault(last[slot], []).append(Empty(slot))
        for slot in (*instruction.reads, *instruction.writes):
            last[slot] = k
    return [x for k, instruction in enumerate(instructions) for x in (instruction, *empty.get(k, ()))]


def _with_frees(instructions: Sequence[Instruction]) -> list[Instruction]:
    last: dict[Slot, int] = {}
    for k, instruction in enumerate(instructions):
        for slot in (*instruction.reads, *instruction.writes):
            last[slot] = k
    free: dict[int, list[Slot]] = {}
    for slot, k in last.items():
        free.setdefault(k, []).append(slot)
    return [
        x
        for k, instruction in enumerate(instructions)
        for x in (_taking(instruction, free.get(k, ())), *((Free(tuple(sorted(free[k]))),) if k in free else ()))
    ]


def _taking(instruction: Instruction, over: Collection[Slot]) -> Instruction:
    """A backward pass lets go of the gradients that enter it as it goes on, if nobody reads them behind it. A part of a
    gradient gets memory of its own where nobody reads the whole of it any more, as that would else live as long."""
    if isinstance(instruction, Assemble) and instruction.adds and instruction.sources:
        return replace(instruction, owns=instruction.owns or set(instruction.sources.values()) <= set(over))
    if not isinstance(instruction, Backward):
        return instruction
    takes = frozenset(slot for slot in instruction.seeds if slot is not None and slot in over)
    return replace(instruction, takes=takes)
