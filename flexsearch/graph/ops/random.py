"""Random numbers that are a function of the element's place in the whole tensor, so that any split draws the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import pi
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box
from flexsearch.graph.ops.attributes import Share, Signed
from flexsearch.graph.ops.base import (
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.pointwise import cast, pointwise
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

_WORD = (1 << 32) - 1


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of ``value``."""
    return ((value + (1 << 31)) & _WORD) - (1 << 31)


# A Weyl sequence, then the two rounds of Chris Wellons' hash "lowbias32" (github.com/skeeto/hash-prospector), less the
# last shift: only the high bits are compared with the threshold.
_WEYL, _FIRST, _SECOND = _signed(0x9E3779B1), _signed(0x7FEB352D), _signed(0x846CA68B)
_AT_ONCE, _PARTS = 1 << 14, 4  # elements of a mask from which on it is made in parts, and how many
_HIGH = 0xC2B2AE3D  # spreads tensors of more than 2**32 elements


def _key(*words: int) -> tuple[int, int]:
    """Two 32-bit keys from integers, by splitmix64."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return _signed(state), _signed(state >> 32)


def keep_mask(
    shape: tuple[int, ...], box: Box, p: float, context: KernelContext, salt: int, device: torch.device
) -> Tensor:
    """Bool tensor of the region ``box`` of a tensor of ``shape``: each element is kept with probability 1 - p."""
    key, threshold = _key(context.seed, context.step, salt), _signed(round(p * (1 << 32)) - (1 << 31))
    rows, columns = _rows(shape, box, key[0], device)
    if device.type == "cpu" and len(rows) * columns >= _AT_ONCE:
        # Whole, the words would take twice the memory of a float32 result; here they are through before there is one.
        mask = torch.empty(len(rows), columns, dtype=torch.bool)
        for part, bits in zip(mask.chunk(_PARTS), rows.chunk(_PARTS), strict=True):
            torch.ge(_hashed(bits, columns, key[1]), threshold, out=part)
    else:
        mask = _hashed(rows, columns, key[1]) >= threshold
    return mask.reshape([high - low for low, high in box])


def random_bits(shape: tuple[int, ...], box: Box, key: tuple[int, int], device: torch.device) -> Tensor:
    """Random int32 numbers for the region ``box`` of a tensor of ``shape``; their high bits are the good ones.

    A counter-based generator: a number depends on the key and the element's row-major index alone.
    """
    rows, columns = _rows(shape, box, key[0], device)
    return _hashed(rows, columns, key[1]).reshape([high - low for low, high in box])


def _rows(shape: tuple[int, ...], box: Box, first: int, device: torch.device) -> tuple[Tensor, int]:
    """The sequence at the first element of each row of a region, int32, and the length of its rows: the index is made
    as rows + columns in one pass; columns take in as many dimensions as lie contiguous."""
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    split, columns, start = len(shape), 1, 0
    while split > 0 and columns < 1024 and (split == len(shape) or columns == strides[split - 1]):
        split -= 1
        low, high = box[split]
        start += low * strides[split]
        columns *= high - low
    rows = torch.full((1,), start, dtype=torch.int64, device=device)
    for i in range(split):
        index = torch.arange(*box[i], dtype=torch.int64, device=device) * strides[i]
        if i == 0:  # what lies 2**32 elements apart must differ; of the leading index alone, as any split finds that
            index = index + (index >> 32) * _HIGH
        rows = (rows[:, None] + index).reshape(-1)
    rows = (rows & _WORD) * _WEYL + first  # no overflow: 32 bits times 31
    rows = ((rows + (1 << 31)) & _WORD) - (1 << 31)
    return rows.to(torch.int32), columns


def _hashed(rows: Tensor, columns: int, second: int) -> Tensor:
    """The random numbers of rows."""
    x = rows[:, None] + torch.arange(columns, dtype=torch.int32, device=rows.device) * _WEYL
    shifted = torch.bitwise_right_shift(x, 15)
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(_FIRST).add_(second)
    torch.bitwise_right_shift(x, 16, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(_SECOND)


class Dropout(OperatorKind):
    """Each element is zero with probability ``p``, and divided by 1 - ``p`` otherwise."""

    name = "dropout"
    pattern = "a.. -> a.."
    backward = 0.5
    saved = Saved(False, False, extra=1)  # a mask of bytes
    trivial = True

    class attributes(Attributes):
        p: Share
        salt: Signed = 0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_form(op, "a.. -> a..", shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        p, salt = float(str(op.attributes["p"])), int(str(op.attributes.get("salt", 0)))
        shape, box = shapes[0], piece.outputs[0]
        if p <= 0:
            return lambda x: x
        if p >= 1:
            return lambda x: x * 0
        scale: Any = 1 / (1 - p)
        return lambda x: (x * keep_mask(shape, box, p, context, salt, x.device)).mul_(scale)

    def saves(self, op: Operator, *before: Operator) -> Saved:
        return self.saved if op.attributes.get("p", 1.0) else Saved(False, False, alias=True)

    def is_free(self, op: Operator) -> bool:
        return op.attributes.get("p") == 0

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: torch.nn.functional.dropout(x, 0.4, True), (rand(4, 3, 5),))


class _Drawn(OperatorKind):
    """Numbers from one distribution; the operand is a scalar that says nothing but where and of what dtype."""

    backward = 0.0
    cost = 10.0
    """FLOPs for each number."""
    count = 1
    """Random words of 32 bits for each number."""

    class attributes(Attributes):
        salt: Signed

    def flops(self, op: Operator, extents: Extents) -> Any:
        return self.cost * output_elements(op, extents)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_form(op, " -> a..", shapes)

    def transform(self, op: Operator) -> Callable[..., Tensor]:
        """Takes ``count`` tensors of random int32 and the dtype of the result."""
        raise AssertionError(f"{self.name} has no distribution")

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        salt, box, transform = int(str(op.attributes["salt"])), piece.outputs[0], self.transform(op)
        shape = tuple(op.sizes[dimension.axes[0]] for dimension in op.access.outputs[0].dimensions)

        def run(x: Tensor) -> Tensor:
            words = (context.seed, context.step, salt)
            keys = [_key(*words), *(_key(*words, more) for more in range(1, self.count))]
            return transform(*(random_bits(shape, box, key, x.device) for key in keys), x.dtype)

        return run


class Uniform(_Drawn):
    """Numbers in [0, 1) with 24 bits."""

    name = "uniform"

    def transform(self, op: Operator) -> Callable[..., Tensor]:
        return lambda bits, dtype: ((bits >> 8) & 0xFFFFFF).to(dtype) / (1 << 24)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x * torch.rand(4, 3, dtype=x.dtype), (rand(4, 3),))
        yield Sample(lambda x: x * torch.empty_like(x).bernoulli_(0.5), (rand(4, 3),))


class Normal(_Drawn):
    """Normal numbers of mean 0 and variance 1, by the transform of Box and Muller, in float64."""

    name = "normal"
    cost = 30.0
    count = 2

    def transform(self, op: Operator) -> Callable[..., Tensor]:
        def run(radius: Tensor, angle: Tensor, dtype: torch.dtype) -> Tensor:
            length = (-2 * _open(radius).log()).sqrt()
            return (length * (2 * pi * _open(angle)).cos()).to(dtype)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x * torch.randn(4, 3, 5, dtype=x.dtype), (rand(4, 3, 5),))
        yield Sample(lambda x: x + torch.normal(x.detach(), 2.0), (rand(4, 3),))


class Exponential(_Drawn):
    """Numbers with the density exp(-x)."""

    name = "exponential"
    cost = 20.0

    def transform(self, op: Operator) -> Callable[..., Tensor]:
        return lambda bits, dtype: (-_open(bits).log()).to(dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: torch.nn.functional.gumbel_softmax(x, 0.5), (rand(4, 5),))


class Randint(_Drawn):
    """Integers in [``low``, ``high``)."""

    name = "randint"

    class attributes(Attributes):
        salt: Signed
        low: Annotated[int, Field(ge=-(2**48), le=2**48)]
        high: Annotated[int, Field(ge=-(2**48), le=2**48)]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if not 0 < attributes.high - attributes.low <= 1 << 31:
            return f"attributes.high: {attributes.high} is not 1 to 2^31 above {attributes.low}"
        return super().check(op, attributes, shapes)

    def transform(self, op: Operator) -> Callable[..., Tensor]:
        low, high = int(str(op.attributes["low"])), int(str(op.attributes["high"]))

        def run(bits: Tensor, dtype: torch.dtype) -> Tensor:
            positive = bits.to(torch.int64) + (1 << 31)  # 32 bits, of which the product keeps the high ones
            return ((positive * (high - low) >> 32) + low).to(dtype)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x * torch.randint(-2, 7, (4, 3)) + torch.randint_like(x, 5), (rand(4, 3),))


def _open(bits: Tensor) -> Tensor:
    """Numbers in the open interval (0, 1), in float64."""
    return (bits.to(torch.float64) + ((1 << 31) + 0.5)) / (1 << 32)


for _kind in (Dropout(), Uniform(), Normal(), Exponential(), Randint()):
    define(_kind)


def draw(b: Builder, kind: str = "uniform", dtype: str | None = None, **more: Any) -> Value:
    """Numbers of the shape of the torch operator at hand. Torch's own generator would draw others for other pieces."""
    dtype = dtype or b.dtype
    data = torch.zeros((), dtype=getattr(torch, dtype))
    place = Value((), dtype, "constant", "place", weight=True, data=data)
    pattern, attributes = f" -> {' '.join(letters(len(b.shape)))}", {"salt": b.salt, **more}
    drawn = b.emit(kind, [place], b.shape, pattern, attributes, short="rand", auxiliary=True)
    drawn.weight = False
    if b.shape and b.shape[0] == b.batch:  # as long as the batch: each sample has numbers of its own
        drawn.sample = (True,) + (False,) * (len(b.shape) - 1)
        b.drafts[-1].roles[letters(1)[0]] = "sample"
    return drawn


