"""Operators of many sizes, on which the figures of a device (``topology.kernels``) are measured: each kind of work has
one or two that most of its time goes into in common models. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple

from flexsearch.cost.costed import Costed
from flexsearch.graph.model import Axis, Dtype, Operator, Tensor
from flexsearch.graph.notation import Operand, parse
from flexsearch.measure.cases import Case, whole_case
from flexsearch.topology.kernels import HALF

Kind = Literal["cpu", "cuda"]


class Sizes(NamedTuple):
    """Of the reference operators of a kind of device. ``sides``: rows, columns and indices summed away of matrix
    products, all combinations; ``elements``: of what reads and writes memory, of which the first are so few that
    little but the start of a kernel is left; ``positions``: of attention."""

    sides: tuple[int, ...]
    images: tuple[int, ...]
    elements: tuple[int, ...]
    positions: tuple[int, ...]


SIZES: Final[dict[str, Sizes]] = {
    "cpu": Sizes((16, 128, 1024), (2, 8), (1 << 8, 1 << 16, 1 << 19, 1 << 22), (64, 256, 1024)),
    "cuda": Sizes((128, 1024, 8192), (16, 128), (1 << 8, 1 << 22, 1 << 25, 1 << 27), (512, 2048, 8192)),
}
TYPES: Final[Mapping[str, tuple[Dtype, ...]]] = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
CONVOLUTIONS: Final = ((64, 56, 1), (64, 28, 3), (256, 14, 1), (256, 14, 3), (64, 14, 5))
"""Channels, pixels on a side, and side of the window."""
UNALIGNED: Final = (4095, 8191, 4094, 8190, 4092, 8188)
"""Columns of products that are odd, or multiples of 2 or 4 at most, which matters to tensor cores."""
WARM: Final = 8
FEATURES: Final = 256
"""Of each row that is looked up or normalised."""
HEAD: Final = 64
"""Features of a head of attention."""
TOKENS: Final = 2048
"""Of all sequences that attention is measured on together."""
CLASSES: Final = 4096
"""Of a loss, and rows of a table."""

LINEAR: Final = "b i, o i -> b o"
ATTENTION: Final = "b h q E, b h K E, b h K v -> b h q v"
SAME: Final = "a b -> a b"


def reference(kind: str, dtype: Dtype) -> Iterator[Case]:
    """Operators for the figures of a type, on a kind of device."""
    sizes = SIZES[kind]
    for m, n, k in product(sizes.sides, repeat=3):
        yield _case("linear", LINEAR, {"b": m, "o": n, "i": k}, dtype, weights=(1,))
    if kind == "cuda" and dtype in HALF:
        for columns in UNALIGNED:
            yield _case("linear", LINEAR, {"b": 4096, "o": columns, "i": 1024}, dtype, weights=(1,))
    for positions, causal in product(sizes.positions, (False, True)):
        axes = {"b": max(1, TOKENS // positions), "h": 4, "q": positions, "v": HEAD, "E": HEAD, "K": positions}
        mask = {"causal": causal, "scale": None, "dropout": 0.0, "grouped": False, "has_mask": False, "salt": 0}
        yield _case("attention", ATTENTION, axes, dtype, mask)
    for channels, side, window in CONVOLUTIONS:
        for images in sizes.images:
            yield _convolution(images, channels, side, window, dtype)
    for elements in sizes.elements:
        # Code of small ones is as warm as that of layers that come again and again.
        for _ in range(WARM if elements == sizes.elements[0] else 1):
            yield from _moving(elements, dtype)


def _convolution(images: int, channels: int, side: int, window: int, dtype: Dtype) -> Case:
    """Of images with so many channels and pixels on a side, to as many."""
    edge = window // 2
    axes = {"n": images, "g": 1, "o": channels, "h": side, "w": side, "c": channels, "KH": window, "KW": window}
    how = {"stride": [1, 1], "padding": [edge, edge], "dilation": [1, 1], "groups": 1}
    reads = f"(h+KH-{edge}) (w+KW-{edge})" if edge else "(h+KH) (w+KW)"
    pattern = f"n (g c) {reads}, (g o) c KH KW -> n (g o) h w"
    shapes = (images, channels, side, side), (channels, channels, window, window)
    return _case("conv2d", pattern, axes, dtype, how, weights=(1,), shapes=shapes, image=True)


def _moving(elements: int, dtype: Dtype) -> Iterator[Case]:
    """What reads and writes about so many elements."""
    rows = max(1, elements // FEATURES)
    axes = {"a": rows, "b": FEATURES}
    for target, operands in (("aten.relu.default", 1), ("aten.mul.Tensor", 2)):
        call = {"target": target, "args": [{"tensor": k} for k in range(operands)], "kwargs": {}}
        yield _case("pointwise", ", ".join(["a b"] * operands) + " -> a b", axes, dtype, call)
    half = FEATURES // 2
    yield _case("cat", f"a (b), a (b-{half}) -> a b", axes, dtype, {"dim": 1}, shapes=((rows, half),) * 2)
    norm = {"eps": 1e-5, "has_weight": True, "has_bias": True}
    yield _case("layer_norm", "a D, D, D -> a D", {"a": rows, "D": FEATURES}, dtype, norm, weights=(1, 2))
    yield _case("softmax", SAME, axes, dtype, {"dim": 1})
    table = {"b": rows, "d": FEATURES, "v": CLASSES}
    yield _case("embedding", "b, v d -> b d", table, dtype, {"padding_idx": None}, weights=(1,), indices=(0,))
    classes = min(elements, CLASSES)
    how = {
        "reduction": "sum", "ignore_index": -100, "label_smoothing": 0.0, "has_count": False, "has_weight": False,
        "probabilities": False,
    }  # fmt: skip
    yield _case("cross_entropy", "n C, n -> ", {"n": elements // classes, "C": classes}, dtype, how, indices=(1,))
    side = max(2, round((elements / 64) ** 0.5) // 2)  # of what comes out of the pool, a fourth of what goes in
    how = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "ceil_mode": False}
    axes, pattern = {"n": 2, "c": 32, "h": side, "w": side, "KH": 3, "KW": 3}, "n c (2*h+KH-1) (2*w+KW-1) -> n c h w"
    yield _case("max_pool2d", pattern, axes, dtype, how, shapes=((2, 32, 2 * side, 2 * side),), image=True)


def _case(
    kind: str, pattern: str, sizes: Mapping[str, int], dtype: Dtype, attributes: Mapping[str, Any] | None = None, *,
    weights: Sequence[int] = (), indices: Sequence[int] = (), shapes: Sequence[tuple[int, ...]] = (),
    image: bool = False,
) -> Case:  # fmt: skip
    """An operator alone. ``weights``, ``indices``: operands that are parameters, and integers; ``shapes``: of operands,
    where they do not follow from the axes."""
    access = parse(pattern)
    inputs = tuple(
        _tensor(f"x{k}", shapes[k] if shapes else _shape(operand, sizes), "int64" if k in indices else dtype,
                weight=k in weights)
        for k, operand in enumerate(access.inputs)
    )  # fmt: skip
    outputs = tuple(_tensor(f"y{k}", _shape(o, sizes), dtype) for k, o in enumerate(access.outputs))
    op = Operator(
        name=kind, kind=kind, pattern=pattern, inputs=tuple(t.name for t in inputs),
        axes=tuple(Axis(name=name, size=sizes[name], role="attribute") for name in access.axes),
        outputs=tuple(t.name for t in outputs), attributes=dict(attributes or {}),
    )  # fmt: skip
    costed = Costed(op, inputs, outputs, tuple(t.floating for t in inputs))
    return whole_case(costed, (image,) * len(inputs))


def _shape(operand: Operand, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[axis] for axis in dimension.axes) for dimension in operand.dimensions)


def _tensor(name: str, shape: tuple[int, ...], dtype: Dtype, weight: bool = False) -> Tensor:
    return Tensor(
        name=name, shape=shape, dtype=dtype, kind="parameter" if weight else "activation", requires_grad=weight
    )  # fmt: skip
