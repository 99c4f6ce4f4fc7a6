"""Reshards bring every destination entry all it needs, and their sums are those of their moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.communication import Pricing
from flexsearch.cost.ticks import TICK
from flexsearch.graph import chunk, volume
from flexsearch.lower import Entry, Exchange, Layout, Lowering, Reshard
from flexsearch.lower.keys import RESHARD
from flexsearch.lower.layout import Layouts
from flexsearch.lower.moves import FREE, SHARED
from flexsearch.lower.requested import plan_all, request_reshard
from flexsearch.lower.reshard import Planner, reshard
from flexsearch.lower.templates import Templates
from flexsearch.lower.weights import plan_weight
from flexsearch.strategy import States
from flexsearch.topology import Topology
from tests.memory_oracle import aliased
from tests.test_baselines import mlp
from tests.test_delta import uneven

Array = npt.NDArray[np.float64]
ITEMSIZE = 4
FLOAT = RESHARD + 2
"""Kind of the keys of its reshards."""
TOPOLOGIES = {
    "GPUs": lambda: Topology.load("p100:4"),
    "hosts": lambda: Topology.load("ethernet-1g-5"),
    "unequal hosts on a bus that move bytes by CPU": lambda: uneven(6, "half", 1e-9, 2),
}


@cache
def planner(name: str) -> Planner:
    return Planner(TOPOLOGIES[name]())


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], devices: int, parts_of_sums: bool) -> Layout:
    """A tensor cut unevenly along its dimensions, in partial sums and in copies, on any devices."""
    degrees = [draw(st.integers(1, min(n, 3))) for n in shape]
    while np.prod(degrees, dtype=int) > devices:
        degrees[degrees.index(max(degrees))] -= 1
    room = devices // int(np.prod(degrees, dtype=int))
    sums = draw(st.integers(1, min(room, 3))) if parts_of_sums else 1
    copies = draw(st.integers(1, room // sums))
    order = draw(st.permutations(range(devices)))
    places = product(*(range(n) for n in degrees), range(sums))
    cells = [tuple(chunk(size, n, k) for size, n, k in zip(shape, degrees, place, strict=False)) for place in places]
    return tuple(Entry(order[k], box, k // copies) for k, box in enumerate(c for c in cells for _ in range(copies)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Layout, Layout, tuple[int, ...]]:
    name = draw(st.sampled_from(sorted(TOPOLOGIES)))
    devices = len(planner(name).topology.devices)
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    source, destination = (draw(grids(shape, devices, sums)) for sums in (True, False))
    return name, source, destination, shape


def part(values: Array, entry: Entry) -> Array:
    return values[(*(slice(low, high) for low, high in entry.box), ...)]


def carried(plan: Reshard, held: list[Array]) -> list[Array]:
    """What the destination entries hold when all moves are done, given what the source entries hold."""
    for phase in plan.phases:
        made = [np.zeros([high - low for low, high in entry.box]) for entry in phase.destination]

        def pieces(moves, phase=phase, held=held):  # type: ignore[no-untyped-def]
            for move in moves:
                where = (
                    tuple(slice(a - o[0], b - o[0]) for (a, b), o in zip(move.box, entry.box, strict=True))
                    for entry in (phase.source[move.source], phase.destination[move.destination])
                )
                there, here = where
                yield move.destination, here, held[move.source][there]

        for k, here, value in pieces(phase.local):
            made[k][here] += value
        for exchange in phase.exchanges:
            if exchange.box is None:
                for k, here, value in pieces(exchange.moves):
                    made[k][here] += value
            else:  # every device of an all-reduce ends up with the sum of what all of them give
                total = np.zeros([high - low for low, high in exchange.box])
                for _, here, value in pieces(exchange.moves):
                    total[here] += value
                for k, entry in enumerate(phase.destination):
                    if entry.device in exchange.devices and entry.box == exchange.box:
                        made[k][...] = total
        held = made
    return held


def ticks(seconds: float) -> float:
    """Durations are whole ticks."""
    return round(seconds / TICK) * TICK


def check_exchange(exchange: Exchange, source: Layout, destination: Layout, topology: Topology) -> None:
    """Its sums, from its moves and the routes alone."""
    pairs: dict[tuple[int, int], int] = {}
    for move in exchange.moves:
        pair = source[move.source].device, destination[move.destination].device
        pairs[pair] = pairs.get(pair, 0) + volume(move.box) * ITEMSIZE
    messages = tuple((a, b, n) for (a, b), n in sorted(pairs.items()))
    nbytes, amount = sum(pairs.values()), 0
    if exchange.form == "all_reduce":
        assert exchange.messages == () and exchange.box is not None
        n, ring, amount = len(exchange.devices), sorted(exchange.devices), volume(exchange.box) * ITEMSIZE
        assert all(a == b for a, b in pairs) and len(pairs) > 1
        nbytes = 2 * (n - 1) * amount
        assert exchange.senders == exchange.receivers == tuple(ring)
    else:
        assert exchange.messages == messages and exchange.box is None
        assert exchange.senders == tuple(sorted({a for a, _, _ in messages}))
        assert exchange.receivers == tuple(sorted({b for _, b, _ in messages}))
    assert exchange.nbytes == nbytes
    assert exchange.devices == tuple(sorted({*exchange.senders, *exchange.receivers}))
    pricing = Pricing(topology)
    if pricing.by_group(exchange.form):
        amount = amount or nbytes
        assert exchange.transfer == pricing.collective(exchange.form, exchange.devices, amount)
    else:
        check_messages(exchange, messages, topology)
    assert exchange.amount == amount


def check_messages(exchange: Exchange, messages: tuple[tuple[int, int, int], ...], topology: Topology) -> None:
    """The price of messages: a start for the first of a device, less for each further one, and the busiest link."""
    load: dict[int, int] = {}
    moved: dict[int, int] = {}
    for a, b, n in messages:
        for resource in topology.route(a, b).resources:
            load[resource] = load.get(resource, 0) + n
        for device in (a, b):
            moved[topology.processor_of[device]] = moved.get(topology.processor_of[device], 0) + n
    communication, transfer = topology.communication, exchange.transfer
    factor, per_byte = communication.factors[exchange.form], communication.cpu_s_per_byte_of(exchange.form)
    links = tuple((r, ticks(factor * n / topology.resources[r].bandwidth)) for r, n in sorted(load.items()))
    most = max(max(Counter(side).values()) for side in ([a for a, _, _ in messages], [b for _, b, _ in messages]))
    latency = max(topology.route(a, b).latency_s for a, b, _ in messages)
    start = communication.overhead_s + (most - 1) * communication.message_s + latency
    assert transfer.link_bytes == tuple(sorted(load.items()))
    assert transfer.links == links
    expected = tuple((p, ticks(communication.cpu_s + per_byte * n)) for p, n in sorted(moved.items()))
    assert transfer.drag == (expected if communication.cpu_s or per_byte else ())
    assert (exchange.start_s, transfer.duration_s) == (start, ticks(start) + max(s for _, s in links))


def check_split(exchanges: Sequence[Exchange]) -> None:
    """Devices that have few messages, all of them, do not wait for each other's."""
    dense = [e for e in exchanges if e.form == "exchange" and len(e.messages) > 1]
    for exchange in dense:
        sends, receives = (Counter(m[side] for m in exchange.messages) for side in (0, 1))
        assert max(*sends.values(), *receives.values()) > 2


