"""Graph files, ``flexsearch.graph/2``: what an operator graph is when all that can be derived is left out.

A file lists the tensors that exist before a step and the operators, one record a line. Shapes of activations follow
from patterns, sizes of axes from shapes, roles of axes from what they index; fields say only what differs. Records that
repeat with advancing numbers stand in a block, once (:mod:`flexsearch.graph.runs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError

from flexsearch.errors import FileFormatError, NotationError
from flexsearch.files import MAX_FILE_BYTES, FileModel, describe, dotted, parse, printable, read_json
from flexsearch.graph.model import Axis, Dtype, Operator, OperatorGraph, Role, Tensor, Tracing
from flexsearch.graph.notation import Access, Operand
from flexsearch.graph.notation import parse as parse_pattern
from flexsearch.graph.runs import expanded
from flexsearch.quantities import MAX_AXES, MAX_OPERANDS, MAX_OPERATORS, Name, Pattern, Shape, Size, Text

FORMAT: Final = "flexsearch.graph/2"
MAX_TENSORS: Final = 4 * MAX_OPERATORS
Times = Annotated[int, Field(ge=2, le=MAX_TENSORS)]


class Leaf(FileModel):
    """A tensor that exists before the step. In a block, names are templates."""

    name: Name
    shape: Shape
    dtype: Dtype = "float32"
    sample: bool | None = None
    """Of an input: false if its first dimension is not the batch."""
    requires_grad: bool | None = None
    """Of a parameter: false if it is not trained. Those that are not floating-point never are."""
    counter: bool = False
    """Of a buffer: true if every step raises it by one."""


class Leaves(FileModel):
    """Tensors that repeat."""

    repeat: Times
    tensors: Annotated[tuple[Leaf, ...], Field(min_length=1, max_length=MAX_TENSORS)]


class Record(FileModel):
    """An operator, without what follows from the rest."""

    name: Name
    kind: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,127}$")]
    pattern: Pattern
    inputs: Annotated[tuple[Name, ...], Field(max_length=MAX_OPERANDS)]
    sizes: Annotated[dict[str, Size], Field(default_factory=dict, max_length=MAX_AXES)]
    """Of axes that the shapes of the inputs leave open."""
    roles: Annotated[dict[str, Role], Field(default_factory=dict, max_length=MAX_AXES)]
    """Of axes where the rule (:func:`usual_role`) says another one."""
    outputs: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_OPERANDS)] | None = None
    """Default: the operator's name; with ".0", ".1", ... if there are several."""
    dtypes: Annotated[tuple[Dtype, ...], Field(max_length=MAX_OPERANDS)] | None = None
    """Of the outputs; default: that of the first input."""
    attributes: dict[Name, JsonValue] = Field(default_factory=dict)
    updates: Annotated[tuple[Name, ...], Field(max_length=MAX_OPERANDS)] = ()
    """Buffers that the first outputs are the new values of."""
    module: Text | None = None
    """Default: the operator's name up to its last dot."""
    source: Text = ""


class Block(FileModel):
    """Operators that repeat."""

    repeat: Times
    first: dict[Name, Name] = Field(default_factory=dict)
    """Operand, as written -> what the first repetition reads in its place."""
    salts: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """What every repetition adds to the attribute ``salt``."""
    operators: Annotated[tuple[Record, ...], Field(min_length=1, max_length=MAX_OPERATORS)]


def _which(value: Any) -> str:
    repeats = "repeat" in value if isinstance(value, dict) else hasattr(value, "repeat")
    return "block" if repeats else "record"


AnyLeaf = Annotated[Annotated[Leaf, Tag("record")] | Annotated[Leaves, Tag("block")], Discriminator(_which)]
AnyRecord = Annotated[Annotated[Record, Tag("record")] | Annotated[Block, Tag("block")], Discriminator(_which)]
LeafList = Annotated[tuple[AnyLeaf, ...], Field(max_length=MAX_TENSORS)]


