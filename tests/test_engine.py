"""The engine gives the times of its definition (``engine_oracle``): whole, from a snapshot, and folded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flexsearch.cost.ticks import FOREVER
from flexsearch.errors import FlexsearchError
from flexsearch.lower.rows import COMPUTE, FORWARD, ISSUE, NEVER, WAIT, Machine, Schedule, Segments
from flexsearch.simulate.engine import LATE, Engine
from flexsearch.simulate.engine_state import State
from tests.engine_oracle import Simulation
from tests.random_rows import Arena, Block, Case, Communication, make_case, random_change, unslowed


def oracle(case: Case, segments: Segments, segment: Any) -> Simulation:
    simulation = Simulation(case.schedule, case.machine, segments, segment)
    simulation.run()
    return simulation


def numbers(segment: list[int]) -> Any:
    return np.array(segment, np.uint32)


@pytest.mark.parametrize("seed", range(150))
def test_start_and_end_of_every_row_are_those_of_the_definition(seed: int) -> None:
    case = make_case(seed)
    segments, segment = case.arena.segments(), numbers(case.segment)
    expected = oracle(case, segments, segment)
    engine = Engine(case.schedule, case.machine)
    assert engine.run(segments, segment) == expected.makespan
    times = engine.times(segments, segment)
    rows = 0
    for (m, b, communication, number), (start, end) in expected.times.items():
        if communication:
            place = times.communication_first[b] + np.uint64(number)
            assert (times.communication_start[m, place], times.communication_end[m, place]) == (start, end)
        else:
            place = times.computation_first[b] + np.uint64(number)
            assert (times.computation_start[m, place], times.computation_end[m, place]) == (start, end)
        rows += 1
    assert rows == (times.communication_end >= 0).sum() + (times.computation_end >= 0).sum()


class Walk:
    """Proposals to the plan of a case, accepted or rejected at random."""

    def __init__(self, case: Case, engine: Engine) -> None:
        self.case, self.engine, self.segment, self.most = case, engine, list(case.segment), LATE
        self.makespan = engine.run(case.arena.segments(), numbers(self.segment))

    def propose(self, limits: bool = True) -> tuple[int, int, int]:
        """What the engine says, the makespan, and the limit that the engine was given."""
        case, change = self.case, random_change(self.case)
        proposed = list(self.segment)
        for b, block in change.items():
            proposed[b] = case.arena.add(block)
        segments = case.arena.segments()
        expected = oracle(case, segments, numbers(proposed)).makespan
        among = self.most, self.makespan, int(self.makespan * 1.02), expected, expected - 1
        limit = case.random.choice(among) if limits else self.most
        ticks = self.engine.propose(segments, numbers(proposed), numbers(list(change)), limit)
        if ticks != LATE and case.random.random() < 0.5:
            self.engine.accept()
            self.makespan, self.segment = ticks, proposed
            for b, block in change.items():
                case.blocks[b] = block
        else:
            self.engine.reject()
        return ticks, expected, limit


@pytest.mark.parametrize("seed", range(60))
def test_a_walk_of_proposals_gives_the_times_of_the_definition(seed: int) -> None:
    case = make_case(1000 + seed, blocks=6)
    walk = Walk(case, Engine(case.schedule, case.machine, room=4))
    for _ in range(20):
        ticks, expected, limit = walk.propose()
        assert ticks == (expected if expected <= limit else LATE)
    segments, segment = case.arena.segments(), numbers(walk.segment)
    assert walk.engine.makespan == Engine(case.schedule, case.machine).run(segments, segment)


def test_what_a_device_is_computing_comes_before_what_it_waits_for_next() -> None:
    """Devices that take turns on a processor: the longest path counted the rest of a computation behind that wait."""
    case = make_case(60412, microbatches=1, blocks=10)
    engine = Engine(case.schedule, case.machine)
    engine.run(case.arena.segments(), numbers(case.segment))
    for _ in range(4):
        change, proposed = random_change(case), list(case.segment)
        for b, block in change.items():
            proposed[b] = case.arena.add(block)
        segments = case.arena.segments()
        expected = oracle(case, segments, numbers(proposed)).makespan
        assert engine.propose(segments, numbers(proposed), numbers(list(change)), expected) == expected
        engine.reject()


def test_most_of_a_plan_is_not_run_again() -> None:
    """In long plans with one change, windows are taken over before it and behind it."""
    before = behind = 0
    for seed in range(15):
        case = make_case(3000 + seed, microbatches=1, blocks=30)
        walk = Walk(case, Engine(case.schedule, case.machine))
        for _ in range(10):
            ticks, expected, _ = walk.propose(limits=False)
            assert ticks == expected
            taken = f"{int(walk.engine.state.kept.taken[0]):b}"
            before += taken[-1] == "1"
            behind += "01" in taken
    assert before > 75 and behind > 50


@pytest.mark.parametrize("seed", range(60))
def test_jumping_over_periods_changes_nothing(seed: int) -> None:
    case = make_case(2000 + seed, microbatches=30 + seed, blocks=3)
    segments, segment = case.arena.segments(), numbers(case.segment)
    folded, unfolded = Engine(case.schedule, case.machine), Engine(case.schedule, case.machine, fold=False)
    makespan = unfolded.run(segments, segment)
    assert folded.run(segments, segment) == makespan
    for _ in range(6):
        change = random_change(case)
        proposed = list(case.segment)
        for b, block in change.items():
            proposed[b] = case.arena.add(block)
        segments, segment = case.arena.segments(), numbers(proposed)
        ticks = folded.propose(segments, segment, numbers(list(change)))
        assert ticks == unfolded.run(segments, segment)
        folded.accept()
        case.segment = proposed
        for b, block in change.items():
            case.blocks[b] = block
    assert folded.run(segments, segment) == ticks == folded.makespan


# ---- hosts


@pytest.mark.parametrize("seed", range(40))
def test_hosts_launch_ahead_and_a_proposal_gives_the_times_of_the_definition(seed: int) -> None:
    case = make_case(5000 + seed, microbatches=1 + seed % 2, blocks=(6, 15, 30)[seed % 3], hosted=True)
    walk = Walk(case, Engine(case.schedule, case.machine))
    for _ in range(15):
        ticks, expected, limit = walk.propose()
        assert ticks == (expected if expected <= limit else LATE)


def test_windows_are_taken_over_with_hosts_ahead_by_more_or_less() -> None:
    behind = shifted = 0
    for seed in range(10):
        case = make_case(5100 + seed, microbatches=1, blocks=30, hosted=True)
        walk = Walk(case, Engine(case.schedule, case.machine))
        for _ in range(10):
            ticks, expected, _ = walk.propose(limits=False)
            assert ticks == expected
            kept = walk.engine.state.kept
            behind += "01" in f"{int(kept.taken[0]):b}"
            windows = [k for k in range(len(kept.host_shift)) if int(kept.host_shifted[0]) >> k & 1]
            shifted += bool(kept.host_shift[windows].any())
    assert behind > 50 and shifted > 25


@pytest.mark.parametrize("seed", range(40))
def test_jumping_over_periods_with_hosts_changes_nothing(seed: int) -> None:
    case = make_case(5200 + seed, microbatches=60 + seed, blocks=3, hosted=True)
    segments, segment = case.arena.segments(), numbers(case.segment)
    folded, unfolded = Engine(case.schedule, case.machine), Engine(case.schedule, case.machine, fold=False)
    assert folded.run(segments, segment) == unfolded.run(segments, segment)


def chain(blocks: list[tuple[int, int]], microbatches: int = 1) -> Case:
    """One device with blocks of one computation each: ticks, and those of launching it."""
    schedule = Schedule(
        kind=np.full(len(blocks), FORWARD, np.uint8), argument=np.arange(len(blocks), dtype=np.uint32),
        once=np.zeros(len(blocks), np.uint8), last=np.zeros(len(blocks), np.uint8), group=numbers([0]),
        action_first=numbers([0]), action_last=numbers([microbatches]), block_first=numbers([0] * microbatches),
        block_last=numbers([len(blocks)] * microbatches), microbatch=numbers(list(range(microbatches))),
        microbatches=numbers([microbatches]), final=numbers([microbatches - 1]),
    )  # fmt: skip
    flags = np.ones(1, np.uint8)
    machine = Machine(numbers([0]), np.full(1, NEVER, np.int64), 0 * flags, flags, numbers([1]), *unslowed(1))
    case = make_case(0)
    case.schedule, case.machine, case.arena, case.devices = schedule, machine, Arena(1), 1
    case.blocks = [Block([[(COMPUTE, b, 0, *ticks)]], []) for b, ticks in enumerate(blocks)]
    case.segment = [case.arena.add(block) for block in case.blocks]
    return case


def proposed(case: Case, engine: Engine, b: int, ticks: int, host: int) -> int:
    """The makespan with another block, which is accepted; it must be that of the definition."""
    case.segment[b] = case.arena.add(Block([[(COMPUTE, b, 0, ticks, host)]], []))
    segments, segment = case.arena.segments(), numbers(case.segment)
    result = engine.propose(segments, segment, numbers([b]))
    assert result == oracle(case, segments, segment).makespan
    engine.accept()
    return result


@pytest.mark.parametrize(
    ("connections", "ticks", "expected"),
    [
        ((4, 4), (100, 100), [100, 200]),  # one after the other
        ((4, 6), (100, 100), [190, 200]),  # by turns of 10
        ((4, 4, 6), (100, 100, 10), [110, 210, 20]),
        ((5, 5, 5), (100, 100, 100), [190, 200, 300]),  # two at once
        ((4, 4, 6), (100, 10, 100), [190, 210, 200]),  # a short one waits for a long one on its connection
    ],
)
def test_connections_share_a_link_and_carry_one_after_the_other(
    connections: tuple[int, ...], ticks: tuple[int, ...], expected: list[int]
) -> None:
    arena, none, once = Arena(1), numbers([0]), numbers([1])
    rows = [
        Communication([0], [0], t, [(0, t)], turn=10 if t > 10 else NEVER, connection=c)
        for c, t in zip(connections, ticks, strict=True)
    ]
    segment = numbers([arena.add(Block([[(ISSUE, 0, k, 0) for k in range(len(rows))]], rows))])
    flags = np.zeros(1, np.uint8)
    kind, action = np.full(1, FORWARD, np.uint8), (none, once, none, once, none)
    schedule = Schedule(kind, none, flags, flags, none, *action, once, none)
    machine = Machine(once, np.full(1, NEVER, np.int64), flags, flags, numbers([2]), *unslowed(1))
    segments = arena.segments()
    assert Engine(schedule, machine).run(segments, segment) == max(expected)
    times = Engine(schedule, machine).times(segments, segment)
    assert times.communication_end[0].tolist() == expected


def test_a_step_takes_the_longer_of_launching_and_computing() -> None:
    for ticks, host, expected in ((10, 4, 4 + 60 * 10), (4, 10, 60 * 10 + 4)):
        case = chain([(ticks, host)] * 60)
        assert Engine(case.schedule, case.machine).run(case.arena.segments(), numbers(case.segment)) == expected


def test_a_host_that_loses_its_lead_by_and_by_holds_the_device_up_behind_many_equal_windows() -> None:
    """Launching block 1 takes longer and longer; all goes as before until the host is no longer ahead."""
    case = chain([(1000, 1), *[(10, 11)] * 90, (10, 1)])
    engine = Engine(case.schedule, case.machine)
    plain = engine.run(case.arena.segments(), numbers(case.segment))
    spans = [proposed(case, engine, 1, 10, host) for host in (11, 400, 700, 950, 980, 1100, 400, 11)]
    assert spans[0] == spans[1] == plain < spans[4] < spans[5] and spans[-1] == plain


def test_a_lead_that_shrinks_in_every_microbatch_ends_the_periods() -> None:
    case = chain([(2000, 1), (10, 15), (20, 25)], microbatches=400)
    case.schedule.once[0] = 1
    segments, segment = case.arena.segments(), numbers(case.segment)
    engine = Engine(case.schedule, case.machine)
    assert engine.run(segments, segment) == oracle(case, segments, segment).makespan == 1 + 400 * 40 + 20
    assert engine.state.fold.jumped[0] > 10_000
    for host in (15, 20, 12, 30, 15):
        proposed(case, engine, 1, 10, host)


OUT_OF_BOUNDS = """
from tests.random_rows import make_case
from tests.test_engine import Engine, numbers
case = make_case(1162, microbatches=12, blocks=2)
Engine(case.schedule, case.machine, room=256).run(case.arena.segments(), numbers(case.segment))
"""


def test_no_period_looks_beyond_the_last_microbatch() -> None:
    """Compiled code reads past the end of an array without a word; the same in plain Python does not."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OUT_OF_BOUNDS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_most_long_plans_have_periods() -> None:
    jumped = 0.0
    for seed in range(40):
        case = make_case(2000 + seed, microbatches=100, blocks=3)
        engine = Engine(case.schedule, case.machine)
        makespan = engine.run(case.arena.segments(), numbers(case.segment))
        jumped += float(engine.state.fold.jumped[0]) / max(1, makespan)
    assert jumped > 20


