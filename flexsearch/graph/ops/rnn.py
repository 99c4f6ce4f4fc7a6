"""Recurrent cells, one step of them, and what makes their hidden features splittable.

Torch keeps the weights of the gates of an LSTM or GRU cell below each other, (gates * hidden, features). A part of the
hidden features is rows of all gates, which is no region of such a matrix. As (gates, hidden, features), which is the
same memory, it is one: so the graph gives parameters that only such cells read this shape, and the hidden axis goes
through the whole cell (gates, states, weights) without moving anything; only what the cell multiplies by its weights is
whole. One operator for a cell, not one for each of its products, slices and activations, is what the FlexFlow paper and
the libraries' kernels have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor, fx

GATES = {"aten.lstm_cell.default": 4, "aten.gru_cell.default": 3}
"""How many gates the weights of a cell have below each other."""


def gate_count(nodes: Iterable[fx.Node]) -> int:
    """How many gates a parameter (under all its names, ``nodes``) has below each other, if it is read, and only as
    weight or bias of cells of one kind; else 0."""
    leaves = torch.utils._pytree.tree_leaves
    users = [(node, user) for node in nodes for user in node.users]
    counts = {0 if node in leaves(user.args[:2]) else GATES.get(str(user.target), 0) for node, user in users}
    return counts.pop() if len(counts) == 1 else 0


def gate_shape(shape: Shape, gates: int) -> Shape:
    """(gates * hidden, ...) as (gates, hidden, ...)."""
    return (gates, shape[0] // gates, *shape[1:]) if gates else shape


class Cell(OperatorKind):
    """One step: input and state whole, weights and results by hidden features (axis ``h``)."""

    roles = {"h": "parameter"}
    words = {"h": "hidden features"}
    backward = 2.0
    matrix = True
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
    """Operands between the input and the weights: the state, and what is read of it feature by feature."""

    def emit(self, b: Builder, operands: Sequence[Value | None], weights: Sequence[Value | None]) -> tuple[Value, ...]:
        """The operator of a call. A weight that others read too, or that is computed, has its gates below each other:
        hidden is then whole."""
        read = [x for x in (*operands, *weights) if x is not None]
        shared = ["b I", "b K", *["b h"] * (self.states - 1)]
        own = [self._weight(x, features) for x, features in zip(weights, (" I", " K", "", ""), strict=True) if x]
        pattern = f"{', '.join([*shared, *own])} -> {', '.join(['b h'] * self.outputs)}"
        sizes = {"G": self.gates} if self.gates > 1 else None
        return b.emit_all(self.name, read, b.results, pattern, sizes=sizes, short=self.name)

    def _weight(self, x: Value, features: str) -> str:
        if self.gates == 1:
            return f"h{features}"
        return f"{'G h' if x.rank > len(features.split()) + 1 else '(G h)'}{features}"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        texts = [str(operand) for operand in (*op.access.inputs, *op.access.outputs)]
        shared = ["b I", "b K", *["b h"] * (self.states - 1)]
        weights = texts[len(shared) : len(op.inputs)]
        rows = ("h",) if self.gates == 1 else ("G h", "(G h)")
        fits = texts[: len(shared)] == shared and all(text == "b h" for text in texts[len(op.inputs) :])
        ends = (" I", " K", "", "")[: len(weights)]
        fits = fits and all(text in [row + end for row in rows] for text, end in zip(weights, ends, strict=True))
        if not fits or len(weights) == 3 or op.sizes.get("G", 1) != self.gates or op.sizes["h"] != op.sizes["K"]:
            return f'pattern "{op.pattern}" of shapes {list(shapes)} is not that of {self.name}'
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Two matrix products for each gate, and about 20 operations on each hidden feature after them."""
        products = 2 * self.gates * (extents["I"] + extents["K"])
        return extents["b"] * extents["h"] * (products + 20)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """As torch's cell, whose weights have the gates below each other."""
        whole = piece.axes["h"] == (0, op.sizes["h"])
        count = self.states + 1
        grouped = [str(operand).startswith("G h") for operand in op.access.inputs[count:]]

        def run(*operands: Tensor) -> Any:
            weights = zip(operands[count:], grouped, strict=True)
            w_ih, w_hh, *biases = (w.flatten(0, 1) if g else w for w, g in weights)
            if whole:
                return self.cell(operands[:count], w_ih, w_hh, *biases)
            b_ih, b_hh = biases or (None, None)
            return self.part(operands[:count], F.linear(operands[0], w_ih, b_ih), F.linear(operands[1], w_hh, b_hh))

        return run

    def cell(self, operands: Sequence[Tensor], *weights: Tensor) -> Any:
        """Torch's own computation of all hidden features."""
        raise AssertionError

    def part(self, operands: Sequence[Tensor], x: Tensor, h: Tensor) -> Any:
        """The new state from the products of the gates' weights with the input and with the old state."""
        raise AssertionError


