"""The probe finds out what a cluster is: pure fitting on made-up measurements, then real ranks and networks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from benchmarks import netns
from flexsearch.cost.communication import Pricing
from flexsearch.errors import RuntimeFailure
from flexsearch.measure import probe as probing
from flexsearch.measure.beside import Network
from flexsearch.measure.fit import FormTime, Measured, fit, messages, place_names, processors
from flexsearch.measure.machine import Compute, Facts
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS, ONE_CALL
from tests.ranks import pool

TINY = probing.Effort(compute_s=0.05, transfer_s=0.01, repeats=2, pairs=16)
CPU = Facts("node", "m0", "m0/a", "cpu", "one core", (0,), 1, "", 2**33)
RATE, OVERHEAD, LATENCY = 1.25e8, 2e-5, 1e-4
FACTORS = {"all_reduce": 1.1, "all_gather": 1.2, "reduce_scatter": 1.3, "all_to_all": 1.4, "exchange": 1.5}


def measured(facts: list[Facts], inside: float = 1e9, **changes: object) -> Measured:
    """What an exact probe of these ranks finds: places on a switch, ``RATE`` between and ``inside`` within them."""
    ranks = range(len(facts))
    same = {p: facts[p[0]].place == facts[p[1]].place for p in combinations(ranks, 2)}
    made = Measured(
        "gloo", facts, [Compute({"float32": 6e10}, 1e10, 1e-5) for _ in ranks],
        {p: OVERHEAD + LATENCY for p in same}, {p: inside if near else RATE for p, near in same.items()},
        {}, OVERHEAD + 2 * (len(facts) - 1) * LATENCY, OVERHEAD + 2 * (len(facts) - 1) * LATENCY, 0.0, {},
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def hosts(count: int, **changes: object) -> list[Facts]:
    return [replace(CPU, hostname=f"h{k}", machine=f"m{k}", place=f"m{k}/a", **changes) for k in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_fit_gets_back_what_made_the_measurements(count: int) -> None:
    plain = fit(measured(hosts(count)), "cluster", "made up")
    assert plain.source_kind("links.bandwidth") == "measured" and plain.source_kind("communication.groups") == "guessed"
    forms = {}
    for form in FORMS:
        n, ranks = 1_000_000, range(count)
        pricing, moves = Pricing(plain), messages(form, count, n)
        cost = pricing.all_reduce(ranks, n) if form == "all_reduce" else pricing.transfer(form, moves)
        # The plain fit knows no forms and takes the backend's factors, which are divided out again.
        busy = max(s for _, s in cost.links) / plain.communication.factors[form]
        steps = 2 * (count - 1) if form == "all_reduce" else 1
        further = 0 if form in ("all_reduce", "exchange") else count - 2  # messages after a rank's first
        forms[form] = FormTime(n, (1 + further) * OVERHEAD + steps * LATENCY + FACTORS[form] * busy)
    found = fit(measured(hosts(count), forms=forms), "cluster", "made up")
    assert [d.name for d in found.devices] == [f"h{k}/cpu0" for k in range(count)]
    assert {link.bandwidth for link in found.links} == {RATE}
    assert found.route(0, 1).latency_s == pytest.approx(LATENCY)
    assert found.communication.overhead_s == pytest.approx(OVERHEAD)
    assert found.communication.factors == pytest.approx(FACTORS)


def test_a_communication_between_computations_starts_later_by_what_was_measured_there() -> None:
    exact = measured(hosts(2), forms={"exchange": FormTime(1_000_000, OVERHEAD + LATENCY + 1_000_000 / RATE)})
    plain, paused = (
        fit(replace(exact, pause_s=exact.small_all_reduce_s + more), "cluster", "made up").communication
        for more in (-1e-5, 3e-4)
    )
    assert plain.overhead_s == pytest.approx(OVERHEAD), "never less than without computing"
    assert paused.overhead_s == pytest.approx(OVERHEAD + 3e-4, abs=1e-6)
    assert paused.factors == plain.factors and paused.message_s == plain.message_s
    beside = fit(replace(exact, overlapped_s=2e-4), "cluster", "made up").communication
    assert beside == plain.model_copy(update={"cpu_s": 2e-4})
    two_each = replace(exact, overlapped_s=2e-4, facts=[replace(fact, machine="one") for fact in exact.facts])
    assert fit(two_each, "cluster", "made up").communication.cpu_s == 1e-4, "late by what both of a core lose"


def test_what_a_form_takes_from_a_processor_is_a_share_of_what_its_ranks_lose_and_copying() -> None:
    two_each = [replace(host, machine="one", cores=(k % 2,)) for k, host in enumerate(hosts(4))]
    forms = {
        "exchange": FormTime(1500, 1.0, lost_s=3e-3), "all_reduce": FormTime(1000, 1.0, lost_s=6e-3),
        "all_gather": FormTime(500, 1.0, lost_s=6e-3, copying_s=3e-3), "all_to_all": FormTime(1000, 1.0),
    }  # fmt: skip
    found = fit(measured(two_each, forms=forms), "cluster", "made up").communication
    # Bytes that a rank sends and receives: 3,000; 2 * 6/4 * 1,000; and 3,000, to and from three others.
    assert found.cpu_s_per_byte == pytest.approx(0.5e-6)
    assert found.cpu_by_form == pytest.approx({"all_reduce": 1e-6, "all_gather": 2e-6})
    assert found.cpu_s_per_byte_of("all_gather") == pytest.approx(2e-6)
    ratio = found.factors["all_to_all"] / found.factors["exchange"]
    assert found.cpu_s_per_byte_of("all_to_all") == pytest.approx(0.5e-6 * ratio)


def test_the_busy_factor_is_what_an_all_reduce_takes_beside_computations_over_what_it_takes_alone() -> None:
    for busy_s, factor in ((3.0, 1.5), (1.9, 1.0), (0.0, 1.0)):
        forms = {"exchange": FormTime(1000, 1.0), "all_reduce": FormTime(1000, 2.0, busy_s=busy_s)}
        found = fit(measured(hosts(2), forms=forms), "cluster", "made up").communication
        assert found.busy_factor == factor


def test_an_all_reduce_begins_when_all_ranks_of_a_processor_have_put_together_what_they_add() -> None:
    own = FormTime(1000, 2.0, packing_s=3e-3)
    forms = dict.fromkeys(FORMS, FormTime(1000, 1.0, packing_s=1.0)) | {"all_reduce": own}
    alone = fit(measured(hosts(2), forms=forms), "cluster", "made up")
    assert alone.communication.pack_s_per_byte == 3e-6
    unpacked = alone.model_copy(update={"communication": alone.communication.model_copy(update={"pack_s_per_byte": 0})})
    later, plain = (Pricing(cluster).all_reduce(range(2), 5000).duration_s for cluster in (alone, unpacked))
    assert later - plain == pytest.approx(15e-3)
    together = [replace(host, machine="one") for host in hosts(2)]
    assert fit(measured(together, forms=forms), "cluster", "made up").communication.pack_s_per_byte == 6e-6


def test_further_tensors_take_what_all_ranks_of_a_processor_do_for_them() -> None:
    per_form = {"all_reduce": 1e-5, "all_gather": 2e-5}
    forms = dict.fromkeys(FORMS, FormTime(1000, 1.0))
    together = [replace(host, machine="one") for host in hosts(2)]
    for facts, sharing in ((hosts(2), 1), (together, 2)):
        found = fit(replace(measured(facts, forms=forms), tensor_s=per_form), "cluster", "made up").communication
        assert found.tensor_by_form == pytest.approx({form: sharing * seconds for form, seconds in per_form.items()})


def test_the_factor_of_a_backends_own_collective_is_that_of_its_ring() -> None:
    """A ring's busiest link carries a share of what is to cross devices: 3 of 12 MB among four."""
    link_s = 3_000_000 / RATE
    taken = FormTime(1_000_000, OVERHEAD + 3 * LATENCY + 1.5 * link_s)
    gpus = [replace(host, kind="cuda", processor="gpu") for host in hosts(4)]
    forms = dict.fromkeys(("all_gather", "reduce_scatter"), taken)
    found = fit(measured(gpus, forms=forms, backend="nccl"), "cluster", "made up").communication.factors
    assert found["all_gather"] == found["reduce_scatter"] == pytest.approx(1.5)