def check_sums(plan: Reshard, topology: Topology) -> None:
    """What a search reads of a reshard, from its moves."""
    for phase in plan.phases:
        for exchange in phase.exchanges:
            check_exchange(exchange, phase.source, phase.destination, topology)
    assert plan.aliased == aliased(plan)
    assert plan.trivial == (not plan.exchanges and aliased(plan) >= {e.device for e in plan.destination})
    for phase in plan.phases:
        check_split(phase.exchanges)
    assert plan.exchanges == tuple(exchange for phase in plan.phases for exchange in phase.exchanges)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(case=cases(), mode=st.sampled_from([FREE, SHARED]))
def test_any_reshard_brings_sums_of_all_terms_and_says_what_it_moves(
    case: tuple[str, Layout, Layout, tuple[int, ...]], mode: np.uint64
) -> None:
    name, source, destination, shape = case
    layouts = Layouts()
    plan = Reshard(planner(name), layouts.intern(source), layouts.intern(destination), ITEMSIZE, mode)
    brings_sums(plan, source, destination, shape)
    check_sums(plan, planner(name).topology)


def brings_sums(plan: Reshard, source: Layout, destination: Layout, shape: tuple[int, ...]) -> None:
    """Every destination entry gets the sum of all terms."""
    rng = np.random.default_rng(0)
    terms = {entry.term: rng.random(shape) for entry in source}
    whole, first = np.zeros(shape), {entry.term: entry for entry in reversed(source)}
    for term, values in terms.items():
        part(whole, first[term])[...] += part(values, first[term])
    held = carried(plan, [part(terms[entry.term], entry) for entry in source])
    for entry, value in zip(destination, held, strict=True):
        np.testing.assert_allclose(value, part(whole, entry), rtol=1e-12)