class LstmCell(Cell):
    """(x, h, c, weights, biases) -> (h, c)."""

    name = "lstm_cell"
    targets = ("aten.lstm_cell",)
    inputs = (5, 7)
    outputs = 2
    saved = Saved(True, True, halves=5)
    gates = 4
    states = 2

    def trace(
        self,
        b: Builder,
        input: Value,
        hx: Sequence[Value],
        w_ih: Value,
        w_hh: Value,
        b_ih: Value | None = None,
        b_hh: Value | None = None,
    ) -> tuple[Value, ...]:
        return self.emit(b, [input, *hx], [w_ih, w_hh, b_ih, b_hh])

    def cell(self, operands: Sequence[Tensor], *weights: Tensor) -> Any:
        x, h, c = operands
        return torch.lstm_cell(x, (h, c), *weights)

    def part(self, operands: Sequence[Tensor], x: Tensor, h: Tensor) -> Any:
        i, f, g, o = (x + h).chunk(4, dim=1)
        new = torch.sigmoid(f) * operands[2] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(new), new

    def samples(self) -> Iterable[Sample]:
        x, h, c = rand(3, 5), rand(3, 4), rand(3, 4)
        weights = rand(16, 5), rand(16, 4), rand(16), rand(16)
        yield Sample(lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), (x, h, c, *weights))
        yield Sample(lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), (x, h, c, *weights[:2]))
        yield Sample(lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *(2 * y for y in w)), (x, h, c, *weights))


class GruCell(Cell):
    """(x, h, h, weights, biases) -> h. The state is read twice: whole by the products, and feature by feature."""

    name = "gru_cell"
    targets = ("aten.gru_cell",)
    inputs = (5, 7)
    saved = Saved(True, True, halves=8)
    gates = 3
    states = 2

    def trace(
        self,
        b: Builder,
        input: Value,
        hx: Value,
        w_ih: Value,
        w_hh: Value,
        b_ih: Value | None = None,
        b_hh: Value | None = None,
    ) -> Value:
        return self.emit(b, [input, hx, hx], [w_ih, w_hh, b_ih, b_hh])[0]

    def cell(self, operands: Sequence[Tensor], *weights: Tensor) -> Any:
        return torch.gru_cell(operands[0], operands[1], *weights)

    def part(self, operands: Sequence[Tensor], x: Tensor, h: Tensor) -> Any:
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = x.chunk(3, dim=1), h.chunk(3, dim=1)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return new + torch.sigmoid(update_x + update_h) * (operands[2] - new)

    def samples(self) -> Iterable[Sample]:
        x, h, weights = rand(3, 5), rand(3, 4), (rand(12, 5), rand(12, 4), rand(12), rand(12))
        yield Sample(torch.gru_cell, (x, h, *weights))
        yield Sample(torch.gru_cell, (x, h, *weights[:2]))
        yield Sample(lambda x, h, *w: torch.gru_cell(x, h, *(2 * y for y in w)), (x, h, *weights))


class TanhCell(Cell):
    """(x, h, weights, biases) -> h."""

    name = "rnn_tanh_cell"
    targets = ("aten.rnn_tanh_cell",)
    inputs = (4, 6)
    saved = Saved(True, True)

    def trace(
        self,
        b: Builder,
        input: Value,
        hx: Value,
        w_ih: Value,
        w_hh: Value,
        b_ih: Value | None = None,
        b_hh: Value | None = None,
    ) -> Value:
        return self.emit(b, [input, hx], [w_ih, w_hh, b_ih, b_hh])[0]

    def cell(self, operands: Sequence[Tensor], *weights: Tensor) -> Any:
        return torch.rnn_tanh_cell(operands[0], operands[1], *weights)

    def part(self, operands: Sequence[Tensor], x: Tensor, h: Tensor) -> Any:
        return torch.tanh(x + h)

    def samples(self) -> Iterable[Sample]:
        yield Sample(torch.rnn_tanh_cell, (rand(3, 5), rand(3, 4), rand(4, 5), rand(4, 4), rand(4), rand(4)))
        yield Sample(torch.rnn_tanh_cell, (rand(3, 5), rand(3, 4), rand(4, 5), rand(4, 4)))


class ReluCell(TanhCell):
    """(x, h, weights, biases) -> h."""

    name = "rnn_relu_cell"
    targets = ("aten.rnn_relu_cell",)

    def cell(self, operands: Sequence[Tensor], *weights: Tensor) -> Any:
        return torch.rnn_relu_cell(operands[0], operands[1], *weights)

    def part(self, operands: Sequence[Tensor], x: Tensor, h: Tensor) -> Any:
        return torch.relu(x + h)

    def samples(self) -> Iterable[Sample]:
        yield Sample(torch.rnn_relu_cell, (rand(3, 5), rand(3, 4), rand(4, 5), rand(4, 4), rand(4), rand(4)))


for _kind in (LstmCell(), GruCell(), TanhCell(), ReluCell()):
    define(_kind)
