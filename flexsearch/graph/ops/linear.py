"""Contractions: linear layers and matrix products. A piece of a summed axis gives a partial sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops.attributes import Scalar
from flexsearch.graph.ops.base import (
    INPUTS,
    MANY,
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    WeightGradient,
    define,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast_shapes, fit, letters
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.pointwise import pointwise
from flexsearch.graph.ops.shape import view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Contraction(OperatorKind):
    """Products of elements, summed over the axes that the output lacks: two FLOPs for each point."""

    contraction = True
    saved = INPUTS

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 2.0 * points(extents)


class Linear(Contraction):
    """``x @ weight.T + bias``; the bias is added by the first piece along the input features."""

    name = "linear"
    targets = ("aten.linear",)
    pattern = "b.. i, o i, +o -> b.. o"
    roles = {"o": "parameter", "i": "reduction"}
    words = {"o": "output features", "i": "input features (partial sums)"}
    inputs = (2, 3)
    saved_without_weights = NOTHING

    def trace(self, b: Builder, input: Value, weight: Value, bias: Value | None = None, **_: Any) -> Value:
        if weight.rank == 1:
            product = matmul(b, input, weight)
            return product if bias is None else pointwise(b, "add.Tensor", (product, bias))
        operands = [x for x in (input, weight, bias) if x is not None]
        return b.emit(self.name, operands, b.shape, dtype=b.dtype, short="linear")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        x, weight, y = shapes[0], shapes[1], shapes[-1]
        if len(weight) != 2 or not x or (x[:-1], x[-1], y[-1:]) != (y[:-1], weight[1], weight[:1]):
            return f"linear of shapes {list(shapes)} is no product"
        first, second, result = ([d.axes for d in o.dimensions] for o in (*op.access.inputs[:2], *op.access.outputs))
        if first[-1] != second[1] or second[0] != result[-1] or first[:-1] != result[:-1]:
            return f'pattern "{op.pattern}" is not that of linear'
        return ""

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return F.linear

    def weight_gradient(self, op: Operator, piece: Piece, shapes: Shapes) -> WeightGradient:
        biased = len(piece.inputs) > 2 and piece.inputs[2] is not None

        def gradients(x: Tensor, gradient: Tensor) -> list[Tensor]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            weight = rows.mT @ x.reshape(-1, x.shape[-1])
            return [weight, rows.sum(0)] if biased else [weight]

        return gradients

    def samples(self) -> Iterable[Sample]:
        yield Sample(F.linear, (rand(4, 3, 6), rand(5, 6), rand(5)))
        yield Sample(F.linear, (rand(4, 6), rand(5, 6)))


class ProductAndSum(Contraction):
    """``beta * bias + alpha * (a @ b)`` (torch.addmm)."""

    name = "addmm"
    targets = ("aten.addmm",)
    roles = {"o": "parameter", "i": "reduction"}
    words = {"o": "output features", "i": "input features (partial sums)"}
    inputs = (3, 3)

    class attributes(Attributes):
        alpha: Scalar = 1.0
        beta: Scalar = 1.0

    def trace(
        self, b: Builder, x: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1, **_: Any
    ) -> Value:
        pattern = f"+{' '.join(fit('bo', b.shape, x.shape))}, b i, i o -> b o"
        return b.emit(self.name, [x, mat1, mat2], b.shape, pattern, {"beta": beta, "alpha": alpha}, dtype=b.dtype)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        alpha: Any = op.attributes.get("alpha", 1)
        beta: Any = op.attributes.get("beta", 1)

        def run(bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
            if bias is not None:
                return torch.addmm(bias, a, b, alpha=alpha, beta=beta)
            y = a @ b
            return y if alpha == 1 else y * alpha

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (rand(5), rand(4, 6), rand(6, 5)))


class Einsum(Contraction):
    """A product of any number of operands by their axes."""

    name = "einsum"
    inputs = (1, MANY)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """torch.matmul where the pattern is one, otherwise torch.einsum, without the broadcast dimensions (``1``)."""
        inputs, output = op.access.inputs, op.access.outputs[0]
        if len(inputs) == 2 and (flips := _as_matmul(inputs[0], inputs[1], output)) is not None:
            first, second = flips
            return lambda a, b: (a.mT if first else a) @ (b.mT if second else b)
        letter = {axis: i for i, axis in enumerate(op.access.axes)}
        subscripts = [[letter[d.axes[0]] for d in operand.dimensions if d.axes] for operand in inputs]
        fixed = [tuple(i for i, d in enumerate(operand.dimensions) if not d.axes) for operand in inputs]
        result = [letter[d.axes[0]] for d in output.dimensions if d.axes]
        added = [i for i, d in enumerate(output.dimensions) if not d.axes]

        def run(*operands: Tensor) -> Tensor:
            arguments: list[Any] = []
            for x, drop, subscript in zip(operands, fixed, subscripts, strict=True):
                arguments += [x.squeeze(drop) if drop else x, subscript]
            y: Tensor = torch.einsum(*arguments, result)
            for position in added:
                y = y.unsqueeze(position)
            return y

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(torch.matmul, (rand(3, 4, 6), rand(6, 5)))
        yield Sample(torch.inner, (rand(3, 4), rand(2, 5, 4)))
        yield Sample(
            lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2), (rand(4, 5), rand(3, 4, 6), rand(3, 6, 5))
        )
        yield Sample(torch.addmv, (rand(4), rand(4, 6), rand(6)))
        yield Sample(F.bilinear, (rand(2, 3, 4), rand(2, 3, 5), rand(6, 4, 5), rand(6)))
        yield Sample(lambda a, b, c: torch.einsum("bij,bkj,k->bi", a, b, c), (rand(3, 4, 6), rand(3, 5, 6), rand(5)))
        yield Sample(lambda a, b: torch.tensordot(a, b, ([1, 2], [0, 2])), (rand(3, 4, 6), rand(4, 5, 6)))
        yield Sample(lambda a, b: torch.kron(a, b).sum(1) + torch.einsum("ij->i", a).mean(), (rand(2, 3), rand(4, 5)))
        yield Sample(lambda a, b: torch.einsum("bii,ij->bj", a, b), (rand(3, 4, 4), rand(4, 5)))
        yield Sample(lambda x: (x.trace(), x.diagonal(), x.diagonal(-2), torch.diag(x, 1)), (rand(5, 4),))
        yield Sample(lambda x: (x.diagonal(1, 0, 2), torch.linalg.diagonal(x)), (rand(5, 4, 5),))


def _as_matmul(a: Operand, b: Operand, output: Operand) -> tuple[bool, bool] | None:
    """Whether to flip the last two dimensions of each operand for ``a @ b`` to be the output; None if it is none."""
    names = [[d.axes[0] if d.axes else "1" for d in operand.dimensions] for operand in (a, b, output)]
    if any(len(n) < 2 or len(set(n) - {"1"}) != len([x for x in n if x != "1"]) for n in names):
        return None
    left, right, result = names
    i, k = result[-2:]
    if "1" in (i, k) or len(result) != max(len(left), len(right)):
        return None
    for position, axis in enumerate(reversed(result[:-2]), 3):
        present = {n[-position] for n in (left, right) if len(n) >= position}
        if present - {axis, "1"} or axis not in present:
            return None
    first, second = i != left[-2], k != right[-1]
    row = left[-2:][::-1] if first else left[-2:]
    column = right[-2:][::-1] if second else right[-2:]
    if row[0] != i or column[1] != k or row[1] != column[0] or row[1] in {"1", *result}:
        return None
    return first, second


for _kind in (Linear(), ProductAndSum(), Einsum()):
    define(_kind)


def contract(b: Builder, operands: Sequence[Value], pattern: str, short: str) -> Value:
    """An einsum; the output's shape follows from the pattern."""
    sizes: dict[str, int] = {}
    left, right = pattern.split("->")
    for text, x in zip(left.split(","), operands, strict=True):
        sizes.update({n: s for n, s in zip(text.split(), x.shape, strict=True) if n != "1"})
    shape = tuple(sizes.get(n, 1) for n in right.split())
    return b.emit("einsum", operands, shape, pattern, dtype=b.dtype, short=short)


