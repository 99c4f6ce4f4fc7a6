"""State of the engine: what a run needs, and what is kept of the plan at hand.

A run is cut into **windows** by horizons. Of the plan at hand a **snapshot** is kept at the start of each window: where
every device stands, the ticks until which clocks and resources lie behind the horizon, and the communications that are
pending. Ticks in a snapshot count from its horizon, so a plan that is put off keeps its snapshots.

A communication is found by its **place**: (microbatch, block, number) in a table with room for ``capacity`` of each
block. Only pending ones have more than a few bytes there: those that somebody has issued, and those that end behind the
horizon.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from flexsearch.compiled import I64, U8, U32, U64
from flexsearch.lower.rows import Machine, Schedule, blocks_run
from flexsearch.packed import packed, zeros

RUNNING, WAITING, COMPUTING, DONE = range(4)
"""A device can run its next step; waits for a communication; for its own computation on a contended processor; has no
steps left."""
ROOM, DEADLOCK, MALFORMED = range(1, 4)
"""Why a run stopped: more is pending than there is room for; devices wait for what nothing starts; a communication has
more senders, and communications before it, than it says."""
ENDED: Final = np.uint64(0xFFFFFFFF)
"""In place of the number of a pending communication: it ended before the horizon."""
WINDOWS: Final = 48
"""Windows of a run; at most 63. Measured on 64 devices: fewer are run through for longer, more are saved for longer."""


@packed
class Devices(NamedTuple):
    """Where devices stand: action, block, steps of it that are done, ``status``, the identity of what they wait for,
    the tick until which they are busy, and what is left of their computation (ticks). ``host``: the tick at which the
    host has launched all steps that are done; ``slack``: ticks by which it was ahead, at the least, in the window
    (below 0: the device waited for it; ``NEVER``: it launched nothing)."""

    action: U32
    block: U32
    step: U32
    status: U8
    awaited: U64
    clock: I64
    left: I64
    host: I64
    slack: I64


@packed
class Pending(NamedTuple):
    """Communications that are pending: place, identity, senders and communications that are missing, tick at which it
    is ready so far, tick at which it ends (-1: not served yet), ticks for which its links were kept busy in turns
    (below 0: it waits for its connection, or has just done so, see ``engine_connections``)."""

    place: U32
    identity: U64
    missing: U32
    ready: I64
    end: I64
    turned: I64


@packed
class Connections(NamedTuple):
    """Communications that hold their connections: identity and connection of the first ``held`` ((1,)). ``waiting``:
    (1,) how many wait for a connection."""

    identity: U64
    connection: U64
    held: U64
    waiting: U64


@packed
class Queue(NamedTuple):
    """A binary heap of rows that are ready, by (tick, identity). ``item``: place of a communication, or the device of a
    computation. ``size``: (1,)."""

    ready: I64
    identity: U64
    item: U32
    size: U64


@packed
class Snapshots(NamedTuple):
    """By version, window (the last one is the mark of a period), and as in ``Devices``, ``Pending`` or by resource.

    ``total``: how many communications are pending. ``host`` may lie before the horizon. By version and window also
    ``computed`` (by device), ``carried`` (by resource): ticks of work done in the window; ``slack`` (by device); and
    ``latest``: latest end in the window, ticks from its start on.
    """

    action: U32
    block: U32
    step: U32
    status: U8
    awaited: U64
    clock: I64
    left: I64
    host: I64
    free: I64
    computing: I64
    total: U64
    place: U32
    identity: U64
    missing: U32
    ready: I64
    end: I64
    turned: I64
    computed: I64
    carried: I64
    slack: I64
    latest: I64


@packed
class Kept(NamedTuple):
    """What is known of the plan at hand, and of the proposal (``new_``).

    By block: ``segment``, ``busy`` (as in ``State``), ``touched`` (bit k: something of it happens in window k). By
    window: ``horizon`` (tick at its start), ``snapshot``, ``work`` (which version is that of the plan at hand: of the
    snapshot at its start, of the work done in it), ``new_snapshot`` (1: the proposal has one of its own),
    ``log_first``, ``log_last`` (rows of ``log``: places of the communications that the proposal serves in it). By
    place: ``window`` (1 + the window in which it is served, 0: in none). ``total_compute`` (by device),
    ``total_carry`` (by resource): ticks of work in the plan.
    ``makespan``: (1,). ``taken``: (1,) bit k: the proposal goes through window k as the plan at hand does.
    ``host_shift``: by window and device, how much later the proposal's host is at its start than in the plan at hand,
    beside the shift of the window; it counts where bit k of ``host_shifted`` ((1,)) is set.

    ``visit_first``: by action, how many blocks the actions of its group before it have. By visit:
    ``visit_window`` (as ``window``), ``visit_tick`` (from the start of the window on) at which it began.
    ``visited``, ``visits``: those of the proposal, and (1,) how many. ``chunk``: (1,) ticks after which a window is
    looked at again: whether its end must be shifted, whether it is late. ``valid``: (1,) whether there are snapshots of
    the plan at hand; ``accepted``: (1,) how many proposals since they were all made; ``first_makespan``: (1,) then.
    """

    segment: U32
    busy: U64
    touched: U64
    new_touched: U64
    horizon: I64
    new_horizon: I64
    snapshot: U8
    new_snapshot: U8
    work: U8
    log_first: U64
    log_last: U64
    log: U32
    window: U8
    total_compute: I64
    new_compute: I64
    total_carry: I64
    new_carry: I64
    makespan: I64
    new_makespan: I64
    taken: U64
    host_shift: I64
    host_shifted: U64
    changed: U32
    changes: U64
    visit_first: U64
    visit_window: U8
    visit_tick: I64
    visited: U32
    new_window: U8
    new_tick: I64
    visits: U64
    chunk: I64
    valid: U8
    accepted: U64
    first_makespan: I64


@packed
class Fold(NamedTuple):
    """Periods of microbatches. ``due``: tick at which the state is compared with the mark; ``lag``: microbatches of the
    period looked for; ``tries``; ``base``: tick of the mark; ``log``: communications served until then; ``computed``,
    ``carried``: work done until then; ``host``: where hosts were then, and ``slack`` since (as in ``Devices``);
    ``begun``: by action of the reference device, when it began; ``current``: the last that began; ``jumped``: ticks
    that were jumped over; ``enabled``. All but five are of shape (1,)."""

    due: I64
    lag: U64
    tries: U64
    base: I64
    log: U64
    computed: I64
    carried: I64
    host: I64
    slack: I64
    begun: I64
    current: U64
    jumped: I64
    enabled: U8


@packed
class Path(NamedTuple):
    """The longest path to the end (``engine_late``). By device: ``left``, ticks from where it stands; ``block``, where
    that is. ``run``: (1,) bit k: window k must be run. ``after``: by place, ticks from the end of a communication on,
    of what is pending or of a block from ``first`` ((1,)) on.
    ``doubt``: (1,) ticks by which the reference device must be later than in the plan at hand for the path to be worked
    out. ``windows``: (1,) how many windows proposals run, 16 times the mean, the last ones counting most. ``ordered``:
    (1,) whether all devices run their blocks in the order of their numbers, for one microbatch: else there is none."""

    left: I64
    block: U32
    run: U64
    after: I64
    first: U64
    doubt: I64
    windows: U64
    ordered: U8


@packed
class Services(NamedTuple):
    """What keeps resources, in the order in which it is served: a communication on its links, a computation on a
    contended processor, each of their turns, and a processor that moves the bytes of a communication (``moves``: 1).

    By service: ``identity`` of the row, ``begin`` (tick), ``resource`` that it waits for (-1: none), ``before``: the
    service that keeps that until then. By resource: ``keeper``, the last service that kept it. ``total``: (1,) how many
    there are. Nothing is written where there is room for none."""

    identity: U64
    begin: I64
    resource: I64
    before: I64
    moves: U8
    keeper: I64
    total: U64


@packed
class Record(NamedTuple):
    """Where start and end of every row are written down. ``computation_first``: by block, place of its computations.
    ``computations``: (1,) places of one microbatch. ``start``, ``end``: by place of a communication, ``begin``,
    ``finish``: by place of a computation (ticks). ``enabled``: (1,)."""

    computation_first: U64
    computations: U64
    start: I64
    end: I64
    begin: I64
    finish: I64
    enabled: U8
    services: Services


@packed
class State(NamedTuple):
    """All of an engine. ``segment``: by block, of the plan that is run; ``busy``: by block, 64 devices a word, bit by
    bit, those that have steps in it. ``runs``: by group of devices and block, how often a device runs it. ``first``,
    ``capacity``: by block, its first place and how many it has; ``places``: (1,) places of one microbatch. By place:
    ``stamp`` (the run that wrote ``slot``), ``slot`` (number among the pending, or ENDED). ``run``: (1,) number of the
    run. ``free``: by resource, tick from which on it is; ``computing``: of a link, tick until which a device that slows
    it computes. ``computed``, ``carried``: ticks of work done. ``pending_count``, ``logged``, ``window``, ``now`` (tick
    up to which all has happened), ``latest`` (the latest end in the window), ``shift`` (ticks by which the reference
    device is later than in the plan at hand), ``reference`` (that device), ``trouble``: (1,). ``woken``: the first
    ``woken_count`` are devices that can go on."""

    schedule: Schedule
    machine: Machine
    devices: Devices
    pending: Pending
    connections: Connections
    queue: Queue
    snapshots: Snapshots
    kept: Kept
    fold: Fold
    path: Path
    record: Record
    segment: U32
    busy: U64
    runs: U32
    first: U64
    capacity: U64
    places: U64
    stamp: U32
    slot: U32
    run: U32
    free: I64
    computing: I64
    computed: I64
    carried: I64
    pending_count: U64
    logged: U64
    window: U64
    now: I64
    latest: I64
    shift: I64
    woken: U32
    woken_count: U64
    reference: U64
    trouble: U8


def make_state(schedule: Schedule, machine: Machine, capacity: U64, room: int, fold: bool) -> State:
    """The state of an engine, with room for ``room`` pending communications and ``capacity`` of each block."""
    devices, blocks = len(schedule.group), len(schedule.kind)
    resources, microbatches = int(machine.resources[0]), int(schedule.microbatches[0])
    places = int(capacity.sum())
    table = max(1, places * microbatches)
    return zeros(
        State, schedule=schedule, machine=machine,
        devices=zeros(Devices, devices), pending=zeros(Pending, room),
        connections=zeros(Connections, identity=room, connection=room),
        queue=zeros(Queue, room + devices, size=1), snapshots=_snapshots(devices, resources, room),
        kept=_kept(schedule, devices, blocks, resources, table),
        fold=zeros(
            Fold, computed=devices, carried=resources, host=devices, slack=devices,
            begun=len(schedule.microbatch) + 1, enabled=np.array([fold and microbatches >= 4], np.uint8),
        ),
        path=zeros(
            Path, left=devices, block=devices, after=places, ordered=np.array([_is_ordered(schedule)], np.uint8)
        ),
        record=zeros(Record, computation_first=blocks, services=make_services(0, 0)),
        segment=blocks, busy=(blocks, (devices + 63) // 64), runs=_runs(schedule),
        first=(np.cumsum(capacity) - capacity).astype(np.uint64), capacity=capacity,
        places=np.array([places], np.uint64), stamp=table, slot=table, free=resources, computing=resources,
        computed=devices, carried=resources, woken=devices,
    )  # fmt: skip


def make_services(room: int, resources: int) -> Services:
    """Room for so many services."""
    return zeros(Services, room, keeper=np.full(resources, -1, np.int64), total=1)


def _snapshots(devices: int, resources: int, room: int) -> Snapshots:
    by_window = 2, WINDOWS + 1
    of_devices, of_resources = (*by_window, devices), (*by_window, resources)
    by_device = ("action", "block", "step", "status", "awaited", "clock", "left", "host", "computed", "slack")
    return zeros(
        Snapshots, (*by_window, room), **dict.fromkeys(by_device, of_devices), free=of_resources,
        computing=of_resources, carried=of_resources, total=by_window, latest=by_window,
    )  # fmt: skip


def _kept(schedule: Schedule, devices: int, blocks: int, resources: int, table: int) -> Kept:
    visit_first, visits = _visits(schedule)
    by_visit = ("visit_window", "visit_tick", "visited", "new_window", "new_tick")
    by_window = ("horizon", "new_horizon", "snapshot", "new_snapshot", "work")
    return zeros(
        Kept, segment=blocks, busy=(blocks, (devices + 63) // 64), touched=blocks, new_touched=blocks,
        **dict.fromkeys(by_window, WINDOWS + 1), log_first=WINDOWS, log_last=WINDOWS, log=table, window=table,
        total_compute=devices, new_compute=devices, total_carry=resources, new_carry=resources,
        host_shift=(WINDOWS + 1, devices), changed=blocks, visit_first=visit_first, **dict.fromkeys(by_visit, visits),
    )  # fmt: skip


def _visits(schedule: Schedule) -> tuple[U64, int]:
    """By action, how many blocks the actions of its group before it have; and the most of a group."""
    first, most = np.zeros(len(schedule.microbatch), np.uint64), 1
    for begin, end in zip(schedule.action_first, schedule.action_last, strict=True):
        visits = 0
        for action in range(int(begin), int(end)):
            first[action] = visits
            visits += int(schedule.block_last[action]) - int(schedule.block_first[action])
        most = max(most, visits)
    return first, most


def _is_ordered(schedule: Schedule) -> bool:
    """Whether all devices run their blocks in the order of their numbers, for one microbatch."""
    if int(schedule.microbatches[0]) > 1:
        return False
    begins, ends = schedule.block_first, schedule.block_last
    for first, last in zip(schedule.action_first.tolist(), schedule.action_last.tolist(), strict=True):
        if any(begins[action] < ends[action - 1] for action in range(first + 1, last)):
            return False
    return True


def _runs(schedule: Schedule) -> U32:
    """By group of devices and block, how often a device runs it."""
    runs = np.zeros((len(schedule.action_first), len(schedule.kind)), np.uint32)
    for group, (first, last) in enumerate(zip(schedule.action_first, schedule.action_last, strict=True)):
        for action in range(int(first), int(last)):
            runs[group, blocks_run(schedule, action)] += np.uint32(1)
    return runs
