"""What a communication costs: collectives as NCCL carries them out, messages that each pay, turns on a link, scale."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import tally
from flexsearch.cost.collectives import ALL_GATHER, ALL_REDUCE, EXCHANGE, ring_edge
from flexsearch.cost.communication import Pricing, least_seconds
from flexsearch.cost.tally import MOST_TURNS, NEVER, turn_of
from flexsearch.cost.ticks import TICK
from flexsearch.lower.exchanges import connection_of
from flexsearch.quantities import MAX_DEVICES
from flexsearch.topology import Communication, Topology
from flexsearch.topology.parts import COLLECTIVES, Group, Protocol

MEASURED = Path(
    os.environ.get("FLEXSEARCH_MEASURED", Path(__file__).parents[2] / "shared" / "data" / "measured")
) / "nccl_allreduce_a100"  # fmt: skip
MEGA = 10**6


def nic_bytes(pricing: Pricing, form: str, devices: list[int], nbytes: int) -> dict[str, int]:
    """Bytes that a collective brings onto each way out of a host."""
    names = [r.name for r in pricing.topology.resources]
    return {names[r]: n for r, n in pricing.collective(form, devices, nbytes).link_bytes if "->fabric" in names[r]}


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables (vTrain, MIT) are not beside the repository")
def test_all_reduces_in_one_host_take_what_was_measured() -> None:
    pricing = Pricing(Topology.load("dgx-a100"))
    for members in range(2, 9):
        rows = np.genfromtxt(MEASURED / f"AR_GPU{members}_1M_1024M_LUT", delimiter=",", skip_header=1, usecols=(0, 3))
        errors = {
            size: pricing.all_reduce(range(members), int(size)).duration_s / (1e-9 * taken) - 1 for size, taken in rows
        }
        small = [abs(e) for size, e in errors.items() if size <= 16 * 2**20]
        large = [abs(e) for size, e in errors.items() if size > 16 * 2**20]
        # Five figures for each number of members explain 1,024 sizes, on both sides of where NCCL changes protocols.
        assert mean(small) < 0.04 and max(small) < 0.13, members
        assert mean(large) < 0.015 and max(large) < 0.13, members


def test_the_faster_protocol_counts_but_never_less_than_the_least_time() -> None:
    protocols = (Protocol(startup_s=20e-6, factor=2.0), Protocol(startup_s=100e-6, factor=1.0))
    more = {"factor": 1.5, "least_s": 50e-6, "protocols": protocols}
    groups = (Group(members=2, startup_s=30e-6, **more), Group(members=8, startup_s=60e-6, **more))
    fields = Topology.load("dgx-a100").model_dump(exclude={"communication"})
    pricing = Pricing(Topology(**fields, communication=Communication(backend="nccl", groups=groups)))

    def taken(form: str, nbytes: int) -> float:
        return pricing.collective(form, range(8), nbytes).duration_s

    edge_s = 2 * 7 / 8 * MEGA / 300e9  # of one MB
    assert taken("all_reduce", 1000) == pytest.approx(50e-6)
    assert taken("all_reduce", 10 * MEGA) == pytest.approx(20e-6 + 2 * 10 * edge_s)
    assert taken("all_reduce", 100 * MEGA) == pytest.approx(100e-6 + 100 * edge_s)
    few, many = taken("all_gather", 7000), taken("all_gather", 7 * 100 * MEGA)
    assert few < 50e-6 and many < 100e-6 + 100 * edge_s
    one = groups[0].model_copy(update={"protocols": protocols[:1]})
    with pytest.raises(ValueError, match="two protocols"):
        Communication(backend="nccl", groups=(one,))


def test_a_pair_of_hosts_uses_all_of_its_network_cards() -> None:
    pair = Pricing(Topology.load("dgx-a100:2"))
    all_reduce = pair.all_reduce(range(16), 100 * MEGA)
    # Eight rings carry 2 * 15/16 of the bytes over each of their edges: 23.4 MB on each card of 25 GB/s, at 1.25 times
    # the ideal time, and the start of 16 members in two hosts.
    ring = 2 * 15 * 100 * MEGA // 16 // 8
    assert set(nic_bytes(pair, "all_reduce", list(range(16)), 100 * MEGA).values()) == {ring}
    moving = 1.25 * ring / 25e9
    assert all_reduce.duration_s == pytest.approx(moving + 42e-6 + 30 * 2.9e-6 + 2 * 3.2e-6, rel=0.01)
    assert 1.1e-3 < all_reduce.duration_s < 1.4e-3
    single = [max(n for _, n in pair.collective(form, [0, 8], MEGA).link_bytes) for form in COLLECTIVES]
    assert single == [MEGA, MEGA // 2, MEGA // 2]  # one device of each host: one card


def test_what_leaves_a_host_enters_the_next_and_rails_are_loaded_alike() -> None:
    pricing = Pricing(Topology.load("dgx-a100:3"))
    for form in COLLECTIVES:
        for members in ([0, 1, 8, 9, 16, 17], list(range(24)), [0, 1, 2, 8, 16, 17]):
            cards = nic_bytes(pricing, form, members, 240 * MEGA)
            rails = min(sum(d // 8 == h for d in members) for h in range(3))
            assert len(cards) == 3 * rails if rails == 1 else len(cards) >= 3 * rails
            per_host = [sum(n for name, n in cards.items() if name.startswith(f"dgx{h}/")) for h in range(3)]
            assert len(set(per_host)) == 1


def test_small_all_reduces_over_many_hosts_climb_a_tree() -> None:
    pricing = Pricing(Topology.load("dgx-a100:64"))
    small = pricing.all_reduce(range(512), 1000).duration_s
    # A ring of 512 takes 1,022 steps of about 3 us; a tree 2 * (7 + 6).
    assert small < 200e-6
    doubled = pricing.all_reduce(range(256), 1000).duration_s
    assert 0.0 < small - doubled < 20e-6  # one more level, up and down


def test_phases_by_host_are_chosen_where_they_are_faster() -> None:
    """An all-gather of few bytes among 256 takes 255 steps on a ring, 7 and 31 in phases, which start twice."""
    pricing = Pricing(Topology.load("dgx-a100:32"))
    few = pricing.collective("all_gather", range(256), 256 * 255)
    launch, step = pricing.rates.launch_s[0], pricing.rates.step_s
    ring = launch + 255 * step[256] + 31 * 3.2e-6
    phases = 2 * launch + 7 * step[8] + 31 * (step[256] + 3.2e-6)
    assert phases < ring
    assert few.duration_s == pytest.approx(phases, rel=0.01)


@pytest.mark.parametrize("name", ["dgx-a100:2", "p100:3", "k80", "v100-nvlink-4", "ethernet-1g"])
def test_more_bytes_and_no_fewer_members_never_take_less(name: str) -> None:
    topology = Topology.load(name)
    pricing, count = Pricing(topology), len(topology.devices)
    for form in COLLECTIVES if topology.communication.backend == "nccl" else ("all_reduce",):
        for members in {2, 3, count // 2, count} - {0, 1}:
            taken = [pricing.collective(form, range(members), 4**k).duration_s for k in range(4, 16)]
            assert all(a <= b + 2 * TICK for a, b in pairwise(taken))  # times are whole ticks
            assert taken[0] >= least_seconds(topology)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_every_collective_brings_each_member_what_it_lacks(data: st.DataObject) -> None:
    """Whatever the algorithm: into a member flow at least the bytes that it must receive, and priced twice it is the
    same (nothing is left in the tally)."""
    topology = Topology.load(data.draw(st.sampled_from(["dgx-a100:3", "p100:3", "k80"])))
    pricing = Pricing(topology)
    members = sorted(data.draw(st.sets(st.integers(0, len(topology.devices) - 1), min_size=2)))
    form, size = data.draw(st.sampled_from(COLLECTIVES)), data.draw(st.integers(10**4, 10**9))
    total = size if form == "all_reduce" else size * (len(members) - 1)
    transfer = pricing.collective(form, members, total)
    assert transfer == pricing.collective(form, members, total)
    assert transfer.duration_s >= max(s for _, s in transfer.links)
    loads = dict(transfer.link_bytes)
    for member in members:
        name = topology.devices[member].name
        into = sum(n for r, n in loads.items() if topology.resources[r].name.endswith(f"->{name}"))
        wanted = size * (len(members) - 1) // len(members) if form != "all_gather" else total // len(members)
        assert into >= 0.9 * wanted - 1000  # the member before an exit of all rings gets what others pass on


@given(st.integers(2, MAX_DEVICES), st.integers(0, 2**60))
def test_the_edge_of_a_ring_is_exact_for_any_number_of_bytes(count: int, nbytes: int) -> None:
    assert ring_edge(np.uint64(count), np.int64(nbytes)) == 2 * (count - 1) * nbytes // count


def test_each_message_of_a_device_pays_and_others_go_beside_them() -> None:
    topology = Topology.load("dgx-a100:8")
    pricing, message_s = Pricing(topology), topology.communication.message_s
    pairs = [(a, b, 8) for a in range(64) for b in range(64) if a != b]
    everyone = pricing.transfer("all_to_all", pairs).duration_s
    one = pricing.transfer("all_to_all", pairs[:1]).duration_s
    # 4,032 messages, 63 of each device one after the other.
    assert everyone - one == pytest.approx(62 * message_s, rel=0.05)
    shift = pricing.transfer("exchange", [(a, (a + 1) % 64, 8) for a in range(64)]).duration_s
    assert shift == pytest.approx(pricing.transfer("exchange", [(7, 8, 8)]).duration_s, rel=0.01)


def test_gloo_pays_its_overhead_for_each_message() -> None:
    gloo = Communication(backend="gloo", overhead_s=3e-5)
    assert (gloo.message_s, gloo.groups) == (3e-5, ())
    assert Communication(backend="gloo", overhead_s=3e-5, message_s=1e-5).message_s == 1e-5


def test_a_file_that_gives_factors_of_collectives_means_groups_of_all_sizes() -> None:
    fields = Topology.load("dgx-a100").model_dump(exclude={"communication"})
    made = Topology(**fields, communication=Communication(backend="nccl", factors={"all_reduce": 2.0}))
    assert made.communication.groups == ()
    edge, latency = 2 * 7 * 100 * MEGA // 8, made.route(0, 1).latency_s
    expected = 2.0 * edge / 300e9 + made.communication.overhead_s + 14 * latency
    assert Pricing(made).all_reduce(range(8), 100 * MEGA).duration_s == pytest.approx(expected, abs=2 * TICK)


def test_what_is_longer_than_a_turn_gives_way() -> None:
    gloo = Pricing(Topology.load("ethernet-1g"))
    links = np.array([r for r, _ in gloo.all_reduce(range(4), MEGA).links], np.uint32)

    def turn(pricing: Pricing, form: Any, longest_s: float, members: int = 2, times: int = 1) -> int:
        rates, bounds = pricing.rates, (np.uint64(0), np.uint64(len(links)))
        kind = np.uint64(form), np.uint64(members), np.uint64(times)
        return int(turn_of(rates, rates.bandwidth, *kind, links, *bounds, longest_s))

    for form in (ALL_REDUCE, EXCHANGE):
        expected = gloo.topology.communication.turn_bytes * gloo.rates.factor[form] / 125e6
        assert turn(gloo, form, 1.0) * TICK == pytest.approx(expected)
        assert turn(gloo, form, 1.0, times=3) == 3 * turn(gloo, form, 1.0)
        for longest_s in (expected * 10000, 1e6):
            assert 0 <= turn(gloo, form, longest_s) * MOST_TURNS * TICK - longest_s <= MOST_TURNS * TICK
        assert turn(gloo, EXCHANGE, expected) == NEVER
    short = 0.008
    assert turn(gloo, ALL_REDUCE, short, 3) * TICK == pytest.approx(short / 12)
    assert turn(gloo, EXCHANGE, 0.001) == NEVER


def test_connections_are_those_of_senders_and_receivers() -> None:
    gloo, nccl = (Pricing(Topology.load(name)).rates for name in ("ethernet-1g:8", "dgx-a100"))

    def connection(rates: Any, form: Any, send: list[int], receive: list[int]) -> int:
        there, here, none = np.array(send, np.uint32), np.array(receive, np.uint32), np.uint64(0)
        ends = np.uint64(len(send)), np.uint64(len(receive))
        return int(connection_of(rates, np.uint64(form), there, none, ends[0], here, none, ends[1]))

    for rates in (gloo, nccl):
        message = connection(rates, EXCHANGE, [0], [1])
        assert message not in (connection(rates, EXCHANGE, [1], [0]), connection(rates, EXCHANGE, [0], [2]))
        group = connection(rates, ALL_REDUCE, [0, 1], [0, 1])
        assert group not in (connection(rates, EXCHANGE, [0, 1], [0, 1]), connection(rates, ALL_REDUCE, [0, 2], [0, 2]))
        assert group == connection(rates, ALL_REDUCE, [1, 0], [0, 1]) and message % 2 == 0
    assert connection(gloo, ALL_REDUCE, [0, 1], [0, 1]) % 2 == 1 and connection(nccl, ALL_REDUCE, [0], [0]) % 2 == 0
    both = (connection(nccl, form, [0, 1], [0, 1]) for form in (ALL_REDUCE, ALL_GATHER))
    assert len(set(both)) == 1
    both = (connection(gloo, form, [0, 1], [0, 1]) for form in (EXCHANGE, ALL_GATHER))
    assert len(set(both)) == 1



def test_prices_do_not_depend_on_the_hash_of_earlier_files() -> None:
    """Fields that came later and say what was meant before leave the hash of a topology; others change it."""
    before = Topology.load("ethernet-1g")
    fields = before.model_dump(exclude={"communication"})
    by_form = {"cpu_by_form": {"exchange": 1e-9}}
    changes: tuple[dict[str, Any], ...] = ({}, {"turn_bytes": 10}, {"message_s": 1.0}, {"cpu_s": 1e-4}, by_form)
    for change in changes:
        communication = Communication(backend="gloo", cpu_s_per_byte=200e-12, **change)
        assert (Topology(**fields, communication=communication).content_hash() == before.content_hash()) == (not change)
    former = Communication(backend="gloo", cpu_s_per_byte=200e-12, turn_bytes=3_000_000)  # as files had by default
    assert former.turn_bytes == 3_000_000
    assert Topology(**fields, communication=former).content_hash() == before.content_hash()


def test_groups_must_ascend() -> None:
    groups = Communication(backend="nccl").model_dump()["groups"][::-1]
    with pytest.raises(ValueError, match="must ascend"):
        Communication(backend="nccl", groups=groups)


_SCALE = """
import resource, time
from flexsearch.cost.communication import Pricing
from flexsearch.topology import Topology
Pricing(Topology.load("dgx-a100:2")).all_reduce(range(16), 10**8)  # compiled by now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
topology = Topology.load("dgx-a100:512")
priced = Pricing(topology).all_reduce(range(4096), 10**8)
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, priced.duration_s)
topology.decisive, topology.subset(range(0, 4096, 2)).routes
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_4096_devices_load_and_are_priced_in_two_seconds() -> None:
    done = subprocess.run([sys.executable, "-c", _SCALE], capture_output=True, text=True, check=True)
    (seconds, kilobytes, priced), (more, after) = (map(float, line.split()) for line in done.stdout.splitlines())
    assert seconds < 2.0 and kilobytes < 300_000
    assert more < 5.0 and after < 300_000
    assert 1e-3 < priced < 3e-3