class GraphFile(FileModel):
    """The contents of a graph file; the expanded graph is an :class:`OperatorGraph`."""

    format: Literal["flexsearch.graph/2"] = FORMAT
    name: Text
    inputs: LeafList = ()
    parameters: LeafList = ()
    buffers: LeafList = ()
    constants: LeafList = ()
    operators: Annotated[tuple[AnyRecord, ...], Field(min_length=1, max_length=MAX_OPERATORS)]
    loss: Name
    buffer_updates: dict[Name, Name] = Field(default_factory=dict)
    """Where the new value is not made by an operator that says so."""
    counters: tuple[Name, ...] = ()
    """Where their order is not that of the buffers."""
    tracing: Tracing = Tracing()


class Metadata(NamedTuple):
    """What is known of a tensor while a file is read or written, in the order of its operators.

    ``sample``: for each dimension, whether it runs over the batch. ``weight``: made of nothing but parameters, buffers
    and constants.
    """

    shape: tuple[int, ...]
    dtype: str
    sample: tuple[bool, ...]
    weight: bool


SECTIONS: Final = (("inputs", "input"), ("parameters", "parameter"), ("buffers", "buffer"), ("constants", "constant"))
"""Lists of a file, and the kind of their tensors."""


def leaf_metadata(kind: str, shape: tuple[int, ...], dtype: str, sample: bool) -> Metadata:
    """A tensor that exists before the step."""
    first = sample and kind == "input"
    return Metadata(shape, dtype, tuple(first and k == 0 for k in range(len(shape))), kind != "input")


