"""The operator graph: tensors and operators of one training step up to the loss, as a file and as a data structure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from flexsearch.errors import FileFormatError
from flexsearch.files import FileModel, content_hash, printable, shipped, shipped_names
from flexsearch.graph.consistency import check_graph
from flexsearch.graph.notation import Access, parse
from flexsearch.output import write
from flexsearch.quantities import (
    MAX_AXES,
    MAX_MOVED_BYTES,
    MAX_OPERANDS,
    MAX_OPERATORS,
    Name,
    Pattern,
    Shape,
    Size,
    Text,
)

Role = Literal["sample", "attribute", "parameter", "reduction"]
"""What an axis is: the batch; a dimension inside a sample; a weight dimension that indexes the output; summed away."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"must be one of {', '.join(DTYPE_BYTES)}")
    return dtype


class Flow(IntEnum):
    """What passes between a tensor and a reader: its value, and its gradient back; its value alone; its gradient alone
    (see ``weight_gradients``)."""

    VALUE = 0
    BOTH = 1
    GRADIENT = 2


HALF: Final = "gradients_of"
"""Attribute of an operator whose backward pass is divided among two: see ``Operator.half``."""

Dtype = Annotated[str, AfterValidator(_check_dtype)]
"""Name of an element type."""


class Axis(FileModel):
    """One iteration axis of an operator: name as in the pattern, number of indices, role."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,63}$")]
    size: Size
    role: Role


class Tensor(FileModel):
    """A value of the graph. ``kind``: ``input`` (a batch), ``parameter``, ``buffer`` (state without gradient),
    ``constant`` (known before training), ``activation`` (made by an operator)."""

    name: Name
    shape: Shape
    dtype: Dtype
    kind: Literal["input", "parameter", "buffer", "constant", "activation"]
    requires_grad: bool = False
    """Parameters only: whether it is trained."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether a gradient can flow through it."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @model_validator(mode="after")
    def _check(self) -> Tensor:
        if self.nbytes >= MAX_MOVED_BYTES:
            raise ValueError(f"tensor {self.name!r} would have {self.nbytes:.3g} bytes; the limit is 2^50 (1 PiB)")
        if self.requires_grad and (self.kind != "parameter" or not self.floating):
            raise ValueError(f"tensor {self.name!r} requires a gradient, which only floating-point parameters have")
        return self


class Operator(FileModel):
    """A node of the graph: what it computes (``kind`` and ``attributes``) and how its operands follow from its axes."""

    name: Name
    kind: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,127}$")]
    pattern: Pattern
    axes: Annotated[tuple[Axis, ...], Field(max_length=MAX_AXES)]
    inputs: Annotated[tuple[Name, ...], Field(max_length=MAX_OPERANDS)]
    outputs: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_OPERANDS)]
    attributes: dict[Name, JsonValue] = Field(default_factory=dict)
    module: Text = ""
    """Dotted name of the module it came from."""
    source: Text = ""
    """``file:line`` of the call, for errors."""

    @cached_property
    def access(self) -> Access:
        """The parsed pattern."""
        return parse(self.pattern)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of indices of each axis."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Role of each axis."""
        return {axis.name: axis.role for axis in self.axes}

    @property
    def half(self) -> Literal["inputs", "weights"] | None:
        """Which gradients it makes, if another operator makes the others (``graph.weight_gradients``); None: all."""
        half = self.attributes.get(HALF)
        return half if half in ("inputs", "weights") else None  # type: ignore[return-value]

    @property
    def plain(self) -> Operator:
        """The operator of which this one is a half: it itself if it is none."""
        return self if self.half is None else self.halved  # not kept if it is itself: comparing would go in circles

    @cached_property
    def halved(self) -> Operator:
        """Of a half, the operator that was divided."""
        fields = {field: getattr(self, field) for field in Operator.model_fields}
        fields["attributes"] = {key: value for key, value in self.attributes.items() if key != HALF}
        if self.half == "inputs":  # without what carries the gradient of the output
            read, written = self.pattern.split("->")
            fields |= {"pattern": f"{read.rpartition(',')[0]} ->{written}", "inputs": self.inputs[:-1]}
        return Operator(**fields)

    @cached_property
    def splittable(self) -> tuple[str, ...]:
        """Axes that may have a degree above 1."""
        return self.access.splittable(self.sizes)

    def axes_of(self, role: Role) -> tuple[str, ...]:
        """Splittable axes of a role."""
        return tuple(a for a in self.splittable if self.roles[a] == role)


class Tracing(FileModel):
    """How a model was imported, where the user chose; whoever imports it again must choose the same.

    ``opaque``: operators outside the table are unsplittable. ``batch_norm_groups``: equal parts of the batch that batch
    normalisation normalises each by its own statistics (1: the exact statistics of the whole batch).
    """

    opaque: bool = False
    batch_norm_groups: Size = 1


