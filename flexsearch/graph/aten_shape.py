"""Handlers of torch operators that move data: reshapes, permutations, slices, concatenation, padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Any

import torch

from flexsearch.graph.aten import Builder, Shape, Value, aten, cast, empty, letters, opaque


def view(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """``x`` reshaped (-1: whatever remains); ``x`` itself if it has that shape already."""
    known = prod(s for s in shape if s != -1)
    target = tuple(prod(x.shape) // known if s == -1 else s for s in shape)
    if target == x.shape:
        return x
    pattern, sizes = view_pattern(x.shape, target)
    return b.emit("view", [x], target, pattern, sizes=sizes, short="view")


def view_pattern(source: Shape, target: Shape) -> tuple[str, dict[str, int]]:
    """Pattern and axis sizes of a row-major reshape.

    The dimensions fall into the smallest groups of equal size on both sides. In a group where several dimensions are
    made from one, or otherwise, the common divisor of the leading sizes can be split, and everything else is whole.
    """
    names, sizes = iter(letters(3 * (len(source) + len(target)))), {}

    def fresh(size: int, whole: bool) -> str:
        name = next(names).upper() if whole else next(names)
        sizes[name] = size
        return name

    remaining = [[s for s in shape if s > 1] for shape in (source, target)]
    sides: list[list[str]] = [[], []]
    while remaining[0] and remaining[1]:
        group = [[side.pop(0)] for side in remaining]
        while (products := [prod(dims) for dims in group])[0] != products[1]:
            smaller = int(products[1] < products[0])
            group[smaller].append(remaining[smaller].pop(0))
        for side, dimensions in zip(sides, _factor(group[0], group[1], fresh), strict=True):
            side.extend(axes[0] if len(axes) == 1 else f"({' '.join(axes)})" for axes in dimensions)
    texts = []
    for shape, side in zip((source, target), sides, strict=True):
        tokens = iter(side)
        texts.append(" ".join("1" if s == 1 else next(tokens) for s in shape))
    return " -> ".join(texts), sizes


def _factor(left: list[int], right: list[int], fresh: Callable[[int, bool], str]) -> list[list[list[str]]]:
    """Axes of every dimension of the two sides of a group; shared ones, where the factors of both sides nest."""
    if len(left) == len(right) == 1:
        axis = fresh(left[0], False)
        return [[[axis]], [[axis]]]
    total, lead = prod(left), gcd(left[0], right[0])
    spans = [list(pairwise([total, *(total // p for p in accumulate(dims, int.__mul__))])) for dims in (left, right)]
    strides = {total // lead} | {low for side in spans for _, low in side}
    bounds = sorted(strides | {total}, reverse=True)
    if all(outer % inner == 0 for outer, inner in pairwise(bounds)):
        axes = [(o, i, fresh(o // i, o < total or lead == 1)) for o, i in pairwise(bounds)]
        return [[[axis for o, i, axis in axes if high >= o and i >= low] for high, low in side] for side in spans]
    shared = [fresh(lead, False)] if lead > 1 else []
    result = []
    for dims in (left, right):
        rest = [dims[0] // lead, *dims[1:]]
        side = [[fresh(size, True)] if size > 1 else [] for size in rest]
        result.append([shared + side[0], *side[1:]])
    return result


def permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    """Dimension ``i`` of the result is dimension ``dims[i]`` of ``x``."""
    order = [d % x.rank for d in dims]
    if order == list(range(x.rank)):
        return x
    names = letters(x.rank)
    pattern = f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"
    shape = tuple(x.shape[d] for d in order)
    return b.emit("permute", [x], shape, pattern, {"dims": order}, short="permute")


def expand(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """``x`` broadcast to ``shape`` (-1: as it is)."""
    lead = len(shape) - x.rank
    target = tuple(x.shape[i - lead] if s == -1 else s for i, s in enumerate(shape))
    if target == x.shape:
        return x
    names = letters(len(target))
    read = ["1" if x.shape[i - lead] != target[i] else names[i] for i in range(lead, len(target))]
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    return b.emit("expand", [x], target, pattern, {"shape": list(target)}, short="expand")


def cut(b: Builder, x: Value, dim: int, start: int, length: int, step: int = 1) -> Value:
    """Elements start, start + step, ... (``length`` of them) along ``dim``."""
    dim %= x.rank
    if (start, length, step) == (0, x.shape[dim], 1):
        return x
    if not length:
        return empty((*x.shape[:dim], 0, *x.shape[dim + 1 :]), x.dtype)
    names = letters(x.rank)
    read = list(names)
    read[dim] = f"({step}*{names[dim]}+{start})"
    shape = tuple(length if i == dim else s for i, s in enumerate(x.shape))
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    attributes = {"dim": dim, "start": start, "step": step}
    return b.emit("slice", [x], shape, pattern, attributes, short="slice")


def pick(b: Builder, x: Value, dim: int, index: int) -> Value:
    """Element ``index`` along ``dim``, which goes away."""
    dim, index = dim % x.rank, index % x.shape[dim]
    names = letters(x.rank)
    read = [f"({index})" if i == dim else name for i, name in enumerate(names)]
    kept = [name for i, name in enumerate(names) if i != dim]
    shape = tuple(s for i, s in enumerate(x.shape) if i != dim)
    pattern = f"{' '.join(read)} -> {' '.join(kept)}"
    return b.emit("slice", [x], shape, pattern, {"dim": dim, "index": index}, short="select")


@aten("view.default", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as")
@aten("_reshape_alias", "reshape_as")
def _view(b: Builder, self: Value, **_: Any) -> Value:
    return view(b, self, b.shape)


@aten("permute")
def _permute(b: Builder, self: Value, dims: Sequence[int]) -> Value:
    return permute(b, self, dims)


@aten("transpose", "swapaxes", "swapdims")
def _transpose(
    b: Builder, self: Value, dim0: int = 0, dim1: int = 0, axis0: int | None = None, axis1: int | None = None
) -> Value:
    first, second = (dim0 if axis0 is None else axis0) % self.rank, (dim1 if axis1 is None else axis1) % self.rank
    order = list(range(self.rank))
    order[first], order[second] = second, first
    return permute(b, self, order)


@aten("t", "mT", "numpy_T")
def _matrix_transpose(b: Builder, self: Value) -> Value:
    order = list(range(self.rank))
    return permute(b, self, order[:-2] + order[-2:][::-1] if b.target != "aten.numpy_T.default" else order[::-1])


@aten("movedim", "moveaxis")
def _movedim(b: Builder, self: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    sources = [d % self.rank for d in ([source] if isinstance(source, int) else source)]
    places = [d % self.rank for d in ([destination] if isinstance(destination, int) else destination)]
    order: list[int | None] = [None] * self.rank
    for from_, to in zip(sources, places, strict=True):
        order[to] = from_
    rest = iter(d for d in range(self.rank) if d not in sources)
    return permute(b, self, [next(rest) if d is None else d for d in order])


@aten("expand", "expand_as", "broadcast_to")
def _expand(b: Builder, self: Value, **_: Any) -> Value:
    return expand(b, self, b.shape)


@aten("copy")
def _copy(b: Builder, self: Value, src: Value, **_: Any) -> Value:
    """Assignment: the source, broadcast to what it is assigned to and in its dtype."""
    return expand(b, cast(b, src, self.dtype), self.shape)


@aten("broadcast_tensors")
def _broadcast_tensors(b: Builder, tensors: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(expand(b, x, shape) for x, (shape, _) in zip(tensors, b.results, strict=True))


@aten("repeat", "tile")
def _repeat(b: Builder, self: Value, repeats: Sequence[int] = (), dims: Sequence[int] = ()) -> Value:
    counts = list(repeats or dims)
    counts = [1] * (self.rank - len(counts)) + counts
    shape = (1,) * (len(counts) - self.rank) + self.shape
    apart = view(b, self, [n for s in shape for n in (1, s)])
    return view(b, expand(b, apart, [n for pair in zip(counts, shape, strict=True) for n in pair]), b.shape)


@aten("repeat_interleave.self_int")
def _repeat_interleave(b: Builder, self: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    flat, dim = (view(b, self, [-1]), 0) if dim is None else (self, dim % self.rank)
    head, tail = flat.shape[: dim + 1], flat.shape[dim + 1 :]
    return view(b, expand(b, view(b, flat, (*head, 1, *tail)), (*head, repeats, *tail)), b.shape)


@aten("slice.Tensor")
def _slice(
    b: Builder, self: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    indices = range(self.shape[dim])[slice(start, end, step)]
    return cut(b, self, dim, indices.start, len(indices), step)


@aten("narrow")
def _narrow(b: Builder, self: Value, dim: int, start: int, length: int) -> Value:
    return cut(b, self, dim, start % self.shape[dim] if length < self.shape[dim] else 0, length)


@aten("select.int")
def _select(b: Builder, self: Value, dim: int, index: int) -> Value:
    return pick(b, self, dim, index)


@aten("unbind")
def _unbind(b: Builder, self: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(pick(b, self, dim, i) for i in range(self.shape[dim]))


@aten("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _split(b: Builder, self: Value, dim: int = 0, **_: Any) -> tuple[Value, ...]:
    parts, start = [], 0
    for shape, _dtype in b.results:
        parts.append(cut(b, self, dim, start, shape[dim]))
        start += shape[dim]
    return tuple(parts)


@aten("cat", "concat", "concatenate")
def cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation; the axis can be split, and a piece then reads only the operands that it touches.

    Tensors without elements (the KV cache of a decoder's first call, also of shape (0,)) are left out.
    """
    tensors = [cast(b, x, b.dtype) for x in tensors if prod(x.shape)]
    if len(tensors) == 1:
        return tensors[0]
    dim, names = dim % tensors[0].rank, letters(tensors[0].rank)
    operands, offset = [], 0
    for x in tensors:
        operands.append(" ".join(f"({name}-{offset})" if i == dim else name for i, name in enumerate(names)))
        offset += x.shape[dim]
    shape = tuple(offset if i == dim else s for i, s in enumerate(tensors[0].shape))
    pattern = f"{', '.join(operands)} -> {' '.join(names)}"
    return b.emit("cat", tensors, shape, pattern, {"dim": dim}, dtype=b.dtype, short="cat")


