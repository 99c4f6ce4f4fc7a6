"""The shipped clusters: each can be planned for, and says where its figures come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexsearch.api import optimize, simulate
from flexsearch.errors import FileFormatError, TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.topology import Topology, presets
from flexsearch.topology.changes import device_named, edited, with_device
from flexsearch.topology.sources import FIGURES
from tests.conftest import Cli

GPUS = {
    "dgx-a100", "dgx-a100-40gb", "hgx-h100", "hgx-h100-500w", "hgx-h200", "hgx-b200", "v100-nvlink-4", "l40s",
    "rtx-4090", "p100", "k80",
}  # fmt: skip


def test_there_is_one_of_every_kind() -> None:
    assert set(presets()) == GPUS | {"xeon", "epyc", "ethernet-1g", "ethernet-10g"}


@pytest.mark.parametrize("name", presets())
def test_two_servers_of_every_preset_can_be_planned_for(name: str) -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load(f"{name}:2")
    plan = optimize(graph, topology=topology, budget=20, processes=1)
    assert plan.prediction is not None and plan.prediction.iteration_s > 0.0
    assert simulate(graph, topology, plan).makespan_s == plan.prediction.iteration_s
    assert plan.prediction.data_parallel_s is not None
    assert plan.prediction.iteration_s <= plan.prediction.data_parallel_s


@pytest.mark.parametrize("name", presets())
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    topology = Topology.load(name)
    said = {figure for record in topology.sources for figure in record.figures}
    absent = set() if topology.communication.groups else {"communication.groups"}
    assert said == set(FIGURES) - absent
    assert all(record.origin for record in topology.sources)


def test_what_is_not_said_is_guessed_and_nothing_is_said_twice(tmp_path: Path) -> None:
    topology = Topology.load("dgx-a100:2")
    assert topology.source_kind("devices.flops") == "published"
    assert topology.source_kind("devices.efficiency") == "measured"
    assert topology.model_copy(update={"sources": ()}).source_kind("devices.flops") == "guessed"
    assert topology.subset([0, 9]).source_kind("devices.efficiency") == "measured"
    assert topology.content_hash() == topology.model_copy(update={"sources": ()}).content_hash()
    with pytest.raises(TopologyError, match="named twice"):
        edited(topology, sources=topology.sources + topology.sources[:1])
    topology.save(tmp_path / "cluster.json")
    text = (tmp_path / "cluster.json").read_text()
    (tmp_path / "cluster.json").write_text(text.replace('"devices.flops"', '"device.flops"', 1))
    with pytest.raises(FileFormatError, match=r"sources\.0\.figures\.0"):
        Topology.load(tmp_path / "cluster.json")


def test_a_limited_h100_is_slower_and_another_device_comes_with_its_efficiency() -> None:
    full, limited = (Topology.load(name).devices[0].efficiency for name in ("hgx-h100", "hgx-h100-500w"))
    assert full is not None and limited is not None and limited.matrix < full.matrix
    changed = with_device(Topology.load("dgx-a100"), device_named("H100-SXM5-80GB"))
    assert changed.devices[0].efficiency == full


def test_the_command_line_lists_presets_and_says_where_figures_come_from(cli: Cli) -> None:
    listed = cli("clusters")
    assert listed.code == 0 and all(name in listed.out for name in presets())
    one = cli("clusters", "l40s:2", "--json").json
    assert one["devices"] == 8 and one["figures"]["devices.flops"]["kind"] == "published"
    efficiency = one["figures"]["devices.efficiency"]
    assert efficiency["kind"] == "guessed" and efficiency["value"]["matrix"] == 0.6
    assert one["figures"]["devices.launches"]["value"]["communication"] == 3
    told = cli("clusters", "l40s").out
    assert "published" in told and "0.25" in told and "8.64e+11" in told
    assert cli("clusters", "l40").code == 2