class OperatorGraph(FileModel):
    """Operators in topological order. ``loss`` is the scalar tensor that training minimises; "" in the graph of a
    forward pass alone (``importer.import_forward``)."""

    format: Literal["flexsearch.graph/1"] = "flexsearch.graph/1"
    name: Text
    tensors: Annotated[tuple[Tensor, ...], Field(max_length=4 * MAX_OPERATORS)]
    operators: Annotated[tuple[Operator, ...], Field(min_length=1, max_length=MAX_OPERATORS)]
    loss: Name | Literal[""]
    buffer_updates: dict[Name, Name] = Field(default_factory=dict)
    """Buffer name -> tensor whose value replaces it after the step (running statistics)."""
    counters: tuple[Name, ...] = ()
    """Integer scalar buffers that every training step raises by one (``num_batches_tracked``)."""
    tracing: Tracing = Tracing()

    @cached_property
    def tensor(self) -> Mapping[str, Tensor]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def gradient(self) -> Mapping[str, Tensor]:
        """By tensor, its gradient as it is held: added up, sent, and read by the update."""
        return self.tensor

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Activation name -> index of the operator that makes it."""
        return {name: i for i, op in enumerate(self.operators) for name in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Tensor name -> (operator index, operand position) of every reader, in order."""
        readers: dict[str, list[tuple[int, int]]] = {t.name: [] for t in self.tensors}
        for i, op in enumerate(self.operators):
            for position, name in enumerate(op.inputs):
                readers[name].append((i, position))
        return {name: tuple(users) for name, users in readers.items()}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Operator index by name."""
        return {op.name: i for i, op in enumerate(self.operators)}

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Tensors that a gradient flows through: they depend on a trained parameter and the loss depends on them."""
        forward = {t.name for t in self.tensors if t.kind == "parameter" and t.requires_grad}
        for op in self.operators:
            if any(name in forward for name in self._differentiated(op)):
                forward.update(name for name in op.outputs if self.tensor[name].floating)
        backward = {self.loss}
        for op in reversed(self.operators):
            if any(name in backward for name in op.outputs):
                backward.update(name for name in self._differentiated(op) if self.tensor[name].floating)
        return frozenset(forward & backward)

    def _differentiated(self, op: Operator) -> tuple[str, ...]:
        """The inputs of which an operator makes gradients, if any are asked for."""
        if op.kind == "detach":
            return ()
        if op.half is None:
            return op.inputs
        weights = op.half == "weights"
        return tuple(name for name in op.inputs if (self.tensor[name].kind == "parameter") == weights)

    @cached_property
    def flows(self) -> tuple[tuple[Flow, ...], ...]:
        """For each operator and each of its operands, what passes between the two."""
        return tuple(self._flows(i, op) for i, op in enumerate(self.operators))

    def _flows(self, i: int, op: Operator) -> tuple[Flow, ...]:
        differentiated = self._differentiated(op) if self.has_backward[i] else ()
        alone = {"weights": set(differentiated), "inputs": {op.inputs[-1]} if op.inputs else set()}
        return tuple(
            Flow.VALUE
            if name not in differentiated or name not in self.differentiable
            else Flow.GRADIENT
            if op.half is not None and name in alone[op.half]
            else Flow.BOTH
            for name in op.inputs
        )

    @cached_property
    def has_backward(self) -> tuple[bool, ...]:
        """For each operator, whether it has a backward task."""
        return tuple(any(name in self.differentiable for name in op.outputs) for op in self.operators)

    @cached_property
    def batch(self) -> int:
        """Size of the first dimension of the first input: the global batch."""
        return next((t.shape[0] for t in self.tensors if t.kind == "input" and t.shape), 1)

    def resized(self, batch: int | str | None = None, sequence: int | None = None) -> OperatorGraph:
        """The graph with another global batch, as 512 samples or "1M-tokens", and sequences of so many tokens, without
        importing the model again: :func:`flexsearch.graph.resize.resized`. Raises UsageError, NotationError."""
        from flexsearch.graph.resize import resized  # it needs this module

        return resized(self, batch, sequence)

    def of_kind(self, *kinds: str) -> tuple[Tensor, ...]:
        """Tensors of the given kinds, in order."""
        return tuple(t for t in self.tensors if t.kind in kinds)

    @cached_property
    def _hash(self) -> str:
        from flexsearch.graph.samples import counting  # it needs this module

        data: dict[str, Any] = self.model_dump(mode="json", exclude={"name": True, "tracing": True})
        for op in data["operators"]:
            del op["source"]  # moving a line of the model's code changes nothing of the plan
        # Nor does it matter where counts stand: those of older graphs come first.
        early = counting(self)
        order = sorted(range(len(self.operators)), key=lambda i: i not in early)
        data["operators"] = [data["operators"][i] for i in order]
        place = {name: k for k, op in enumerate(data["operators"]) for name in op["outputs"]}
        data["tensors"].sort(key=lambda tensor: place.get(tensor["name"], -1))
        return content_hash(data)

    def content_hash(self) -> str:
        """Digest of everything that a plan depends on: the name, source lines and import options are left out."""
        return self._hash

    @classmethod
    def load(cls, path: str | Path) -> OperatorGraph:
        """Read a graph file, or a shipped graph by name (``alexnet``). Raises FileFormatError."""
        there = isinstance(path, str | os.PathLike) and os.path.exists(path)
        file = Path(path) if there else shipped("graphs", str(path))
        if file is None:
            raise FileFormatError(
                f"no graph file {printable(str(path))}, and no shipped graph of that name "
                f"(shipped: {', '.join(shipped_names('graphs'))})",
                "Make one with `flexsearch import MODULE:CALLABLE -o graph.json`.",
            )
        from flexsearch.graph.files import read  # these need this module
        from flexsearch.graph.ops.check import check_kinds

        graph = read(file)
        try:
            check_kinds(graph)
            if not graph.loss:
                raise ValueError("loss: it is empty; a training step needs one")
        except ValueError as error:
            raise FileFormatError(
                f"graph file {printable(str(path))} contradicts itself: {error}",
                "Make it again with `flexsearch import`.",
            ) from error
        return graph

    def save(self, path: str | Path) -> None:
        """Write the graph file (``flexsearch.graph/2``), atomically."""
        from flexsearch.graph.compact import to_text  # it needs this module

        write(path, to_text(self))

    @model_validator(mode="after")
    def _check(self) -> OperatorGraph:
        check_graph(self)
        return self