@aten("stack")
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= tensors[0].rank + 1
    return cat(b, [view(b, x, (*x.shape[:dim], 1, *x.shape[dim:])) for x in tensors], dim)


@aten("pad", "constant_pad_nd")
def pad(b: Builder, self: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Padding by a constant (negative: cropping); a piece that lies in the padding reads nothing.

    The other modes read far away elements: the padded dimensions are whole.
    """
    before = {self.rank - 1 - i // 2: pad[i] for i in range(0, len(pad), 2)}
    names = letters(self.rank)
    if mode != "constant":
        kept = [name.upper() if i in before else name for i, name in enumerate(names)]
        made = [f"{name}1".upper() if i in before else name for i, name in enumerate(names)]
        pattern = f"{' '.join(kept)} -> {' '.join(made)}"
        target = torch.ops.aten.pad.default
        return opaque(b, target, (self, list(pad), mode, value), {}, lambda _: pattern)[0]
    read = [f"({name}{-before[i]:+d})" if before.get(i) else name for i, name in enumerate(names)]
    for i, (start, size) in enumerate(zip(self.shape, b.shape, strict=True)):
        if start != size and not before.get(i):
            read[i] = f"({names[i]})"
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    attributes = {"pad": list(pad), "value": float(value or 0.0), "dtype": self.dtype}
    return b.emit("pad", [self], b.shape, pattern, attributes, short="pad")


@aten("unfold")
def _unfold(b: Builder, self: Value, dimension: int, size: int, step: int) -> Value:
    """Windows along a dimension, their elements as a new last one: a view of overlapping parts."""
    if not self.rank:
        return view(b, self, b.shape)
    dim, names = dimension % self.rank, letters(self.rank)
    read = " ".join(f"({step}*{name}+k0)" if i == dim else name for i, name in enumerate(names))
    attributes = {"dim": dim, "step": step}
    pattern, sizes = f"{read} -> {' '.join(names)} k0", {names[dim]: b.shape[dim], "k0": size}
    return b.emit("unfold", [self], b.shape, pattern, attributes, sizes=sizes, short="unfold")


@aten("im2col")
def _im2col(
    b: Builder,
    self: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """Windows of an image as columns, (n, channels * window, places)."""
    kernel, dilation, padding, stride = ([*x, *x][:2] for x in (kernel_size, dilation, padding, stride))
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(self.shape[-2:], padding, dilation, kernel, stride, strict=True)
    )
    (s, t), (d, e), (p, q) = stride, dilation, padding
    n = "n " if self.rank == 4 else ""
    return b.emit(
        "im2col", [self], b.shape, f"{n}c ({s}*h+{d}*KH-{p}) ({t}*w+{e}*KW-{q}) -> {n}(c KH KW) (h w)",
        {"kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride, "dtype": self.dtype},
        sizes={"h": rows, "w": columns, "KH": kernel[0], "KW": kernel[1], "c": self.shape[-3]}, short="im2col",
    )  # fmt: skip


@aten("select_scatter", "slice_scatter")
def _scatter(b: Builder, self: Value, src: Value, dim: int = 0, **position: Any) -> Value:
    """``self`` with a part replaced, which is a concatenation of what lies before it, the part, and what lies after."""
    dim %= self.rank
    size, step = self.shape[dim], position.get("step", 1)
    if "index" in position:
        chosen = range(size)[position["index"] % size :][:1]
        src = view(b, src, (*src.shape[:dim], 1, *src.shape[dim:]))
    else:
        chosen = range(size)[slice(position.get("start"), position.get("end"), step)]
    if step != 1:
        raise b.error("assigns to a slice with a step, which has no place in the table; write it with torch.where")
    end = chosen.start + len(chosen)
    parts = [
        *([cut(b, self, dim, 0, chosen.start)] if chosen.start else []),
        src,
        *([cut(b, self, dim, end, size - end)] if end < size else []),
    ]
    return cat(b, parts, dim)


@aten("roll")
def _roll(b: Builder, self: Value, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Value:
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [dims] if isinstance(dims, int) else list(dims)
    x = self if along else view(b, self, [-1])
    for shift, dim in zip(by, along or [0], strict=True):
        size = x.shape[dim]
        if shift % size:
            start = size - shift % size
            x = cat(b, [cut(b, x, dim, start, size - start), cut(b, x, dim, 0, start)], dim)
    return view(b, x, b.shape)


@aten("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "positive", "resolve_conj", "resolve_neg")
def _same(b: Builder, self: Value, **_: Any) -> Value:
    return self


@aten("detach")
def _detach(b: Builder, self: Value) -> Value:
    return b.emit("detach", [self], self.shape, short="detach") if self.grad else self


@aten("atleast_1d", "atleast_2d", "atleast_3d", "ravel")
def _atleast(b: Builder, self: Value) -> Value:
    return view(b, self, b.shape)


@aten("squeeze_copy", "unsqueeze_copy", "view_copy")
def _view_copy(b: Builder, self: Value, **_: Any) -> Value:
    return view(b, self, b.shape)