def test_the_forms_that_are_known_are_found() -> None:
    topology = planner("GPUs").topology
    rows = [tuple(Entry(d, (chunk(64, 16, d), (0, 64)), d) for d in range(16))]
    rows.append(tuple(Entry(d, ((0, 64), chunk(64, 16, d)), d) for d in range(16)))
    whole = tuple(Entry(d, ((0, 64), (0, 64)), 0) for d in range(16))
    sums = tuple(Entry(d, ((0, 64), (0, 64)), d) for d in range(16))
    forms = [reshard(a, b, ITEMSIZE, topology).form for a, b in (
        (rows[0], rows[0]), (whole, rows[0]), (rows[0], rows[1]), (rows[0], whole), (sums, rows[0]), (sums, whole),
    )]  # fmt: skip
    assert forms[:5] == ["nothing", "slice", "all_to_all", "all_gather", "reduce_scatter"]
    assert forms[5] in ("all_reduce", "reduce_scatter + all_gather")


def moves(plan: Reshard) -> int:
    """How many there are."""
    return sum(len(phase.local) + sum(len(exchange.moves) for exchange in phase.exchanges) for phase in plan.phases)


def test_sums_among_very_many_devices_are_all_reduces_without_a_look_at_messages() -> None:
    cluster = Topology.load("dgx-a100:10")
    sums = tuple(Entry(d, ((0, 64), (0, 64)), d) for d in range(80))
    plan = reshard(sums, tuple(Entry(d, ((0, 64), (0, 64)), 0) for d in range(80)), 4, cluster)
    (exchange,) = plan.exchanges
    assert exchange.form == "all_reduce"
    assert exchange.devices == tuple(range(80))
    assert moves(plan) == 80
    check_sums(plan, cluster)
    # Where not all of a region's devices want the sum, messages are weighed as ever.
    few = reshard(sums, tuple(Entry(d, ((0, 64), (0, 64)), 0) for d in range(4)), 4, cluster)
    assert {x.form for x in few.exchanges} != {"all_reduce"}
    check_sums(few, cluster)


