"""Peak memory of every device, exactly, kept up to date from proposal to proposal, compiled.

A device's memory is a row of **cells**, five for each block: bytes that begin where its first operand is put together;
that end there or begin where the others are; that end there or begin with its computing; that end with that or begin
with its communicating; that end with that. The use at a moment is the sum of all cells up to where it begins. Cells
come in chunks, and a chunk is a pair: its net bytes and its high-water mark. Pairs compose, so the peak of a device is
a scan over the chunks of its actions, in the order of its schedule. With several microbatches there are cells for the
first, the last, that whose backward pass is the second to run, and the others, as weights are gathered for the first,
gradients leave with the final one, which is the last or, where backward passes run in reverse, the first, and what is
left of the gradients of one is added to the sum during the next.

The account is that of one plan. It moves to another by the spans of the units around the operators whose configs
differ: minus the old ones, plus the new ones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import FOUR, I64, ONE, THREE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.rows import FORWARD, GATHER, Schedule
from flexsearch.packed import packed
from flexsearch.simulate.lifetimes import list_spans
from flexsearch.simulate.spans import BUFFERS, GRADIENTS, Sources, Spans

CELLS: Any = np.uint64(5)
"""Of a block."""
BLOCK_CELLS: Final = int(CELLS)


@packed
class Account(NamedTuple):
    """The account of one plan, ``state``. ``empty``: (1,) whether it is that of no plan. ``cells``, by which of the
    microbatches, device and cell; ``net`` and ``high``, by which, device and chunk. ``chunk_of``, by cell; chunk c is
    the cells ``[chunk_first[c], chunk_first[c + 1])``. ``stale``: by device and chunk, whether cells changed since the
    pair was worked out; ``changed``: by device, whether any did. ``next_block``: by group of devices and block, the
    block itself if the group runs it, else the next one that it runs (past all, the last). ``peak``, ``capacity``: by
    device, bytes. ``stamp``: by unit, the ``round`` ((1,)) in which it was ``touched``, ``number`` ((1,)) of them."""

    state: State
    spans: Spans
    schedule: Schedule
    empty: U8
    cells: I64
    net: I64
    high: I64
    chunk_of: U32
    chunk_first: U32
    stale: npt.NDArray[np.uint8]
    changed: U8
    next_block: npt.NDArray[np.uint32]
    peak: I64
    capacity: I64
    stamp: U64
    round: U64
    touched: U32
    number: U64


def forget(account: Account) -> None:
    """Make it the account of no plan."""
    account.empty[0] = 1
    account.state.config[:] = NOTHING
    for column in (account.cells, account.net, account.high, account.stale, account.changed, account.peak):
        column[:] = 0


@lean
def missing_memory(account: Account, sources: Sources, state: State) -> Any:
    """Bytes that a plan lacks over those that the device has, summed over the devices; 0.0 if it fits."""
    _touch(account, sources, state)
    # The old spans of all units that differ, then the new ones: compiling would take twice as long with two calls.
    count = account.number[0]
    for k in range(count if account.empty[0] == 1 else ZERO, TWO * count):
        new = k >= count
        list_spans(sources, state if new else account.state, np.uint64(account.touched[k % count]), account.spans)
        enter(account, np.int64(1) if new else np.int64(-1))
    _remember(account.state, state)
    account.empty[0] = 0
    return _survey(account)


@lean
def _touch(account: Account, sources: Sources, state: State) -> None:
    """List the units that differ between the account's plan and ``state``."""
    units, old = sources.units, account.state
    account.round[0] += ONE
    account.number[0] = ZERO
    for i in range(np.uint64(state.config.shape[0])):
        if state.config[i] == old.config[i]:
            continue
        for k in range(np.uint64(units.concerned_first[i]), np.uint64(units.concerned_last[i])):
            u = np.uint64(units.concerned[k])
            if account.stamp[u] != account.round[0]:
                account.stamp[u] = account.round[0]
                account.touched[account.number[0]] = u
                account.number[0] += ONE


@lean
def _remember(old: State, state: State) -> None:
    """Make the account's plan equal to ``state``."""
    for i in range(np.uint64(state.config.shape[0])):
        old.config[i] = state.config[i]
    for slot in range(np.uint64(state.leader.shape[0])):
        old.leader[slot], old.need[slot] = state.leader[slot], state.need[slot]
        old.forward[slot], old.backward[slot] = state.forward[slot], state.backward[slot]
        old.kept[slot] = state.kept[slot]
    for w in range(np.uint64(state.plan.shape[0])):
        old.plan[w] = state.plan[w]


@lean
def _survey(account: Account) -> Any:
    """Find the peaks of the devices whose cells changed; returns the memory that is missing."""
    missing = 0.0
    for d in range(np.uint64(account.peak.shape[0])):
        if account.changed[d] == 1:
            account.peak[d] = _peak(account, d)
        missing += max(0.0, float(account.peak[d]) / float(account.capacity[d]) - 1.0)
    return missing


