"""From when to when the values of a program live: receives are posted, and values let go of, where the program says so.

A receive is posted as early as the receives that are under way stay below ``POSTED_BYTES`` together, so that data can
arrive while the rank computes, and at the latest where it is waited for. A value is let go of behind its last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

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
    Wait,
)

POSTED_BYTES = 32 * 2**20
"""Bytes of receives that are under way at a time; one may be larger."""
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


def _with_posts(lowered: Lowered, device: int, instructions: Sequence[Instruction]) -> list[Instruction]:
    waits = [k for k, instruction in enumerate(instructions) if isinstance(instruction, Wait)]
    posts: dict[int, list[Instruction]] = {}
    under_way: deque[tuple[int, int]] = deque()
    total = at = 0
    for k in waits:
        wait = instructions[k]
        assert isinstance(wait, Wait)
        nbytes = _received_bytes(lowered, device, wait.task)
        if not nbytes:
            continue  # an all-reduce is done in place
        while under_way and total + nbytes > POSTED_BYTES:
            place, released = under_way.popleft()
            at, total = place + 1, total - released
        posts.setdefault(at, []).append(Post(wait.task, wait.slot))
        under_way.append((k, nbytes))
        total += nbytes
    return [x for k, instruction in enumerate(instructions) for x in (*posts.get(k, ()), instruction)]


def _received_bytes(lowered: Lowered, device: int, task: int) -> int:
    """Bytes of messages that a task brings to a device."""
    what = lowered.tasks.communication[task]
    assert what is not None
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
        for x in (instruction, *((Free(tuple(sorted(free[k]))),) if k in free else ()))
    ]
