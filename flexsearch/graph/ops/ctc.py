"""Connectionist temporal classification: the batch can be split, time and classes are whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import is_whole
from flexsearch.graph.ops.attributes import Natural
from flexsearch.graph.ops.base import (
    INPUTS,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    integers,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.loss import REDUCTIONS
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class TemporalClassification(OperatorKind):
    """Operands: logarithms of probabilities (time, batch, classes), targets, and the lengths of both.

    Targets of shape (batch, length) can be split; where they lie one after the other, the batch is whole as well.
    """

    name = "ctc_loss"
    targets = ("flexsearch.ctc_loss",)
    inputs = (4, 4)
    saved = INPUTS

    class attributes(Attributes):
        blank: Natural = 0
        reduction: Literal["none", "mean", "sum"] = "mean"
        zero_infinity: bool = False

    def trace(
        self, b: Builder, log_probs: Value, targets: Value, input_lengths: Value, target_lengths: Value, blank: int,
        reduction: int, zero_infinity: bool,
    ) -> Value:  # fmt: skip
        rows = "" if log_probs.rank == 2 else "n" if targets.rank == 2 else "N"
        counts = [rows or "1" * lengths.rank for lengths in (input_lengths, target_lengths)]
        listed = f"{rows} S" if targets.rank == 2 else "S"
        pattern = f"T {rows} C, {listed}, {', '.join(counts)} -> {'' if reduction else rows}"
        attributes = {"blank": blank, "reduction": REDUCTIONS[reduction], "zero_infinity": zero_infinity}
        operands = [log_probs, targets, input_lengths, target_lengths]
        return b.emit(self.name, operands, b.shape, pattern, attributes)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        scores, targets = op.access.inputs[0].dimensions, op.access.inputs[1].dimensions
        if not 2 <= len(shapes[0]) <= 3 or not is_whole(scores[0]) or not is_whole(scores[-1]):
            return f'pattern "{op.pattern}" does not keep time and classes whole'
        if attributes.blank >= shapes[0][-1]:
            return f"attributes.blank: {attributes.blank} is none of {shapes[0][-1]} classes"
        batch = shapes[0][1:-1]
        if any(shape != batch and (batch or shape != (1,)) for shape in shapes[2:4]) or shapes[4] not in (batch, ()):
            return f"lengths and losses of a batch of shape {list(batch)} have that shape"
        fits = len(targets) == 1 or (len(targets) == 2 and targets[0] == scores[1])
        whole = targets and is_whole(targets[-1]) and (len(targets) == 2 or all(map(is_whole, scores)))
        return "" if fits and whole else f'pattern "{op.pattern}" splits targets that belong together'

    def flops(self, op: Operator, extents: Extents) -> Any:
        """About 10 for each step in time and state: the labels and the blanks between them."""
        rows = extents.get("n", extents.get("N", 1))
        labels = extents["S"] * (1 if "N" in extents else rows)
        return 10.0 * extents["T"] * (2 * labels + rows)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The losses of the samples one by one; the mean is over the whole batch, of losses over lengths of targets."""
        blank: Any = op.attributes.get("blank", 0)
        how, finite = op.attributes.get("reduction", "mean"), bool(op.attributes.get("zero_infinity"))
        rows = shapes[0][1] if len(shapes[0]) == 3 else 1

        def run(log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
            y = F.ctc_loss(log_probs, targets, lengths, target_lengths, blank, "none", finite)
            if how == "mean":
                y = y / target_lengths.clamp(min=1).to(y) / rows
            return y if how == "none" else y.sum()

        return run

    def samples(self) -> Iterable[Sample]:
        def call(x: Tensor, *rest: Any, **more: Any) -> Tensor:
            return F.ctc_loss(x.log_softmax(-1), *rest, **more)

        x, targets = rand(7, 4, 5), integers(4, 4, 3) + 1
        own, lengths = torch.tensor([7, 6, 7, 5]), torch.tensor([3, 2, 1, 3])
        yield Sample(call, (x, targets, own, lengths))
        yield Sample(lambda x, t: call(x, t, (7, 7, 7, 7), (3, 2, 1, 3), reduction="none"), (x, targets))
        yield Sample(lambda *xs: call(*xs, blank=4, reduction="sum"), (x, targets.view(-1)[:9] % 4, own, lengths))
        yield Sample(
            lambda x, t: call(x, t, torch.tensor(7), torch.tensor(3), zero_infinity=True), (x[:, 0], targets[0])
        )


define(TemporalClassification())
