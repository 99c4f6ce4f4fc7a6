"""The marked calls of a traced step: whether they are self-contained, and the nodes that a repetition walks again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from flexsearch.graph.repeats import ENTER, LEAVE, REPEAT, Call, Tracer

Node = torch.fx.Node


class EntangledError(Exception):
    """Blocks read or change more than their inputs, parameters and buffers. ``structures``: those that do."""

    def __init__(self, structures: set[int]) -> None:
        super().__init__(f"{len(structures)} structures of blocks are not self-contained")
        self.structures = structures


@dataclass(frozen=True, eq=False)
class Block:
    """A call that others repeat.

    ``nodes``: in order, from its inputs to ``outputs``. ``inputs``: its marks by position. ``reads``: placeholders,
    those of the block itself (whose targets begin with ``path``) and those that are the same for all. ``mutated``:
    buffers of the block and the nodes that are their new values.
    """

    path: str
    nodes: tuple[Node, ...]
    inputs: Mapping[int, Node]
    outputs: tuple[Node, ...]
    reads: tuple[Node, ...]
    mutated: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a program by the number of their call, and what repeats them, nested repetitions included."""

    by_number: Mapping[int, Block]
    targets: Mapping[str, str]
    """Parameter or buffer of a repetition -> its counterpart in the block that was traced."""
    mutated: Mapping[str, str]
    """Of these, the buffers that the step changes."""


NO_BLOCKS = Blocks({}, {}, {})


def moved(path: str, source: str, place: str) -> str:
    """``path`` in the block ``place`` instead of ``source``; others stay."""
    return place + path[len(source) :] if path == source or path.startswith(f"{source}.") else path


def find_blocks(program: torch.export.ExportedProgram, tracer: Tracer) -> Blocks:
    """The repeated blocks of a functional program. Raises EntangledError."""
    nodes = list(program.graph.nodes)
    repeats = [n for n in nodes if n.target is REPEAT]
    numbers = {int(n.args[1]) for n in repeats}
    view = _View(program, nodes)
    blocks: dict[int, Block] = {}
    for number in sorted(numbers):
        call = tracer.calls[number]
        second = next(c for c in tracer.calls if c.first is call)
        block, other = view.block(call), view.block(second)
        if block is None or other is None or not view.equal(block, other):
            raise EntangledError({call.structure})
        blocks[number] = block
    targets, mutated = {}, Counter[str](view.mutated.values())
    counterparts: dict[str, str] = {}
    for node in repeats:
        for number, place in _instances(node, blocks, "", ""):
            block = blocks[number]
            for read in block.reads:
                target = view.target(read)
                targets[moved(target, block.path, place)] = target
            for target, _ in block.mutated:
                mutated[moved(target, block.path, place)] += 1
                counterparts[moved(target, block.path, place)] = target
            if any(mutated[moved(target, block.path, place)] > 1 for target, _ in block.mutated):
                raise EntangledError({tracer.calls[number].structure})
    return Blocks(blocks, targets, counterparts)


def _instances(node: Node, blocks: Mapping[int, Block], source: str, place: str) -> Iterator[tuple[int, str]]:
    """The block that a ``repeat`` node stands for, with its path; and those that are repeated inside it."""
    number, path = int(str(node.args[1])), moved(str(node.args[2]), source, place)
    yield number, path
    for inner in blocks[number].nodes:
        if inner.target is REPEAT:
            yield from _instances(inner, blocks, blocks[number].path, path)


