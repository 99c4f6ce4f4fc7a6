"""The examples do what they say, on ranks that are up already."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import pool

FOLDER = Path(__file__).resolve().parent.parent / "examples"


def _main(name: str, *arguments: Any) -> Any:
    """The result of an example's ``main`` on this rank."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*arguments)


def test_a_plain_loop_learns() -> None:
    first, second = pool(2).run(_main, "plain_loop")
    assert first == second
    loss, accuracy = first
    assert loss < 1.2 and accuracy > 0.7


def test_a_run_is_resumed_under_another_plan(tmp_path: Path) -> None:
    whole = pool(1).run(_main, "resume", str(tmp_path / "whole"), 4)[0]
    parts = [pool(ranks).run(_main, "resume", str(tmp_path / "parts"), 2)[0] for ranks in (4, 2)]
    assert [*parts[0], *parts[1]] == pytest.approx(whole, rel=1e-4)


def test_a_model_of_hugging_face_trains_and_is_read_from_what_was_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    losses = pool(2).run(_main, "huggingface", str(tmp_path))
    first, last = losses[0]
    assert losses[1] == losses[0] and last < first - 0.5
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).loss.item() < first - 0.5
