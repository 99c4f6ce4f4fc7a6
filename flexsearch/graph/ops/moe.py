"""Mixture of experts: products with one of several weights for each token, and places of tokens at experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flexsearch.errors import NotationError
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import parse
from flexsearch.graph.ops.attributes import Positive
from flexsearch.graph.ops.base import (
    INPUTS,
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    integers,
    output_elements,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.linear import matmul
from flexsearch.graph.ops.pointwise import cast_to
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class _ExpertProduct(OperatorKind):
    """Each row times the weight of one expert. A piece of the experts computes their rows and adds 0 to the others.

    FLOPs: two for each element of a row and each output, whatever the number of experts; of a piece of the experts,
    its share of them, as if they were used equally.
    """

    roles = {"e": "parameter", "o": "parameter", "i": "reduction"}
    words = {"e": "experts", "o": "output features", "i": "input features (partial sums)"}
    inputs = (3, 3)
    saved = INPUTS
    contraction = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        lead = " ".join(f"b{i}" for i in range(len(shapes[-1]) - 1))
        patterns = [text.replace("b..", lead) for text in self.patterns]
        fits = any(op.access == parse(text) for text in patterns)
        return "" if fits else f'pattern "{op.pattern}" of {self.name} must be "{patterns[0]}"'

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns that it may have."""
        assert self.pattern is not None
        return (self.pattern,)

    def integers_below(self, op: Operator) -> int:
        return op.sizes["e"]

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 2.0 * points({a: n for a, n in extents.items() if a not in ("e", "E")}) * (extents["e"] / op.sizes["e"])


