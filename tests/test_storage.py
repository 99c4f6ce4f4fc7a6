"""Batches from storage: what a step takes with them, by hand and by the definition of simulated time; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FileFormatError, TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, Lowering, lower_for_ranks
from flexsearch.lower.folding import fold
from flexsearch.report.reading import Input, reading
from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.simulate.whatif import without_reading
from flexsearch.strategy import Options, make_config
from flexsearch.topology import Reading, Storage, Topology
from flexsearch.topology.changes import edited
from tests.conftest import Cli
from tests.engine_oracle import Simulation
from tests.test_baselines import mlp
from tests.test_delta import walk

BATCH, SAMPLE = 64, 1e6


def cluster(hosts: int = 4, **storage: Any) -> Topology:
    """Hosts that read samples of 1 MB, by default at 100 MB/s, 2 ms for each file."""
    options = {"sample_bytes": SAMPLE} | {name: storage.pop(name) for name in Reading.model_fields if name in storage}
    fields = {"kind": "local", "bandwidth": 1e8, "file_latency_s": 0.002} | storage
    return edited(Topology.load(f"ethernet-1g:{hosts}"), storage=Storage(reading=Reading(**options), **fields))


def plan(topology: Topology, graph: OperatorGraph | None = None) -> Lowered:
    """Data parallelism."""
    setting = Setting.of(graph or mlp(batch=BATCH), topology)
    return setting.lower(setting.baseline("data-parallel"))


def step_s(topology: Topology) -> tuple[float, float]:
    """A step, and one without reading."""
    lowered = plan(topology)
    return simulate(lowered).makespan_s, without_reading(lowered)


def near(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9, abs=10 * TICK)


# by hand: a host reads 16 samples, 16 x (2 ms + 10 ms) = 192 ms


def test_without_prefetch_a_step_reads_first() -> None:
    step, computing = step_s(cluster(prefetch=0))
    assert step == near(0.192 + computing)


def test_with_prefetch_reading_and_computing_go_on_side_by_side() -> None:
    step, computing = step_s(cluster(prefetch=1))
    assert computing < 0.192
    assert step == near(0.192)


def test_batches_that_are_read_at_the_same_time_share_latencies_but_not_bandwidth() -> None:
    slow = cluster(prefetch=2, file_latency_s=0.05)
    assert step_s(slow)[0] == near(16 * (0.05 + 0.01) / 2)
    assert step_s(cluster(prefetch=2))[0] == near(16 * 0.01)  # half of 192 ms is less than the bytes take


def test_reading_is_hidden_behind_a_longer_step() -> None:
    step, computing = step_s(cluster(prefetch=1, bandwidth=1e12, file_latency_s=0.0))
    assert step == computing


def test_one_big_file_is_opened_once() -> None:
    assert step_s(cluster(files_per_sample=0.0, files_per_batch=1.0))[0] == near(0.002 + 0.160)


@pytest.mark.parametrize(("hosts", "expected"), [(1, 64 * 0.012), (2, 32 * 0.012), (4, 0.32), (8, 0.32)])
def test_readers_of_one_server_share_its_bandwidth(hosts: int, expected: float) -> None:
    """64 MB at 200 MB/s take 320 ms, whoever reads them; a host's own way takes 12 ms for each of its samples."""
    topology = cluster(hosts, kind="shared", server_bandwidth=2e8)
    graph = mlp(batch=BATCH)
    setting = Setting.of(graph, topology)
    lowered = setting.lower(setting.baseline("data-parallel" if hosts > 1 else "single"))
    assert simulate(lowered).makespan_s == near(max(expected, without_reading(lowered)))


def test_readers_with_disks_of_their_own_do_not_wait_for_each_other() -> None:
    times = [step_s(cluster(hosts, files_per_sample=0.0))[0] for hosts in (2, 4, 8)]
    assert times == [near(64 / hosts * 0.01) for hosts in (2, 4, 8)]


def test_what_stays_in_memory_is_not_read() -> None:
    assert step_s(cluster(hits=0.75))[0] == near(0.192 / 4)
    assert step_s(cluster(cache_bytes=6 * 10**8, samples=1000))[0] == near(0.192 * 0.4)
    step, computing = step_s(cluster(cache_bytes=2 * 10**9, samples=1000))
    assert step == computing


