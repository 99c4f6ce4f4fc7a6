"""Arguments of the Python API that make no sense: each is refused with what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexsearch
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.runtime.parallel import Parallel, parallelize
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool

ONE_RANK = Topology.load("ethernet-1g:1")
BATCH, TARGETS = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


@cache
def model() -> nn.Module:
    return nn.Linear(3, 2)


def optimize(net: Any = None, inputs: Any = BATCH, **options: Any) -> Strategy:
    of = model() if net is None else net
    options = {"loss": F.cross_entropy, "targets": TARGETS, "budget": 5, **options}
    return flexsearch.optimize(of, inputs, ONE_RANK, **options)


def told(call: Callable[[], object]) -> str:
    with pytest.raises((FlexsearchError, AttributeError)) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: optimize(inputs=torch.ones(0, 3)), r"a tensor of shape (0, 3), which has no elements. Give a batch"),
        (lambda: optimize(inputs={}), "no tensor among the example inputs. Give a batch"),
        (lambda: flexsearch.optimize(None, BATCH, ONE_RANK), "must be an nn.Module, not NoneType"),  # type: ignore[arg-type]
        (lambda: optimize(margin=nan), "margin=nan is not a share. Give a number from 0"),
        (lambda: optimize(margin=-0.1), "margin=-0.1"),
        (lambda: optimize(processes=0), "cannot search in processes=0. Give a number from 1"),
        (lambda: optimize(processes="2"), "processes='2'"),
        (lambda: optimize(seed="lucky"), "seed 'lucky' is not between 0 and 2^64 - 1"),
        (lambda: optimize(start="plan.json"), "start= is a Strategy, not a str. Read a file by Strategy.load(PATH)"),
        (lambda: optimize(options="adam"), "options= is an Options, not a str"),
        (lambda: optimize(pins="fc1: batch=2"), "pins= is a list of texts, not a str. Give pins=[...]"),
        (lambda: Strategy.load(None), "cannot read strategy file None: NoneType is no path"),  # type: ignore[arg-type]
        (lambda: OperatorGraph.load(None), "no graph file None"),  # type: ignore[arg-type]
        (lambda: Topology.load(None), 'no topology file or preset "None"'),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_planned_or_read_is_refused(call: Callable[[], object], words: str) -> None:
    assert words in told(call)


def step() -> Parallel:
    graph = import_model(model(), BATCH, F.cross_entropy, targets=TARGETS)
    return parallelize(model(), baseline("single", graph, ONE_RANK), loss=F.cross_entropy)


def misused(folder: str) -> dict[str, str]:
    """What a step says to calls that make no sense, and to the next good one."""
    one: Any = step()
    one((BATCH, TARGETS))
    lost = f"{folder}/file/checkpoint"
    calls: dict[str, Callable[[], object]] = {
        "state": lambda: one.load_state_dict(None),
        "value": lambda: one.load_state_dict({"weight": 1.0, "bias": 2.0}),
        "norm type": lambda: one.clip_grad_norm_(1.0, norm_type=0),
        "negative norm type": lambda: one.clip_grad_norm_(1.0, norm_type=-inf),
        "norm": lambda: one.clip_grad_norm_(nan),
        "scale": lambda: one((BATCH, TARGETS), scale="x"),
        "data set": lambda: one.loader(iter([1])),
        "module": lambda: one.eval(),
        "data loader": lambda: one.loader(DataLoader(TensorDataset(BATCH))),
        "unknown": lambda: one.load_state_dict({**model().state_dict(), "other": BATCH}),
        "path": lambda: one.save(None),
        "optimizer": lambda: one.save(folder, "adam"),
        "time-out": lambda: parallelize(model(), one.strategy, loss=F.cross_entropy, timeout_s=nan),
        "no time": lambda: parallelize(model(), one.strategy, loss=F.cross_entropy, timeout_s=0),
        "model": lambda: parallelize(None, one.strategy, loss=F.cross_entropy),  # type: ignore[arg-type]
        "seed": lambda: parallelize(model(), one.strategy, loss=F.cross_entropy, seed="x"),  # type: ignore[arg-type]
    }
    said = {what: told(call) for what, call in calls.items()}
    one((BATCH, TARGETS))  # nothing that was refused ended the run
    said["samples"] = told(lambda: one((BATCH, TARGETS), samples="3"))
    said["save"] = told(lambda: step().save(lost))
    said["safetensors"] = told(lambda: step().save_safetensors(lost))
    return said


def test_a_step_refuses_what_makes_no_sense_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    [said] = pool(1).run(misused, str(tmp_path))
    words = {
        "state": "a state is a dict of tensors by name, not a NoneType", "value": "'weight' is a float in the state",
        "norm type": "norm_type=0 is no norm", "negative norm type": "norm_type=-inf is no norm",
        "norm": "max_norm=nan", "scale": "cannot be scaled by 'x'", "data set": "a list_iterator has no length",
        "module": "has no 'eval'. Use `with step.evaluating()",
        "data loader": "step.loader(loader.dataset", "unknown": "has 'other', which this model has not",
        "path": "NoneType is no path of a folder", "optimizer": "a str is no optimizer",
        "time-out": "timeout_s=nan is no time", "no time": "timeout_s=0 is no time",
        "model": "needs a model, not a NoneType", "seed": "seed='x' is no seed",
        "samples": "samples='3' is no number of samples", "save": "no checkpoint can be written to",
        "safetensors": "no weights can be written to",
    }  # fmt: skip
    assert said.keys() == words.keys()
    for what, text in words.items():
        assert text in said[what], what
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