def test_overlapping_sums_among_very_many_hosts_are_added_up_in_each_host_first() -> None:
    hosts = 66
    cluster, devices = Topology.load(f"dgx-a100:{hosts}"), range(8 * hosts)
    halves = ((0, 8), (8, 16))
    sums = tuple(Entry(d, (halves[d % 2], (0, 4)), d) for d in devices)
    wanted = tuple(Entry(d, ((0, 10) if d % 8 < 3 else (6, 16), (0, 4)), d) for d in devices)
    plan = reshard(sums, wanted, ITEMSIZE, cluster)
    within, across = plan.phases
    assert all(len({d // 8 for d in x.devices}) == 1 for x in within.exchanges)
    assert {x.form for x in across.exchanges} == {"all_reduce"}
    # One of each host: those at its n-th device.
    assert [x.devices for x in across.exchanges] == [tuple(range(k, 8 * hosts, 8)) for k in range(8)]
    assert moves(plan) < 10 * len(devices)  # not their square
    check_sums(plan, cluster)
    brings_sums(plan, sums, wanted, (16, 4))
    # Where hosts want different parts, messages are weighed as ever.
    uneven = tuple(Entry(d, ((0, 10) if d % 8 < 3 - (d < 8) else (6, 16), (0, 4)), d) for d in devices)
    brings_sums(reshard(sums, uneven, ITEMSIZE, cluster), sums, uneven, (16, 4))


def test_the_messages_of_a_shift_are_exchanges_of_their_own() -> None:
    topology = planner("GPUs").topology
    rows = tuple(Entry(d, (chunk(64, 16, d),), d) for d in range(16))
    shifted = tuple(Entry((d + 1) % 16, (chunk(64, 16, d),), 0) for d in range(16))
    plan = reshard(rows, shifted, ITEMSIZE, topology)
    assert sorted(e.messages for e in plan.exchanges) == [((d, (d + 1) % 16, 16),) for d in range(16)]
    halos = tuple(Entry(d, ((max(0, 4 * d - 1), min(64, 4 * d + 5)),), 0) for d in range(16))
    plan = reshard(rows, halos, ITEMSIZE, topology)
    assert sorted(e.messages for e in plan.exchanges) == sorted(
        ((a, b, 4),) for d in range(15) for a, b in ((d, d + 1), (d + 1, d))
    )
    # Three messages to a device: dense.
    wide = tuple(Entry(d, ((max(0, 4 * d - 12), 4 * d + 4),), 0) for d in range(16))
    assert len(reshard(rows, wide, ITEMSIZE, topology).exchanges) == 1


def test_sums_of_which_several_devices_want_the_same_are_no_reduce_scatter() -> None:
    topology = planner("GPUs").topology
    sums = tuple(Entry(d, ((0, 8),), d) for d in range(4))
    halves = tuple(Entry(d, (chunk(8, 2, d // 2),), 0) for d in range(4))
    quarters = tuple(Entry(d, (chunk(8, 4, d),), 0) for d in range(4))
    assert reshard(sums, halves, ITEMSIZE, topology).form == "exchange"
    assert reshard(sums, quarters, ITEMSIZE, topology).form == "reduce_scatter"


def test_sums_of_messages_cost_what_a_reduce_scatter_does_and_swaps_do_not() -> None:
    topology = Topology.load("ethernet-1g:2")
    whole, halves = ((0, 2**20),), tuple(Entry(d, (chunk(2**20, 2, d),), d) for d in range(2))
    # Each device has one half and wants the other: nothing is added up.
    assert reshard(halves, halves[::-1], ITEMSIZE, topology).form == "nothing"
    swapped = tuple(Entry(d, halves[1 - d].box, 0) for d in range(2))
    assert {e.form for e in reshard(halves, swapped, ITEMSIZE, topology).exchanges} == {"all_to_all"}
    (one,) = reshard(tuple(Entry(d, whole, d) for d in range(2)), (Entry(0, whole, 0),), ITEMSIZE, topology).exchanges
    assert (one.form, one.senders, one.receivers) == ("reduce_scatter", (1,), (0,))


def test_two_messages_take_a_processor_twice_as_much_as_one_all_reduce() -> None:
    topology = Topology.load("ethernet-1g:2")
    both = [tuple(Entry(d, ((0, 8),), term) for d, term in enumerate(terms)) for terms in ((0, 1), (0, 0))]
    forms = []
    for cpu_s in (0.0, 1e-2):
        communication = topology.communication.model_copy(update={"cpu_s": cpu_s})
        cluster = topology.model_copy(update={"communication": communication})
        forms.append([exchange.form for exchange in reshard(*both, ITEMSIZE, cluster).exchanges])
    assert forms == [["reduce_scatter"] * 2, ["all_reduce"]]


def test_gradients_that_share_a_communication_are_chosen_by_bytes_alone() -> None:
    """A few bytes go faster as two messages than around a ring, but a bucket of them does not."""
    topology = Topology.load("ethernet-1g:2")
    factors = {**topology.communication.factors, "all_reduce": 1.0, "exchange": 1.0, "reduce_scatter": 2.0}
    topology = topology.model_copy(
        update={"communication": topology.communication.model_copy(update={"factors": factors})}
    )
    layouts, here = Layouts(), Planner(topology)
    sums = layouts.intern(tuple(Entry(d, ((0, 8),), d) for d in range(2)))
    both = layouts.intern(tuple(Entry(d, ((0, 8),), 0) for d in range(2)))
    assert {e.form for e in Reshard(here, sums, both, ITEMSIZE, FREE).exchanges} == {"reduce_scatter"}
    assert {e.form for e in Reshard(here, sums, both, ITEMSIZE, SHARED).exchanges} == {"all_reduce"}


def test_the_nearest_copy_is_sent_and_equally_near_ones_take_turns() -> None:
    topology = planner("GPUs").topology  # four to a node

    def owners(holders: tuple[int, ...], wanting: tuple[int, ...]) -> dict[int, int]:
        source = tuple(Entry(d, ((0, 64),), 0) for d in holders)
        destination = tuple(Entry(d, ((0, 64 - k),), 0) for k, d in enumerate(wanting))
        plan = reshard(source, destination, ITEMSIZE, topology)
        return {b: a for exchange in plan.exchanges for a, b, _ in exchange.messages}

    assert owners((0, 15), (1, 14, 2)) == {1: 0, 14: 15, 2: 0}
    assert owners((0, 1), (2, 3)) == {2: 0, 3: 1}
    assert owners((0, 15), (15, 0)) == {}


def test_room_grows_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tuple(Entry(d, (chunk(64, 16, d), (0, 4)), d) for d in range(16))
    destination = tuple(Entry(15 - d, ((0, 64), (0, 4)), 0) for d in range(16))
    plans = []
    for rows in (1 << 14, 1):
        monkeypatch.setattr("flexsearch.lower.reshard.ROOM", rows)
        plans.append(reshard(source, destination, ITEMSIZE, planner("GPUs").topology))
    assert [e.moves for e in plans[0].exchanges] == [e.moves for e in plans[1].exchanges]
    assert [e.transfer for e in plans[0].exchanges] == [e.transfer for e in plans[1].exchanges]
    check_sums(plans[1], planner("GPUs").topology)


def test_groups_that_shard_a_weight_gather_all_of_it() -> None:
    # 16 devices, half of the weight on each half of them
    layouts, here = Layouts(), planner("GPUs")
    need = tuple(Entry(d, ((8 * (d // 8), 8 * (d // 8) + 8), (0, 8)), d) for d in range(16))
    plan = plan_weight([layouts.intern(need)], [True], States.WEIGHTS, ITEMSIZE, ITEMSIZE, here, layouts, SHARED)
    values = np.arange(128.0).reshape(16, 8)
    held = carried(plan.forward[0], [part(values, entry) for entry in plan.storage])
    for entry, value in zip(need, held, strict=True):
        assert (value == part(values, entry)).all()
    check_sums(plan.forward[0], here.topology)


def test_templates_hold_what_the_exchanges_say() -> None:
    graph, topology = mlp(), TOPOLOGIES["unequal hosts on a bus that move bytes by CPU"]()
    lowering = Lowering(graph, topology, Costs(graph, topology))
    templates = Templates(lowering)
    sums = tuple(Entry(d, ((0, 64),), d) for d in (3, 0, 5, 1))
    halves = tuple(Entry(d, (chunk(64, 2, k % 2),), 0) for k, d in enumerate((0, 4, 2, 1)))
    for a, b in ((sums, halves), (halves, sums), (sums, sums)):
        source, destination = lowering.intern(a), lowering.intern(b)
        request_reshard(templates.tables, np.uint64(FLOAT), np.uint64(source), np.uint64(destination))
        assert plan_all(templates.tables)
        number = templates.keys.find(FLOAT, source, destination)
        plan, pools = lowering.reshard(source, destination, 4), templates.pools
        first, middle, last = (
            int(row[number]) for row in (pools.reshard_first, pools.reshard_middle, pools.reshard_last)
        )
        assert last - first == len(plan.exchanges) and middle - first == len(plan.phases[0].exchanges)
        for x, exchange in zip(range(first, last), plan.exchanges, strict=True):
            transfer = exchange.transfer
            assert tuple(pools.send[pools.send_first[x] : pools.send_last[x]]) == exchange.senders
            assert tuple(pools.receive[pools.receive_first[x] : pools.receive_last[x]]) == exchange.receivers
            links = slice(int(pools.link_first[x]), int(pools.link_last[x]))
            drags = slice(int(pools.drag_first[x]), int(pools.drag_last[x]))
            decisive = tuple((r, seconds) for r, seconds in transfer.links if topology.decisive[r])
            assert tuple(zip(pools.link[links], pools.link_ticks[links] * TICK, strict=True)) == decisive
            assert tuple(zip(pools.drag[drags], pools.drag_ticks[drags] * TICK, strict=True)) == transfer.drag
            assert pools.duration[x] * TICK == transfer.duration_s