@lean
def enter(account: Account, sign: Any) -> None:
    """Add the spans at hand to the cells, or take them away (``sign`` -1)."""
    spans, schedule = account.spans, account.schedule
    last = np.uint64(account.cells.shape[0]) - ONE
    for s in range(spans.size[0]):
        d, nbytes = np.uint64(spans.device[s]), sign * spans.nbytes[s]
        if nbytes == 0:
            continue
        begin = _cell(account, d, np.uint64(spans.first[s]), ZERO)
        end = _cell(account, d, np.uint64(spans.last[s]), ONE)
        if spans.last[s] < spans.first[s]:
            _carry(account, d, begin, end, nbytes, last, spans.part[s] == GRADIENTS)
            continue
        a, b = begin // CELLS, end // CELLS
        # What begins and ends in passes that every microbatch makes, each has of its own; the rest is there once.
        repeated = schedule.once[a] == 0 and schedule.once[b] == 0
        _change(account, d, begin, nbytes, _which(schedule, a, last, False), repeated)
        # A receive buffer of a gather goes with the first microbatch that reads what is gathered.
        stays = spans.part[s] != BUFFERS
        _change(account, d, end, -nbytes, _which(schedule, b, last, stays), repeated)
        if last > ZERO and not repeated and spans.part[s] == GRADIENTS and schedule.once[a] == 0:
            # A sum over the microbatches: what the later ones add to it is there for a moment, too.
            for which in range(last + ONE):
                if which != _which(schedule, a, last, False):
                    _change(account, d, begin, nbytes, which, False)
                    _change(account, d, begin + ONE, -nbytes, which, False)


@lean
def _carry(account: Account, d: Any, begin: Any, end: Any, nbytes: Any, last: Any, beside: Any) -> None:
    """Enter what begins in each microbatch and ends in the next one, for the final one with the step. ``beside``: it is
    to be added to a sum, which begins as that of the first to run, and so that is left out. It is
    there once it has been cut out of what ends where it begins."""
    begin = begin + ONE if beside else begin
    final = last if account.schedule.final[0] > ZERO else ZERO
    second = final if account.schedule.microbatches[0] == TWO else TWO
    for which in range(last + ONE):
        first = which == last - final
        if not (beside and first):
            _change(account, d, begin, nbytes, which, False)
        if not first and not (beside and which == second):
            _change(account, d, end, -nbytes, which, False)
    blocks = np.uint64(account.schedule.kind.shape[0])
    _change(account, d, CELLS * blocks - ONE, -nbytes, final, False)


@lean
def _which(schedule: Schedule, block: Any, last: Any, ends: Any) -> Any:
    """Place in ``Account.cells`` of the microbatch with which what is there once begins, or ``ends``, at a block.
    Forward passes begin with the first microbatch and end with the last; backward passes end with the final one."""
    final = last if schedule.final[0] > ZERO else ZERO
    if schedule.last[block] == 1:
        return final
    if schedule.once[block] == 1:
        return ZERO
    if schedule.kind[block] != FORWARD and schedule.kind[block] != GATHER and final == ZERO:
        return ZERO if ends else last
    return last if ends else ZERO


@lean
def _cell(account: Account, d: Any, moment: Any, ends: Any) -> Any:
    """Where what begins or ends at a moment counts on a device. Where it does not run the block, that is where the
    first operand of the next block that it runs is put together."""
    block = moment // FOUR
    own = np.uint64(account.next_block[np.uint64(account.schedule.group[d]), block])
    if own == block:
        return CELLS * block + moment % FOUR + ends
    return CELLS * own + ends


@lean
def _change(account: Account, d: Any, cell: Any, nbytes: Any, which: Any, repeated: Any) -> None:
    chunk = np.uint64(account.chunk_of[cell])
    account.stale[d, chunk] = 1
    account.changed[d] = 1
    if repeated:
        for k in range(np.uint64(account.cells.shape[0])):
            account.cells[k, d, cell] += nbytes
    else:
        account.cells[which, d, cell] += nbytes


@lean
def _peak(account: Account, d: Any) -> Any:
    """Peak of a device whose cells changed, bytes."""
    schedule, kinds = account.schedule, np.uint64(account.cells.shape[0])
    for c in range(np.uint64(account.stale.shape[1])):
        if account.stale[d, c] == 1:
            account.stale[d, c] = 0
            for k in range(kinds):
                net = high = np.int64(0)
                for cell in range(np.uint64(account.chunk_first[c]), np.uint64(account.chunk_first[c + ONE])):
                    net += account.cells[k, d, cell]
                    high = max(high, net)
                account.net[k, d, c], account.high[k, d, c] = net, high
    account.changed[d] = 0
    use = top = np.int64(0)
    group = np.uint64(schedule.group[d])
    for a in range(np.uint64(schedule.action_first[group]), np.uint64(schedule.action_last[group])):
        k = which_cells(schedule, np.uint64(schedule.microbatch[a]))
        first, last = np.uint64(schedule.block_first[a]), np.uint64(schedule.block_last[a])
        if first < last:
            begin = np.uint64(account.chunk_of[CELLS * first])
            for c in range(begin, np.uint64(account.chunk_of[CELLS * last - ONE]) + ONE):
                top = max(top, use + account.high[k, d, c])
                use += account.net[k, d, c]
    return top


@lean
def which_cells(schedule: Schedule, microbatch: Any) -> Any:
    """Place in ``Account.cells`` of a microbatch's: of the first, one of the middle, the second to run, and the last
    one; of the first, none, and the last of two; or of the only one."""
    count = np.uint64(schedule.microbatches[0])
    if microbatch == ZERO:
        return ZERO
    if microbatch + ONE == count:
        return TWO if count == TWO else THREE
    return TWO if microbatch == (ONE if schedule.final[0] > ZERO else count - TWO) else ONE
