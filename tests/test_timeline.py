"""Measured timelines of plans with stages and microbatches: each predicted task once, in order."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest
import torch

from flexsearch.clocks import CudaClock, clock_of
from flexsearch.cost import Costs
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.lower import lower_for_ranks
from flexsearch.report.trace import chrome_trace
from flexsearch.runtime import arrivals, timeline
from flexsearch.runtime.arrivals import Message, Receipt, _listen, flows_from, free_since
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.parallel import parallelize
from flexsearch.runtime.train import train
from flexsearch.strategy import Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from flexsearch.tracing import save_trace
from tests.exported import layout
from tests.ranks import pool
from tests.test_program import imported

SPEC = "tests.exported:build"
QUARTERS = ("layers.1.input_norm", "layers.2.input_norm", "layers.3.input_norm")
Named = list[tuple[int, str]]
"""(device, name of a task or pass)."""


class Traced(NamedTuple):
    """Events of devices, ``predicted`` and ``measured``, by begin; what is ``wrong`` with measured order; the
    ``summary``; of each device the most that its measured memory counter says, bytes (``peaks``); of how many
    communications, those that are ``drawn``."""

    predicted: Named
    measured: Named
    wrong: list[str]
    summary: dict[str, Any]
    peaks: list[int]
    drawn: tuple[int, int]


def _plan(schedule: str) -> Strategy:
    model, inputs, targets, loss = load_callable(SPEC, name="llama")
    graph = import_model(model, inputs, loss, targets=targets)
    borders = QUARTERS if schedule == "interleaved-1f1b" else QUARTERS[1:2]
    return layout(graph, 1, 1, borders, ranks=2, topology="ethernet-1g:2", schedule=schedule, microbatches=4)


def _traced(file: str) -> Traced:
    done = train(Strategy.from_file(StrategyFile.model_validate_json(file)), SPEC, arguments={"name": "llama"},
                 steps=1, trace=True)  # fmt: skip
    timeline, tasks = done.timeline, done.lowered.tasks
    assert timeline is not None
    events = chrome_trace(done.lowered, done.simulation, timeline.spans, timeline.curves())["traceEvents"]
    sides: tuple[Named, Named] = [], []
    devices = len(done.lowered.topology.devices)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        device, side = divmod(event["pid"] - 1, 2)
        if device < devices:
            sides[side].append((device, event["name"]))
    wrong = []
    for device in done.lowered.devices:
        spans = sorted((span, t) for t, span in timeline.spans.items() if tasks.device[t] == device)
        for ((_, end), before), ((start, _), after) in pairwise(spans):
            if start < end - 1e-9:
                wrong.append(f"device {device}: {after} begins before {before} ends")
    counters = [e for e in events if e["ph"] == "C"]
    peaks = [max(e["args"]["bytes"] for e in counters if e["pid"] == 2 * d + 2) for d in done.lowered.devices]
    communications = {t for t, what in enumerate(tasks.communication) if what is not None and what.receivers}
    drawn = len(communications & set(timeline.spans)), len(communications)
    return Traced(*sides, wrong, done.summary(), peaks, drawn)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zero-bubble"])
def test_every_predicted_task_and_pass_is_measured_once_under_its_name(schedule: str) -> None:
    traced = pool(2).run(_traced, _plan(schedule).to_file().model_dump_json())[0]
    assert Counter(traced.measured) == Counter(traced.predicted)
    assert traced.wrong == []
    stages, halves = (4 if schedule == "interleaved-1f1b" else 2), ("FIW" if schedule == "zero-bubble" else "FB")
    assert {"0F", "0B", *(f"{s}{kind}" for s in range(1, stages) for kind in halves)} <= {
        row["stage_pass"] for row in traced.summary["errors"]
    }
    assert traced.drawn[0] == traced.drawn[1]
    for row, peak in zip(traced.summary["memory"], traced.peaks, strict=True):
        assert row["measured_peak"] == peak == pytest.approx(row["predicted_peak"], rel=0.25)
        assert row["name"]


class _Event:
    """A moment of a device that is 5 ms behind its host, which knows it when it has waited."""

    known, asked = False, 0

    def __init__(self) -> None:
        self.at = time.perf_counter() + 0.005


class _Events(CudaClock):
    """``CudaClock`` without a GPU."""

    def mark(self) -> _Event:
        _Event.known = False
        return _Event()

    def wait(self) -> None:
        _Event.known = True

    def between(self, start: _Event, end: _Event) -> float:
        assert _Event.known, "asked before the device has come so far"
        _Event.asked += 1
        return end.at - start.at


def _traced_by_events(file: str) -> tuple[Traced, int]:
    timeline.clock_of = lambda device: _Events()  # type: ignore[attr-defined]
    _Event.asked = 0
    try:
        return _traced(file), _Event.asked
    finally:
        timeline.clock_of = clock_of  # type: ignore[attr-defined]


def test_devices_that_run_behind_their_hosts_are_timed_by_their_own_clock() -> None:
    traced, asked = pool(2).run(_traced_by_events, _plan("1f1b").to_file().model_dump_json())[0]
    here = sum(device == 0 for device, _ in traced.measured)
    assert asked > here, "each of this rank's tasks begins and ends by events"
    assert Counter(traced.measured) == Counter(traced.predicted)
    assert traced.wrong == [] and traced.drawn[0] == traced.drawn[1]


def test_marks_are_seconds_of_the_host() -> None:
    clock, events = clock_of(torch.device("cpu")), _Events()
    zero, mark = events.mark(), events.mark()
    events.wait()
    assert events.when(mark, zero, 7.0) == 7.0 + mark.at - zero.at
    assert events.when(3.0, zero, 7.0) == 3.0, "what the host has noted itself"
    assert clock.when(3.0, 2.0, 7.0) == 3.0


def _traced_in_a_loop(file: str) -> tuple[int, bool, bool]:
    """How many tasks were measured; whether weights and gradients stay; whether this rank wrote a trace."""
    torch.manual_seed(0)
    loaded = load_callable(SPEC, name="llama")
    plan = Strategy.from_file(StrategyFile.model_validate_json(file))
    step = parallelize(loaded.model, plan, loss=loaded.loss, inputs=loaded.inputs, targets=loaded.targets)
    batch = loaded.inputs, loaded.targets
    step(batch)

    def state() -> list[torch.Tensor]:
        return [x.detach().clone() for p in step.parameters() for x in (p, p.grad) if x is not None]

    before = state()
    timeline = step.trace(batch, torch.optim.SGD(step.parameters()), steps=1)
    with TemporaryDirectory() as folder:
        save_trace(Path(folder) / "trace.json", step, timeline)
        written = (Path(folder) / "trace.json").exists()
    return len(timeline.spans), all(map(torch.equal, before, state())), written


def test_tracing_a_step_of_ones_own_loop_changes_neither_weights_nor_gradients() -> None:
    plan = _plan("1f1b")
    (first, *stays), (second, *others) = pool(2).run(_traced_in_a_loop, plan.to_file().model_dump_json())
    assert first == second > 100 and stays == [True, True] and others == [True, False]


class Sent:
    """Stands for the backend's handle of a message that comes when it is told to."""

    def __init__(self) -> None:
        self.come = Event()

    def wait(self) -> None:
        assert self.come.wait(10.0)


