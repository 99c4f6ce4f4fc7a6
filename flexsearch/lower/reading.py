"""Batches that hosts read from storage, as rows of a block that stands before all others.

Each host reads, once a step, the samples that its devices compute with: those of the largest input; targets lie with
them. That is a communication on the host's own way to the storage, issued by its first device, and where the storage is
shared, another one on the server. They go on side by side, and the batch is there when both have ended: files of
several hosts are served in turn.

With ``Reading.prefetch`` batches read ahead, a step waits for none of its rows. What it reads is for a later step, and
in a steady state a step is over when both that and its own computing are. So many batches are read at the same time,
and each step ends one of them: of a batch's time, latencies of files included, it takes that share, but never less than
its bytes take. Without, devices wait before they do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.cost.ticks import ticks_of
from flexsearch.graph import OperatorGraph
from flexsearch.lower.arrays import NOTHING, Pools, Program, ReadTable, State
from flexsearch.lower.draft import Draft, Filled, add_link, add_step, close, new_stamp, open_communication
from flexsearch.lower.rows import ISSUE, WAIT, Segments
from flexsearch.lower.split import Split
from flexsearch.strategy import OperatorConfig
from flexsearch.topology import Topology


def readers(graph: OperatorGraph) -> dict[int, int]:
    """Operator -> position of the operand, of those that compute with the largest input."""
    inputs = graph.of_kind("input")
    if not inputs:
        return {}
    largest = max(inputs, key=lambda t: t.nbytes)
    positions: dict[int, int] = {}
    for operator, position in graph.consumers[largest.name]:
        positions.setdefault(operator, position)
    return positions


def sample_bytes(graph: OperatorGraph) -> float:
    """Of a sample in the graph's inputs."""
    return sum(t.nbytes for t in graph.of_kind("input")) / graph.batch


def make_read_table(
    graph: OperatorGraph, topology: Topology, operators: Mapping[int, int], microbatches: int, inside: int,
    replicas: int,
) -> ReadTable:  # fmt: skip
    """``operators``: of ``readers``. ``inside``, ``replicas``: blocks on a host and in all, of which one is lowered."""
    seconds, prefetch, ways, server = np.zeros(4), 0, [0] * len(topology.hosts), int(NOTHING)
    if operators and (storage := topology.storage) is not None:
        reading, place = storage.reading, {r.name: k for k, r in enumerate(topology.resources)}
        nbytes = reading.sample_bytes or sample_bytes(graph)
        share = storage.missing(nbytes)
        count = share * microbatches
        byte_s, latency_s = nbytes / storage.bandwidth, storage.file_latency_s
        each = inside * count
        seconds[:] = (
            share * reading.files_per_batch * latency_s, each * (reading.files_per_sample * latency_s + byte_s),
            each * byte_s, 0.0,
        )  # fmt: skip
        ways = [place[f"storage of {host}"] for host in topology.hosts]
        if storage.server_bandwidth is not None:
            server, seconds[3] = place["storage server"], replicas * count * nbytes / storage.server_bandwidth
        prefetch = reading.prefetch
    return ReadTable(
        operator=np.array(list(operators), np.uint32), host=topology.host_of, way=np.array(ways, np.uint32),
        server=np.array([server], np.uint32), seconds=seconds, prefetch=np.array([prefetch], np.uint32),
    )  # fmt: skip


def samples_of(
    graph: OperatorGraph, operator: int, config: OperatorConfig, split: Split
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """By position of a config's split: how many samples its piece holds, and the first position that holds the same."""
    op, count = graph.operators[operator], len(split.extent_of)
    axes = [axis.name for axis in op.axes if axis.role == "sample"]
    whole = prod(op.sizes[axis] for axis in axes)
    held, part, first = np.zeros(count, np.uint32), np.zeros(count, np.uint32), dict[object, int]()
    for k in range(count):
        intervals = config.intervals(op, k)
        own = tuple(intervals[axis] for axis in axes)
        held[k] = -(-graph.batch * prod(high - low for low, high in own) // whole)
        part[k] = first.setdefault(own, k)
    return held, part


@lean
def read(
    program: Program, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled, b: Any
) -> None:
    """The rows of the block."""
    table, row = program.reading, ZERO
    depth = float(table.prefetch[0])
    for h in range(np.uint64(table.way.shape[0])):
        samples = float(_samples(table, pools, state, draft, h))
        if samples == 0.0:
            continue
        own = table.seconds[0] + samples * table.seconds[1]
        if depth > 1.0:
            own = max(own / depth, samples * table.seconds[2])
        first = row
        _row(table, pools, state, draft, segments, filled, b, h, row, table.way[h], own)
        row += ONE
        if table.server[0] != NOTHING and draft.full[0] == 0:
            server_s = samples * table.seconds[3]
            _row(table, pools, state, draft, segments, filled, b, h, row, table.server[0], server_s)
            row += ONE
        if draft.full[0] == 1:
            return
        if depth == 0.0:
            for number in range(first, row):
                _devices(table, pools, state, draft, segments, filled, b, h, number, True)


@lean
def _samples(table: ReadTable, pools: Pools, state: State, draft: Draft, h: Any) -> Any:
    """How many samples the devices of a host compute with; of several operators, the one with most."""
    most = ZERO
    for n in range(np.uint64(table.operator.shape[0])):
        config, samples, stamp = np.uint64(state.config[np.uint64(table.operator[n])]), ZERO, new_stamp(draft)
        for k in range(np.uint64(pools.config_first[config]), np.uint64(pools.config_last[config])):
            part = np.uint64(pools.entry_part[k])
            if np.uint64(table.host[np.uint64(pools.entry_device[k])]) == h and draft.mark[part] != stamp:
                draft.mark[part] = stamp
                samples += np.uint64(pools.entry_samples[k])
        most = max(most, samples)
    return most


@lean
def _row(
    table: ReadTable, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled, b: Any, h: Any,
    row: Any, resource: Any, seconds: Any,
) -> None:  # fmt: skip
    """A communication that keeps one resource busy for all its time."""
    c = open_communication(segments, filled, draft, ONE, ZERO, np.uint64(draft.mark.shape[0]))
    if draft.full[0] == 1:
        return
    ticks = ticks_of(seconds)
    segments.missing[c] = np.uint32(1)
    add_link(segments, filled, resource, ticks)
    _devices(table, pools, state, draft, segments, filled, b, h, row, False)
    close(segments, filled, c, ticks)


@lean
def _devices(
    table: ReadTable, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled, b: Any, h: Any,
    row: Any, waits: Any,
) -> None:  # fmt: skip
    """The devices of a host that compute with what is read: they wait for it, or else receive it, and the first one
    issues it."""
    stamp, first = new_stamp(draft), True
    for n in range(np.uint64(table.operator.shape[0])):
        config = np.uint64(state.config[np.uint64(table.operator[n])])
        for k in range(np.uint64(pools.config_first[config]), np.uint64(pools.config_last[config])):
            d = np.uint64(pools.entry_device[k])
            if np.uint64(table.host[d]) != h or draft.mark[d] == stamp:
                continue
            draft.mark[d] = stamp
            if waits:
                add_step(draft, d, WAIT, b, row, np.int64(0), np.int64(0))
                continue
            if first:
                add_step(draft, d, ISSUE, b, row, np.int64(0), np.int64(0))
                first = False
            segments.receiver[filled.receiver[0]] = d
            filled.receiver[0] += ONE