class GroupedProduct(_ExpertProduct):
    """Rows sorted by expert; the last operand says where the rows of each expert end."""

    name = "grouped_mm"
    targets = ("flexsearch.grouped_mm", "transformers.grouped_mm_fallback")
    pattern = "s i, e i o, E -> s o"
    words = {**_ExpertProduct.words, "s": "tokens"}

    def trace(self, b: Builder, input: Value, weight: Value, offs: Value) -> Value:
        return b.emit(self.name, [input, weight, offs], b.shape, dtype=b.dtype, short=self.name)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        ends = "" if op.sizes.get("E") == op.sizes.get("e") else f"grouped_mm of shapes {list(shapes)} is none"
        return super().check(op, attributes, shapes) or ends

    def integers_below(self, op: Operator) -> int:
        return op.sizes["s"] + 1  # ends of groups of rows

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.experts import grouped_product

        (first, last), (low, _) = piece.axes["e"], piece.axes["s"]

        def run(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
            ends = [0, *offsets.long().tolist()][first : last + 1]
            return grouped_product(x, weight, [end - low for end in ends])

        return run

    def samples(self) -> Iterable[Sample]:
        from flexsearch.graph.experts import grouped_mm

        yield Sample(grouped_mm, (rand(7, 8), rand(4, 8, 6), torch.tensor([0, 2, 2, 7])))
        yield Sample(grouped_mm, (rand(7, 8), rand(3, 8, 6), torch.tensor([3, 4, 5])))


class ExpertLinear(_ExpertProduct):
    """Rows in any order; the last operand is the expert of each. No row depends on another."""

    name = "expert_linear"
    targets = ("flexsearch.expert_linear",)
    pattern = "b.. i, e i o, b.. -> b.. o"

    @property
    def patterns(self) -> tuple[str, ...]:
        """Weights are (experts, inputs, outputs), or (experts, outputs, inputs) as those of nn.Linear."""
        return "b.. i, e i o, b.. -> b.. o", "b.. i, e o i, b.. -> b.. o"

    def saves(self, op: Operator, *before: Operator) -> Saved:
        """Besides the operands, the rows in the order of experts."""
        return Saved(True, False, halves=-(-2 * op.sizes["i"] // op.sizes["o"]))

    def trace(self, b: Builder, x: Value, weight: Value, experts: Value, transposed: bool) -> Value:
        pattern = self.patterns[transposed]
        return b.emit(self.name, [x, weight, experts], b.shape, pattern, dtype=b.dtype, short=self.name)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.experts import rows_by_expert

        first, transposed = piece.axes["e"][0], str(op.access.inputs[1]) == "e o i"
        return lambda x, weight, experts: rows_by_expert(x, weight, experts, transposed, first)

    def samples(self) -> Iterable[Sample]:
        from flexsearch.graph.experts import expert_linear

        yield Sample(expert_linear, (rand(3, 5, 4), rand(4, 4, 2), integers(4, 3, 5)))
        yield Sample(expert_linear, (rand(4), rand(3, 4, 2), torch.tensor(2)))
        yield Sample(lambda x, w, e: expert_linear(x, w, e, True), (rand(6, 4), rand(3, 2, 4), integers(3, 6) % 2 * 2))


class _Placing(OperatorKind):
    """Of tokens in groups: axis ``g``, whole tokens ``S`` of a group, whole choices ``K`` of a token."""

    roles = {"e": "parameter"}
    follows = {"c": "S"}
    words = {"g": "groups of tokens", "e": "experts", "c": "places of an expert", "d": "features"}

    class attributes(Attributes):
        capacity: Positive

    def integers_below(self, op: Operator) -> int:
        """Places, or experts."""
        return op.sizes.get("e", 1) * op.sizes.get("c", 2)

    def resized(self, op: Operator, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The capacity grows with the tokens of a group."""
        capacity, rest = divmod(int(str(op.attributes["capacity"])) * sizes["S"], op.sizes["S"])
        if rest:
            raise NotationError(
                f"operator {op.name!r} has room for {op.attributes['capacity']} of {op.sizes['S']} tokens at each "
                f"expert, which is no whole number of {sizes['S']}"
            )
        return {**op.attributes, "capacity": capacity}

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if op.pattern != self.pattern:
            return f'pattern "{op.pattern}" of {self.name} must be "{self.pattern}"'
        size = op.sizes.get("c", attributes.capacity)
        return "" if size == attributes.capacity else f"attributes.capacity: {attributes.capacity} is not {size}"


class Slots(_Placing):
    """Place of each choice of an expert (-1: the expert has none left), among ``count`` times ``capacity``."""

    name = "expert_slots"
    targets = ("flexsearch.expert_slots",)
    pattern = "g S K -> g S K"
    saved = NOTHING
    backward = 0.0

    class attributes(_Placing.attributes):
        count: Positive

    def trace(self, b: Builder, experts: Value, count: int, capacity: int) -> Value:
        return b.emit(self.name, [experts], b.shape, attributes={"count": count, "capacity": capacity})

    def flops(self, op: Operator, extents: Extents) -> Any:
        """A count for each choice and each expert."""
        return points(extents) * min(int(str(op.attributes["count"])), 100)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.experts import places

        count, capacity = int(str(op.attributes["count"])), int(str(op.attributes["capacity"]))
        return lambda experts: places(experts, count, capacity)

    def samples(self) -> Iterable[Sample]:
        from flexsearch.graph.experts import slots

        yield Sample(lambda x, e: x * slots(e, 4, 3), (rand(3, 6, 2), integers(4, 3, 6, 2)))


class Dispatch(_Placing):
    """Tokens at their places. Groups and experts can be split: from one to the other tokens move by all-to-all."""

    name = "dispatch"
    targets = ("flexsearch.dispatch",)
    pattern = "g S d, g S K -> g e c d"
    inputs = (2, 2)
    saved = Saved(False, False)

    def trace(self, b: Builder, x: Value, slots: Value, count: int, capacity: int) -> Value:
        return b.emit(self.name, [x, slots], b.shape, attributes={"capacity": capacity}, dtype=b.dtype)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.experts import placed

        experts, part, capacity = piece.axes["e"], piece.axes["c"], op.sizes["c"]
        return lambda x, slots: placed(x, slots, experts, part, capacity)

    def samples(self) -> Iterable[Sample]:
        from flexsearch.graph.experts import dispatch, slots

        yield Sample(lambda x, e: dispatch(x, slots(e, 4, 3), 4, 3), (rand(3, 6, 5), integers(4, 3, 6, 2)))


class Combine(_Placing):
    """Tokens back from their places: a sum over the choices. A piece of the experts gives a partial sum."""

    name = "combine"
    targets = ("flexsearch.combine",)
    pattern = "g e c d, g S K, g S K -> g S d"
    inputs = (3, 3)

    def saves(self, op: Operator, *before: Operator) -> Saved:
        """What lies in the places of each choice, to be multiplied by its weight."""
        return Saved(False, False, halves=2 * op.sizes["K"])

    def trace(self, b: Builder, y: Value, slots: Value, weights: Value) -> Value:
        return b.emit(self.name, [y, slots, weights], b.shape, attributes={"capacity": y.shape[2]}, dtype=b.dtype)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Two for each feature of each choice, of which a piece of the experts has its share."""
        share = extents["e"] / op.sizes["e"] * (extents["c"] / op.sizes["c"])
        return 2.0 * extents["g"] * extents["S"] * extents["K"] * extents["d"] * share

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.experts import collected

        experts, part, capacity = piece.axes["e"], piece.axes["c"], op.sizes["c"]
        return lambda y, slots, weights: collected(y, slots, weights, experts, part, capacity)

    def samples(self) -> Iterable[Sample]:
        from flexsearch.graph.experts import combine, slots

        yield Sample(
            lambda y, e, w: combine(y, slots(e, 4, 3), w), (rand(3, 4, 3, 5), integers(4, 3, 6, 2), rand(3, 6, 2))
        )


for _kind in (GroupedProduct(), ExpertLinear(), Slots(), Dispatch(), Combine()):
    define(_kind)


@rewrite("_grouped_mm")
def _grouped_mm(
    b: Builder,
    x: Value,
    mat2: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: Any = None,
) -> Value:
    """Rows sorted by group times one matrix for each group, or a batch of products."""
    if bias is not None:
        raise b.error("has a bias", "Add it to the result.")
    if offs is None:
        return cast_to(b, matmul(b, x, mat2), out_dtype)
    if x.rank != 2 or mat2.rank != 3:
        raise b.error(
            f"of shapes {list(x.shape)} and {list(mat2.shape)} is not rows times one matrix for each group",
            "Write it so, or as a loop over the groups.",
        )
    products = b.emit("grouped_mm", [x, mat2, offs], b.shape, dtype=x.dtype, short="grouped_mm")
    return cast_to(b, products, out_dtype)