def scaled(b: Builder, x: Value, scale: float | Value, shift: float | Value) -> Value:
    """``x * scale + shift``."""
    for target, other, neutral in (("mul", scale, 1), ("add", shift, 0)):
        if isinstance(other, Value):
            x = pointwise(b, f"{target}.Tensor", (x, other))
        elif other != neutral:
            x = pointwise(b, f"{target}.Scalar", (x, other))
    return x


@rewrite("rand", "rand_like")
def _rand(b: Builder, **_: Any) -> Value:
    return draw(b)


@rewrite("bernoulli.p", "bernoulli.default", "bernoulli.out", "bernoulli.Tensor")
def _bernoulli(b: Builder, x: Value, p: float | Value | None = None, **_: Any) -> Value:
    """1 with a probability (that of ``x``, where ``p`` is missing), else 0."""
    chance = x if p is None else p
    dtype = b.dtype if b.dtype.startswith(("float", "bfloat")) else "float32"
    overload = "lt.Tensor" if isinstance(chance, Value) else "lt.Scalar"
    return cast(b, pointwise(b, overload, (draw(b, dtype=dtype), chance)), b.dtype)


@rewrite("uniform")
def _uniform(b: Builder, x: Value, to: float = 1.0, **call: Any) -> Value:
    low = float(call.get("from", 0.0))
    drawn = pointwise(b, "mul.Scalar", (draw(b), to - low))
    return pointwise(b, "add.Scalar", (drawn, low))


