"""A model with more layers from the graph of one with few: importing three layers of a large model takes a second."""

from __future__ import annotations

from flexsearch.errors import NotationError
from flexsearch.graph.compact import compact
from flexsearch.graph.files import Block, Leaves, Record, expand, output_names
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.notation import parse
from flexsearch.graph.runs import expanded


def deepened(graph: OperatorGraph, layers: int) -> OperatorGraph:
    """``graph``, whose one block of operators repeats, with ``layers`` repetitions of it; names count on.

    What reads a result of the last repetition reads that of the new last one. The rest is as it was, so this is the
    graph of the deeper model if that differs by its number of layers alone. Raises NotationError unless exactly one
    block of operators repeats, and every block of parameters, buffers and constants as often.
    """
    file = compact(graph)
    blocks = [x for x in file.operators if isinstance(x, Block)]
    sections = {name: getattr(file, name) for name in ("parameters", "buffers", "constants")}
    times = {x.repeat for section in sections.values() for x in section if isinstance(x, Leaves)}
    if len(blocks) != 1 or times - {blocks[0].repeat} or layers < 2:
        raise NotationError(
            f"graph {graph.name!r} has {len(blocks)} blocks of operators that repeat; {layers} layers cannot be made "
            "of it: that takes one block, and at least 2 layers"
        )
    last: dict[str, str] = {}
    for record in blocks[0].operators:
        results = record.outputs or output_names(record.name, len(parse(record.pattern).outputs))
        last.update((expanded(x, blocks[0].repeat - 1), expanded(x, layers - 1)) for x in results)

    def longer(item: Record | Block) -> Record | Block:
        if isinstance(item, Block):
            return item.model_copy(update={"repeat": layers})
        return item.model_copy(update={"inputs": tuple(last.get(x, x) for x in item.inputs)})

    return expand(file.model_copy(update={
        "operators": tuple(map(longer, file.operators)),
        **{
            name: tuple(x.model_copy(update={"repeat": layers}) if isinstance(x, Leaves) else x for x in section)
            for name, section in sections.items()
        },
    }))  # fmt: skip
