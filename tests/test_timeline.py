"""Measured timelines of plans with stages and microbatches: each predicted task once, in order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.report.trace import chrome_trace
from flexsearch.runtime.train import train
from flexsearch.strategy import Strategy, StrategyFile
from tests.exported import layout
from tests.ranks import pool

SPEC = "tests.exported:build"
QUARTERS = ("layers.1.input_norm", "layers.2.input_norm", "layers.3.input_norm")
Named = list[tuple[int, str]]
"""(device, name of a task or pass)."""


def _plan(schedule: str) -> Strategy:
    model, inputs, targets, loss = load_callable(SPEC, name="llama")
    graph = import_model(model, inputs, loss, targets=targets)
    borders = QUARTERS if schedule == "interleaved-1f1b" else QUARTERS[1:2]
    return layout(graph, 1, 1, borders, ranks=2, topology="ethernet-1g:2", schedule=schedule, microbatches=4)


def _traced(file: str) -> tuple[Named, Named, list[str], list[dict[str, Any]]]:
    """Events of devices, predicted and measured, by begin; what is wrong with measured order; the summary."""
    done = train(Strategy.from_file(StrategyFile.model_validate_json(file)), SPEC, arguments={"name": "llama"},
                 steps=1, trace=True)  # fmt: skip
    assert done.timeline is not None
    events = chrome_trace(done.lowered, done.simulation, done.timeline.spans)["traceEvents"]
    sides: tuple[Named, Named] = [], []
    devices = len(done.lowered.topology.devices)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        device, side = divmod(event["pid"] - 1, 2)
        if device < devices:
            sides[side].append((device, event["name"]))
    wrong, tasks = [], done.lowered.tasks
    for device in done.lowered.devices:
        spans = sorted((span, t) for t, span in done.timeline.spans.items() if tasks.device[t] == device)
        for ((_, end), before), ((start, _), after) in pairwise(spans):
            if start < end - 1e-9:
                wrong.append(f"device {device}: {after} begins before {before} ends")
    return *sides, wrong, done.summary()["errors"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zero-bubble"])
def test_every_predicted_task_and_pass_is_measured_once_under_its_name(schedule: str) -> None:
    predicted, measured, wrong, errors = pool(2).run(_traced, _plan(schedule).to_file().model_dump_json())[0]
    assert Counter(measured) == Counter(predicted)
    assert wrong == []
    stages, halves = (4 if schedule == "interleaved-1f1b" else 2), ("FIW" if schedule == "zero-bubble" else "FB")
    assert {f"{s}{kind}" for s in range(stages) for kind in halves} <= {row["stage_pass"] for row in errors}