@rewrite("randn", "randn_like")
def _randn(b: Builder, **_: Any) -> Value:
    return draw(b, "normal")


@rewrite("normal", "normal_functional")
def _normal(b: Builder, x: Value | None = None, mean: float | Value = 0.0, std: float | Value = 1.0, **_: Any) -> Value:
    return scaled(b, draw(b, "normal"), std, mean)


@rewrite("exponential")
def _exponential(b: Builder, x: Value, lambd: float = 1.0, **_: Any) -> Value:
    return scaled(b, draw(b, "exponential"), 1 / lambd, 0)


@rewrite("randint", "randint_like")
def _randint(b: Builder, high: int, low: int = 0, **_: Any) -> Value:
    """Integers, in whatever dtype is asked for."""
    if not isinstance(high, int) or not 0 < high - low <= 1 << 31:
        raise b.error("draws integers from a range of more than 2^31", "Draw them outside the model and pass them in.")
    return draw(b, "randint", low=low, high=high)


@rewrite("native_dropout", "dropout")
def _dropout(b: Builder, input: Value, p: float, train: bool | None = True) -> Any:
    out = input
    if train is not False and p > 0:
        out = b.emit("dropout", [input], input.shape, attributes={"p": p, "salt": b.salt}, short="dropout")
    return out if len(b.results) == 1 else (out, None)