class _View:
    """A functional program with what is asked of it many times."""

    def __init__(self, program: torch.export.ExportedProgram, nodes: Sequence[Node]) -> None:
        signature = program.graph_signature
        self.nodes, self.data = nodes, {**program.state_dict, **program.constants}
        self.position = {node: k for k, node in enumerate(nodes)}
        self.specs = {spec.arg.name: spec for spec in signature.input_specs}
        self.placeholders = {str(self.specs[n.name].target): n for n in nodes if n.op == "placeholder"}
        outputs: Any = nodes[-1].args[0]
        self.mutated = {
            node: str(spec.target)
            for node, spec in zip(outputs, signature.output_specs, strict=True)
            if spec.kind.name == "BUFFER_MUTATION"
        }

    def target(self, node: Node) -> str:
        return str(self.specs[node.name].target)

    def block(self, call: Call) -> Block | None:
        """The nodes between the marks of a call; None if they read or make what does not go through the marks."""
        inputs = {int(str(n.args[2])): n for n in self.nodes if n.target is ENTER and n.args[1] == call.number}
        leaves = [n for n in self.nodes if n.target is LEAVE and n.args[1] == call.number]
        if not inputs or len(leaves) != 1:
            return None
        marks, end = set(inputs.values()), leaves[0]
        begin = min(self.position[n] for n in marks)
        inside = tuple(n for n in self.nodes[begin : self.position[end]] if n not in marks)
        members = {*inside}
        outside = {x for n in inside for x in n.all_input_nodes if x not in members and x not in marks}
        own = {n for n in outside if n.op == "placeholder" and self.target(n).startswith(f"{call.path}.")}
        if any(n.op != "placeholder" or self.specs[n.name].kind.name == "USER_INPUT" for n in outside):
            return None
        mutated = {n: t for n, t in self.mutated.items() if n in members or t.startswith(f"{call.path}.")}
        for node, target in mutated.items():
            buffer = self.placeholders[target]
            if node not in members or not target.startswith(f"{call.path}.") or not members.issuperset(buffer.users):
                return None
        if any(user not in members and user is not end for n in inside for user in n.users if user.op != "output"):
            return None
        if any(user.op == "output" and n not in mutated for n in inside for user in n.users):
            return None
        results: Any = end.args[0]
        if any(n not in members for n in results) or any(n.op == "get_attr" for n in inside):
            return None
        reads = (*sorted(own, key=self.position.__getitem__), *(n for n in self.nodes if n in outside - own))
        return Block(call.path, inside, inputs, tuple(results), reads, tuple((t, n) for n, t in mutated.items()))

    def equal(self, a: Block, b: Block) -> bool:
        """Whether two blocks do the same, each with its own parameters and buffers."""
        if len(a.nodes) != len(b.nodes) or a.inputs.keys() != b.inputs.keys() or len(a.reads) != len(b.reads):
            return False
        same: dict[Node, Node] = {a.inputs[k]: b.inputs[k] for k in a.inputs}
        for x, y in zip(a.reads, b.reads, strict=True):
            mine = self.target(x).startswith(f"{a.path}.")
            if not (moved(self.target(x), a.path, b.path) == self.target(y) if mine else self._same_value(x, y)):
                return False
            same[x] = y
        numbers: dict[Any, Any] = {}
        """Of calls inside these: number of a's -> number of b's."""
        for x, y in zip(a.nodes, b.nodes, strict=True):
            args, kwargs = map_arg((x.args, x.kwargs), lambda n: same.get(n, n))
            if x.target in (ENTER, LEAVE, REPEAT):
                repeated = x.target is REPEAT and args[1] == y.args[1]
                number = args[1] if repeated else numbers.setdefault(args[1], y.args[1])
                args = (args[0], number, *(moved(z, a.path, b.path) if isinstance(z, str) else z for z in args[2:]))
            if x.target != y.target or (args, kwargs) != (y.args, y.kwargs):
                return False
            same[x] = y
        return tuple(map(same.get, a.outputs)) == b.outputs and (
            [(moved(t, a.path, b.path), same[n]) for t, n in a.mutated] == [*b.mutated]
        )

    def _same_value(self, x: Node, y: Node) -> bool:
        """Whether two placeholders are one, or constants that are equal."""
        if x is y:
            return True
        a, b = self.data.get(self.target(x)), self.data.get(self.target(y))
        if "CONSTANT" not in self.specs[x.name].kind.name or not isinstance(a, torch.Tensor) or a.is_meta:
            return False
        return isinstance(b, torch.Tensor) and not b.is_meta and a.dtype == b.dtype and torch.equal(a, b)


def check_aliases(program: torch.export.ExportedProgram, tracer: Tracer) -> None:
    """Marks hide that a tensor which leaves or enters a block shares memory with another; nobody may notice.

    ``program``: not yet functional, so that its nodes tell what is changed in place. Raises EntangledError if a call
    changes its inputs, or if what it returns is a view of something else and is changed later.
    """
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    written = {_storage(x) for node in nodes for x in _written(node)}
    entered = {_storage(n): int(n.args[1]) for n in nodes if n.target is ENTER}
    problems = {tracer.calls[entered[s]].structure for s in written if s in entered}
    passed = {_storage(x) for n in nodes if n.target in (ENTER, REPEAT) for x in n.all_input_nodes}
    passed.update(_storage(n) for n in nodes if n.args and getattr(n.args[0], "target", None) in (LEAVE, REPEAT))
    if written & passed:
        problems |= {tracer.calls[int(n.args[1])].structure for n in nodes if n.target is LEAVE and _views(n, nodes)}
    if problems | tracer.surprised:
        raise EntangledError(problems | tracer.surprised)


def _views(end: Node, nodes: Sequence[Node]) -> bool:
    """Whether an output of a call shares memory with another one, or with what was there before the call."""
    marks = [n for n in nodes if n.target is ENTER and n.args[1] == end.args[1]]
    before = {_storage(n) for n in nodes[: nodes.index(marks[0])]} | {_storage(n) for n in marks}
    storages = [_storage(n) for n in end.all_input_nodes]
    return len({*storages}) < len(storages) or bool(before.intersection(storages))


def _storage(node: Node) -> int:
    """A number for the memory of a node's tensor; another one for each node without one."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else -id(node)


def _written(node: Node) -> Iterator[Node]:
    """The operands that a call changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for k, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Node))
