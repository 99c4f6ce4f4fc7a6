"""The emitted rows are those of the definition."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.rows import COMPUTE, ISSUE, NEVER, WAIT
from flexsearch.strategy import Options
from tests.random_strategies import TYPES, strategies
from tests.task_oracle import task_graph
from tests.test_baselines import cnn, mlp, transformer
from tests.test_delta import TOPOLOGIES, dags, normed, tied

GRAPHS = {"mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(layers=1), "norm": normed, "tied": tied}


def tasks_of(s: Any, segment: Any, devices: int) -> list[Any]:
    """(ticks, links, drags, dependencies, turn) of every row, in order of identity."""
    number, rows = {}, []
    last = {}
    computes = {}
    for b, g in enumerate(segment.tolist()):
        table = int(s.device_steps[g])
        here = {}
        for d in range(devices):
            for k in range(int(s.step_first[table + d]), int(s.step_first[table + d + 1])):
                if s.step_kind[k] == COMPUTE:
                    here[int(s.step_row[k])] = d
        for row in sorted(here):
            computes[b, row] = number["c", b, row] = len(rows)
            rows.append([0, [], [], set()])
        for c in range(int(s.communication_first[g]), int(s.communication_last[g])):
            number["m", b, c - int(s.communication_first[g])] = len(rows)
            links = [(int(s.link[k]), int(s.link_ticks[k])) for k in range(s.link_first[c], s.link_last[c])]
            drags = [(int(s.drag[k]), int(s.drag_ticks[k])) for k in range(s.drag_first[c], s.drag_last[c])]
            turn = inf if s.turn[c] == NEVER else int(s.turn[c])
            rows.append([int(s.communication_ticks[c]), links, drags, set(), turn])
    for b, g in enumerate(segment.tolist()):
        table = int(s.device_steps[g])
        missing = {}
        for d in range(devices):
            waits = set()
            for k in range(int(s.step_first[table + d]), int(s.step_first[table + d + 1])):
                if s.step_kind[k] == COMPUTE:
                    assert s.step_block[k] == b
                    t = number["c", b, int(s.step_row[k])]
                    rows[t][0] = int(s.step_ticks[k])
                    rows[t][3] |= waits | ({last[d]} if d in last else set())
                    last[d], waits = t, set()
                elif s.step_kind[k] == WAIT:
                    t = number["m", int(s.step_block[k]), int(s.step_row[k])]
                    assert t not in waits
                    waits.add(t)
                else:
                    assert s.step_kind[k] == ISSUE and s.step_block[k] == b and not waits
                    t = number["m", b, int(s.step_row[k])]
                    rows[t][3] |= {last[d]} if d in last else set()
                    missing[t] = missing.get(t, 0) + 1
            assert not waits
        for c in range(int(s.communication_first[g]), int(s.communication_last[g])):
            t = number["m", b, c - int(s.communication_first[g])]
            rows[t].append((int(s.missing[c]), missing[t]))
    for b, g in enumerate(segment.tolist()):
        for c in range(int(s.communication_first[g]), int(s.communication_last[g])):
            t = number["m", b, c - int(s.communication_first[g])]
            for k in range(s.follower_first[c], s.follower_last[c]):
                to = number["m", int(s.follower_block[k]), int(s.follower_row[k])]
                rows[to][3].add(t)
                rows[to][5] = rows[to][5][0] - 1, rows[to][5][1]
    for row in rows:
        if len(row) == 6:
            assert row[5][0] == row[5][1]
    return rows


def check(lowering: Lowering, configs: Any, options: Options) -> None:
    lowered, topology = lowering.lower(configs, options), lowering.topology
    expected, decisive = task_graph(lowering, lowered), topology.decisive
    rows = tasks_of(lowered.rows.segments, lowered.rows.segment, len(topology.devices))
    assert len(rows) == len(expected)
    for t, row in enumerate(rows):
        assert row[0] == round(expected.duration[t] / TICK), t
        assert row[3] == set(expected.dependencies[t]), t
        if expected.communication[t] is not None:
            links = {r: round(s / TICK) for r, s in expected.links[t]}
            held = {r: ticks for r, ticks in row[1] if decisive[r]}
            assert held == links and len(dict(row[1])) == len(row[1])
            assert row[4] == (inf if expected.turn[t] == inf else round(expected.turn[t] / TICK))
            assert dict(row[2]) == {r: round(s / TICK) for r, s in expected.drag[t]}


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("graph", GRAPHS)
@settings(derandomize=True, deadline=None, max_examples=4, phases=(Phase.generate,))
@given(data=st.data(), prefetch=st.integers(0, 3))
def test_rows_are_those_of_the_definition(data: Any, graph: str, name: str, prefetch: int) -> None:
    made, topology = GRAPHS[graph](), TOPOLOGIES[name]()
    strategy = data.draw(strategies(made, topology, types=st.sampled_from(sorted(TYPES))))
    options = strategy.options.model_copy(update={"prefetch": prefetch})
    made = options.typed(made)
    check(Lowering(made, topology, Costs(made, topology)), strategy.in_order(made), options)


@settings(derandomize=True, deadline=None, max_examples=20, phases=(Phase.generate,))
@given(data=st.data(), graph=dags(), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_so_are_those_of_random_graphs(data: Any, graph: OperatorGraph, name: str) -> None:
    topology = TOPOLOGIES[name]()
    strategy = data.draw(strategies(graph, topology))
    options = Options(bucket_bytes=strategy.options.bucket_bytes)
    check(Lowering(graph, topology, Costs(graph, topology)), strategy.in_order(graph), options)