@pytest.mark.parametrize("seed", range(40))
def test_a_whole_run_is_late_only_above_the_limit(seed: int) -> None:
    case = make_case(4000 + seed)
    segments, segment = case.arena.segments(), numbers(case.segment)
    engine = Engine(case.schedule, case.machine)
    makespan = engine.run(segments, segment)
    assert engine.run(segments, segment, makespan) == makespan
    assert engine.run(segments, segment, makespan - 1) in (makespan, LATE)
    if makespan > 100:
        assert engine.run(segments, segment, makespan // 10) == LATE


def test_what_is_late_cannot_be_accepted() -> None:
    case = make_case(7, microbatches=1, blocks=4)
    walk = Walk(case, Engine(case.schedule, case.machine))
    segments, segment = case.arena.segments(), numbers(walk.segment)
    assert walk.engine.propose(segments, segment, numbers([]), walk.makespan - 1) == LATE
    with pytest.raises(RuntimeError):
        walk.engine.accept()
    assert walk.engine.propose(segments, segment, numbers([]), walk.makespan) == walk.makespan
    walk.engine.accept()


def test_a_deadlock_is_reported() -> None:
    """A device that waits for a communication of a later block, whose sender waits for the device."""
    for seed in range(20):
        case = make_case(5000 + seed, microbatches=2)
        if case.contended or len(case.blocks) < 3:
            continue
        never = Communication([0], [0], 1, [], missing=1)
        case.segment[0] = case.arena.add(
            Block([[(ISSUE, 0, 0, 0), (WAIT, 0, 0, 0)] if d == 0 else [] for d in range(case.devices)], [never])
        )
        case.blocks[0] = Block([], [])
        engine = Engine(case.schedule, case.machine)
        with pytest.raises(FlexsearchError, match=r"device 0 waits forever for communication 0 of block 0"):
            engine.run(case.arena.segments(), numbers(case.segment))
        break
    else:
        pytest.fail("no case fits")


# ---- long durations


@pytest.mark.parametrize("seed", range(100))
def test_times_near_the_end_of_the_range_are_exact_or_late(seed: int) -> None:
    case = make_case(6000 + seed, blocks=3, scale=(2**40, 2**52, 2**57, FOREVER)[seed % 4])
    segments, segment = case.arena.segments(), numbers(case.segment)
    engine = Engine(case.schedule, case.machine, room=4)
    if oracle(case, segments, segment).makespan >= FOREVER:
        for run in (engine.run, engine.times):
            with pytest.raises(FlexsearchError, match="24 days, which is too long to be simulated"):
                run(segments, segment)
        assert engine.run(segments, segment, FOREVER) == LATE
        return
    walk = Walk(case, engine)
    walk.most = FOREVER
    for _ in range(10):
        ticks, expected, limit = walk.propose()
        assert ticks == (expected if expected <= limit and expected < FOREVER else LATE)


def test_a_proposal_that_takes_too_long_is_late_under_a_limit_and_refused_without() -> None:
    case = make_case(1, microbatches=1, blocks=3)
    walk = Walk(case, Engine(case.schedule, case.machine))
    d = next(d for d, row in enumerate(case.blocks[-1].steps) if row)
    case.blocks[-1].steps[d].append((COMPUTE, len(case.blocks) - 1, 99, FOREVER))
    changed, walk.segment[-1] = numbers([len(case.blocks) - 1]), case.arena.add(case.blocks[-1])
    segments, segment = case.arena.segments(), numbers(walk.segment)
    assert walk.engine.propose(segments, segment, changed, FOREVER) == LATE
    with pytest.raises(FlexsearchError, match="too long to be simulated"):
        walk.engine.propose(segments, segment, changed)
    walk.engine.reject()
    assert walk.engine.propose(segments, numbers(case.segment), changed) == walk.makespan


def test_no_jump_goes_beyond_the_longest_plan() -> None:
    jumped = late = 0
    for seed in range(60):
        case = make_case(2000 + seed, microbatches=100, blocks=3, scale=2**(51 + seed % 3))
        segments, segment = case.arena.segments(), numbers(case.segment)
        engine, expected = Engine(case.schedule, case.machine), oracle(case, segments, segment).makespan
        assert engine.run(segments, segment, FOREVER) == (expected if expected < FOREVER else LATE)
        jumped += engine.state.fold.jumped[0] > 0
        late += expected >= FOREVER
    assert jumped > 20 and late > 5


@pytest.mark.parametrize("seed", range(30))
def test_long_waits_between_short_steps_take_no_time(seed: int) -> None:
    """Horizons that follow from how much is computed, or from how long the first microbatches took, are no guide."""
    case = make_case(7000 + seed, microbatches=8, blocks=3, scale=1)
    for b, block in enumerate(case.blocks):
        for c in block.communications:
            c.ticks += 2**50
            c.links, c.turn = [(link, 2**50 + ticks) for link, ticks in c.links], NEVER
        case.segment[b] = case.arena.add(block)
    walk = Walk(case, Engine(case.schedule, case.machine))
    for _ in range(5):
        ticks, expected, limit = walk.propose()
        assert ticks == (expected if expected <= limit else LATE)


# ---- the comparisons above can fail


def test_the_order_of_ties_matters() -> None:
    """Serving rows that are ready at the same tick in another order gives other times somewhere."""
    other = 0
    for seed in range(40):
        case = make_case(seed)
        segments, segment = case.arena.segments(), numbers(case.segment)
        expected = oracle(case, segments, segment).times
        simulation = Simulation(case.schedule, case.machine, segments, segment)
        simulation.order = lambda row: tuple(-int(part) for part in row)
        simulation.run()
        other += simulation.times != expected
    assert other > 5


def spoil_touched(state: State) -> None:
    state.kept.touched[:] = 0


def spoil_links(state: State) -> None:
    state.snapshots.free[:] = 0


def spoil_pending(state: State) -> None:
    state.snapshots.total[:] = 0


def spoil_turns(state: State) -> None:
    state.snapshots.turned[:] = np.abs(state.snapshots.turned) // 2  # who waits in line for a connection does not


def spoil_computing(state: State) -> None:
    state.snapshots.computing[:] = 0


def spoil_ends(state: State) -> None:
    state.snapshots.latest[:] -= 1


SPOILS = (spoil_touched, spoil_links, spoil_pending, spoil_turns, spoil_computing, spoil_ends)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_snapshot_that_is_wrong_is_noticed(spoil: Callable[[State], None]) -> None:
    for seed in range(150):
        case = make_case(1000 + seed, blocks=6)
        walk = Walk(case, Engine(case.schedule, case.machine))
        same, segment = numbers([0]), numbers(walk.segment)  # a block with the rows that it has: snapshots are made
        assert walk.engine.propose(case.arena.segments(), segment, same) == walk.makespan
        for _ in range(3):
            spoil(walk.engine.state)
            try:
                ticks, expected, _ = walk.propose(limits=False)
            except FlexsearchError:  # a device waits for what was forgotten
                return
            if ticks != expected:
                return
    pytest.fail("nothing was noticed")
