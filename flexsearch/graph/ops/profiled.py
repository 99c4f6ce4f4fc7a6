"""Operators of which only times and bytes are known: layers of somebody else's profile."""

from __future__ import annotations

from typing import Any

from flexsearch.errors import ImportModelError
from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    MANY,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Shapes,
    define,
)
from flexsearch.graph.piece import Piece
from flexsearch.quantities import Seconds, Size, Text


class ProfiledAttributes(Attributes):
    """``forward_s``, ``backward_s``: seconds that one device takes for a minibatch of ``samples``. ``layer``: what the
    profile says it is."""

    forward_s: Seconds
    backward_s: Seconds
    samples: Size
    layer: Text = ""


class Profiled(OperatorKind):
    """A layer with given times. Only its sample axis ``b`` can be split; a piece takes its share of the samples times
    the given time, on any device. It has no FLOPs, and nothing of it can be run."""

    name = "given"
    attributes = ProfiledAttributes
    inputs = (1, MANY)
    words = {"b": "samples"}
    windows = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if op.roles.get("b") != "sample":
            return 'needs an axis "b" of samples, in proportion to which its time is'
        if op.splittable not in ((), ("b",)):
            return "can be split by samples alone; give its other axes upper-case names"
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0 * extents["b"]

    def own_seconds(self, op: Operator, extents: Extents) -> tuple[Any, Any]:
        share, attributes = extents["b"] / op.attributes["samples"], op.attributes
        return attributes["forward_s"] * share, attributes["backward_s"] * share

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        raise ImportModelError(
            f"the graph has no operators to run: {op.name!r} is a time and bytes that a profile gave",
            "Such a graph can be planned and simulated. To run a plan, import the PyTorch model itself.",
        )


define(Profiled())
