"""What a graph file may say about an operator on images: whatever passes its check is computed, and nothing crashes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops import (
    KINDS,
    Sample,
    adaptive_pool,
    batch_norm,
    border,
    conv,
    norm,
    pool,
    resample,
    sampling,
    window,
)
from tests.interpret import interpret, whole
from tests.op_samples import Called, written
from tests.test_ops import _cuts

MODULES = (adaptive_pool, batch_norm, border, conv, norm, pool, resample, sampling, window)
NAMES = sorted(name for name, kind in KINDS.items() if type(kind).__module__ in {m.__name__ for m in MODULES})
VALUES: tuple[Any, ...] = (
    0, 2, -1, 2**40, 0.5, True, None, "x", "nearest", [], [0, 0], [1], [1, 2], [2, 2, 2], [3, 1, 4, 1, 5, 9, 2],
    [None, None], [2.0, 0.3], {"a": 1},
)  # fmt: skip


@cache
def _imported(name: str) -> tuple[Called, Imported]:
    torch.manual_seed(0)
    sample: Sample = next(iter(KINDS[name].samples()))
    model = Called(sample)
    return model, import_with_constants(model, model.inputs())


def _mutations(operator: dict[str, Any], draw: random.Random) -> Iterator[None]:
    """Change the operator of a graph file in one place at a time, and back."""
    attributes, axes, pattern = operator["attributes"], operator["axes"], operator["pattern"]
    for field in list(attributes):
        value = attributes[field]
        for other in VALUES:
            attributes[field] = other
            yield
        del attributes[field]
        yield
        attributes[field] = value
    for axis in axes:
        size = axis["size"]
        for other in (1, 2, size + 1, 7, 2 * size):
            axis["size"] = other
            yield
        axis["size"] = size
    digits = [i for i, c in enumerate(pattern) if c.isdigit()]
    for i in draw.sample(digits, min(len(digits), 6)):
        for other in "0123":
            operator["pattern"] = pattern[:i] + other + pattern[i + 1 :]
            yield
    for old, new in (("+", "-"), ("-", "+"), ("n", "N"), ("c", "C"), ("h", "H"), ("(g", "(c"), (" g", " (g)")):
        operator["pattern"] = pattern.replace(old, new, 1)
        yield
    operator["pattern"] = pattern


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_operator_is_refused_or_computed(name: str, tmp_path: Path) -> None:
    model, imported = _imported(name)
    path = tmp_path / "graph.json"
    document = written(imported.graph)
    operator = next(op for op in document["operators"] if op["kind"] == name)
    values = dict(imported.constants) | dict(zip(imported.input_names, model.inputs(), strict=True))
    values |= dict(model.named_parameters())
    draw = random.Random(name)
    refused = accepted = 0
    for _ in _mutations(operator, draw):
        try:
            path.write_text(json.dumps(document))
            graph = OperatorGraph.load(path)
        except FlexsearchError:
            refused += 1
            continue
        accepted += 1
        with torch.no_grad():
            for cuts in (whole, lambda op: _cuts(op, draw)):
                interpret(graph, values, cuts=cuts)
    assert refused and accepted