def sizes_from_inputs(access: Access, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes that follow from the inputs and from ``sizes``; others are missing."""
    result = dict(sizes)
    pairs = [
        (dimension, size)
        for operand, shape in zip(access.inputs, shapes, strict=True)
        for dimension, size in zip(operand.dimensions, shape, strict=True)
    ]
    for dimension, size in pairs:
        if dimension.plain:
            result.setdefault(dimension.axes[0], size)
    for dimension, size in pairs:
        unknown = [axis for axis in dimension.axes if axis not in result]
        if dimension.merged and len(unknown) == 1:
            result[unknown[0]] = size // max(1, prod(result[axis] for axis in dimension.axes if axis in result))
    return result


def usual_role(axis: str, access: Access, inputs: Sequence[Metadata]) -> Role:
    """The role of an axis that a file does not name: sample if it runs over the batch, reduction if it is summed away,
    parameter if it indexes a weight of a contraction, else attribute."""
    weight = False
    for operand, tensor in zip(access.inputs, inputs, strict=True):
        for dimension, sample in zip(operand.dimensions, tensor.sample, strict=True):
            if sample and axis in (dimension.axes[:1] if dimension.merged else dimension.axes):
                return "sample"
            weight = weight or (tensor.weight and axis in dimension.axes)
    if axis in access.summed:
        return "reduction"
    return "parameter" if weight and access.summed else "attribute"


def output_metadata(
    operand: Operand, dtype: str, sizes: Mapping[str, int], roles: Mapping[str, str], weight: bool
) -> Metadata:
    """An output: a dimension is the product of its axes, which is 1 where it has none."""
    shape = tuple(prod(sizes[axis] for axis in d.axes) for d in operand.dimensions)
    sample = tuple(bool(d.axes) and roles[d.axes[0]] == "sample" for d in operand.dimensions)
    return Metadata(shape, dtype, sample, weight)


class _Reader:
    """Expands a file. ``where``: how errors begin."""

    def __init__(self, file: GraphFile, where: str) -> None:
        self.file, self.where = file, where
        self.metadata: dict[str, Metadata] = {}
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.updates: dict[str, str] = {}
        self.derived: dict[tuple[int, tuple[Metadata, ...]], tuple[tuple[Axis, ...], tuple[Metadata, ...]]] = {}
        """Axes and outputs of a record for these inputs: the same in almost all repetitions."""

    def error(self, place: Sequence[str | int], problem: str) -> FileFormatError:
        return FileFormatError(
            f"{self.where} is malformed:\n  {dotted(place)}: {problem}", "Make it again with `flexsearch import`."
        )

    def graph(self) -> OperatorGraph:
        file = self.file
        self._check_size()
        counters: list[str] = []
        for section, kind in SECTIONS:
            for place, name, leaf in self._leaves(section):
                self._leaf(place, name, kind, leaf)
                if leaf.counter:
                    counters.append(name)
        for k, item in enumerate(file.operators):
            if isinstance(item, Record):
                self._operator(("operators", k), item, None, {}, 0)
                continue
            for time in range(item.repeat):
                for j, record in enumerate(item.operators):
                    self._operator(
                        ("operators", k, "operators", j), record, time, {} if time else item.first, item.salts
                    )
        try:
            return OperatorGraph(
                name=file.name, tensors=tuple(self.tensors), operators=tuple(self.operators), loss=file.loss,
                buffer_updates={**self.updates, **file.buffer_updates}, counters=(*counters, *file.counters),
                tracing=file.tracing,
            )  # fmt: skip
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise self.error(problem["loc"], describe(problem)) from error

    def _check_size(self) -> None:
        """Refuse a small file that would become a huge graph, before it does."""
        count = sum(len(x.operators) * x.repeat if isinstance(x, Block) else 1 for x in self.file.operators)
        if count > MAX_OPERATORS:
            raise self.error(("operators",), f"are {count} with all repetitions; at most {MAX_OPERATORS} are allowed")
        sections = [x for section, _ in SECTIONS for x in getattr(self.file, section)]
        leaves = sum(len(x.tensors) * x.repeat if isinstance(x, Leaves) else 1 for x in sections)
        if leaves > MAX_TENSORS:
            raise self.error(("tensors",), f"are {leaves} with all repetitions; at most {MAX_TENSORS} are allowed")
        blocks = [x for x in (*sections, *self.file.operators) if isinstance(x, Leaves | Block)]
        if sum(len(x.model_dump_json()) * x.repeat for x in blocks) > MAX_FILE_BYTES:
            raise self.error(("operators",), f"with all repetitions are more than {MAX_FILE_BYTES >> 20} MiB")

    def _leaves(self, section: str) -> Iterator[tuple[tuple[str | int, ...], str, Leaf]]:
        for k, item in enumerate(getattr(self.file, section)):
            if isinstance(item, Leaf):
                yield (section, k), item.name, item
                continue
            for time in range(item.repeat):
                for j, leaf in enumerate(item.tensors):
                    yield (section, k, "tensors", j), expanded(leaf.name, time), leaf

    def _leaf(self, place: Sequence[str | int], name: str, kind: str, leaf: Leaf) -> None:
        for field, owner in (("sample", "input"), ("requires_grad", "parameter"), ("counter", "buffer")):
            if (getattr(leaf, field) not in (None, False) and kind != owner) or (
                leaf.sample is False and kind != "input"
            ):
                raise self.error((*place, field), f"only {owner}s have this field")
        floating = leaf.dtype.startswith(("float", "bfloat", "complex"))
        trained = kind == "parameter" and (floating if leaf.requires_grad is None else leaf.requires_grad)
        self._tensor(place, name, kind, leaf_metadata(kind, leaf.shape, leaf.dtype, leaf.sample is not False), trained)

    def _tensor(
        self, place: Sequence[str | int], name: str, kind: Any, metadata: Metadata, trained: bool = False
    ) -> None:  # fmt: skip
        if name in self.metadata:
            raise self.error((*place, "name"), f"there are two tensors {name!r}")
        self.metadata[name] = metadata
        try:
            self.tensors.append(
                Tensor(name=name, shape=metadata.shape, dtype=metadata.dtype, kind=kind, requires_grad=trained)
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise self.error((*place, *problem["loc"]), f"{describe(problem)} ({name!r})") from error

    def _operator(
        self, place: Sequence[str | int], record: Record, time: int | None, first: Mapping[str, str], salts: int
    ) -> None:
        """Repetition ``time`` of a record; None: it stands alone, and its names are no templates."""

        def named(text: str) -> str:
            return text if time is None else expanded(text, time)

        name = named(record.name)
        inputs = tuple(first[x] if x in first else named(x) for x in record.inputs)
        for operand in inputs:
            if operand not in self.metadata:
                raise self.error(
                    (*place, "inputs"),
                    f"{name!r} reads {operand!r}, which is not in the graph or made later; order the operators",
                )
        operands = tuple(self.metadata[x] for x in inputs)
        key = (id(record), operands)
        if key not in self.derived:
            self.derived[key] = self._derive(place, record, name, operands)
        axes, results = self.derived[key]
        outputs = tuple(map(named, record.outputs)) if record.outputs else output_names(name, len(results))
        if len(outputs) != len(results) or len(record.updates) > len(outputs):
            raise self.error(
                (*place, "outputs"), f"{name!r} has {len(outputs)} outputs; its pattern has {len(results)}"
            )
        for output, result in zip(outputs, results, strict=True):
            self._tensor(place, output, "activation", result)
        for output, buffer in zip(outputs, record.updates, strict=False):
            self.updates[named(buffer)] = output
        attributes = record.attributes
        if time and isinstance(salt := attributes.get("salt"), int):
            attributes = attributes | {"salt": salt + time * salts}
        module = name.rpartition(".")[0] if record.module is None else named(record.module)
        try:
            self.operators.append(Operator(
                name=name, kind=record.kind, pattern=record.pattern, axes=axes, inputs=inputs, outputs=outputs,
                attributes=attributes, module=module, source=record.source,
            ))  # fmt: skip
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise self.error((*place, *problem["loc"]), f"{describe(problem)} ({name!r})") from error

    def _derive(
        self, place: Sequence[str | int], record: Record, name: str, inputs: tuple[Metadata, ...]
    ) -> tuple[tuple[Axis, ...], tuple[Metadata, ...]]:
        """Axes and outputs of an operator."""
        try:
            access = parse_pattern(record.pattern)
            if len(access.inputs) != len(inputs):
                raise NotationError(f"has {len(access.inputs)} inputs, the operator {len(inputs)}")
            shapes = [x.shape for x in inputs]
            ranks = [len(operand.dimensions) for operand in access.inputs]
            if ranks != [len(shape) for shape in shapes]:
                raise NotationError(f"has inputs of {ranks} dimensions, the operator of shapes {shapes}")
            sizes = sizes_from_inputs(access, shapes, record.sizes)
            if missing := [axis for axis in access.axes if axis not in sizes]:
                raise NotationError(f"the size of {missing[0]!r} does not follow from the inputs; give it in `sizes`")
        except NotationError as error:
            raise self.error((*place, "pattern"), f"{error} ({name!r})") from error
        if unused := {*record.sizes, *record.roles} - {*access.axes}:
            raise self.error((*place, "sizes"), f"{name!r} has no axis {min(unused)!r}")
        roles: dict[str, Role] = {a: record.roles.get(a) or usual_role(a, access, inputs) for a in access.axes}
        dtypes = record.dtypes or ((inputs[0].dtype if inputs else "float32"),) * len(access.outputs)
        if len(dtypes) != len(access.outputs):
            raise self.error((*place, "dtypes"), f"{name!r} has {len(access.outputs)} outputs")
        weight = all(x.weight for x in inputs)
        try:
            axes = tuple(Axis(name=a, size=sizes[a], role=roles[a]) for a in access.axes)
            results = tuple(
                output_metadata(operand, dtype, sizes, roles, weight)
                for operand, dtype in zip(access.outputs, dtypes, strict=True)
            )
        except ValidationError as error:
            raise self.error((*place, "sizes"), f"{describe(error.errors(include_url=False)[0])} ({name!r})") from error
        return axes, results


def output_names(name: str, count: int) -> tuple[str, ...]:
    """What the outputs of an operator are called unless a file says otherwise."""
    return (name,) if count == 1 else tuple(f"{name}.{k}" for k in range(count))


def expand(file: GraphFile, where: str = "graph file") -> OperatorGraph:
    """The graph that a file describes. Raises FileFormatError, which begins with ``where``."""
    return _Reader(file, where).graph()


def read(path: str | Path) -> OperatorGraph:
    """The graph in a file of this or of the earlier format. Raises FileFormatError."""
    data, source = read_json(path, "graph"), f"file {printable(str(path))}"
    if isinstance(data, dict) and data.get("format") == "flexsearch.graph/1":
        return parse(OperatorGraph, data, source, "graph")
    return expand(parse(GraphFile, data, source, "graph"), f"graph {source}")
