"""A rank's step as readable Python, to read, or to compare two strategies by diff."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flexsearch.graph import Box
from flexsearch.graph.ops.local import extent
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import (
    Add,
    Assemble,
    AwaitSends,
    Backward,
    Deliver,
    Empty,
    Fetch,
    Forward,
    Free,
    Instruction,
    Keep,
    Key,
    Load,
    Post,
    Program,
    Result,
    Slot,
    Start,
    Transport,
    Update,
    Wait,
    reshard_of,
)
from flexsearch.runtime.rewrites import CUTS


def listing(program: Program) -> str:
    """The rank's step as one Python function: kernels with the regions they make, communications with their partners
    and bytes. Calls stand in the order in which they are issued."""
    inputs = ", ".join(_name(t.name) for t in program.lowered.graph.of_kind("input"))
    lines = [f"def step_of_rank_{program.device}({inputs}):"]
    for instruction in program.instructions:
        lines += [f"    {line}" for line in _lines(program, instruction)]
    return "\n".join(lines) + "\n    return loss\n"


def _lines(program: Program, instruction: Instruction) -> Iterator[str]:
    lowered = program.lowered
    match instruction:
        case Forward():
            yield from _forward(program, instruction)
        case Backward():
            yield from _backward(program, instruction)
        case Start():
            yield _start(lowered, program.device, instruction.task)
        case Post():
            yield f"post({instruction.task})"
        case Wait():
            yield f"wait({instruction.task})"
        case AwaitSends():
            yield f"await_sends({instruction.nbytes})  # messages under way"
        case Assemble():
            yield _assemble(program, instruction)
        case Keep():
            for source, copy in instruction.parts.values():
                yield f"{_value(program, copy)} = cut({_value(program, source)})"
        case Load():
            yield f"{_value(program, instruction.slot)} = weights[{instruction.name!r}]"
        case Fetch():
            tensor = lowered.edges[instruction.edge].tensor
            blank = lowered.graph.tensor[tensor].kind in ("activation", "parameter")
            what = f"{'blank' if blank else 'cut'}({_name(tensor)})"
            yield f"{_value(program, instruction.slot)} = {what}  # microbatch {instruction.microbatch}"
        case Deliver():
            for weight, slot in instruction.weights:
                yield f"{_name(lowered.weights[weight].tensor)}.grad += {_value(program, slot)}"
        case Add():
            yield f"{_value(program, instruction.total)} += {_value(program, instruction.slot)}"
        case Result():
            yield f"{_name(instruction.name)} = {_value(program, instruction.slot)}"
        case Empty():
            yield f"empty({_value(program, instruction.slot)})  # until it is gathered again"
        case Free():
            yield f"del {', '.join(_value(program, slot) for slot in instruction.slots)}"
        case Update():
            yield "optimizer.step()"


def _assemble(program: Program, instruction: Assemble) -> str:
    lowered, transport = program.lowered, instruction.transport
    targets = ", ".join(_value(program, slot) for slot in instruction.results.values())
    name = _tensor(lowered, transport)
    what, form = f"{transport.purpose!r}, {name!r}", reshard_of(lowered, transport).form
    call = f"assemble({what}, adds_to=[{targets}])" if instruction.adds else f"{targets} = assemble({what})"
    return f"{call}  # {form}"


def _tensor(lowered: Lowered, transport: Transport) -> str:
    key = transport.key
    return lowered.weights[key].tensor if transport.purpose == "synchronise" else lowered.edges[key].tensor


def _backward(program: Program, instruction: Backward) -> Iterator[str]:
    segment = program.segments[instruction.segment]
    operators = program.lowered.graph.operators
    seeds = ", ".join("1" if slot is None else _value(program, slot) for slot in instruction.seeds)
    gradients = ", ".join(_value(program, slot) for slot in instruction.gradients if slot is not None)
    first, last = operators[segment.operators[0]].name, operators[segment.operators[-1]].name
    part = "" if instruction.part == "all" else f", {instruction.part}"
    yield (
        f"backward({seeds}, adds_to=[{gradients}])  # segment {instruction.segment}, microbatch "
        f"{instruction.microbatch}{part}: {last} to {first}"
    )


def _forward(program: Program, instruction: Forward) -> Iterator[str]:
    lowered, segment = program.lowered, program.segments[instruction.segment]
    results = [name for o in segment.operators for name in lowered.graph.operators[o].outputs]
    again = ", again" if instruction.again else ""
    yield f"# segment {instruction.segment}, microbatch {instruction.microbatch}{again}"
    for call in segment.calls:
        operands = ", ".join(
            "None" if a is None else (_name(results[~a]) if a < 0 else _value(program, instruction.leaves[a])) + (
                _part(*call.parts[p]) if p in call.parts and call.kind != CUTS else ""
            )
            for p, a in enumerate(call.arguments)
        )  # fmt: skip
        targets = ", ".join(_name(results[k]) for k in call.results)
        regions = ", ".join(
            _region(box, lowered.graph.tensor[name].shape)
            for o in call.operators
            for name, box in zip(
                lowered.graph.operators[o].outputs,
                lowered.placed[o].piece_on(program.device).outputs,
                strict=True,
            )
        )
        yield f"{targets} = {call.kind}({operands})  # {regions}"
    for result, slot in instruction.exports:
        yield f"{_value(program, slot)} = {_name(results[result])}"


def _start(lowered: Lowered, rank: int, task: int) -> str:
    what = lowered.tasks.communication[task]
    assert what is not None
    keys = dict.fromkeys(member.key for member in what.members)
    names = [lowered.weights[k].tensor if what.purpose == "synchronise" else lowered.edges[k].tensor for k in keys]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    peers = ", ".join(str(d) for d in what.devices if d != rank)
    return f"start({task})  # {what.form} of {shown} ({what.purpose}) with ranks {peers}: {what.nbytes:,} bytes in all"


def _value(program: Program, slot: Slot) -> str:
    """Variable of a value: the tensor's name, with the edge where it has been moved for some readers."""
    key, lowered = program.slots[slot], program.lowered
    suffix = f"_{key.microbatch}" if lowered.stages.microbatches > 1 and key.kind != "total" else ""
    return _variable(lowered, key) + suffix + ("_again" if key.again else "")


