"""Messages under way where the account of memory has no room for them: when a rank waits for what it has sent, and when
it lets come what it receives.

On gloo, what has been sent stays until the other side has taken it, which may be several passes later, and what is
posted has its memory from then on. While the rank holds less than at its peak, both may be. Before an instruction that
comes near the peak, sends are waited for until they fit below it, or are no more than ``liveness.ahead_bytes``; and
receives that would be beside it are posted behind it, where that is allowed.

A rank may wait for its sends anywhere, and post a receive as late as before it waits for anything that stands later in
the order of tasks, sends included (``wire.Wire``). Then, of all that ranks wait for, what comes first in that order is
under way: nothing hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flexsearch.graph import volume
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import AwaitSends, Instruction, Post, Program, Start, Update, Wait
from flexsearch.runtime.liveness import ahead_bytes, received_bytes
from flexsearch.runtime.tasks import tasks_of
from flexsearch.simulate.account import BLOCK_CELLS
from flexsearch.simulate.memory import Use, use_of


def with_room(program: Program, place: Mapping[int, int]) -> Program:
    """The program that waits for messages, and lets them come, where the account of memory has room. ``place``: of
    communications, in the order in which all ranks issue them."""
    lowered, device = program.lowered, program.device
    ahead = ahead_bytes(lowered, device)
    rows = program.instructions
    sends = any(sent_bytes(lowered, device, x.task) > ahead for x in rows if isinstance(x, Start))
    if not sends and not any(received_bytes(lowered, device, x.task) > ahead for x in rows if isinstance(x, Post)):
        return program
    use = use_of(lowered, device)
    limits = list(_limits(program, use))
    program = replace(program, instructions=tuple(_posted_later(program, use, limits, ahead, place)))
    return replace(program, instructions=tuple(_waiting(program, use, _limits(program, use), ahead)))


def sent_bytes(lowered: Lowered, device: int, task: int) -> int:
    """Bytes of what a device sends parts of in a task, which messages may keep."""
    what = lowered.tasks.communication[task]
    assert what is not None
    if what.one_call or what.purpose in ("gather", "regather"):  # what is stored lives anyway
        return 0
    total = 0
    for member in what.members:
        source = member.reshard.phases[member.phase].source
        sent = {move.source for move in member.what.moves if source[move.source].device == device}
        total += lowered.moved(what.purpose, member.key).itemsize * sum(volume(source[k].box) for k in sent)
    return total


class _Limit(NamedTuple):
    """Of an instruction: the ``first`` and the ``last`` of its cells in the account of memory (or both the last one
    before it); so many bytes are ``left`` below the peak while it runs."""

    first: int
    last: int
    left: int


def _limits(program: Program, use: Use) -> Iterator[_Limit | None]:
    """By instruction; None: that does not matter."""
    tasks, last = program.lowered.tasks, 0
    for instruction, members in zip(program.instructions, tasks_of(program), strict=True):
        rows = [tasks.identity[t] for t in members]
        places = [use.place[row.microbatch, row.block] for row in rows if (row.microbatch, row.block) in use.place]
        if places:
            first, last = min(places), max(places) + BLOCK_CELLS - 1
            yield _Limit(first, last, use.peak - int(use.after[first : last - 1].max()))
        elif isinstance(instruction, Post):
            early = use.brought(tasks.identity[instruction.task]) > last
            more = received_bytes(program.lowered, program.device, instruction.task) if early else 0
            yield _Limit(last, last, use.peak - int(use.after[last]) - more)
        else:
            yield None


# ---- receives


def _posted_later(
    program: Program, use: Use, limits: Sequence[_Limit | None], ahead: int, place: Mapping[int, int]
) -> Iterator[Instruction]:
    """The instructions, with receives behind what has no room for them before the account of memory has them."""
    rows = program.instructions
    later: dict[int, list[Instruction]] = {}
    moved = set[int]()
    for k, post in enumerate(rows):
        nbytes = received_bytes(program.lowered, program.device, post.task) if isinstance(post, Post) else 0
        if nbytes <= ahead:
            continue
        assert isinstance(post, Post)
        brought = use.brought(program.lowered.tasks.identity[post.task])
        others = (j for j in _before(rows, k, place) if not isinstance(rows[j], Post))
        full = [j for j in others if (at := limits[j]) is not None and at.first < brought and at.left < nbytes]
        if full:
            later.setdefault(full[-1], []).append(post)
            moved.add(k)
    for k, instruction in enumerate(rows):
        if k not in moved:
            yield instruction
        yield from later.get(k, ())


def _before(rows: Sequence[Instruction], k: int, place: Mapping[int, int]) -> Iterator[int]:
    """Numbers of the instructions that a receive, number k, may be posted behind."""
    post = rows[k]
    assert isinstance(post, Post)
    for j in range(k + 1, len(rows)):
        at = rows[j]
        if isinstance(at, Update) or (isinstance(at, Wait) and place[at.task] >= place[post.task]):
            return
        if isinstance(at, Start) and at.task == post.task and any(at.sources):
            return  # both directions at once
        yield j


# ---- sends


def _waiting(program: Program, use: Use, limits: Iterator[_Limit | None], ahead: int) -> Iterator[Instruction]:
    """The instructions, with those that wait where more may be under way than is left."""
    rows, identity, under_way = program.instructions, program.lowered.tasks.identity, 0
    counted: dict[int, int] = {}
    """The last cell in which the account of memory still has what is sent -> bytes."""
    for k, (instruction, limit) in enumerate(zip(rows, limits, strict=True)):
        most = ahead
        if limit is not None:
            there = sum(nbytes for cell, nbytes in counted.items() if cell >= limit.last)
            most = max(ahead, limit.left + there)
            if under_way > most and not _posted_ahead(rows, k):
                yield AwaitSends(most)
                under_way = most
        if isinstance(instruction, Start):
            sent = sent_bytes(program.lowered, program.device, instruction.task)
            under_way = min(under_way, max(0, ahead - sent)) + sent
            until = use.brought(identity[instruction.task])
            counted[until] = counted.get(until, 0) + sent
        elif isinstance(instruction, Wait):
            under_way = min(under_way, ahead)
        yield instruction


def _posted_ahead(rows: Sequence[Instruction], k: int) -> bool:
    """Whether an instruction posts a receive before its task is issued: for that nobody needs to wait."""
    post = rows[k]
    if not isinstance(post, Post):
        return False
    following = next((x for x in rows[k:] if not isinstance(x, Post)), None)
    return not (isinstance(following, Start) and following.task == post.task)