def test_a_gpu_keeps_some_of_its_memory_for_its_driver_and_libraries() -> None:
    gpus = [replace(host, kind="cuda", processor=f"gpu{k}") for k, host in enumerate(hosts(2))]
    for facts, preset in ((gpus, "l40s"), (hosts(2), "xeon")):
        share = Topology.load(preset).devices[0].memory_fraction
        assert [d.memory_fraction for d in fit(measured(facts), "cluster", "made up").devices] == [share, share]
    assert share == 1.0


def test_a_slow_host_has_a_slow_link() -> None:
    slow = {p: RATE / 4 if 2 in p else RATE for p in combinations(range(4), 2)}
    found = fit(measured(hosts(4), bandwidth=slow), "cluster", "made up")
    assert [link.bandwidth for link in found.links] == [RATE, RATE, RATE / 4, RATE]


def test_ranks_of_a_host_share_its_network_card() -> None:
    facts = [replace(host, cores=(core,)) for host in hosts(2) for core in range(2)]
    shared = fit(measured(facts, together={f.place: RATE for f in facts}), "cluster", "made up")
    assert [link.bandwidth for link in shared.links if link.b == "switch"] == [RATE, RATE]
    wide = fit(measured(facts, together={f.place: 2 * RATE for f in facts}), "cluster", "made up")
    assert [link.bandwidth for link in wide.links if link.b == "switch"] == [2 * RATE, 2 * RATE]
    assert wide.route(0, 2).bandwidth == RATE and wide.route(0, 1).bandwidth == 1e9
    assert shared.hosts == ("h0", "h1") and len(set(shared.processor_of)) == 4


