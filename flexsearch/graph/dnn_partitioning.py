"""Layer graphs of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020): JSON with ``nodes`` and ``edges``.

``nodes``: ``id``, ``fpgaLatency`` (ms on an accelerator), ``isBackwardNode``, ``colorClass`` (nodes that must share a
device), ``size`` (bytes that a node needs there: weights and output). ``edges``: ``sourceId``, ``destId``, ``cost`` (ms
to move the output of the source between an accelerator and the host), ``size`` (bytes of that output).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from flexsearch.errors import FileFormatError
from flexsearch.files import parse, printable, read_json
from flexsearch.graph.profiled import DEFAULT_BATCH, LayerProfile, ProfiledLayer, in_order
from flexsearch.quantities import MAX_OPERATORS

BYTES_PER_MS: Final = 2**31
"""Bytes that move in a ms, by the published files' own sizes and costs. Only for edges without a size."""

Amount = Annotated[float, Field(ge=0.0, le=1e15)]
Milliseconds = Annotated[float, Field(ge=0.0, le=1e9)]
Identity = Annotated[int, Field(ge=0, lt=2**53)]


class _Part(BaseModel):
    """Fields that are not listed say nothing of times and bytes on accelerators."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class Node(_Part):
    """A layer, forward or backward."""

    id: Identity
    fpgaLatency: Milliseconds
    cpuLatency: Milliseconds = 0.0
    isBackwardNode: Annotated[int, Field(ge=0, le=1)] | bool = 0
    colorClass: int | None = None
    size: Amount = 0.0
    name: Annotated[str, Field(max_length=1000)] = ""
    supportedOnFpga: Annotated[int, Field(ge=0, le=1)] | bool = 1


class Edge(_Part):
    """``destId`` reads the output of ``sourceId``."""

    sourceId: Identity
    destId: Identity
    cost: Milliseconds = 0.0
    size: Amount | None = None


class File(_Part):
    """A whole file."""

    nodes: Annotated[tuple[Node, ...], Field(min_length=1, max_length=MAX_OPERATORS)]
    edges: Annotated[tuple[Edge, ...], Field(max_length=4 * MAX_OPERATORS)] = ()
    maxSizePerFPGA: Amount = 0.0
    maxFPGAs: Annotated[int, Field(ge=0, le=4096)] = 0
    maxCPUs: Annotated[int, Field(ge=0, le=4096)] = 0


def load_file(path: str | Path) -> File:
    """The contents of a file, checked. Raises FileFormatError, which names the field."""
    source = f"dnn-partitioning file {printable(str(path))}"
    remedy = "Correct it, or give a file of msr-fiddle/dnn-partitioning."
    try:
        file = parse(File, read_json(path, "dnn-partitioning"), f"file {printable(str(path))}", "dnn-partitioning")
    except FileFormatError as error:
        raise FileFormatError(error.message, remedy if "malformed" in error.message else error.remedy) from error
    seen: dict[int, int] = {}
    for k, node in enumerate(file.nodes):
        if node.id in seen:
            raise FileFormatError(f"{source}: nodes.{k}.id: {node.id} is that of nodes.{seen[node.id]} too", remedy)
        seen[node.id] = k
    for k, edge in enumerate(file.edges):
        for field, end in (("sourceId", edge.sourceId), ("destId", edge.destId)):
            if end not in seen:
                raise FileFormatError(f"{source}: edges.{k}.{field}: there is no node {end}", remedy)
    return file


def read_dnn_partitioning(path: str | Path, batch: int | None = None) -> LayerProfile:
    """The profile in a file. A forward node and the backward nodes of its colour class become one layer; a file without
    backward nodes is of inference. ``batch``: samples of the minibatch, which the format does not tell.

    The bytes of a layer's weights are its size without its output. Raises FileFormatError, which names the field."""
    file, source = load_file(path), f"dnn-partitioning file {printable(str(path))}"
    forward = [node for node in file.nodes if not node.isBackwardNode]
    backward_ms = _backward(file, forward, source)
    outputs = _outputs(file.edges)
    ids = {node.id for node in forward}
    reads: dict[int, list[int]] = {node.id: [] for node in forward}
    for edge in file.edges:
        if edge.sourceId in ids and edge.destId in ids and edge.sourceId not in reads[edge.destId]:
            reads[edge.destId].append(edge.sourceId)
    layers = [
        ProfiledLayer(
            f"node{node.id}", tuple(f"node{i}" for i in sorted(reads[node.id])), node.fpgaLatency / 1e3,
            backward_ms[node.id] / 1e3, outputs.get(node.id, 0.0), max(0.0, node.size - outputs.get(node.id, 0.0)),
            printable(node.name), f"{Path(path).name}: node {node.id}",
        )
        for node in sorted(forward, key=lambda node: node.id)
    ]  # fmt: skip
    notes = [f"the minibatch is taken to be {batch or DEFAULT_BATCH} samples"
             + ("" if batch else ", which the file does not tell; --batch gives another")]  # fmt: skip
    notes += _left_out(file, forward)
    trained = len(forward) < len(file.nodes)
    return LayerProfile(in_order(layers, source), trained, batch or DEFAULT_BATCH, tuple(notes))


def _left_out(file: File, forward: Sequence[Node]) -> list[str]:
    """What a graph cannot say, as clauses."""
    notes = ["times are those on accelerators (fpgaLatency); CPUs are left out"]
    if (count := sum(not node.supportedOnFpga for node in file.nodes)) > 0:
        notes.append(f"{count} nodes that accelerators do not support are planned as if they did")
    classes = [node.colorClass for node in forward if node.colorClass is not None]
    if len(set(classes)) < len(classes):
        notes.append("forward nodes of one colour class may come to lie on different devices")
    if any(edge.size is None for edge in file.edges):
        notes.append(f"edges without a size are taken to carry {BYTES_PER_MS} bytes for each ms of their cost")
    return notes


def _outputs(edges: Sequence[Edge]) -> dict[int, float]:
    """Bytes of each node's output: the most that an edge says."""
    output_bytes: dict[int, float] = {}
    for edge in edges:
        nbytes = edge.cost * BYTES_PER_MS if edge.size is None else edge.size
        output_bytes[edge.sourceId] = max(output_bytes.get(edge.sourceId, 0.0), nbytes)
    return output_bytes


def _backward(file: File, forward: Sequence[Node], source: str) -> Mapping[int, float]:
    """By forward node: ms of the backward nodes of its class; of several forward nodes of a class each has a part, in
    proportion to their own times. Raises FileFormatError for a backward node that has none."""
    members: dict[int, list[Node]] = {}
    for node in forward:
        if node.colorClass is not None:
            members.setdefault(node.colorClass, []).append(node)
    backward_ms = {node.id: 0.0 for node in forward}
    for k, node in enumerate(file.nodes):
        if not node.isBackwardNode:
            continue
        owners = members.get(node.colorClass, []) if node.colorClass is not None else []
        if not owners:
            raise FileFormatError(
                f"{source}: nodes.{k}.colorClass: no forward node has that of backward node {node.id}",
                "Give a backward node the colorClass of its forward node.",
            )
        total = sum(owner.fpgaLatency for owner in owners)
        for owner in owners:
            share = owner.fpgaLatency / total if total else 1 / len(owners)
            backward_ms[owner.id] += node.fpgaLatency * share
    return backward_ms
