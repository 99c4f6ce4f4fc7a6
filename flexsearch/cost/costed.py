"""Operators with what their costs depend on: FLOPs, bytes, launches, gradients, from the extents of a piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from flexsearch.cost.efficiency import Product, product_of
from flexsearch.cost.profile import Work, family, sizes_of
from flexsearch.graph.model import Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import Dimension, Operand
from flexsearch.graph.ops import backward_flops, forward_flops, kind_of


@dataclass(frozen=True)
class Costed:
    """An operator with what its cost depends on besides its extents. ``needs``: inputs that want a gradient. Of one
    whose backward pass is divided among two (``graph.weight_gradients``), the whole. ``casts``: by input, bytes that
    casting an element of its gradient moves, from the type in which it is made to that in which it is held."""

    op: Operator
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    needs: tuple[bool, ...]
    casts: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: OperatorGraph, operator: int) -> Costed:
        """Operator number ``operator`` of a graph."""
        op, backward = graph.operators[operator].plain, graph.has_backward[operator]
        inputs, held = ([of[name] for name in op.inputs] for of in (graph.tensor, graph.gradient))
        widths = [(tensor.itemsize, gradient.itemsize) for tensor, gradient in zip(inputs, held, strict=True)]
        return cls(
            op,
            tuple(inputs),
            tuple(graph.tensor[name] for name in op.outputs),
            tuple(backward and name in graph.differentiable for name in op.inputs),
            tuple(computed + held if held > computed else 0 for computed, held in widths),
        )

    @cached_property
    def dtype(self) -> str:
        """Type in which it computes: of the first floating operand, preferably not of an input or a buffer, which are
        cast before in half precision."""
        floating = [t for t in (*self.inputs, *self.outputs) if t.floating]
        dtypes = (t.dtype for t in floating if t.kind not in ("input", "buffer"))
        return next(dtypes, floating[0].dtype if floating else "float32")

    @cached_property
    def family(self) -> str:
        """Of its signatures."""
        return family(self.op, self.dtypes, self.needs)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the inputs, then of the outputs."""
        return tuple(t.dtype for t in (*self.inputs, *self.outputs))

    def signature(self, extents: Mapping[str, int]) -> str:
        """Key of a piece of these extents in a profile."""
        return f"{self.family} | {sizes_of(self.op, extents)}"

    def forward(self, extents: Mapping[str, int]) -> Work:
        """FLOPs (``_whole_times`` as many) and bytes of the forward task of a piece with the given extents."""
        flops, nbytes = self.counts(extents)[0]
        return Work(flops=flops, nbytes=nbytes)

    def backward(self, extents: Mapping[str, int]) -> Work:
        """FLOPs and bytes of the backward task: gradients of the outputs and saved inputs in, the needed gradients
        out."""
        flops, nbytes = self.counts(extents)[1]
        return Work(flops=flops, nbytes=nbytes)

    def counts(self, extents: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """As ``forward`` and ``backward``, as plain numbers; of arrays of extents: arrays."""
        reads, writes = self._reach
        read = [_reached(reach, extents) for reach in reads]
        written = sum([_reached(reach, extents) for reach in writes])
        rows = 0 if self._table is None else self._rows(self._table, extents)
        return self._forward_counts(extents, read, written, rows), self._backward_counts(extents, read, written, rows)

    def cast_bytes(self, extents: Mapping[str, Any]) -> Any:
        """Bytes that casting the gradients moves that a piece of these extents makes."""
        wide = [k for k, (each, need) in enumerate(zip(self.casts, self.needs, strict=False)) if each and need]
        return sum(_reached(self._reach[0][k], extents) // self.inputs[k].itemsize * self.casts[k] for k in wide)

    @cached_property
    def _reach(self) -> tuple[list[_Reach], list[_Reach]]:
        """Of the inputs, and of the outputs."""
        access = self.op.access
        sides = (access.inputs, self.inputs), (access.outputs, self.outputs)
        reads, writes = ([_reach(o, t) for o, t in zip(*side, strict=True)] for side in sides)
        return reads, writes

    def _forward_counts(
        self, extents: Mapping[str, Any], read: Sequence[Any], written: Any, rows: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        """FLOPs and bytes. ``read``: bytes of the operands; ``written``: of the results; ``rows``: see ``_rows``."""
        if self._free:
            return 0.0, 0.0
        if kind_of(self.op).copies:  # an operand's window may lie outside; all that is written was read once
            moved = written
        else:  # the rows of a table that are looked up, not the table
            moved = sum(nbytes for i, nbytes in enumerate(read) if i != self._table) + rows
        return self._whole_times * forward_flops(self.op, extents), moved + written

    def _backward_counts(
        self, extents: Mapping[str, Any], read: Sequence[Any], written: Any, rows: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        """As ``_forward_counts``."""
        reads = kind_of(self.op).backward_reads
        if not any(self.needs) or reads == "nothing" or (reads == "inputs" and self._free):
            return 0.0, 0.0
        gradients = sum(nbytes for nbytes, need in zip(read, self.needs, strict=True) if need)
        if reads == "gradients":
            saved = 0
        elif self._table is not None:  # clears the table's gradient, adds to the rows
            saved = sum(nbytes for i, nbytes in enumerate(read) if i != self._table) + 2 * rows
        else:
            saved = sum(nbytes for nbytes, t in zip(read, self.inputs, strict=True) if t.floating)
        return self._whole_times * backward_flops(self.op, extents, self.needs), written + saved + gradients

    @cached_property
    def launches(self) -> tuple[int, int, int]:
        """Operators that a host launches in the forward and in the backward task, views among them; of the latter,
        those that make gradients of parameters alone. The backward pass of a contraction takes one for each gradient
        (products, sums of biases), that of other operators one."""
        weights = sum(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))
        if kind_of(self.op).contraction:
            return 1, sum(self.needs), weights
        return 1, int(any(self.needs)), int(0 < weights == sum(self.needs))

    def weight_share(self, extents: Mapping[str, Any]) -> float:
        """Share of the backward task that makes the gradients of parameters, by FLOPs; of a backward task without
        FLOPs all or nothing: all if it makes no other gradients."""
        if self.gradients is None:
            return float(self.trained)
        own, rest = (float(backward_flops(self.op, extents, needs)) for needs in self.gradients)
        return own / (own + rest) if own > 0.0 else 0.0

    @cached_property
    def gradients(self) -> tuple[tuple[bool, ...], tuple[bool, ...]] | None:
        """By input, whether it is a parameter that wants a gradient, and whether it is something else that does; None
        unless there are both."""
        trained = tuple(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))
        others = tuple(need and not own for need, own in zip(self.needs, trained, strict=True))
        return (trained, others) if any(trained) and any(others) else None

    @cached_property
    def trained(self) -> bool:
        """Whether it makes gradients of parameters."""
        return any(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))

    @cached_property
    def product(self) -> Product | None:
        """Axes of the matrix product that it is."""
        return product_of(self.op)

    def product_sizes(self, extents: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """Rows, columns and indices summed away of a piece with these extents, if it is a matrix product."""
        if self.product is None:
            return None
        rows, columns, summed = (prod(extents[axis] for axis in axes) for axes in self.product)
        return rows, columns, summed

    @cached_property
    def _whole_times(self) -> float:
        """How often FLOPs count: attention in one kernel twice where no causal mask halves it, as a device's figures
        are of causal attention whose mask counts as full work (``topology.kernels``)."""
        return 2.0 if kind_of(self.op).fused_attention and not self.op.attributes.get("causal") else 1.0

    @cached_property
    def _free(self) -> bool:
        return kind_of(self.op).is_free(self.op)

    @cached_property
    def _table(self) -> int | None:
        """Place of the operand of which only some rows are read."""
        return kind_of(self.op).table

    def _rows(self, place: int, extents: Mapping[str, Any]) -> Any:
        """Bytes of the table, the operand at ``place``, that are looked up."""
        return kind_of(self.op).looked_up(self.op, extents) * self.inputs[place].itemsize


_Reach = tuple[int, tuple[str, ...], tuple[tuple[Dimension, int], ...]]
"""Of an operand: bytes of an element; axes of its plain dimensions; its others, with their sizes."""


def _reach(operand: Operand, tensor: Tensor) -> _Reach:
    pairs = list(zip(operand.dimensions, tensor.shape, strict=True))
    return tensor.itemsize, tuple(d.axes[0] for d, _ in pairs if d.plain), tuple(p for p in pairs if not p[0].plain)


def _reached(reach: _Reach, extents: Mapping[str, Any]) -> Any:
    """Bytes of an operand that a piece of these extents reads or writes, as if no window were clipped."""
    count: Any
    count, plain, others = reach
    for axis in plain:
        count = count * extents[axis]  # not in place: it may be an array
    for dimension, size in others:
        if dimension.merged:
            count = count * _at_most(size, prod(extents[a] for a in dimension.axes))
        else:
            pairs = zip(dimension.axes, dimension.coefficients, strict=True)
            count = count * _at_most(size, 1 + sum(c * (extents[a] - 1) for a, c in pairs))
    return count


def _at_most(size: int, reached: Any) -> Any:
    return np.minimum(size, reached) if isinstance(reached, np.ndarray) else min(size, reached)