def test_a_rank_waits_itself_for_what_the_listener_has_not_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "WAITED_S", 60.0)  # a busy machine may take longer than it usually does
    first, second, works = Message(1, 0), Message(2, 0), (Sent(), Sent())
    listener = Thread(target=_listen, args=([first, second],), daemon=True)
    listener.start()
    second.post(works[1])  # type: ignore[arg-type]
    works[1].come.set()
    assert second.wait().late  # the listener is at the first one, which nobody has sent
    first.post(works[0])  # type: ignore[arg-type]
    works[0].come.set()
    listener.join(10.0)
    assert first.wait().task == 1 and not listener.is_alive()


def test_a_message_flows_when_it_is_issued_has_room_and_the_connection_is_free() -> None:
    graph = imported().graph
    plan = baseline("placement", graph, Topology.load("ethernet-1g:2"))
    lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
    what = next(w for w in lowered.tasks.communication if w is not None and w.form == "exchange")
    connection = (0, 1)
    earlier, later = Receipt(1, 0, 0.0, 5.0, False), Receipt(2, 0, 0.0, 9.0, False)
    free = free_since({1: {connection: earlier}, 2: {connection: later}})
    assert flows_from(what, [1.0], {connection: earlier}, free) == 1.0
    assert flows_from(what, [1.0], {connection: later}, free) == 5.0
    assert flows_from(what, [6.0], {connection: later}, free) == 6.0
    assert flows_from(what, [6.0], {connection: later._replace(posted=7.0)}, free) == 7.0
    other = (0, 2)  # its bytes flow on, while the first connection is still busy
    assert flows_from(what, [1.0], {connection: later, other: later._replace(task=3)}, free) == 1.0


def test_live_bytes_count_each_storage_once_while_it_lives() -> None:
    there = torch.zeros(100)
    with LiveBytes([there]) as live:
        x = torch.ones(1000)
        y = x.view(10, 100)
        assert live.live == 4000
        z = y * there[0]
        del x, y
        assert (live.live, live.peak) == (4000, 8000)
        z.untyped_storage().resize_(0)
        live.refresh()
        assert live.live == 0
