"""Recurrent layers over a whole sequence (nn.LSTM, nn.GRU, nn.RNN): one operator for each layer and direction.

So layers can run on different devices, and each piece is a call of torch's own fast kernel. The batch can be split.
Time cannot, as each step needs the one before; nor the hidden features, as each step needs all of them of the step
before: an exchange between devices at every step would cost more than it brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    KINDS,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.join import cat
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.shape import pick, view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Recurrent(OperatorKind):
    """(input, states, weights, biases, projection) -> (outputs of all steps, last states) of one layer and direction.

    Axes: batch ``b``, time ``T``, input features ``I``, gate features ``F``, hidden features ``H``, and ``P``, those of
    the output (a projection of the hidden ones, if there is one). The states are absent where they are zeros.
    """

    words = {"b": "batch"}
    backward = 2.0
    matrix = True
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1

    class attributes(Attributes):
        backwards: bool = False
        batch_first: bool = False
        has_states: bool = True
        has_biases: bool = True
        projected: bool = False

    def patterns(self, how: Any) -> tuple[list[str], list[str]]:
        """Operands and results of a layer with the attributes ``how``."""
        hidden = "P" if how.projected else "H"
        steps = "b T" if how.batch_first else "T b"
        states = [f"b {hidden}", "b H"][: self.states]
        gates = "F" if self.gates > 1 else "H"
        recurrent = "P" if how.projected else "H1" if self.gates == 1 else "H"
        weights = [f"{gates} I", f"{gates} {recurrent}", *[gates] * (2 * how.has_biases)]
        inputs = [f"{steps} I", *(states if how.has_states else []), *weights, *(["P H"] if how.projected else [])]
        return inputs, [f"{steps} {hidden}", *states]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        inputs, outputs = self.patterns(attributes)
        fits = op.pattern == f"{', '.join(inputs)} -> {', '.join(outputs)}"
        fits = fits and not (attributes.projected and self.states == 1)
        if not fits or op.sizes.get("F", op.sizes["H"]) != self.gates * op.sizes["H"]:
            return f'pattern "{op.pattern}" of shapes {list(shapes)} is not that of {self.name}'
        return "" if op.sizes.get("H1", op.sizes["H"]) == op.sizes["H"] else f"{self.name} of shapes {list(shapes)}"

    def flops(self, op: Operator, extents: Extents) -> Any:
        """At each step two matrix products for each gate, a projection, and about 20 operations on each feature."""
        hidden, out = extents["H"], extents.get("P", extents["H"])
        step = (
            2 * self.gates * hidden * (extents["I"] + out) + 20 * hidden + (2 * hidden * out if "P" in extents else 0)
        )
        return extents["b"] * extents["T"] * step

    def saves(self, op: Operator, *before: Operator) -> Saved:
        """Besides inputs and outputs, for each step the gates, and what the states were made from."""
        features = (self.gates + self.states) * op.sizes["H"]
        return Saved(True, True, halves=-(-2 * features // op.sizes.get("P", op.sizes["H"])))

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        how = self.attributes.model_validate(op.attributes)
        count, time = self.states * how.has_states, 1 if how.batch_first else 0
        batch, hidden = piece.extent("b"), op.sizes["H"]
        sizes = [op.sizes["P"] if how.projected else hidden, hidden][: self.states]

        def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            states = [h[None] for h in rest[:count]] if count else [x.new_zeros(1, batch, n) for n in sizes]
            x = x.flip(time) if how.backwards else x
            hx = states if self.states > 1 else states[0]
            # train=True, which cuDNN needs for a backward; there is no dropout within a layer.
            y, *last = self.layer(x, hx, rest[count:], how.has_biases, 1, 0.0, True, False, how.batch_first)
            return (y.flip(time) if how.backwards else y, *(h[0] for h in last))

        return run

    def layer(self, *call: Any) -> tuple[Tensor, ...]:
        """Torch's own computation of a layer."""
        raise AssertionError


class Lstm(Recurrent):
    """A layer of nn.LSTM; results: outputs, last output, last cell state."""

    name = "lstm"
    inputs = (3, 8)
    outputs = 3
    gates = 4
    states = 2

    def layer(self, *call: Any) -> tuple[Tensor, ...]:
        return torch.lstm(*call)

    def samples(self) -> Iterable[Sample]:
        yield _sample("lstm", 4, layers=2, first=True)
        yield _sample("lstm", 4, layers=2, sides=2, out=2)
        yield _sample("lstm", 4, bias=False, with_states=True)


