"""From an operator graph to the records of a graph file: what :mod:`flexsearch.graph.files` reads back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from flexsearch.files import to_json
from flexsearch.graph.files import (
    SECTIONS,
    Block,
    GraphFile,
    Leaf,
    Leaves,
    Record,
    expand,
    leaf_metadata,
    output_metadata,
    output_names,
    sizes_from_inputs,
    usual_role,
)
from flexsearch.graph.model import Operator, OperatorGraph, Tensor
from flexsearch.graph.runs import Run, earlier, expanded, pattern_of, runs, template


def to_text(graph: OperatorGraph) -> str:
    """The file of a graph: one record a line.

    A graph whose tensors are not in the order that a file implies (inputs, parameters, buffers, constants, results of
    the operators), as one made by hand may be, is written in full, as ``flexsearch.graph/1``.
    """
    file = compact(graph)
    try:
        same = expand(file) == graph
    except ValueError:
        same = False
    return lines(file) if same else to_json(graph)


def compact(graph: OperatorGraph) -> GraphFile:
    """The graph as a file, without what can be derived."""
    writer = _Writer(graph)
    sections: dict[str, Any] = {section: writer.leaves(kind) for section, kind in SECTIONS}
    operators = writer.operators()
    return GraphFile(
        name=graph.name,
        **sections,
        operators=operators,
        loss=graph.loss,
        buffer_updates=writer.other_updates,
        counters=() if writer.counters_in_order else graph.counters,
        tracing=graph.tracing,
    )


class _Writer:
    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.braces = any(
            "{" in x or "}" in x for x in (*graph.tensor, *(op.name + op.module for op in graph.operators))
        )
        """Names with braces cannot stand beside templates: then nothing is written as a block."""
        buffers = [t.name for t in graph.of_kind("buffer") if t.name in graph.counters]
        self.counters_in_order = tuple(buffers) == graph.counters
        self.updated = {value: buffer for buffer, value in graph.buffer_updates.items()}
        if len(self.updated) < len(graph.buffer_updates):
            self.updated = {}
        self.written: set[str] = set()
        self.metadata = {
            t.name: leaf_metadata(t.kind, t.shape, t.dtype, self._samples(t))
            for t in graph.tensors
            if t.kind != "activation"
        }

    def _samples(self, tensor: Tensor) -> bool:
        """Whether readers take the first dimension of an input for the batch, or there are none."""
        if tensor.kind != "input" or not tensor.shape:
            return True
        axes = [
            (op, axis)
            for i, position in self.graph.consumers[tensor.name]
            for op in (self.graph.operators[i],)
            for axis in op.access.inputs[position].dimensions[0].axes[:1]
        ]
        return not axes or any(op.roles[axis] == "sample" for op, axis in axes)

    def leaves(self, kind: str) -> tuple[Leaf | Leaves, ...]:
        """The tensors of a kind."""
        records = [self._leaf(tensor) for tensor in self.graph.of_kind(kind)]
        tokens = [(pattern_of(x.name), x.model_dump_json(exclude={"name"})) for x in records]
        return _joined(records, tokens, lambda x: [x.name], self.braces, _leaf_block)

    def _leaf(self, tensor: Tensor) -> Leaf:
        frozen = tensor.kind == "parameter" and tensor.floating and not tensor.requires_grad
        return Leaf(
            name=tensor.name, shape=tensor.shape, dtype=tensor.dtype,
            sample=None if self._samples(tensor) else False,
            requires_grad=False if frozen else None,
            counter=self.counters_in_order and tensor.name in self.graph.counters,
        )  # fmt: skip

    def operators(self) -> tuple[Record | Block, ...]:
        records = [self._record(op) for op in self.graph.operators]
        tokens = [_token(record) for record in records]
        return _joined(records, tokens, _names, self.braces, _operator_block, _salted)

    @property
    def other_updates(self) -> dict[str, str]:
        return {b: value for b, value in self.graph.buffer_updates.items() if b not in self.written}

    def _record(self, op: Operator) -> Record:
        access = op.access
        inputs = [self.metadata[name] for name in op.inputs]
        sizes = sizes_from_inputs(access, [x.shape for x in inputs], {})
        explicit = {axis: size for axis, size in op.sizes.items() if sizes.get(axis) != size}
        roles = {a: role for a, role in op.roles.items() if role != usual_role(a, access, inputs)}
        dtypes = tuple(self.graph.tensor[name].dtype for name in op.outputs)
        weight = all(x.weight for x in inputs)
        for name, operand, dtype in zip(op.outputs, access.outputs, dtypes, strict=True):
            self.metadata[name] = output_metadata(operand, dtype, op.sizes, op.roles, weight)
        updates = tuple(self.updated.get(name, "") for name in op.outputs)
        updates = () if "" in updates else updates
        self.written.update(updates)
        return Record(
            name=op.name, kind=op.kind, pattern=op.pattern, inputs=op.inputs, sizes=explicit, roles=roles,
            outputs=None if op.outputs == output_names(op.name, len(op.outputs)) else op.outputs,
            dtypes=None if set(dtypes) == {inputs[0].dtype if inputs else "float32"} else dtypes,
            attributes=op.attributes, updates=updates, source=op.source,
            module=None if op.module == op.name.rpartition(".")[0] else op.module,
        )  # fmt: skip


def _token(record: Record) -> tuple[Any, ...]:
    """What repetitions of a record have in common."""
    attributes = {**record.attributes, "salt": None} if _salted(record) is not None else record.attributes
    fixed = (record.kind, record.pattern, record.sizes, record.roles, record.dtypes, attributes, record.source)
    names = tuple(pattern_of(name) for name in _names(record))
    return (*map(json.dumps, fixed), names, len(record.inputs), record.module is None, record.outputs is None)


def _names(record: Record) -> list[str]:
    """Names that a record gives, in all repetitions by one template."""
    return [
        record.name,
        *(record.outputs or ()),
        *record.updates,
        *([record.module] if record.module is not None else []),
    ]


def _salted(record: Record) -> int | None:
    salt = record.attributes.get("salt")
    return salt if isinstance(salt, int) and not isinstance(salt, bool) else None


class _Draft:
    """A block in the making: ``period`` records from ``start`` on, and what their repetitions are."""

    def __init__(self, records: Sequence[Any], names: Callable[[Any], list[str]], start: int, period: int) -> None:
        self.records, self.names, self.start, self.period = records, names, start, period
        self.templates = [
            self._templates(names(records[start + k]), names(records[start + period + k])) for k in range(period)
        ]
        self.first: dict[str, str] = {}
        self.inputs = [self._inputs(k) for k in range(period)] if isinstance(records[0], Record) else []
        salts = {
            b - a for a, b in ((_salted(x), _salted(y)) for x, y in self._pairs()) if a is not None and b is not None
        }
        self.salts = min(salts, default=0)
        self.valid = (
            len(salts) <= 1 and self.salts >= 0 and all(None not in x for x in (*self.templates, *self.inputs))
            and self.fits(0) and self.fits(1)
        )  # fmt: skip

    def _pairs(self) -> list[tuple[Any, Any]]:
        if not isinstance(self.records[0], Record):
            return []
        return [(self.records[self.start + k], self.records[self.start + self.period + k]) for k in range(self.period)]

    def _templates(self, first: Sequence[str], second: Sequence[str]) -> list[str | None]:
        return [template(a, b) for a, b in zip(first, second, strict=True)]

    def _at(self, time: int, k: int) -> Any:
        place = self.start + time * self.period + k
        return self.records[place] if place < len(self.records) else None

    def _inputs(self, k: int) -> list[str | None]:
        """Templates of a record's operands: those of the later repetitions, where the first reads something else."""
        zero, one, two = (self._at(time, k) for time in range(3))
        result: list[str | None] = []
        for position, operand in enumerate(zero.inputs):
            text = template(operand, one.inputs[position])
            third = two.inputs[position] if two is not None and len(two.inputs) > position else None
            if third is not None and (text is None or expanded(text, 2) != third):
                later = template(one.inputs[position], third)
                text = None if later is None else earlier(later)
                if text is not None:
                    self.first[text] = operand
            result.append(text)
        return result

    def fits(self, time: int) -> bool:
        """Whether repetition ``time`` is what the templates say."""
        for k in range(self.period):
            record = self._at(time, k)
            if [expanded(str(x), time) for x in self.templates[k]] != self.names(record):
                return False
            if isinstance(record, Record):
                inputs = [
                    self.first.get(str(x)) if not time and x in self.first else expanded(str(x), time)
                    for x in self.inputs[k]
                ]
                if inputs != [*record.inputs]:
                    return False
                salt = _salted(self.records[self.start + k])
                if salt is not None and _salted(record) != salt + time * self.salts:
                    return False
        return True


