"""Profiles of PipeDream (Narayanan et al., SOSP 2019): ``*.graph.txt`` of msr-fiddle/pipedream.

A line for each node, ``node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.1,
activation_size=822083584.0, parameter_size=7168.0``, with times in ms and sizes in bytes of a minibatch on one GPU, and
a line for each edge, indented by a tab, ``<tab>node1 -- node2``. Several outputs are a list, ``[6291456.0; 131072.0]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flexsearch.errors import FileFormatError
from flexsearch.files import printable, read_text
from flexsearch.graph.profiled import DEFAULT_BATCH, ITEM_BYTES, LayerProfile, ProfiledLayer, in_order

FIELDS: Final = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_LINEAR: Final = re.compile(r"Linear\(.*\bout_features=(\d{1,9})\b")
_NODE: Final = re.compile(r"\w{1,100}", re.ASCII)
_LARGEST: Final = dict(zip(FIELDS, (1e9, 1e9, 1e15, 1e15), strict=True))
"""ms and bytes: what is beyond is no measurement."""


def read_pipedream(path: str | Path, batch: int | None = None) -> LayerProfile:
    """The profile in a file. ``batch``: samples of its minibatch; None: as many as the outputs of its linear layers
    have rows. An ``Input`` node becomes an input of the graph: its time, that of loading data, is left out.

    Raises FileFormatError, which names the line."""
    return _Reader(path).profile(batch)


class _Reader:
    def __init__(self, path: str | Path) -> None:
        self.file = Path(path).name
        self.source = f"PipeDream profile {printable(str(path))}"
        self.lines = read_text(path, self.source, "a PipeDream profile (*.graph.txt)").splitlines()
        self.nodes: dict[str, ProfiledLayer] = {}
        self.edges: dict[str, dict[str, int]] = {}

    def error(self, number: int, problem: str, remedy: str) -> FileFormatError:
        return FileFormatError(f"{self.source}, line {number}: {problem}", remedy)

    def profile(self, batch: int | None) -> LayerProfile:
        for number, line in enumerate(self.lines, 1):
            if not line.strip():
                continue
            if line[0].isspace():
                self._edge(number, line)
            else:
                self._node(number, line)
        if not self.nodes:
            raise FileFormatError(f"{self.source} has no nodes", "Give a PipeDream profile (*.graph.txt).")
        layers = in_order(sorted(self._linked(), key=lambda layer: _natural(layer.name)), self.source)
        notes = [f"the minibatch is taken to be {batch} samples"] if batch is not None else []
        if batch is None:
            batch = _rows(self.nodes)
            why = "as the outputs of its linear layers say" if batch is not None else "which the profile does not tell"
            batch = batch or DEFAULT_BATCH
            notes.append(f"the minibatch is taken to be {batch} samples, {why}; --batch gives another")
        if any(layer.data and layer.forward_s > 0 for layer in layers):
            notes.append("the time of Input nodes, that of loading data, is left out")
        trained = any(layer.backward_s > 0 for layer in layers)
        if not trained:
            notes.append("no node has a backward time, so the weights are not trained")
        return LayerProfile(layers, trained, batch, tuple(notes))

    def _linked(self) -> list[ProfiledLayer]:
        """The nodes with what they read."""
        for source, targets in self.edges.items():
            for target, number in targets.items():
                for name in (source, target):
                    if name not in self.nodes:
                        raise self.error(number, f"there is no node {name!r}", "Add its line, or remove the edge.")
        reads: dict[str, list[str]] = {name: [] for name in self.nodes}
        for source in sorted(self.edges, key=_natural):
            for target in self.edges[source]:
                reads[target].append(source)
        for name, inputs in reads.items():
            if inputs and self.nodes[name].data:
                raise FileFormatError(f"{self.source}: the Input node {name!r} reads {inputs[0]!r}", "Remove the edge.")
        return [
            ProfiledLayer(
                name, tuple(reads[name]), n.forward_s, n.backward_s, n.output_bytes, n.parameter_bytes, n.text,
                n.source, n.data,
            )
            for name, n in self.nodes.items()
        ]  # fmt: skip

    def _edge(self, number: int, line: str) -> None:
        ends = [text.strip() for text in line.split(" -- ")]
        if len(ends) != 2 or not all(_NODE.fullmatch(end) for end in ends):
            raise self.error(
                number, f'"{printable(line.strip()[:80])}" is not an edge', 'Write it as "<tab>node1 -- node2".'
            )
        self.edges.setdefault(ends[0], {}).setdefault(ends[1], number)

    def _node(self, number: int, line: str) -> None:
        parts = [text.strip() for text in line.split(" -- ")]
        if len(parts) < 3 or not _NODE.fullmatch(parts[0]):
            raise self.error(
                number, f'"{printable(line.strip()[:80])}" is not a node',
                'Write it as "node1 -- LAYER -- forward_compute_time=..., ..."; edges begin with a tab.',
            )  # fmt: skip
        name, text, values = parts[0], printable(" -- ".join(parts[1:2])), parts[2]
        if name in self.nodes:
            raise self.error(number, f"there are two nodes {name!r}", "Give each node one line.")
        fields = self._fields(number, values)
        forward, backward, output, parameters = (self._amount(number, field, fields[field]) for field in FIELDS)
        self.nodes[name] = ProfiledLayer(
            name, (), forward / 1e3, backward / 1e3, output, parameters, text[:1000], f"{self.file}:{number}",
            text == "Input",
        )  # fmt: skip

    def _fields(self, number: int, values: str) -> dict[str, str]:
        fields: dict[str, str] = {}
        for item in re.split(r",\s*(?=[A-Za-z_]+\s*=)", values):
            field, _, value = item.partition("=")
            if (field := field.strip()) in fields:
                raise self.error(number, f"{field} is given twice", "Give it once.")
            fields[field] = value.strip()
        for field in FIELDS:
            if field not in fields:
                raise self.error(number, f"{field} is missing", f"A node has {', '.join(FIELDS)}.")
        return fields

    def _amount(self, number: int, field: str, text: str) -> float:
        """A number that is not negative, or the sum of a list of them."""
        inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        items = [item.strip() for item in re.split("[;,]", inside)] if inside is not text else [text]
        try:
            values = [float(item) for item in items if item or len(items) > 1 or inside is text]
        except ValueError:
            values = [math.nan]
        if not 0 <= sum(values) <= _LARGEST[field] or min(values, default=0.0) < 0:
            raise self.error(
                number,
                f'{field} is "{printable(text[:40])}"',
                f"Give a number from 0 to {_LARGEST[field]:g}, or a list [1.0; 2.0].",
            )
        return sum(values)


def _natural(name: str) -> tuple[object, ...]:
    """Key that sorts node2 before node10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", name))


def _rows(nodes: Mapping[str, ProfiledLayer]) -> int | None:
    """Rows that the outputs of all linear layers have; None if there are none, or they disagree."""
    row_counts = set()
    for node in nodes.values():
        if (match := _LINEAR.search(node.text)) is not None and int(match[1]):
            row_counts.add(node.output_bytes / (ITEM_BYTES * int(match[1])))
    rows = row_counts.pop() if len(row_counts) == 1 else 0.0
    return int(rows) if rows >= 1 and rows.is_integer() else None
