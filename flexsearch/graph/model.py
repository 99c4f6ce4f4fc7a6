"""The operator graph: tensors and operators of one training step up to the loss, as a file and as a data structure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from flexsearch.errors import FileFormatError, NotationError
from flexsearch.files import FileModel, content_hash, load, save, shipped, shipped_names
from flexsearch.graph.notation import Access, infer_sizes, parse

Role = Literal["sample", "attribute", "parameter", "reduction"]
"""What an axis is: the batch; a dimension inside a sample; a weight dimension that indexes the output; summed away."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Axis(FileModel):
    """One iteration axis of an operator: name as in the pattern, number of indices, role."""

    name: str
    size: int = Field(ge=1)
    role: Role


class Tensor(FileModel):
    """A value of the graph. ``kind``: ``input`` (a batch), ``parameter``, ``buffer`` (state without gradient),
    ``constant`` (known before training), ``activation`` (made by an operator)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
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
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r} has unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; every size must be at least 1")
        return self


class Operator(FileModel):
    """A node of the graph: what it computes (``kind`` and ``attributes``) and how its operands follow from its axes."""

    name: str
    kind: str
    pattern: str
    axes: tuple[Axis, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, JsonValue] = Field(default_factory=dict)
    module: str = ""
    """Dotted name of the module it came from."""
    source: str = ""
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
    batch_norm_groups: int = Field(default=1, ge=1)


class OperatorGraph(FileModel):
    """Operators in topological order. ``loss`` is the scalar tensor that training minimises."""

    format: Literal["flexsearch.graph/1"] = "flexsearch.graph/1"
    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    loss: str
    buffer_updates: dict[str, str] = Field(default_factory=dict)
    """Buffer name -> tensor whose value replaces it after the step (running statistics)."""
    counters: tuple[str, ...] = ()
    """Integer scalar buffers that every training step raises by one (``num_batches_tracked``)."""
    tracing: Tracing = Tracing()

    @cached_property
    def tensor(self) -> Mapping[str, Tensor]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Activation name -> index of the operator that makes it."""
        return {name: i for i, op in enumerate(self.operators) for name in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Tensor name -> (operator index, operand position) of every reader, in order."""
        found: dict[str, list[tuple[int, int]]] = {t.name: [] for t in self.tensors}
        for i, op in enumerate(self.operators):
            for position, name in enumerate(op.inputs):
                found[name].append((i, position))
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Operator index by name."""
        return {op.name: i for i, op in enumerate(self.operators)}

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Tensors that a gradient flows through: they depend on a trained parameter and the loss depends on them."""
        forward = {t.name for t in self.tensors if t.kind == "parameter" and t.requires_grad}
        for op in self.operators:
            if op.kind != "detach" and any(name in forward for name in op.inputs):
                forward.update(name for name in op.outputs if self.tensor[name].floating)
        backward = {self.loss}
        for op in reversed(self.operators):
            if op.kind != "detach" and any(name in backward for name in op.outputs):
                backward.update(name for name in op.inputs if self.tensor[name].floating)
        return frozenset(forward & backward)

    @cached_property
    def has_backward(self) -> tuple[bool, ...]:
        """For each operator, whether it has a backward task."""
        return tuple(any(name in self.differentiable for name in op.outputs) for op in self.operators)

    @cached_property
    def batch(self) -> int:
        """Size of the first dimension of the first input: the global batch."""
        return next((t.shape[0] for t in self.tensors if t.kind == "input" and t.shape), 1)

    def of_kind(self, *kinds: str) -> tuple[Tensor, ...]:
        """Tensors of the given kinds, in order."""
        return tuple(t for t in self.tensors if t.kind in kinds)

    @cached_property
    def _hash(self) -> str:
        data: dict[str, Any] = self.model_dump(mode="json", exclude={"name": True, "tracing": True})
        for op in data["operators"]:
            del op["source"]  # moving a line of the model's code changes nothing of the plan
        return content_hash(data)

    def content_hash(self) -> str:
        """Digest of everything that a plan depends on: the name, source lines and import options are left out."""
        return self._hash

    @classmethod
    def load(cls, path: str | Path) -> OperatorGraph:
        """Read a graph file, or a shipped graph by name (``alexnet``). Raises FileFormatError."""
        found = Path(path) if Path(path).exists() else shipped("graphs", str(path))
        if found is None:
            raise FileFormatError(
                f"no graph file {path}, and no shipped graph of that name "
                f"(shipped: {', '.join(shipped_names('graphs'))}). "
                "Make one with `flexsearch import MODULE:CALLABLE -o graph.json`."
            )
        return load(cls, found, "graph")

    def save(self, path: str | Path) -> None:
        """Write the graph file, atomically."""
        save(self, path)

    @model_validator(mode="after")
    def _check(self) -> OperatorGraph:
        known = {t.name for t in self.tensors}
        if len(known) != len(self.tensors):
            raise ValueError("two tensors have the same name")
        if len({op.name for op in self.operators}) != len(self.operators):
            raise ValueError("two operators have the same name")
        ready = {t.name for t in self.tensors if t.kind != "activation"}
        for op in self.operators:
            for name in (*op.inputs, *op.outputs):
                if name not in known:
                    raise ValueError(f"operator {op.name!r} uses tensor {name!r}, which is not in the graph")
            for name in op.inputs:
                if name not in ready:
                    raise ValueError(f"operator {op.name!r} reads {name!r} before it is made; order the operators")
            for name in op.outputs:
                if name in ready:
                    raise ValueError(f"operator {op.name!r} makes {name!r}, which exists already")
            ready.update(op.outputs)
            self._check_pattern(op)
        if self.loss not in ready or self.tensor[self.loss].shape != ():
            raise ValueError(f"loss {self.loss!r} must be a scalar tensor of the graph")
        for name in known - ready:
            raise ValueError(f"activation {name!r} is made by no operator")
        for buffer, name in self.buffer_updates.items():
            if buffer not in known or self.tensor[buffer].kind != "buffer" or name not in ready:
                raise ValueError(f"buffer update {buffer!r} <- {name!r} does not name a buffer and a tensor")
            if self.tensor[buffer].shape != self.tensor[name].shape:
                raise ValueError(f"buffer update {buffer!r} <- {name!r} changes the shape")
        return self

    def _check_pattern(self, op: Operator) -> None:
        shapes = [self.tensor[name].shape for name in op.inputs]
        outputs = [self.tensor[name].shape for name in op.outputs]
        try:
            access = op.access
            if (len(access.inputs), len(access.outputs)) != (len(shapes), len(outputs)):
                raise NotationError(f'pattern "{op.pattern}" does not have as many operands as the operator')
            sizes = infer_sizes(access, shapes, outputs, op.sizes)
        except NotationError as error:
            raise ValueError(f"operator {op.name!r}: {error}") from error
        if set(sizes) != set(op.sizes):
            raise ValueError(f"operator {op.name!r} lists axes {list(op.sizes)}, its pattern has {list(sizes)}")