def test_samples_have_the_bytes_of_the_inputs_unless_said_otherwise() -> None:
    graph = mlp(batch=BATCH)
    nbytes = sum(t.nbytes for t in graph.of_kind("input"))
    topology = cluster(sample_bytes=None, bandwidth=1e4, file_latency_s=0.0)
    assert step_s(topology)[0] == near(nbytes / 4 / 1e4)


def test_devices_that_compute_with_the_same_samples_read_them_once_a_host() -> None:
    """Two GPUs of a host share each sample of the batch between them; two hosts with one copy each read all of it."""
    topology = edited(Topology.load("p100:2"), storage=cluster().storage)
    graph = mlp(batch=BATCH)

    def seconds(devices: tuple[int, ...], parts: int = 1) -> float:
        configs = [
            make_config(op, {a.name: parts for a in op.axes if a.role == "sample"}, devices) for op in graph.operators
        ]
        lowered = Lowering(graph, topology, Costs(graph, topology)).lower(configs, Options())
        return simulate(lowered).makespan_s

    assert seconds((0, 1)) == near(64 * 0.012)
    assert seconds((0, 4)) == near(64 * 0.012)
    assert seconds((0, 1), 2) == near(64 * 0.012)
    assert seconds((0, 4), 2) == near(32 * 0.012)


# the engine


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("kind", ["local", "shared"])
def test_starts_and_ends_are_those_of_the_definition(kind: str, prefetch: int) -> None:
    more = {"server_bandwidth": 1.5e8} if kind == "shared" else {}
    lowered = plan(cluster(kind=kind, prefetch=prefetch, **more))
    rows, found = lowered.rows, simulate(lowered)
    definition = Simulation(rows.schedule, rows.machine, rows.segments, rows.segment)
    assert found.makespan_s == definition.run() * TICK
    for row, start, end in zip(lowered.tasks.identity, found.start, found.end, strict=True):
        assert (start, end) == tuple(ticks * TICK for ticks in definition.times[row])  # type: ignore[index]
    read = [what for what in lowered.tasks.communication if what is not None and what.purpose == "read"]
    assert len(read) == 4 * (1 + (kind == "shared"))
    assert {what.devices for what in read} == {(0,), (1,), (2,), (3,)}
    ways = [r for r, x in enumerate(lowered.topology.resources) if x.kind == "storage"]
    assert [found.link_bytes[r] for r in ways] == [16e6] * 4 + [64e6] * (kind == "shared")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_walk_of_proposals_is_simulated_as_the_whole_plans_are(prefetch: int) -> None:
    topology = cluster(3, kind="shared", server_bandwidth=1e8, prefetch=prefetch, bandwidth=3e8, sample_bytes=1e5)
    for seed in range(4):
        walk(mlp(batch=12), topology, np.random.default_rng(seed), Options(), 12)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("preset", ["ethernet-1g:4", "dgx-a100:2"])
def test_equal_blocks_read_as_all_of_them_do(preset: str, prefetch: int) -> None:
    """A plan of replicas that are simulated as one takes as long as the same plan with all of them."""
    storage = cluster(kind="shared", server_bandwidth=2e8, prefetch=prefetch, bandwidth=3e8).storage
    topology, graph = edited(Topology.load(preset), storage=storage), mlp(batch=BATCH)
    setting, count = Setting.of(graph, topology), len(topology.devices)
    whole = setting.baseline("data-parallel", Options(bucket_bytes=2**30))
    parts = fold(graph, topology, count)
    block = parts.folding.block
    costs = Costs(parts.part, block)
    configs = parts.folded(whole.in_order(graph))
    assert configs is not None
    one = Lowering(parts.part, block, costs, parts).lower(configs, whole.options)
    all_ = setting.lower(whole)
    assert reading(one, 1.0) == pytest.approx(reading(all_, 1.0))
    assert simulate(one).makespan_s == near(simulate(all_).makespan_s)