def test_a_single_group_counts_and_its_start_grows_with_members() -> None:
    """From the file's own start of a communication; the factor is the same for all."""
    group = Group(members=4, startup_s=50e-6, factor=1.5)
    fields = {name: getattr(Topology.load("dgx-a100"), name) for name in ("name", "devices", "switches", "links")}
    library = Communication(backend="nccl", overhead_s=20e-6, groups=(group,))
    pricing = Pricing(Topology(**fields, communication=library))
    four, eight = (pricing.all_reduce(range(n), 0).duration_s for n in (4, 8))
    assert four == pytest.approx(50e-6, abs=TICK) and eight == pytest.approx(20e-6 + 30e-6 * 7 / 3, abs=TICK)
    moving = pricing.all_reduce(range(4), 1 << 30).duration_s - four
    assert moving == pytest.approx(1.5 * 2 * 3 / 4 * (1 << 30) / 300e9, rel=1e-6)


@pytest.mark.parametrize("name", ["dgx-a100:4", "ethernet-1g:8"])
def test_a_group_that_was_priced_before_costs_what_it_costs_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups share a few slots and rows here, so that they drive each other out."""
    topology, rng = Topology.load(name), np.random.default_rng(0)
    monkeypatch.setattr(tally, "SLOTS", 4)
    monkeypatch.setattr(tally, "ROWS", 1)
    kept, count = Pricing(topology), len(topology.devices)
    groups = [sorted(rng.choice(count, size, replace=False).tolist()) for size in (2, 3, count // 2, count) * 3]
    for _ in range(60):
        devices, nbytes = groups[rng.integers(len(groups))], int(rng.integers(1, 10**8))
        for form in ("all_reduce", "all_gather"):
            assert kept.collective(form, devices, nbytes) == Pricing(topology).collective(form, devices, nbytes)
