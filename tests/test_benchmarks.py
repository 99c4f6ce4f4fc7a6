"""The benchmarks can be started: nothing that they import has moved."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.llm_plans import SEQ, TABLE_1, layout_of, tflops

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_published_layouts_use_all_their_gpus_and_samples() -> None:
    for row in TABLE_1:
        layout = layout_of(row)
        assert layout.devices == row.gpus and row.layers % layout.stages == 0
        assert layout.data * layout.microbatches * row.microbatch == row.batch


def test_the_formula_for_tflops_is_that_of_the_paper() -> None:
    """It counts 8 FLOPs for each parameter and token, and a little for attention (section 5.1)."""
    row = TABLE_1[-1]
    assert 1.0 < tflops(row, 1.0) * 1e12 * row.gpus / (8 * row.parameters * 1e9 * row.batch * SEQ) < 1.05
