"""From drafts to an operator graph: dead code goes, counts come late, operators and tensors get readable names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from flexsearch.errors import ImportModelError
from flexsearch.graph.model import Axis, Operator, OperatorGraph, Tensor, Tracing
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops.value import Draft, Value

_LEAVES = ("parameter", "buffer", "constant")


def assemble(
    name: str,
    drafts: Sequence[Draft],
    loss: Value,
    inputs: Sequence[Value],
    updates: Mapping[Value, Value],
    counters: Sequence[Value],
    tracing: Tracing,
    returned: Sequence[Value] = (),
) -> tuple[OperatorGraph, list[Value]]:
    """The graph, and its inputs, parameters, buffers and constants.

    ``updates``: new values of buffers; ``counters``: buffers that every step raises by one; ``returned``: outputs of a
    model; those that no operator makes are in the graph, too, even if nothing reads them. Names are those of the
    layers, and depend on nothing that dead code could change. They are given as if counts came first, as they once did.
    """
    live = ancestors(drafts, [loss, *updates.values()])
    _salt(drafts, live)
    _mark_samples(live)
    early = _counting(live)
    live = early + [d for d in live if d not in early]
    read = (v for d in live for v in d.inputs if v.kind != "activation")
    leaves = dict.fromkeys([*inputs, *read, *updates, *counters])
    for value in (loss, *updates.values(), *returned):
        if value.kind != "activation":
            leaves.setdefault(value)
    names = _Names(v.name for v in leaves if v.kind != "constant")
    for value in leaves:
        if value.kind == "constant":
            value.name = names.fresh(value.name)
    name_of = dict(zip(live, _operator_names(live, names), strict=True))
    for draft, operator_name in name_of.items():
        for i, output in enumerate(draft.outputs):
            output.name = operator_name if len(draft.outputs) == 1 else names.fresh(f"{operator_name}.{i}")
    # A stage is a run of operators, and counts belong to the one where targets are fed to the loss.
    live = _before_readers(live, early)
    operators = [_operator(draft, name_of[draft]) for draft in live]
    order = ("input", "parameter", "buffer", "constant")
    values = sorted(leaves, key=lambda v: order.index(v.kind)) + [v for d in live for v in d.outputs]
    graph = OperatorGraph(
        name=name,
        tensors=tuple(
            Tensor(name=v.name, shape=v.shape, dtype=v.dtype, kind=v.kind, requires_grad=v.requires_grad)
            for v in values
        ),
        operators=tuple(operators),
        loss=loss.name,
        buffer_updates={buffer.name: value.name for buffer, value in updates.items()},
        counters=tuple(v.name for v in counters),
        tracing=tracing,
    )
    return graph, list(leaves)


def ancestors(drafts: Sequence[Draft], wanted: Iterable[Value]) -> list[Draft]:
    """The drafts that the wanted values depend on, in order."""
    needed, kept = set(wanted), []
    for draft in reversed(drafts):
        if needed.intersection(draft.outputs):
            needed.update(draft.inputs)
            kept.append(draft)
    return kept[::-1]


def _salt(drafts: Sequence[Draft], live: Sequence[Draft]) -> None:
    """Salts of random draws count the drafts before them: those that stay, whatever dead code there was."""
    kept = set(live)
    before = [0, *accumulate(int(draft in kept) for draft in drafts)]
    for draft in live:
        if isinstance(salt := draft.attributes.get("salt"), int):
            draft.attributes["salt"] = before[salt]


def _mark_samples(drafts: Sequence[Draft]) -> None:
    """Axes run over the batch, too, of what is expanded along it for readers that run over it: masks, and tokens or
    queries that are weights, with all that is computed of them before they meet the batch."""
    readers: dict[Value, list[tuple[Draft, Operand]]] = defaultdict(list)
    for draft in drafts:
        for value, operand in zip(draft.inputs, draft.access.inputs, strict=True):
            readers[value].append((draft, operand))
    expanded = _expanded(drafts)
    for draft in reversed(drafts):
        for axis in expanded.get(draft, ()):
            (place,) = [k for k, d in enumerate(draft.access.outputs[0].dimensions) if axis in d.axes]
            met = [
                operand.dimensions[place].plain and reader.roles[operand.dimensions[place].axes[0]] == "sample"
                for reader, operand in readers[draft.outputs[0]]
            ]
            if any(met) and (all(met) or draft.inputs[0].kind == "constant"):
                draft.roles[axis] = "sample"


def _expanded(drafts: Sequence[Draft]) -> dict[Draft, list[str]]:
    """Of drafts with one output that follows from no input of the model: axes of the output along which something was
    expanded, here or before."""
    axes_of: dict[Draft, list[str]] = {}
    along: dict[Value, set[int]] = {}  # places in values that follow from no input
    for draft in drafts:
        if len(draft.outputs) > 1 or not all(v in along or v.kind in _LEAVES for v in draft.inputs):
            continue
        names = [
            {d.axes[0]: k for k, d in enumerate(operand.dimensions) if d.plain}
            for operand in (*draft.access.outputs, *draft.access.inputs)
        ]
        written, read = names[0], list(zip(draft.inputs, names[1:], strict=True))
        axes_of[draft] = [
            axis for axis in written
            if (draft.kind == "expand" and axis not in read[0][1])
            or (any(axis in n for _, n in read) and all(n[axis] in along.get(v, ()) for v, n in read if axis in n))
        ]  # fmt: skip
        along[draft.outputs[0]] = {written[axis] for axis in axes_of[draft]}
    return axes_of


def _counting(drafts: list[Draft]) -> list[Draft]:
    """Counts of valid targets, and what they depend on, in order; but no count that depends on a weight."""
    counts = [d for d in drafts if d.kind == "valid_count"]
    needs = [ancestors(drafts, d.outputs) for d in counts]
    free = [row for row in needs if all(v.kind != "parameter" for d in row for v in d.inputs)]
    needed = {d for row in free for d in row}
    return [d for d in drafts if d in needed]


def _before_readers(drafts: list[Draft], moved: list[Draft]) -> list[Draft]:
    """The drafts with each of those that are ``moved`` just before its first reader."""
    waiting, placed = list(moved), list[Draft]()
    for draft in drafts:
        if draft in moved:
            continue
        if waiting:
            due = ancestors(waiting, draft.inputs)
            placed += due
            waiting = [d for d in waiting if d not in due]
        placed.append(draft)
    return placed + waiting


def _operator_names(drafts: Sequence[Draft], names: _Names) -> list[str]:
    """The layer's name for the operator that a layer is; with the operator's short name where a layer is several."""
    paths = {d.module for d in drafts}
    inner = {path.rsplit(".", i)[0] for path in paths for i in range(1, path.count(".") + 1)}
    shorts: dict[str, Counter[str]] = {path: Counter() for path in paths}
    for draft in drafts:
        shorts[draft.module][draft.short] += not draft.auxiliary
    result = []
    for draft in drafts:
        path = draft.module
        single = sum(1 for count in shorts[path].values() if count) == 1 and path and path not in inner
        full = path if single and not draft.auxiliary else f"{path}.{draft.short}" if path else draft.short
        result.append(names.fresh(full))
    return result


class _Names:
    """Names in use; ``fresh`` numbers a name that is taken: relu, relu_1, relu_2."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = Counter(taken)
        if double := [name for name, count in self.taken.items() if count > 1]:
            raise ImportModelError(
                f"two tensors of the model are called {double[0]!r}; 'input...' and 'target...' are names of the "
                "step's arguments, so rename the parameter or buffer"
            )

    def fresh(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self.taken:
            number += 1
            candidate = f"{name}_{number}"
        self.taken[candidate] = 1
        return candidate


def _operator(draft: Draft, name: str) -> Operator:
    axes = tuple(Axis(name=a, size=draft.sizes[a], role=draft.roles[a]) for a in draft.access.axes)
    return Operator(
        name=name,
        kind=draft.kind,
        pattern=str(draft.access),
        axes=axes,
        inputs=tuple(v.name for v in draft.inputs),
        outputs=tuple(v.name for v in draft.outputs),
        attributes=draft.attributes,
        module=draft.module,
        source=draft.source,
    )
