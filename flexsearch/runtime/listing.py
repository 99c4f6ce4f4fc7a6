"""A rank's step as readable Python, to read, or to compare two strategies by diff."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flexsearch.graph import Box
from flexsearch.lower import Lowered
from flexsearch.runtime.program import Backward, Finish, Forward, Key, Program, Start, Update, reshard_of


def listing(program: Program) -> str:
    """The rank's step as one Python function: kernels with the regions they make, communications with their partners
    and bytes. Calls stand in the order in which they are issued."""
    lowered = program.lowered
    inputs = ", ".join(_name(t.name) for t in lowered.graph.of_kind("input"))
    lines = [f"def step_of_rank_{program.device}({inputs}):"]
    for instruction in program.instructions:
        match instruction:
            case Forward(segment):
                lines += _forward(program, segment)
            case Backward(segment):
                names = ", ".join(_name(name) for _, name in program.segments[segment].seeds)
                operators = program.segments[segment].operators
                first, last = (lowered.graph.operators[o].name for o in (operators[0], operators[-1]))
                lines.append(f"    backward({names})  # segment {segment}: {last} to {first}")
            case Start(task):
                lines.append(f"    {_start(lowered, program.device, task)}")
            case Finish(transport):
                purpose, key = transport
                form = reshard_of(lowered, transport).form
                name = lowered.weights[key].tensor if purpose == "synchronise" else lowered.edges[key].tensor
                target = {"backward": f"gradient({_name(name)})", "synchronise": f"{_name(name)}.grad"}.get(
                    purpose, _value(lowered, Key("edge", key))
                )
                lines.append(f"    {target} = finish({purpose!r}, {name!r})  # {form}")
            case Update():
                lines.append("    optimizer.step()")
    return "\n".join(lines) + f"\n    return {_name(lowered.graph.loss)}\n"


def _forward(program: Program, number: int) -> Iterator[str]:
    lowered, segment = program.lowered, program.segments[number]
    results = [name for o in segment.operators for name in lowered.graph.operators[o].outputs]
    yield f"    # segment {number}"
    for o, arguments in zip(segment.operators, segment.arguments, strict=True):
        op = lowered.graph.operators[o]
        piece = lowered.placed[o].placement.piece_on(program.device)
        given = ", ".join(
            "None" if a is None else _name(results[~a]) if a < 0 else _value(lowered, segment.leaves[a].value)
            for a in arguments
        )
        made = ", ".join(_name(name) for name in op.outputs)
        regions = ", ".join(
            _region(box, lowered.graph.tensor[n].shape) for n, box in zip(op.outputs, piece.outputs, strict=True)
        )
        yield f"    {made} = {op.kind}({given})  # {regions}"


def _start(lowered: Lowered, rank: int, task: int) -> str:
    what = lowered.tasks.communication[task]
    assert what is not None
    keys = dict.fromkeys(member.key for member in what.members)
    names = [lowered.weights[k].tensor if what.purpose == "synchronise" else lowered.edges[k].tensor for k in keys]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    peers = ", ".join(str(d) for d in what.devices if d != rank)
    return f"start({task})  # {what.form} of {shown} ({what.purpose}) with ranks {peers}: {what.nbytes:,} bytes in all"


def _value(lowered: Lowered, key: Key) -> str:
    """Variable of a value: the tensor's name, with the edge where it has been moved for some readers."""
    if key.kind == "home":
        return _name(str(key.name))
    edge = lowered.edges[int(key.name)]
    moved = lowered.graph.tensor[edge.tensor].kind in ("activation", "parameter")
    return _name(edge.tensor) + (f"_for_{_name(lowered.graph.operators[edge.readers[0][0]].name)}"
                                 if moved and edge.readers else "")  # fmt: skip


def _name(text: str) -> str:
    """A Python identifier for a layer or tensor name."""
    return re.sub(r"\W", "_", text)


def _region(box: Box, shape: tuple[int, ...]) -> str:
    parts = [":" if (a, b) == (0, size) else f"{a}:{b}" for (a, b), size in zip(box, shape, strict=True)]
    return f"[{', '.join(parts)}]" if parts else "scalar"