@rewrite("matmul", "mm", "bmm", "mv", "dot")
def _matmul(b: Builder, x: Value, other: Value | None = None, **named: Any) -> Value:
    right = other if other is not None else next(iter(named.values()))  # mat2, vec, tensor, by overload
    return matmul(b, x, right)


def matmul(b: Builder, left: Value, right: Value) -> Value:
    """Matrix product of the last two dimensions, batch dimensions broadcast; vectors as in torch.matmul."""
    rows, columns = ["i"] if left.rank > 1 else [], ["k"] if right.rank > 1 else []
    batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    names = [f"b{n}" for n in range(len(batch))]
    first = [*fit(names, batch, left.shape[:-2]), *rows, "j"]
    second = [*fit(names, batch, right.shape[:-2]), "j", *columns]
    return contract(
        b, [left, right], f"{' '.join(first)}, {' '.join(second)} -> {' '.join([*names, *rows, *columns])}", "matmul"
    )


@rewrite("inner")
def _inner(b: Builder, x: Value, other: Value) -> Value:
    """Sums of products along the last dimensions."""
    if not x.rank or not other.rank:
        return pointwise(b, "mul.Tensor", (x, other))
    left, right = ([f"{side}{i}" for i in range(v.rank - 1)] for side, v in (("a", x), ("b", other)))
    return contract(
        b, [x, other], f"{' '.join([*left, 'k'])}, {' '.join([*right, 'k'])} -> {' '.join(left + right)}", "inner"
    )


