"""Where a rank waits for messages that it has sent, as they would else take more than the account of memory has left.

On gloo, what has been sent stays until the other side has taken it, which may be several passes later. While the rank
holds less than at its peak, it may. Before an instruction that comes near the peak, messages under way are waited for
until they fit below it, or are no more than ``liveness.ahead_bytes``. A rank may wait for its sends anywhere: others
have posted what they receive of it before they wait for anything later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import Instruction, Post, Program, Settle, Start, Wait
from flexsearch.runtime.liveness import ahead_bytes, received_bytes
from flexsearch.runtime.tasks import tasks_of
from flexsearch.simulate.memory import Use, use_of


def with_room(program: Program) -> Program:
    """The program that waits for messages where the account of memory has no room for them."""
    lowered, device = program.lowered, program.device
    ahead = ahead_bytes(lowered, device)
    if all(sent_bytes(lowered, device, x.task) <= ahead for x in program.instructions if isinstance(x, Start)):
        return program
    limits = _limits(program, use_of(lowered, device))
    return replace(program, instructions=tuple(_settled(program, limits, ahead)))


def sent_bytes(lowered: Lowered, device: int, task: int) -> int:
    """Bytes of messages in which a device sends its part of a task."""
    what = lowered.tasks.communication[task]
    assert what is not None
    if what.one_call:
        return 0
    return sum(nbytes for member in what.members for sender, _, nbytes in member.what.messages if sender == device)


def _limits(program: Program, use: Use) -> Iterator[int | None]:
    """By instruction, so many bytes are left below the peak while it runs; None: that does not matter."""
    tasks, held = program.lowered.tasks, int(use.after[0])
    for instruction, members in zip(program.instructions, tasks_of(program), strict=True):
        if members:
            rows = [tasks.identity[t] for t in members]
            places = [use.place[row.microbatch, row.block] for row in rows if (row.microbatch, row.block) in use.place]
            if places:
                held = int(use.after[max(places) + 3])
                yield use.peak - int(use.after[min(places) : max(places) + 1].max())
                continue
        if isinstance(instruction, Post):
            yield use.peak - held - received_bytes(program.lowered, program.device, instruction.task)
        else:
            yield None


def _settled(program: Program, limits: Iterator[int | None], ahead: int) -> Iterator[Instruction]:
    """The instructions, with those that wait where more may be under way than is left."""
    under_way = 0
    for k, (instruction, left) in enumerate(zip(program.instructions, limits, strict=True)):
        most = ahead if left is None else max(ahead, left)
        if left is not None and under_way > most and not _posted_ahead(program.instructions, k):
            yield Settle(most)
            under_way = most
        if isinstance(instruction, Start):
            sent = sent_bytes(program.lowered, program.device, instruction.task)
            under_way = min(under_way, max(0, ahead - sent)) + sent
        elif isinstance(instruction, Wait):
            under_way = min(under_way, ahead)
        yield instruction


def _posted_ahead(instructions: Sequence[Instruction], k: int) -> bool:
    """Whether an instruction posts a receive before its task is issued: for that nobody needs to wait."""
    post = instructions[k]
    if not isinstance(post, Post):
        return False
    following = next((x for x in instructions[k:] if not isinstance(x, Post)), None)
    return not (isinstance(following, Start) and following.task == post.task)
