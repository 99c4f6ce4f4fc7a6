"""Graphs of layers whose times and bytes somebody measured: what both file formats of such profiles have in common.

Nothing is known of what a layer computes, so each becomes an operator of kind ``given``: tensors are (samples, elements
of 4 bytes), only the samples can be split, and times and bytes are in proportion to them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import JsonValue

from flexsearch.errors import FileFormatError
from flexsearch.graph.model import Axis, Operator, OperatorGraph, Tensor

DEFAULT_BATCH: Final = 64
"""Samples of a minibatch where a profile does not tell. Taken: most of PipeDream's profiles have so many."""
ITEM_BYTES: Final = 4
"""Of an element: everything is float32."""

Format = Literal["pipedream", "dnn-partitioning"]
FORMATS: Final[tuple[Format, ...]] = ("pipedream", "dnn-partitioning")


@dataclass(frozen=True)
class ProfiledLayer:
    """A layer of a profile. ``forward_s``, ``backward_s``: seconds for a whole minibatch on one device;
    ``output_bytes``: of its results for a minibatch; ``inputs``: names of the layers that it reads; ``source``:
    file:line, or file and field; ``data``: it only loads the batch, and is an input of the graph."""

    name: str
    inputs: tuple[str, ...]
    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float
    text: str = ""
    source: str = ""
    data: bool = False


@dataclass(frozen=True)
class LayerProfile:
    """A profile as it was read. ``layers``: in topological order; ``trained``: whether there are backward passes;
    ``batch``: samples of a minibatch; ``notes``: what was assumed or left out, a clause each."""

    layers: tuple[ProfiledLayer, ...]
    trained: bool
    batch: int
    notes: tuple[str, ...] = ()


def in_order(layers: Sequence[ProfiledLayer], where: str) -> tuple[ProfiledLayer, ...]:
    """The layers in topological order, of those that are ready the first listed one first. Raises FileFormatError if
    they are in a circle; ``where`` names the file."""
    place = {layer.name: k for k, layer in enumerate(layers)}
    readers: dict[str, list[int]] = {layer.name: [] for layer in layers}
    missing = [len(layer.inputs) for layer in layers]
    for k, layer in enumerate(layers):
        for name in layer.inputs:
            readers[name].append(k)
    ready, ordered = [k for k, count in enumerate(missing) if not count], []
    heapq.heapify(ready)
    while ready:
        layer = layers[heapq.heappop(ready)]
        ordered.append(layer)
        for reader in readers[layer.name]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(layers):
        stuck = sorted(set(place) - {layer.name for layer in ordered}, key=place.__getitem__)
        raise FileFormatError(
            f"{where}: the edges lead in a circle, through {', '.join(stuck[:4])}{', ...' * (len(stuck) > 4)}",
            "Remove the edge that leads back.",
        )
    return tuple(ordered)


def profiled_graph(name: str, profile: LayerProfile) -> OperatorGraph:
    """The graph of a profile; its loss is an operator that takes no time and adds up what nobody reads. Raises
    FileFormatError if there is no layer that computes, ValueError if one is beyond the limits of a graph."""
    if all(layer.data for layer in profile.layers):
        raise FileFormatError(f"profile {name!r} has no layer that computes", "Give one with a layer and its times.")
    return _Writer(profile).graph(name)


class _Writer:
    def __init__(self, profile: LayerProfile) -> None:
        self.profile, self.batch = profile, profile.batch
        self.leaves: dict[str, list[Tensor]] = {"input": [], "parameter": []}
        self.activations: list[Tensor] = []
        self.operators: list[Operator] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.trained: set[str] = set()
        """Tensors that depend on a trained parameter."""

    def graph(self, name: str) -> OperatorGraph:
        read = {source for layer in self.profile.layers for source in layer.inputs}
        for layer in self.profile.layers:
            if not layer.data:
                self._layer(layer)
            elif layer.name in read:
                self._leaf("input", layer.name, (self.batch, self._elements(layer.output_bytes)))
        sinks = [op.name for op in self.operators if op.name not in read]
        loss = "loss" + "_" * sum(layer.name.startswith("loss") for layer in self.profile.layers)
        self._operator(loss, sinks, None, {"forward_s": 0.0, "backward_s": 0.0})
        tensors = (*self.leaves["input"], *self.leaves["parameter"], *self.activations)
        return OperatorGraph(name=name, tensors=tensors, operators=tuple(self.operators), loss=loss)

    def _elements(self, nbytes: float) -> int:
        """Of each sample, where a minibatch has so many bytes: rounded up, at least one."""
        return max(1, -(-int(nbytes) // (ITEM_BYTES * self.batch)))

    def _layer(self, layer: ProfiledLayer) -> None:
        inputs = list(dict.fromkeys(layer.inputs))
        if not inputs:  # it makes its own data; the batch still says how many samples there are
            if "samples" not in self.shapes:
                self._leaf("input", "samples", (self.batch, 1))
            inputs = ["samples"]
        elements = -(-int(layer.parameter_bytes) // ITEM_BYTES)
        if self.profile.trained and layer.backward_s > 0 and not self.trained & {*inputs}:
            elements = max(1, elements)  # without a weight there would be no backward pass to take the given time
        if elements:
            self._leaf("parameter", f"{layer.name}.weight", (elements,))
            inputs.append(f"{layer.name}.weight")
        if self.trained & {*inputs}:
            self.trained.add(layer.name)
        times = {"forward_s": layer.forward_s, "backward_s": layer.backward_s}
        self._operator(layer.name, inputs, self._elements(layer.output_bytes), times, layer.text, layer.source)

    def _leaf(self, kind: Literal["input", "parameter"], name: str, shape: tuple[int, ...]) -> None:
        trained = kind == "parameter" and self.profile.trained
        self.leaves[kind].append(Tensor(name=name, shape=shape, dtype="float32", kind=kind, requires_grad=trained))
        self.shapes[name] = shape
        if trained:
            self.trained.add(name)

    def _operator(
        self, name: str, inputs: Sequence[str], elements: int | None, times: Mapping[str, float], text: str = "",
        source: str = "",
    ) -> None:  # fmt: skip
        """``elements``: of each sample of the result; None: the result is a scalar, the sum over all samples.

        A dimension that is always read whole is a window over two indices, ``(999*F)``: an axis of its full size for
        each operand would soon make more points of the iteration space than a graph may have."""
        operands = [_whole(self.shapes[x]) for x in inputs]
        axes = [Axis(name="b", size=self.batch, role="sample")]
        shape: tuple[int, ...] = ()
        if elements is not None:
            axes.append(Axis(name="G", size=elements, role="attribute"))
            shape = (self.batch, elements)
        if any("F" in operand for operand in operands):
            axes.append(Axis(name="F", size=2, role="reduction"))
        self.activations.append(Tensor(name=name, shape=shape, dtype="float32", kind="activation"))
        self.shapes[name] = shape
        pattern = f"{', '.join(operands)} -> {'b G' if shape else ''}"
        attributes: dict[str, JsonValue] = {**times, "samples": self.batch}
        if text:
            attributes["layer"] = text
        self.operators.append(Operator(
            name=name, kind="given", pattern=pattern, axes=tuple(axes), inputs=tuple(inputs), outputs=(name,),
            attributes=attributes, source=source,
        ))  # fmt: skip


def _whole(shape: tuple[int, ...]) -> str:
    """Operand of a tensor (samples, elements) or (elements,): a share of the samples, all the elements."""
    dimension = "1" if shape[-1] == 1 else f"({shape[-1] - 1}*F)"
    return dimension if len(shape) == 1 else f"b {dimension}"