@rewrite("outer", "ger")
def _outer(b: Builder, x: Value, vec2: Value) -> Value:
    return contract(b, [x, vec2], "i, j -> i j", "outer")


@rewrite("kron")
def _kron(b: Builder, x: Value, other: Value) -> Value:
    """Each element of ``x`` times the other operand, in blocks."""
    rank = max(x.rank, other.rank)
    shapes = [(1,) * (rank - v.rank) + v.shape for v in (x, other)]
    left = view(b, x, [n for size in shapes[0] for n in (size, 1)])
    right = view(b, other, [n for size in shapes[1] for n in (1, size)])
    return view(b, pointwise(b, "mul.Tensor", (left, right)), b.shape)


@rewrite("tensordot")
def _tensordot(b: Builder, x: Value, other: Value, dims_self: Sequence[int], dims_other: Sequence[int]) -> Value:
    left, right = ([f"{side}{i}" for i in range(v.rank)] for side, v in (("a", x), ("b", other)))
    for i, j in zip(dims_self, dims_other, strict=True):
        right[j] = left[i]
    kept = [n for n in (*left, *right) if (n in left) + (n in right) == 1]
    return contract(b, [x, other], f"{' '.join(left)}, {' '.join(right)} -> {' '.join(kept)}", "tensordot")


@rewrite("einsum")
def _einsum(b: Builder, equation: str, tensors: Sequence[Value], **_: Any) -> Value:
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    operands = left.split(",")
    if not arrow:  # implicit output: what occurs once, in alphabetical order
        right = "..." * ("..." in left) + "".join(c for c in sorted(set(left) - set(".,")) if left.count(c) == 1)
    # Upper-case letters mean whole axes in our notation, so every letter gets a name of its own.
    rename = dict(zip(dict.fromkeys(c for c in text if c.isalpha()), letters(52), strict=False))
    twice = {c for operand in operands for c in operand if c.isalpha() and operand.count(c) > 1}
    rename |= {c: rename[c].upper() for c in twice}  # a diagonal: its pieces would not fill the operand
    ranks = [x.rank - len(o.replace("...", "")) for o, x in zip(operands, tensors, strict=True)]
    spread = max((rank for o, rank in zip(operands, ranks, strict=True) if "..." in o), default=0)

    def axes(operand: str, dots: int) -> list[str]:
        head, _, tail = operand.partition("...")
        return [rename[c] for c in head] + [f"b_{i}" for i in range(spread - dots, spread)] + [rename[c] for c in tail]

    named = [axes(o, rank) for o, rank in zip(operands, ranks, strict=True)]
    size: dict[str, int] = {}
    for own, x in zip(named, tensors, strict=True):
        size.update({n: s for n, s in zip(own, x.shape, strict=True) if s > 1 or n not in size})
    read = [" ".join(fit(o, tuple(size[n] for n in o), x.shape)) for o, x in zip(named, tensors, strict=True)]
    output_axes = axes(right, spread if "..." in right else 0)
    return contract(b, tensors, f"{', '.join(read)} -> {' '.join(output_axes)}", "einsum")


@rewrite("baddbmm", "addmv", "addbmm")
def _product_and_sum(b: Builder, x: Value, *, beta: float = 1, alpha: float = 1, **factors: Value) -> Value:
    """``beta * x + alpha *`` the product of matrices, of a matrix and a vector, or the sum of products of a batch."""
    left, right = factors.values()
    product = contract(b, [left, right], "b i j, b j k -> i k", "matmul") if "addbmm" in b.target.split(".") else None
    product = product or matmul(b, left, right)
    if alpha != 1:
        product = pointwise(b, "mul.Tensor", (product, alpha))
    return product if beta == 0 else pointwise(b, "add.Tensor", (product, x), {"alpha": beta} if beta != 1 else {})


@rewrite("bilinear")
def _bilinear(b: Builder, input1: Value, input2: Value, weight: Value, bias: Value | None = None) -> Value:
    """Each output feature is a bilinear form of the features of two inputs."""
    batch = " ".join(letters(input1.rank - 1))
    form = contract(b, [input1, weight, input2], f"{batch} i0, o0 i0 j0, {batch} j0 -> {batch} o0", "bilinear")
    return form if bias is None else pointwise(b, "add.Tensor", (form, bias))
