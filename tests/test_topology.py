"""What a topology promises: presets with the right shapes and routes, lossless files, errors that name the field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost.communication import Pricing
from flexsearch.errors import FileFormatError, FlexsearchError, TopologyError
from flexsearch.topology import Communication, Device, Link, Topology, presets


def device(name: str, host: str = "h", kind: str = "cpu", processor: str | None = None) -> Device:
    return Device(
        name=name, kind="cuda" if kind == "cuda" else "cpu", host=host, model="test", flops={"float32": 1e9},
        memory_bandwidth=1e9, memory_bytes=10**9, processor=processor, overhead_s=0.0,
    )  # fmt: skip


def link(a: str, b: str, bandwidth: float = 1e9, duplex: str = "full", latency_s: float = 1e-6) -> Link:
    return Link(a=a, b=b, bandwidth=bandwidth, latency_s=latency_s, duplex="half" if duplex == "half" else "full")


def topology(devices: list[Device], links: list[Link], switches: tuple[str, ...] = (), **rest: Any) -> Topology:
    communication = rest.pop("communication", Communication(backend="gloo"))
    return Topology(
        name=rest.pop("name", "t"), devices=tuple(devices), links=tuple(links), switches=switches,
        communication=communication, **rest,
    )  # fmt: skip


def star(n: int) -> Topology:
    return topology([device(f"d{i}", f"h{i}") for i in range(n)], [link(f"d{i}", "s") for i in range(n)], ("s",))


def names(t: Topology, i: int, j: int) -> list[str]:
    return [t.resources[k].name for k in t.route(i, j).resources]


# presets


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "model"),
    [
        ("p100", 16, 4, "P100"),
        ("p100:2", 8, 2, "P100"),
        ("k80", 64, 16, "K80"),
        ("ethernet-1g", 4, 4, "one server core"),
        ("ethernet-1g-1", 1, 1, "one server core"),
        ("ethernet-1g:2", 2, 2, "one server core"),
        ("ethernet-10g-8", 8, 8, "one server core"),
        ("ethernet-10g-64", 64, 64, "one server core"),
        ("dgx-a100", 8, 1, "A100-SXM4-80GB"),
        ("dgx-a100:4", 32, 4, "A100-SXM4-80GB"),
        ("hgx-h100:16", 128, 16, "H100-SXM5-80GB"),
        ("v100-nvlink-4", 4, 1, "V100-16GB"),
    ],
)
def test_preset_has_its_devices_and_hosts(name: str, devices: int, hosts: int, model: str) -> None:
    t = Topology.load(name)
    assert len(t.devices) == devices
    assert len(t.hosts) == hosts
    assert {d.model for d in t.devices} == {model}
    assert t.source
    assert [t.devices[i].host for i in range(devices)] == [h for h in t.hosts for _ in range(devices // hosts)]


def test_every_shipped_preset_loads_and_reaches_every_device() -> None:
    assert set(presets()) >= {"p100", "k80", "ethernet-1g", "ethernet-10g", "dgx-a100", "hgx-h100", "v100-nvlink-4"}
    for name in presets():
        t = Topology.load(name)
        assert all(t.route(0, j).resources for j in range(1, len(t.devices)))


def test_a_dash_and_a_colon_mean_the_same_number_of_nodes() -> None:
    assert Topology.load("ethernet-1g-8") == Topology.load("ethernet-1g:8")
    assert Topology.load("ethernet-1g-4") == Topology.load("ethernet-1g")
    assert Topology.load("ethernet-1g-8").content_hash() != Topology.load("ethernet-1g").content_hash()


def test_p100_route_inside_a_node_is_nvlink() -> None:
    t = Topology.load("p100")
    assert names(t, 0, 3) == ["node0/gpu0->node0/gpu3"]
    assert t.route(0, 3).bandwidth == 20e9


def test_p100_route_between_nodes_passes_both_nics() -> None:
    t = Topology.load("p100")
    assert names(t, 1, 6) == [
        "node0/gpu1->node0/nic", "node0/nic->ib", "ib->node1/nic", "node1/nic->node1/gpu2",
    ]  # fmt: skip
    assert t.route(1, 6).bandwidth == 12.5e9
    assert t.route(1, 6).latency_s == pytest.approx(3.2e-6)
    # All four GPUs of a node share its one NIC.
    assert t.route(0, 4).resources[1] == t.route(3, 9).resources[1]


def test_k80_pairs_sit_behind_a_pcie_switch() -> None:
    t = Topology.load("k80")
    assert names(t, 0, 1) == ["node0/gpu0->node0/pcie0", "node0/pcie0->node0/gpu1"]
    assert len(t.route(0, 2).resources) == 4
    assert "node0/pcie0->node0/pcie-root" in names(t, 1, 3)
    assert t.route(0, 63).bandwidth == 7e9


def test_dgx_a100_uses_nvswitch_inside_and_its_own_nic_outside() -> None:
    t = Topology.load("dgx-a100:2")
    assert names(t, 0, 7) == ["dgx0/gpu0->dgx0/nvswitch", "dgx0/nvswitch->dgx0/gpu7"]
    assert (t.route(0, 7).bandwidth, t.route(0, 15).bandwidth) == (300e9, 25e9)
    assert "dgx0/nic3->fabric" in names(t, 3, 12)
    assert "fabric->dgx1/nic4" in names(t, 3, 12)


def test_ethernet_hosts_meet_at_the_switch() -> None:
    t = Topology.load("ethernet-1g")
    assert names(t, 0, 2) == ["host0/cpu->switch", "switch->host2/cpu"]
    assert t.route(0, 2).bandwidth == 125e6
    assert t.communication.backend == "gloo"


# resources and routes


def test_resources_are_processors_then_link_directions() -> None:
    t = topology(
        [device("a", processor="core0"), device("b", processor="core0"), device("c")],
        [link("a", "s"), link("b", "s", 2e9, "half"), link("c", "s")],
        ("s",),
    )
    assert [(r.kind, r.name) for r in t.resources] == [
        ("processor", "core0"), ("processor", "c"), ("link", "a->s"), ("link", "s->a"), ("link", "b<->s"),
        ("link", "c->s"), ("link", "s->c"),
    ]  # fmt: skip
    assert t.processor_of == (0, 0, 1)
    assert t.resources[4].bandwidth == 2e9


def test_half_duplex_is_one_resource_for_both_directions() -> None:
    devices = [device("a", "h0"), device("b", "h1")]
    half = topology(devices, [link("a", "b", duplex="half")])
    full = topology(devices, [link("a", "b")])
    assert half.route(0, 1).resources == half.route(1, 0).resources
    assert not set(full.route(0, 1).resources) & set(full.route(1, 0).resources)


def test_route_to_itself_is_free() -> None:
    route = star(2).route(1, 1)
    assert (route.resources, route.latency_s, route.bandwidth) == ((), 0.0, math.inf)


def test_route_takes_the_way_that_is_fastest_for_a_megabyte() -> None:
    slow_direct = [link("a", "b", 1e6), link("a", "s", 1e9), link("s", "b", 1e9)]
    t = topology([device("a"), device("b")], slow_direct, ("s",))
    assert names(t, 0, 1) == ["a->s", "s->b"]
    far = [link("a", "b", 1e9), link("a", "s", 1e10, latency_s=1.0), link("s", "b", 1e10)]
    assert names(topology([device("a"), device("b")], far, ("s",)), 0, 1) == ["a->b"]


def test_messages_pass_through_a_device_only_where_nothing_else_leads() -> None:
    devices = [device(n) for n in "abc"]
    mesh = [link("a", "b", 1e12), link("b", "c", 1e12)]
    assert names(topology(devices, mesh), 0, 2) == ["a->b", "b->c"]
    with_bus = topology(devices, [*mesh, link("a", "bus", 1e6), link("c", "bus", 1e6)], ("bus",))
    assert names(with_bus, 0, 2) == ["a->bus", "bus->c"]


@given(st.data())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_routes_run_along_links_and_back_the_same_way(data: st.DataObject) -> None:
    n, switches = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    ends = [f"d{i}" for i in range(n)] + [f"s{i}" for i in range(switches)]
    pairs = {(ends[k], data.draw(st.sampled_from(ends[:k]))) for k in range(1, len(ends))}
    links = [
        link(a, b, data.draw(st.sampled_from([1e6, 1e9])), data.draw(st.sampled_from(["full", "half"])))
        for a, b in sorted(pairs)
    ]
    t = topology([device(e, e) for e in ends[:n]], links, tuple(ends[n:]))
    for i in range(n):
        for j in range(n):
            if i != j:
                there, back = t.route(i, j), t.route(j, i)
                assert (there.bandwidth, there.latency_s) == (back.bandwidth, back.latency_s)
                assert there.bandwidth == min(t.resources[k].bandwidth for k in there.resources)
                assert len(set(there.resources)) == len(there.resources) == len(back.resources)
    part = data.draw(st.permutations(range(n)))[: data.draw(st.integers(1, n))]
    small = t.subset(part)
    assert [d.name for d in small.devices] == [ends[i] for i in part]
    again = Topology.model_validate_json(t.model_dump_json())
    assert again == t
    assert all(again.route(0, j) == t.route(0, j) for j in range(n))


@given(st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_routes_in_pieces_are_the_shortest_ones(data: st.DataObject) -> None:
    """Hosts of any wiring around a switch, or a mesh of switches without a center: as fast as
    a search over everything."""
    hosts, spines = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    latencies, widths = st.sampled_from([1e-6, 1e-5, 1e-4]), st.sampled_from([1e9, 3e9, 1e10])
    devices, switches, links = [], [f"spine{k}" for k in range(spines)], []

    def join(a: str, b: str) -> None:
        links.append(Link(a=a, b=b, bandwidth=data.draw(widths), latency_s=data.draw(latencies)))

    for h in range(hosts):
        own = [f"h{h}d{k}" for k in range(data.draw(st.integers(1, 3)))]
        devices += own
        switches.append(f"h{h}nic")
        for spine in range(spines):
            join(f"h{h}nic", f"spine{spine}")
        for k, name in enumerate(own):
            join(name, f"h{h}nic")
            for other in own[:k]:
                if data.draw(st.booleans()):
                    join(other, name)
    t = topology([device(name) for name in devices], links, tuple(switches))
    graph = nx.Graph()
    graph.add_weighted_edges_from((x.a, x.b, x.latency_s + 1e6 / x.bandwidth) for x in links)
    cost = {r.name: graph.edges[r.name.split("->")]["weight"] for r in t.resources if r.kind == "link"}
    for i, one in enumerate(devices):
        for j, other in enumerate(devices):
            between = graph.subgraph([*switches, one, other])  # devices forward nothing
            crossed = names(t, i, j)
            shortest = nx.shortest_path_length(between, one, other, "weight")
            assert sum(cost[name] for name in crossed) == pytest.approx(shortest)
            assert [a.split("->")[1] for a in crossed[:-1]] == [b.split("->")[0] for b in crossed[1:]]
    assert t.nearest_s == min(
        (t.route(i, j).latency_s for i in range(len(devices)) for j in range(len(devices)) if i != j), default=0.0
    )


def test_a_link_that_is_only_crossed_with_a_narrower_one_decides_nothing() -> None:
    found = Topology.load("p100:4")
    idle = {r.name for r, can in zip(found.resources, found.decisive, strict=True) if not can}
    between = [(f"node{n}/gpu{g}", f"node{n}/nic") for n in range(4) for g in range(4)]
    assert idle == {f"{a}->{b}" for pair in between for a, b in (pair, pair[::-1])}
    two = Topology.load("p100:2")  # one way from node to node: out of one NIC is into the other
    assert len(two.resources) - two.decisive.sum() == 2 * 8 + 2
    assert Topology.load("p100:1").decisive.all()  # every link is a route of its own


@given(st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_transfers_start_the_same_whether_they_look_at_all_links_or_at_the_decisive_ones(data: st.DataObject) -> None:
    inner = data.draw(st.integers(1, 4))
    bandwidths = st.sampled_from([1e9, 2e9, 5e9])
    duplex = data.draw(st.sampled_from(["full", "half"]))
    links = [link(f"s{k}", f"s{data.draw(st.integers(0, k - 1))}", data.draw(bandwidths)) for k in range(1, inner)]
    count = data.draw(st.integers(2, 6))
    for d in range(count):
        links.append(link(f"d{d}", f"s{data.draw(st.integers(0, inner - 1))}", data.draw(bandwidths), duplex))
    made = topology([device(f"d{d}") for d in range(count)], links, tuple(f"s{k}" for k in range(inner)))
    pricing, free, looked = Pricing(made), [0.0] * len(made.resources), [0.0] * len(made.resources)
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] != pair[1])
    for ready in sorted(data.draw(st.lists(st.floats(0, 1e-3), max_size=12))):
        messages = data.draw(st.lists(pairs, min_size=1, max_size=4, unique=True))
        transfer = pricing.transfer("exchange", [(a, b, data.draw(st.integers(1, 10**6))) for a, b in messages])
        begin = max([ready, *(free[r] for r, _ in transfer.links)])
        assert begin == max([ready, *(looked[r] for r, _ in transfer.links if made.decisive[r])])
        for r, seconds in transfer.links:
            free[r] = looked[r] = begin + seconds


def test_missing_dtypes_fall_back_to_float32() -> None:
    plain = device("a")
    assert [plain.flops_for(t) for t in ("float32", "float64", "bfloat16", "int64")] == [1e9, 0.5e9, 1e9, 1e9]
    assert [plain.flops_for(t) for t in ("complex64", "complex128")] == [0.25e9, 0.125e9]
    assert Topology.load("dgx-a100").devices[0].flops_for("bfloat16") == 312e12


def test_communication_takes_the_figures_of_its_backend_unless_given() -> None:
    gloo = Communication(backend="gloo", factors={"exchange": 1.5})
    assert gloo.factors == {
        "all_reduce": 1.05, "all_gather": 1.1, "reduce_scatter": 1.15, "all_to_all": 1.1, "exchange": 1.5,
    }  # fmt: skip
    assert 0 < Communication(backend="nccl").overhead_s < gloo.overhead_s
    assert Communication(backend="nccl", overhead_s=0.0).overhead_s == 0


@pytest.mark.parametrize(("i", "j"), [(0, 4), (-1, 0), (4, 4)])
def test_a_route_of_an_unknown_device_is_an_error(i: int, j: int) -> None:
    with pytest.raises(TopologyError, match="4 devices are numbered from 0"):
        Topology.load("ethernet-1g").route(i, j)


# subset


def test_subset_keeps_order_routes_and_only_what_they_need() -> None:
    t = Topology.load("p100")
    s = t.subset([5, 0, 1])
    assert [d.name for d in s.devices] == ["node1/gpu1", "node0/gpu0", "node0/gpu1"]
    assert s.switches == ("ib", "node0/nic", "node1/nic")
    assert names(s, 0, 1) == names(t, 5, 0)
    assert s.route(1, 2).bandwidth == 20e9
    assert t.subset(range(16)).route(0, 15).bandwidth == t.route(0, 15).bandwidth
    assert t.subset([3]).links == ()


def test_subset_keeps_a_device_that_messages_must_pass_through_as_a_switch() -> None:
    chain = topology([device(n) for n in "abc"], [link("a", "b"), link("b", "c")])
    s = chain.subset([2, 0])
    assert s.switches == ("b",)
    assert names(s, 0, 1) == ["c->b", "b->a"]


@pytest.mark.parametrize(("part", "message"), [([0, 0], "twice"), ([7], "no device 7"), ([], "at least one device")])
def test_subset_refuses_what_is_no_subset(part: list[int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        star(3).subset(part)


# files


def test_files_round_trip(tmp_path: Path) -> None:
    for name in presets():
        t = Topology.load(name)
        t.save(tmp_path / "t.json")
        again = Topology.load(tmp_path / "t.json")
        assert again == t
        assert again.content_hash() == t.content_hash()


def test_hash_ignores_name_source_and_memory_left_free_and_nothing_else() -> None:
    devices, links = [device("a"), device("b")], [link("a", "b")]
    t = topology(devices, links)
    t.route(0, 1)
    assert t.content_hash() == topology(devices, links, name="other", source="elsewhere").content_hash()
    roomier = [one.model_copy(update={"memory_fraction": 0.9}) for one in devices]
    assert t.content_hash() == topology(roomier, links).content_hash()
    others = [
        topology(devices[::-1], links),
        topology(devices, [link("a", "b", 2e9)]),
        topology(devices, [link("a", "b", duplex="half")]),
        topology(devices, links, communication=Communication(backend="gloo", overhead_s=1.0)),
        topology([device("a", processor="p"), device("b", processor="p")], links),
    ]
    assert len({t.content_hash(), *(o.content_hash() for o in others)}) == 6


EXPLICIT: dict[str, Any] = json.loads(star(3).model_dump_json())
COMPACT: dict[str, Any] = {
    "format": "flexsearch.topology/1",
    "name": "c",
    "nodes": {
        "count": 2,
        "devices": [
            {
                "name": "gpu{0..3}", "kind": "cuda", "model": "M", "flops": {"float32": 1e12}, "memory_bandwidth": 1e11,
                "memory_bytes": 10**10, "overhead_s": 1e-6, "processor": "board{0..3}",
            }
        ],
        "switches": ["nic{0..3}"],
        "links": [
            {"a": "gpu{0..3}", "b": "gpu{0..3}", "bandwidth": 1e10, "latency_s": 0},
            {"a": "gpu{0..3}", "b": "nic{0..3}", "bandwidth": 1e10, "latency_s": 0},
            {"a": "nic{0..3}", "b": "leaf{0..3}", "bandwidth": 1e9, "latency_s": 0},
        ],
    },
    "switches": ["leaf{0..3}", "spine"],
    "links": [{"a": "leaf{0..3}", "b": "spine", "bandwidth": 1e9, "latency_s": 0}],
    "communication": {"backend": "nccl"},
}  # fmt: skip


def write(folder: Path, data: Any) -> Path:
    path = folder / "t.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_compact_files_expand_ranges_meshes_and_shared_switches(tmp_path: Path) -> None:
    path = write(tmp_path, COMPACT)
    t = Topology.load(path)
    assert [d.name for d in t.devices] == [f"node{n}/gpu{g}" for n in range(2) for g in range(4)]
    assert t.devices[5].processor == "node1/board1"
    assert t.devices[5].host == "node1"
    assert len(t.links) == 2 * (6 + 4 + 4) + 4
    assert names(t, 2, 6) == [
        "node0/gpu2->node0/nic2", "node0/nic2->leaf2", "leaf2->node1/nic2", "node1/nic2->node1/gpu2",
    ]  # fmt: skip
    assert len(t.route(0, 7).resources) == 6
    assert len(Topology.load(f"{path}:3").devices) == 12


def test_compact_files_may_join_nodes_directly_by_full_names(tmp_path: Path) -> None:
    data = copy.deepcopy(COMPACT)
    data["links"].append({"a": "node0/nic{0..3}", "b": "node1/nic{0..3}", "bandwidth": 1e10, "latency_s": 0})
    t = Topology.load(write(tmp_path, data))
    assert "node0/nic1->node1/nic1" in names(t, 1, 5)
    with pytest.raises(TopologyError, match=r'links\.1\.b: "node1/nic0" is neither'):
        Topology.load(f"{tmp_path / 't.json'}:1")


Edit = Callable[[dict[str, Any]], Any]


def put(value: Any, *where: str | int) -> Edit:
    """Set the field at ``where``; the value "DELETE" removes it."""

    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in where[:-1]:
            inner = inner[key]
        if value == "DELETE":
            del inner[where[-1]]
        else:
            inner[where[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        # missing
        (put("DELETE", "format"), FileFormatError, r'"format": null.*flexsearch\.topology/1'),
        (put("DELETE", "name"), FileFormatError, r"\bname: is missing"),
        (put("DELETE", "devices"), FileFormatError, r"devices: is missing"),
        (put("DELETE", "communication"), FileFormatError, r"communication: is missing"),
        (put("DELETE", "communication", "backend"), FileFormatError, r"communication\.backend: is missing"),
        (put("DELETE", "devices", 1, "host"), FileFormatError, r"devices\.1\.host: is missing"),
        (put("DELETE", "devices", 1, "flops", "float32"), FileFormatError, r"devices\.1\.flops: float32 is missing"),
        (put("DELETE", "links", 2, "bandwidth"), FileFormatError, r"links\.2\.bandwidth: is missing"),
        (put([], "devices"), TopologyError, r"devices: empty"),
        # extra
        (put(1, "color"), FileFormatError, r"color: is no field"),
        (put(1, "devices", 0, "cores"), FileFormatError, r"devices\.0\.cores: is no field"),
        (put(1, "links", 0, "speed"), FileFormatError, r"links\.0\.speed: is no field"),
        (put({"float8": 1e9, "float32": 1e9}, "devices", 0, "flops"), FileFormatError, r'unknown dtype "float8"'),
        (put({"gather": 1.0}, "communication", "factors"), FileFormatError, r'factors: unknown form "gather"'),
        # mistyped
        (put("flexsearch.strategy/1", "format"), FileFormatError, r"another kind of file"),
        (put("fast", "links", 0, "bandwidth"), FileFormatError, r"links\.0\.bandwidth: must be a number"),
        (put("1e9", "devices", 2, "flops", "float32"), FileFormatError, r"devices\.2\.flops\.float32: must"),
        (put(1.5, "devices", 0, "memory_bytes"), FileFormatError, r"devices\.0\.memory_bytes"),
        (put(7, "devices", 0, "name"), FileFormatError, r"devices\.0\.name: must be text"),
        (put("", "devices", 0, "name"), FileFormatError, r"devices\.0\.name: must not be empty"),
        (put("d{0..2}", "switches", 0), FileFormatError, r"switches\.0: a name must not .*braces"),
        (put("tpu", "devices", 0, "kind"), FileFormatError, r"devices\.0\.kind"),
        (put("simplex", "links", 0, "duplex"), FileFormatError, r"links\.0\.duplex"),
        (put("mpi", "communication", "backend"), FileFormatError, r"communication\.backend"),
        (put(3, "communication", "factors"), FileFormatError, r"communication\.factors"),
        (put("gloo", "communication"), FileFormatError, r"communication: "),
        (put({}, "devices"), FileFormatError, r"devices: must be"),
        # negative, zero, not a number
        (put(-1.0, "links", 1, "bandwidth"), FileFormatError, r"links\.1\.bandwidth: must be at least 1"),
        (put(0, "links", 1, "bandwidth"), FileFormatError, r"links\.1\.bandwidth"),
        (put(-1e-6, "links", 1, "latency_s"), FileFormatError, r"links\.1\.latency_s"),
        (put(-5, "devices", 0, "flops", "float32"), FileFormatError, r"devices\.0\.flops\.float32: must be at least"),
        (put(0, "devices", 0, "memory_bytes"), FileFormatError, r"devices\.0\.memory_bytes"),
        (put(-1, "devices", 0, "overhead_s"), FileFormatError, r"devices\.0\.overhead_s"),
        (put(0, "communication", "factors", "exchange"), FileFormatError, r"factors\.exchange: must be at least"),
        (put(math.nan, "links", 0, "bandwidth"), FileFormatError, r"links\.0\.bandwidth must be a number, not NaN"),
        (
            put(math.inf, "devices", 0, "memory_bandwidth"),
            FileFormatError,
            r"devices\.0\.memory_bandwidth must be a number, not Infinity",
        ),
        (
            put(math.nan, "devices", 0, "flops", "float32"),
            FileFormatError,
            r"devices\.0\.flops\.float32 must be a number",
        ),
        # contradictory
        (put("nowhere", "links", 0, "b"), TopologyError, r'links\.0\.b: no device or switch is called "nowhere"'),
        (put("d01", "links", 0, "a"), TopologyError, r'links\.0\.a: .*did you mean "d'),
        (put("s", "links", 0, "a"), TopologyError, r'links\.0: joins "s" with itself'),
        (put("d1", "links", 0, "a"), TopologyError, r"links\.1: joins .* again, as links\.0 does"),
        (put("d0", "devices", 2, "name"), TopologyError, r'devices\.2\.name: "d0" is already .* devices\.0\.name'),
        (put("d0", "switches", 0), TopologyError, r'switches\.0: "d0" is already .* devices\.0\.name'),
        (put("DELETE", "links", 2), TopologyError, r'no route between devices "d0" and "d2"'),
        (put([], "links"), TopologyError, r'no route between devices "d0" and "d1"'),
        (put("nccl", "communication", "backend"), TopologyError, r'backend: nccl cannot reach the cpu device "d0"'),
        (put({"count": 2, "devices": []}, "nodes"), TopologyError, r'both "nodes" and "devices"'),
    ],
)
def test_malformed_explicit_file_names_the_field(
    tmp_path: Path, edit: Edit, error: type[FlexsearchError], message: str
) -> None:
    data = copy.deepcopy(EXPLICIT)
    edit(data)
    with pytest.raises(error, match=message) as raised:
        Topology.load(write(tmp_path, data))
    assert "t.json" in str(raised.value)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (put("DELETE", "nodes", "count"), FileFormatError, r"nodes\.count: is missing"),
        (put(0, "nodes", "count"), FileFormatError, r"nodes\.count: must be at least 1"),
        (put(2.5, "nodes", "count"), FileFormatError, r"nodes\.count"),
        (put(1, "nodes", "racks"), FileFormatError, r"nodes\.racks: is no field"),
        (put([], "nodes", "devices"), FileFormatError, r"nodes\.devices: must have at least 1"),
        (put("h", "nodes", "devices", 0, "host"), FileFormatError, r"nodes\.devices\.0\.host: leave it out"),
        (put("gpu{0..", "nodes", "devices", 0, "name"), FileFormatError, r'devices\.0\.name: "gpu\{0\.\."'),
        (put("gpu{3..0}", "nodes", "devices", 0, "name"), FileFormatError, r"devices\.0\.name: .*backwards"),
        (put("gpu{0..4}", "nodes", "devices", 0, "name"), TopologyError, r"devices\.0\.processor: .*4 names for 5"),
        (put("nic{0..2}", "nodes", "links", 1, "b"), TopologyError, r"nodes\.links\.1: .*4 names.*3"),
        (put("port", "nodes", "links", 1, "b"), TopologyError, r'nodes\.links\.1: "port" is no name inside the node'),
        (put("spine", "nodes", "switches", 0), TopologyError, r'links\.1: "nic0" is no name inside'),
        (put(["leaf0", "nic{0..3}"], "nodes", "switches"), TopologyError, r'links\.2: "leaf0" is both'),
        (put("spine", "nodes", "links", 2, "a"), TopologyError, r"nodes\.links\.2: .*shared by all nodes"),
        (put("leaf{0..4}", "links", 0, "a"), TopologyError, r'links\.0\.a: "leaf4" is neither a shared switch'),
        (put(-1, "nodes", "links", 0, "bandwidth"), FileFormatError, r"nodes\.links\.0\.bandwidth"),
        (put("DELETE", "nodes", "devices", 0, "model"), FileFormatError, r"nodes\.devices\.0\.model: is missing"),
        (put([], "nodes"), FileFormatError, r"nodes: "),
    ],
)
def test_malformed_compact_file_names_the_field(
    tmp_path: Path, edit: Edit, error: type[FlexsearchError], message: str
) -> None:
    data = copy.deepcopy(COMPACT)
    edit(data)
    with pytest.raises(error, match=message) as raised:
        Topology.load(write(tmp_path, data))
    assert "t.json" in str(raised.value)


@pytest.mark.parametrize("keep", [0, 1, 40, 200, -2])
def test_truncated_file_says_so(tmp_path: Path, keep: int) -> None:
    with pytest.raises(FileFormatError, match=r"not valid JSON.*cut off"):
        Topology.load(write(tmp_path, json.dumps(EXPLICIT)[:keep]))


@pytest.mark.parametrize("content", ["[]", '"p100"', "3", "null"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(FileFormatError, match="must be a JSON object"):
        Topology.load(write(tmp_path, content))


def test_a_number_of_nodes_needs_the_compact_form(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="asks for a number of nodes"):
        Topology.load(f"{write(tmp_path, EXPLICIT)}:2")


@pytest.mark.parametrize("name", ["p100:0", "ethernet-1g-0", "p100:99999999999"])
def test_the_number_of_nodes_has_bounds(name: str) -> None:
    with pytest.raises(TopologyError, match="must be from 1 to 4,096"):
        Topology.load(name)


@pytest.mark.parametrize(
    ("name", "first"),
    [("p10", "p100"), ("dgx-a10", "dgx-a100"), ("ethernet-1", "ethernet-1g"), ("hgx-h10:2", "hgx-h100")],
)
def test_an_unknown_name_lists_the_presets_closest_first(name: str, first: str) -> None:
    with pytest.raises(TopologyError, match=rf"number of nodes: {first}(,|$)") as raised:
        Topology.load(name)
    assert all(preset in str(raised.value) for preset in presets())


def test_a_missing_file_is_named() -> None:
    with pytest.raises(TopologyError, match=r'no topology file "nowhere/cluster\.json"'):
        Topology.load("nowhere/cluster.json")
