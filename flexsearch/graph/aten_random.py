"""Handlers of torch operators that draw random numbers: all from one operator, whose draws no split changes."""

from __future__ import annotations

from typing import Any

import torch

from flexsearch.graph.aten import Builder, Value, aten, cast, letters
from flexsearch.graph.aten_math import pointwise


@aten("rand", "rand_like")
def _rand(b: Builder, **_: Any) -> Value:
    """Uniform in [0, 1). Torch's own generator would draw other numbers for other pieces."""
    place = Value((), b.dtype, "constant", "place", weight=True, data=torch.zeros((), dtype=getattr(torch, b.dtype)))
    attributes = {"salt": len(b.drafts)}
    pattern = f" -> {' '.join(letters(len(b.shape)))}"
    drawn = b.emit("uniform", [place], b.shape, pattern, attributes, short="rand", auxiliary=True)
    drawn.weight = False
    if b.shape and b.shape[0] == b.batch:  # as long as the batch: each sample has numbers of its own
        drawn.sample = (True,) + (False,) * (len(b.shape) - 1)
        b.drafts[-1].roles[letters(1)[0]] = "sample"
    return drawn


@aten("bernoulli.p", "bernoulli.default", "bernoulli.out")
def _bernoulli(b: Builder, self: Value, p: float | None = None, **_: Any) -> Value:
    """1 with a probability (that of ``self``, where ``p`` is missing), else 0."""
    drawn = _rand(b)
    below = pointwise(b, "lt.Tensor", (drawn, self)) if p is None else pointwise(b, "lt.Scalar", (drawn, p))
    return cast(b, below, b.dtype)


@aten("uniform")
def _uniform(b: Builder, to: float = 1.0, **call: Any) -> Value:
    low = float(call.get("from", 0.0))
    scaled = pointwise(b, "mul.Scalar", (_rand(b), to - low))
    return pointwise(b, "add.Scalar", (scaled, low))
