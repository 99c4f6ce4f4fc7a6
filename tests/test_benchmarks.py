"""The benchmarks can be started: nothing that they import has moved."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from math import log2
from pathlib import Path
from typing import cast

import pytest

from benchmarks import runtime_vs_torch
from benchmarks.emulated import Machine
from benchmarks.harness import report_tables
from benchmarks.llm_plans import SEQ, TABLE_1, layout_of, tflops
from benchmarks.sync_scaling import SIZES, exchanges, resnet20
from flexsearch.sync import parse_recipe
from flexsearch.sync.compression import Sizes
from flexsearch.sync.configurations import configurations
from flexsearch.sync.threshold import AdaptiveThreshold

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_rows_are_printed_by_table_or_all_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"table": "far", "x": 3, "error": None}, {"table": "near", "y": 5}]
    report_tables(rows, {"near": "N", "far": "F", "none": "Z"}, False)
    text = capsys.readouterr().out
    assert text.index("N") < text.index("5") < text.index("F") < text.index("3")
    assert not any(word in text for word in ("Z", "error", "table"))
    report_tables(rows, {}, True)
    assert json.loads(capsys.readouterr().out) == {"rows": rows}


def test_published_layouts_use_all_their_gpus_and_samples() -> None:
    for row in TABLE_1:
        layout = layout_of(row)
        assert layout.devices == row.gpus and row.layers % layout.stages == 0
        assert layout.data * layout.microbatches * row.microbatch == row.batch


def test_the_formula_for_tflops_is_that_of_the_paper() -> None:
    """It counts 8 FLOPs for each parameter and token, and a little for attention (section 5.1)."""
    row = TABLE_1[-1]
    assert 1.0 < tflops(row, 1.0) * 1e12 * row.gpus / (8 * row.parameters * 1e9 * row.batch * SEQ) < 1.05


def test_the_prediction_for_one_rank_counts_beside_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        def __init__(self, machine: object, model: str, ranks: int, network: str) -> None:
            self.named = {"model": model, "ranks": ranks, "network": network}

    def row(case: Stub, part: str) -> dict[str, object]:
        table = {"single": "one rank", "found": "found"}.get(part, "layouts")
        predicted_s = {"single": 1.5, "found": 9.0}.get(part, 1.0)
        return {"table": table, **case.named, "predicted_s": predicted_s, "ours_s": 1.0, "error": None}

    monkeypatch.setattr(runtime_vs_torch, "Case", Stub)
    monkeypatch.setattr(runtime_vs_torch, "_row", row)
    options = Namespace(models=["llama", "gpt2"], ranks=[2], networks=["loopback", "1gbit"], layouts=["tensor"])
    rows = [r for r in runtime_vs_torch.run(cast(Machine, None), options) if r["table"] == "accuracy"]
    assert [(r["model"], r["network"], r["layouts"]) for r in rows] == [
        ("llama", "loopback", 2), ("llama", "1gbit", 2), ("gpt2", "loopback", 2), ("gpt2", "1gbit", 2),
        ("all", "all", 6),
    ]  # fmt: skip
    assert [r["median_error_percent"] for r in rows] == [25, 25, 25, 25, 0]


@pytest.mark.parametrize("workers", [4, 16, 32])
def test_workers_can_follow_the_configurations_and_the_threshold_leaves_what_gossip_can_bring(workers: int) -> None:
    recipes = [parse_recipe(text) for text in configurations(workers)]
    for recipe in recipes:
        recipe.check(workers, Sizes(((1000,),), 4), tuple(range(workers)))
    thresholds = [r.compression for r in recipes if isinstance(r.compression, AdaptiveThreshold)]
    assert len(recipes) == 10 and len(thresholds) == 4
    assert all(abs(c.density * log2(workers) - 1) < 1e-3 for c in thresholds if c.density is not None)


def test_resnet20_has_the_parameters_of_its_paper() -> None:
    """0.27 M (He et al., 2015, table 6)."""
    assert sum(tensor.nbytes for tensor in resnet20(8).of_kind("parameter")) / 4 == pytest.approx(0.27e6, rel=0.02)


@pytest.mark.parametrize("workers", [4, 32])
def test_priced_exchanges_are_near_their_formulas(workers: int) -> None:
    """What formulas leave out is small: messages in turn start faster than the first, gloo does not fill the link."""
    rows = exchanges(workers, SIZES)
    for row in rows:
        for name in ("ring", "tree", "halving"):
            assert 0.95 < row[f"{name}_s"] / row[f"{name}_formula_s"] < 1.2
        for name in ("server", "shards"):
            assert 0.5 < row[f"{name}_s"] / row[f"{name}_formula_s"] < 1.2
    assert rows[0]["best"] == "halving" and rows[-1]["server_s"] > workers / 2 * rows[-1]["ring_s"]
