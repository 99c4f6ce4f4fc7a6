"""A graph file that says something else of an attention, a recurrent layer or an expert is refused, or can be run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsearch.errors import FlexsearchError
from flexsearch.graph import Operator, OperatorGraph, make_piece
from flexsearch.graph.ops import (
    KINDS,
    KernelContext,
    attention,
    backward_flops,
    build_kernel,
    forward_flops,
    kind_of,
    moe,
    recurrent,
    rnn,
)
from tests.fuzz_documents import paths, put
from tests.op_samples import imported, written
from tests.test_ops import _cuts as cuts

MODULES = {module.__name__ for module in (attention, moe, recurrent, rnn)}
SAMPLES = [
    (name, number)
    for name, kind in sorted(KINDS.items())
    if type(kind).__module__ in MODULES
    for number, _ in enumerate(kind.samples())
]
MUTATIONS = 150
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 2**40, 2**70, 0.5, -0.5, 1e308, "", "h", "G", [], {}, [1], {"tensor": 0},
)  # fmt: skip


def _mutate(document: Any, kinds: set[str], draw: random.Random) -> None:
    """Change one thing that the file says of an operator of these kinds, or the shape of a tensor."""
    numbers = [i for i, op in enumerate(document["operators"]) if op["kind"] in kinds]
    op = document["operators"][draw.choice(numbers)]
    what = draw.choice(("attributes", "pattern", "axes", "inputs", "shape", "kind"))
    if what == "attributes" and op.get("attributes"):
        at = draw.choice([path for path in paths(op["attributes"]) if path])
        put(op["attributes"], at, draw.choice(VALUES))
    elif what == "pattern":
        tokens = op["pattern"].replace(",", " , ").split(" ")
        places = [i for i, token in enumerate(tokens) if token and token not in ",->"]
        first, second = draw.choice(places), draw.choice(places)
        if draw.random() < 0.5:
            tokens[first], tokens[second] = tokens[second], tokens[first]
        else:
            tokens[first] = draw.choice([*(tokens[i] for i in places), "1", "Z", "(b h)", f"({tokens[first]}+1)"])
        op["pattern"] = " ".join(tokens).replace(" , ", ", ")
    elif what == "axes":
        axis = draw.choice(op["axes"])
        axis[draw.choice(list(axis))] = draw.choice([1, 2, 7, "sample", "parameter", "reduction", "q", "K"])
    elif what == "inputs":
        inputs = op["inputs"]
        inputs[draw.randrange(len(inputs))] = draw.choice(inputs)
    elif what == "shape":
        name = draw.choice(op["inputs"])
        [tensor] = [t for t in document["tensors"] if t["name"] == name]
        tensor["shape"] = draw.choice([tensor["shape"][::-1], tensor["shape"][:-1], [1, *tensor["shape"]]])
    else:
        op["kind"] = draw.choice(sorted(k for k in KINDS if type(KINDS[k]).__module__ in MODULES))


def _values(graph: OperatorGraph, op: Operator) -> list[Tensor]:
    values = []
    for name in op.inputs:
        tensor = graph.tensor[name]
        dtype = getattr(torch, tensor.dtype)
        values.append((torch.rand(tensor.shape, dtype=torch.float64) * 3).to(dtype))
    return values


def _run(graph: OperatorGraph, op: Operator, draw: random.Random) -> None:
    """Compute one piece of an operator, and ask all that planning asks."""
    shapes = [[graph.tensor[name].shape for name in names] for names in (op.inputs, op.outputs)]
    intervals = {axis: draw.choice(list(parts)) for axis, parts in cuts(op, draw).items()}
    piece = make_piece(op, intervals, *shapes)
    local = [
        None if box is None else x[tuple(slice(a, b) for a, b in box)]
        for box, x in zip(piece.inputs, _values(graph, op), strict=True)
    ]
    result = build_kernel(op, piece, shapes[0], KernelContext())(*local)
    results = result if isinstance(result, tuple) else (result,)
    assert [tuple(x.shape) for x in results] == [tuple(b - a for a, b in box) for box in piece.outputs]
    extents = {axis: high - low for axis, (low, high) in intervals.items()}
    assert forward_flops(op, extents) >= 0
    assert backward_flops(op, extents, [True] * len(op.inputs)) >= 0
    kind_of(op).saves(op)


@pytest.mark.parametrize(("name", "number"), SAMPLES)
def test_a_changed_file_is_refused_or_runs(name: str, number: int, tmp_path: Path) -> None:
    graph = imported(name, number).graph
    kinds = {op.kind for op in graph.operators if type(KINDS[op.kind]).__module__ in MODULES}
    graph.save(tmp_path / "graph.json")
    assert OperatorGraph.load(tmp_path / "graph.json") == graph
    text = json.dumps(written(graph))
    draw, refused = random.Random(f"{name} {number}"), 0
    for _ in range(MUTATIONS):
        document = json.loads(text)
        _mutate(document, kinds, draw)
        (tmp_path / "changed.json").write_text(json.dumps(document))
        try:
            changed = OperatorGraph.load(tmp_path / "changed.json")
        except FlexsearchError:
            refused += 1
            continue
        for op in changed.operators:
            if type(KINDS[op.kind]).__module__ in MODULES:
                try:
                    _run(changed, op, draw)
                except Exception as error:
                    raise AssertionError(f"{op}") from error
    assert refused > MUTATIONS // 5