def _variable(lowered: Lowered, key: Key) -> str:
    name = key.name
    if key.kind in ("arrived", "saved"):
        return f"{key.kind}_{name}"
    if isinstance(name, tuple):  # a part of a reshard
        transport, number = name
        return f"{key.kind}_{number}_of_{_name(_tensor(lowered, transport))}"
    if key.kind == "total":
        return f"{_name(str(name))}_total"
    if key.kind.startswith("home"):
        return _name(str(name)) + ("_gradient" if key.kind != "home" else "_here")
    number = int(str(name))
    if key.kind == "weight gradient":
        return f"{_name(lowered.weights[number].tensor)}_gradient"
    edge = lowered.edges[number]
    readers = f"_for_{_name(lowered.graph.operators[edge.readers[0][0]].name)}" if edge.readers else "_here"
    return _name(edge.tensor) + readers + ("_gradient" if key.kind == "edge gradient" else "")


def _name(text: str) -> str:
    """A Python identifier for a layer or tensor name."""
    return re.sub(r"\W|^(?=\d)", "_", text)


def _part(held: Box, read: Box) -> str:
    """The index that takes region ``read`` from a tensor that holds ``held``."""
    moved = tuple((low - start, high - start) for (low, high), (start, _) in zip(read, held, strict=True))
    return _region(moved, extent(held))


def _region(box: Box, shape: tuple[int, ...]) -> str:
    parts = [":" if (a, b) == (0, size) else f"{a}:{b}" for (a, b), size in zip(box, shape, strict=True)]
    return f"[{', '.join(parts)}]" if parts else "scalar"