class Gru(Recurrent):
    """A layer of nn.GRU; results: outputs, last output."""

    name = "gru"
    inputs = (3, 6)
    outputs = 2
    gates = 3

    def layer(self, *call: Any) -> tuple[Tensor, ...]:
        return torch.gru(*call)

    def samples(self) -> Iterable[Sample]:
        yield _sample("gru", 3, layers=2, dropout=0.4, sides=2)
        yield _sample("gru", 3, first=True, with_states=True)


class RnnTanh(Recurrent):
    """A layer of nn.RNN; results: outputs, last output."""

    name = "rnn_tanh"
    inputs = (3, 6)
    outputs = 2

    def layer(self, *call: Any) -> tuple[Tensor, ...]:
        return torch.rnn_tanh(*call)

    def samples(self) -> Iterable[Sample]:
        yield _sample("rnn_tanh", 1, layers=2)


class RnnRelu(RnnTanh):
    """A layer of nn.RNN; results: outputs, last output."""

    name = "rnn_relu"

    def layer(self, *call: Any) -> tuple[Tensor, ...]:
        return torch.rnn_relu(*call)

    def samples(self) -> Iterable[Sample]:
        yield _sample("rnn_relu", 1, bias=False)


for _kind in (Lstm(), Gru(), RnnTanh(), RnnRelu()):
    define(_kind)


def _sample(
    name: str, gates: int, layers: int = 1, dropout: float = 0.0, sides: int = 1, first: bool = False,
    bias: bool = True, out: int = 0, with_states: bool = False,
) -> Sample:  # fmt: skip
    """A call of ``torch.lstm`` and its like: 3 features, 4 hidden ones, projected to ``out`` if that is not 0."""
    rows, width, weights = gates * 4, out or 4, []
    for layer in range(layers):
        one = [rand(rows, width * sides if layer else 3), rand(rows, width), *[rand(rows)] * (2 * bias)]
        weights += (one + [rand(out, 4)] * bool(out)) * sides
    x = rand(3, 5, 3) if first else rand(5, 3, 3)
    states = [rand(layers * sides, 3, n) for n in (width, 4)[: 1 + (gates == 4)]]

    def call(x: Tensor, *rest: Tensor) -> Any:
        own = list(rest[: len(states)]) if with_states else [torch.zeros_like(h) for h in states]
        hx, weights = own if gates == 4 else own[0], list(rest[len(states) if with_states else 0 :])
        return getattr(torch, name)(x, hx, weights, bias, layers, dropout, True, sides == 2, first)

    return Sample(call, (x, *(states if with_states else []), *(0.3 * w for w in weights)))


@rewrite("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _layers(
    b: Builder,
    input: Value,
    hx: Value | Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    """Layer after layer: both directions read what the layer before gave, dropped with our own random numbers."""
    states = [hx] if isinstance(hx, Value) else list(hx)
    directions, count = 1 + bidirectional, len(params) // (num_layers * (1 + bidirectional))
    how = {"batch_first": batch_first, "has_biases": has_biases, "projected": count > 2 + 2 * has_biases}
    x, last = input, []
    for layer in range(num_layers):
        if layer and train and dropout > 0:
            x = b.emit("dropout", [x], x.shape, attributes={"p": dropout, "salt": b.salt}, short="dropout")
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = params[number * count : (number + 1) * count]
            start = [] if all(_zeros(h) for h in states) else [pick(b, h, 0, number) for h in states]
            y, *final = _layer(b, x, start, weights, states, {**how, "backwards": direction == 1})
            outputs.append(y)
            last.append(final)
        x = cat(b, outputs, 2) if directions > 1 else outputs[0]
    stacked = ([view(b, h, (1, *h.shape)) for h in finals] for finals in zip(*last, strict=True))
    return (x, *(cat(b, finals) for finals in stacked))


def _layer(
    b: Builder, x: Value, start: Sequence[Value], weights: Sequence[Value], states: Sequence[Value], how: dict[str, Any]
) -> tuple[Value, ...]:
    """One layer in one direction; ``states``: those of all layers, which give the sizes."""
    kind = KINDS[b.target.split(".")[1]]
    assert isinstance(kind, Recurrent)
    attributes = {**how, "has_states": bool(start)}
    inputs, outputs = kind.patterns(kind.attributes.model_validate(attributes))
    sizes = [state.shape[1:] for state in states]
    results = [((*x.shape[:2], sizes[0][1]), x.dtype), *((shape, x.dtype) for shape in sizes)]
    pattern = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    return b.emit_all(kind.name, [x, *start, *weights], results, pattern, attributes, short=kind.name)


def _zeros(x: Value) -> bool:
    """Whether a tensor is the zeros that a recurrent layer begins with by default. They are no operand: a constant
    would have the size of the batch."""
    return x.data is not None and not x.data.is_meta and not bool(x.data.any())