def _joined(
    records: Sequence[Any], tokens: Sequence[Any], names: Callable[[Any], list[str]], braces: bool,
    block: Callable[[_Draft, Run], Any], *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The records, with blocks in the place of those that repeat."""
    if braces or len(records) < 3:
        return tuple(records)
    drafts: dict[tuple[int, int], _Draft] = {}

    def draft(start: int, period: int) -> _Draft:
        if (start, period) not in drafts:
            drafts[start, period] = _Draft(records, names, start, period)
        return drafts[start, period]

    def fits(start: int, period: int, time: int) -> bool:
        return draft(start, period).valid and draft(start, period).fits(time)

    result: list[Any] = []
    position = 0
    for run in runs(tokens, fits):
        result += records[position : run.start]
        result.append(block(draft(run.start, run.period), run))
        position = run.end
    return (*result, *records[position:])


def _leaf_block(draft: _Draft, run: Run) -> Leaves:
    leaves = [
        draft.records[run.start + k].model_copy(update={"name": draft.templates[k][0]}) for k in range(run.period)
    ]
    return Leaves(repeat=run.times, tensors=tuple(leaves))


def _operator_block(draft: _Draft, run: Run) -> Block:
    operators = []
    for k in range(run.period):
        record: Record = draft.records[run.start + k]
        names = [str(x) for x in draft.templates[k]]
        outputs = len(record.outputs or ())
        updates = len(record.updates)
        operators.append(record.model_copy(update={
            "name": names[0], "inputs": tuple(draft.inputs[k]),
            "outputs": tuple(names[1 : 1 + outputs]) or None,
            "updates": tuple(names[1 + outputs : 1 + outputs + updates]),
            "module": names[-1] if record.module is not None else None,
        }))  # fmt: skip
    return Block(repeat=run.times, first=draft.first, salts=draft.salts, operators=tuple(operators))


def lines(file: GraphFile) -> str:
    """A file's JSON: one field or record a line, without fields that have their default."""
    data = _without_empty(file.model_dump(mode="json", exclude_defaults=True))
    fields = [f"  {json.dumps(key)}: {_listed(value, 4)}" for key, value in {"format": file.format, **data}.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


_OPTIONAL = frozenset(("sizes", "roles", "attributes", "first", "buffer_updates", "tracing"))


def _without_empty(value: Any) -> Any:
    """Records without objects that are empty, which is what they are by default."""
    if isinstance(value, list):
        return [_without_empty(x) for x in value]
    if not isinstance(value, dict):
        return value
    kept = {key: x for key, x in value.items() if x != {} or key not in _OPTIONAL}
    return {key: _without_empty(x) if key in ("operators", "tensors") else x for key, x in kept.items()}


def _listed(value: Any, indent: int) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(" " * indent + _record_line(x, indent) for x in value) + "\n" + " " * (indent - 2) + "]"


def _record_line(value: Any, indent: int) -> str:
    """A record on a line; a block with its own on lines of theirs."""
    if not isinstance(value, dict) or "repeat" not in value:
        return json.dumps(value)
    inner = next(key for key in ("operators", "tensors") if key in value)
    head = "".join(f"{json.dumps(key)}: {json.dumps(x)}, " for key, x in value.items() if key != inner)
    return f"{{{head}{json.dumps(inner)}: {_listed(value[inner], indent + 2)}}}"