def test_near_and_far_pairs_of_a_host_have_wires_of_their_own() -> None:
    near = {p: 1e10 if p in ((0, 1), (2, 3)) else 1e9 for p in combinations(range(4), 2)}
    gpus = [replace(CPU, kind="cuda", processor=f"gpu{k}") for k in range(4)]
    found = fit(measured(gpus, bandwidth=near), "cluster", "made up")
    assert {p: found.route(*p).bandwidth for p in near} == near and not found.switches


def test_a_disturbed_device_is_like_its_likes_and_a_slow_one_is_not() -> None:
    speeds = [6e10, 5e10, 2e10]
    compute = [Compute({"float32": f}, 1e10, 1e-5) for f in speeds]
    found = fit(measured(hosts(3), compute=compute), "cluster", "made up")
    assert [d.flops["float32"] for d in found.devices] == [6e10, 6e10, 2e10]


def test_one_rank_is_a_topology_too() -> None:
    found = fit(measured(hosts(1)), "one", "made up")
    assert len(found.devices) == 1 and not found.links


def test_processors() -> None:
    def on(*cores: tuple[int, ...], threads: int = 1) -> list[int]:
        return processors([replace(CPU, cores=c, threads=threads) for c in cores])

    assert on((0,), (1,), (0,), (1,)) == [0, 1, 0, 1]
    assert on((0, 1), (0, 1)) == [0, 1], "as many cores as threads: none waits for the other"
    assert on((0, 1), (0, 1), (0, 1)) == [0, 1, 0]
    assert on((0, 1), (0, 1), threads=2) == [0, 0]
    assert on((0,), (2,), (0, 2)) == [0, 1, 0], "joined by way of the third"
    assert processors(hosts(2)) == [0, 1], "core 0 of another machine is another core"
    assert processors([replace(CPU, kind="cuda", processor=p) for p in ("a", "b", "a")]) == [0, 1, 0]


def test_containers_are_hosts_even_where_they_share_cores() -> None:
    facts = [replace(CPU, place=f"m0/{k}", cores=(k % 2,)) for k in range(4)]
    found = fit(measured(facts), "cluster", "made up")
    assert [d.name for d in found.devices] == [f"node-{k}/cpu0" for k in range(4)]
    assert found.hosts == tuple(f"node-{k}" for k in range(4))
    assert found.processor_of[0] == found.processor_of[2] != found.processor_of[1]


def test_host_names_become_names() -> None:
    facts = [replace(CPU, hostname="my {odd} host"), replace(CPU, hostname="b", place="p")]
    assert list(place_names(facts).values()) == ["my-odd-host", "b"]


def test_many_pairs_are_measured_together_and_cover_every_place() -> None:
    places = [f"p{k // 8}" for k in range(64)]
    assert probing.schedule(places[:4], 6) == [[p] for p in combinations(range(4), 2)]
    rounds = probing.schedule(places, 16)
    assert all(len({r for p in pairs for r in p}) == 2 * len(pairs) for pairs in rounds), "one transfer for a rank"
    inside = {p for pairs in rounds for p in pairs if places[p[0]] == places[p[1]]}
    across = {places[r] for pairs in rounds for p in pairs if p not in inside for r in p}
    assert len(inside) == 8 * 28 and across == set(places) and len(rounds) < 20