def test_ranks_do_not_read() -> None:
    """The training loop does."""
    topology, graph = cluster(), mlp(batch=BATCH)
    setting = Setting.of(graph, topology)
    lowered = lower_for_ranks(graph, setting.baseline("data-parallel"), topology, setting.costs)
    assert not [what for what in lowered.tasks.communication if what is not None and what.purpose == "read"]


def test_the_hash_of_a_cluster_does_not_depend_on_what_is_read() -> None:
    plain = Topology.load("ethernet-1g:4")
    assert plain.content_hash() == "567f27bf0b4030a0"
    assert cluster().content_hash() == cluster(prefetch=0, sample_bytes=5.0).content_hash() != plain.content_hash()
    assert cluster().subset([0, 1]).storage == cluster().storage


# what is said


def said(topology: Topology) -> Input:
    lowered = plan(topology)
    found = reading(lowered, simulate(lowered).makespan_s)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ({"bandwidth": 1e12, "file_latency_s": 0.0}, "It is hidden behind the step."),
        ({"prefetch": 0}, "Read ahead"),
        ({"file_latency_s": 0.1}, "Most of it is opening files: put many samples into each file"),
        ({"bandwidth": 1e7}, "It is bytes"),
        ({"kind": "shared", "server_bandwidth": 1e7}, "All hosts wait for one server"),
    ],
)
def test_the_reason_is_named_where_input_is_the_limit(storage: dict[str, Any], words: str) -> None:
    found = said(cluster(**storage))
    assert words in found.words()
    assert found.limits == ("Input is the limit" in found.words()) == ("hidden" not in words)
    assert (found.samples, found.hosts) == (16, 4)


def test_commands_say_it(cli: Cli) -> None:
    cluster(2, kind="shared", server_bandwidth=1e7).save("nfs.json")
    options = ("-t", "nfs.json", "--budget", "5", "-o", "s.json", "--json")
    data = cli("optimize", "lenet", *options, "--data", "sample-bytes=10k,prefetch=2").json
    assert data["input"]["limits"] and data["input"]["prefetch"] == 2
    explained = cli("explain", "s.json", "--tries", "0", "--json").json
    assert "Input is the limit" in " ".join(cli("explain", "s.json", "--tries", "0").out.split())
    assert explained["input"]["limits"]
    assert {one["change"] for one in explained["what_if"]} >= {"reading"}
    assert "read" in str(explained["critical_path"])


# bad input


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bandwidth": -1.0}, "storage.bandwidth"),
        ({"kind": "shared"}, "a shared file system needs server_bandwidth"),
        ({"server_bandwidth": 1e8}, "server_bandwidth is for shared storage"),
        ({"hits": 0.5, "cache_bytes": 1}, "cache_bytes or hits, not both"),
        ({"cache_bytes": 1}, "needs reading.samples"),
        ({"reading": {"prefetch": -1}}, "storage.reading.prefetch"),
    ],
)
def test_storage_that_cannot_be_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    data = json.loads(Topology.load("ethernet-1g:2").model_dump_json(exclude_none=True))
    data["storage"] = {"kind": "local", "bandwidth": 1e8} | fields
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=words):
        Topology.load(tmp_path / "t.json")


def test_reading_without_storage_is_refused() -> None:
    with pytest.raises(TopologyError, match="has no storage"):
        Topology.load("ethernet-1g:2").with_reading(prefetch=2)
    with pytest.raises(TopologyError, match="prefetch"):
        cluster().with_reading(prefetch=-1)


@pytest.mark.parametrize("data", ["prefetch", "prefetch=-1", "depth=2", "sample-bytes=1.5e3", "prefetch=0.5"])
def test_data_that_makes_no_sense_is_refused(data: str, cli: Cli) -> None:
    cluster(2).save("t.json")
    ran = cli("simulate", "lenet", "-t", "t.json", "--baseline", "data-parallel", "--data", data)
    assert ran.code == 2 and data.partition("=")[0].replace("-", "_")[:6] in ran.err.replace("-", "_")
    plain = cli("simulate", "lenet", "-t", "ethernet-1g:2", "--baseline", "data-parallel", "--data", "prefetch=2")
    assert plain.code == 2 and 'Add "storage" to its file.' in plain.err