def test_probe_without_a_process_group_says_what_to_do() -> None:
    with pytest.raises(RuntimeFailure, match="init_process_group"):
        probing.probe()


def test_main_without_torchrun_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeFailure, match="torchrun"):
        probing.main_from_env(None)


def _probe() -> str:
    """Of ranks that compute little between what they send: how much is for the size of the figures alone."""
    probing.QUICK, probing.Network = TINY, partial(Network, 8)  # type: ignore[misc,assignment]
    return probing.probe(quick=True).model_dump_json()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_nccl_without_cuda_devices_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeFailure, match="nccl connects CUDA devices, and PyTorch sees none here"):
        probing.main_from_env(None, backend="nccl")


def test_local_ranks(tmp_path: object) -> None:
    """Both ranks get the same valid topology, which survives a file."""
    first, second = pool(2).run(_probe)
    assert first == second
    topology = Topology.model_validate_json(first)
    topology.save(f"{tmp_path}/probed.json")
    assert Topology.load(f"{tmp_path}/probed.json") == topology
    assert len(topology.devices) == 2 and len(topology.hosts) == 1
    communication = topology.communication
    assert set(communication.factors) == set(FORMS)
    assert set(communication.tensor_by_form) == {*FORMS} - {"exchange"}
    assert min(communication.tensor_by_form.values()) > 0
    assert communication.pack_s_per_byte > 0
    assert topology.source is not None and "flexsearch probe" in topology.source and "/" not in topology.source


def _probe_calls() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ONE_CALL, "gloo", FORMS[1:4])
        return _probe()


def test_what_ranks_leave_to_one_call_is_measured_as_one_call() -> None:
    factors = Topology.model_validate_json(pool(2).run(_probe_calls)[0]).communication.factors
    assert set(factors) == set(FORMS)


def _probe_two_places() -> str:
    known = probing.facts
    probing.facts = lambda device: replace(
        known(device), place=f"place{dist.get_rank() // 2}", cores=(dist.get_rank(),)
    )
    try:
        return _probe()
    finally:
        probing.facts = known


def test_ranks_of_several_hosts_with_several_ranks() -> None:
    topology = Topology.model_validate_json(pool(3).run(_probe_two_places)[0])
    names = ["0/cpu0", "0/cpu1", "1/cpu0"]
    assert [d.name.rsplit("-", 1)[1] for d in topology.devices] == names, "three ranks, two places"
    ends = {frozenset(end.rsplit("-", 1)[-1] for end in (link.a, link.b)) for link in topology.links}
    nic, wires = "0/nic", [{"0/cpu0", "0/nic"}, {"0/cpu1", "0/nic"}, {"0/nic", "switch"}, {"1/cpu0", "switch"}]
    assert nic in {s.rsplit("-", 1)[-1] for s in topology.switches}
    assert all(frozenset(wire) in ends for wire in wires)


SCRIPT = """
import functools
import sys
from flexsearch.measure import probe
probe.QUICK = probe.Effort(compute_s=0.1, transfer_s=0.02, repeats=1, pairs=16)
probe.Network = functools.partial(probe.Network, 8)
probe.main_from_env(sys.argv[1], quick=True)
"""


@pytest.mark.skipif(netns.unavailable() is not None, reason=f"no network namespaces here: {netns.unavailable()}")
def test_hosts_are_told_apart_by_their_networks_and_share_a_core(tmp_path: object) -> None:
    cores = sorted(netns.os.sched_getaffinity(0))[:1]
    with netns.SlowNetwork(3, rate="1gbit", cores=cores) as network:
        network.run([sys.executable, "-c", SCRIPT, f"{tmp_path}/net.json"], timeout=300)
    topology = Topology.load(f"{tmp_path}/net.json")
    assert topology.switches == ("switch",) and len(topology.links) == 3, "one wire to the switch for each host"
    assert len(set(topology.processor_of)) == 1, "all on one core"
    assert all(link.bandwidth < 1.6e8 for link in topology.links), "no wire is faster than it was made"
