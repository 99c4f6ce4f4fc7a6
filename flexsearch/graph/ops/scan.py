"""What runs along a dimension, which is whole: cumulative sums, sorting, reversal, search in what is sorted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log2, prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import AlongCall, Form, is_whole
from flexsearch.graph.ops.base import (
    NOTHING,
    OUTPUTS,
    Extents,
    OperatorKind,
    Sample,
    define,
    input_elements,
    integers,
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters
from flexsearch.graph.ops.calls import CallAttributes, check_call
from flexsearch.graph.ops.join import cat
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.pointwise import pointwise
from flexsearch.graph.ops.reduce import reduce
from flexsearch.graph.ops.shape import cut, permute, view
from flexsearch.graph.ops.value import Value

if TYPE_CHECKING:
    pass


class Scan(AlongCall):
    """Each element of the result is made of those before it, or the order is reversed."""

    name = "scan"
    forms: Mapping[str, Form] = {
        "aten.cumsum": Form(1, 1, NOTHING),
        **dict.fromkeys(("aten.cumprod", "aten.logcumsumexp"), Form(1)),
        **dict.fromkeys(("aten.cummax", "aten.cummin"), Form(1, 2, OUTPUTS)),
        "aten.flip": Form(1, 1, NOTHING),
    }
    targets = tuple(forms)

    def samples(self) -> Iterable[Sample]:
        x = rand(4, 6, 3)
        yield Sample(lambda x: (x.cumsum(1), x.cumsum(-1, dtype=torch.float32), x.cumprod(0)), (x,))
        yield Sample(lambda x: (x.logcumsumexp(1), *x.cummax(2), *x.cummin(1), x.flip(0, 2)), (x,))
        yield Sample(lambda x, i: x * i.cumsum(1), (rand(4, 6), integers(3, 4, 6)))


class Sort(AlongCall):
    """Elements in order and where they were; about log2 comparisons for each."""

    name = "sort"
    forms: Mapping[str, Form] = {
        "aten.sort.default": Form(1, 2, OUTPUTS),
        "aten.sort.stable": Form("dim", 2, OUTPUTS),
        "aten.argsort.default": Form(1, 1, NOTHING),
        "aten.argsort.stable": Form("dim", 1, NOTHING),
        "aten.topk.default": Form(2, 2, OUTPUTS),
    }
    targets = tuple(forms)

    def flops(self, op: Operator, extents: Extents) -> Any:
        whole = [op.sizes[d.axes[0]] for d in op.access.outputs[0].dimensions if d.axes and is_whole(d)]
        return input_elements(op, extents) * (1 + ceil(log2(max(whole, default=1))))

    def samples(self) -> Iterable[Sample]:
        x = rand(4, 6, 3)
        yield Sample(lambda x: (*x.sort(1), *x.sort(dim=0, descending=True, stable=True), *x.topk(2, 1)), (x,))
        yield Sample(lambda x: (x.argsort(1), x.argsort(dim=1, stable=True), x.msort(), *x.topk(1)), (x,))


class Search(OperatorKind):
    """Where values would stand among sorted ones, or whether they are among others at all; these are whole."""

    name = "search"
    targets = ("aten.searchsorted.Tensor", "aten.bucketize.Tensor", "aten.isin.Tensor_Tensor")
    attributes = CallAttributes
    inputs = (2, 3)
    saved = NOTHING

    def access(self, b: Builder, *args: Any, **call: Any) -> str:
        if "test_elements" in call:
            axes = " ".join(letters(call["elements"].rank))
            return f"{axes}, {' '.join(f'S{i}' for i in range(call['test_elements'].rank))} -> {axes}"
        if "boundaries" in call:
            axes = " ".join(letters(call["x"].rank))
            return f"{axes}, S -> {axes}"
        batch = letters(call["sorted_sequence"].rank - 1)
        values = letters(call["x"].rank) if not batch else [*batch, "v"]
        table = " ".join([*batch, "S"])
        sorter = f", {table}" if call["sorter"] is not None else ""
        return f"{table}, {' '.join(values)}{sorter} -> {' '.join(values)}"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if problem := check_call(op, attributes):
            return problem
        if attributes.target not in self.targets:
            return f"attributes.target: {attributes.target!r} is none of {', '.join(self.targets)}"
        table = int(attributes.target != "aten.searchsorted.Tensor")
        dimensions = op.access.inputs[table].dimensions
        whole = all(map(is_whole, dimensions[-1:] if not table else dimensions))
        return "" if whole else f'pattern "{op.pattern}" does not keep the sorted values whole'

    def flops(self, op: Operator, extents: Extents) -> Any:
        whole = prod(size for axis, size in op.sizes.items() if axis.isupper())
        return output_elements(op, extents) * (1 + ceil(log2(max(whole, 1))))

    def samples(self) -> Iterable[Sample]:
        table = rand(6).sort()[0]
        yield Sample(lambda x, t: torch.bucketize(x, t) * x, (rand(4, 3), table))
        yield Sample(lambda x, t: torch.searchsorted(t, x, right=True) * x, (rand(4, 3), table))
        yield Sample(lambda x, t: torch.searchsorted(t, x) * x, (rand(4, 5), rand(4, 6).sort(1)[0]))
        yield Sample(lambda x, t: torch.searchsorted(t, x, sorter=t.argsort(1)) * x, (rand(4, 5), rand(4, 6)))
        yield Sample(lambda x, i, t: torch.isin(i, t) * x, (rand(4, 5), integers(6, 4, 5), integers(6, 2, 2)))


_SCAN, _SORT = Scan(), Sort()
for _kind in (_SCAN, _SORT, Search()):
    define(_kind)


@rewrite("msort")
def _msort(b: Builder, x: Value) -> Value:
    results = (*b.results, (b.shape, "int64"))
    values: Value = _SORT.append(b, torch.ops.aten.sort.default, {"x": x, "dim": 0}, results)[0]
    return values


def flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    """``x`` in reverse order along ``dims``."""
    call = {"x": x, "dims": list(dims)}
    value: Value = _SCAN.append(b, torch.ops.aten.flip.default, call, [(x.shape, x.dtype)])
    return value


@rewrite("fliplr", "flipud")
def _flip(b: Builder, x: Value) -> Value:
    return flip(b, x, [1 if b.target.startswith("aten.fliplr") else 0])


@rewrite("rot90")
def _rot90(b: Builder, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    """Quarter turns in the plane of two dimensions."""
    first, second = (d % x.rank for d in dims)
    if k % 4 in (2, 3):
        x = flip(b, x, [first, second])
    if k % 2 == 0:
        return x
    order = list(range(x.rank))
    order[first], order[second] = second, first
    return flip(b, permute(b, x, order), [first])


@rewrite("diff")
def _diff(
    b: Builder, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Value:
    """Differences of neighbours, ``n`` times over."""
    parts: Sequence[Value] = [part for part in (prepend, x, append) if part is not None]
    x = cat(b, parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        x = _neighbours(b, "logical_xor.default" if x.dtype == "bool" else "sub.Tensor", x, dim)
    return x


def _neighbours(b: Builder, operator: str, x: Value, dim: int) -> Value:
    """An elementwise operator of each element along ``dim`` and the one before it."""
    size = x.shape[dim] - 1
    return pointwise(b, operator, (cut(b, x, dim, 1, size), cut(b, x, dim, 0, size)))


@rewrite("trapezoid", "cumulative_trapezoid")
def _trapezoid(b: Builder, y: Value, x: Value | None = None, dx: float = 1, dim: int = -1) -> Value:
    """Sums of the means of neighbours times the steps between them."""
    means = pointwise(b, "mul.Scalar", (_neighbours(b, "add.Tensor", y, dim), 0.5))
    if x is None:
        areas = pointwise(b, "mul.Scalar", (means, dx))
    else:
        after = [1] * (y.rank - 1 - dim % y.rank) if x.rank == 1 else []
        steps = _neighbours(b, "sub.Tensor", x, -1 if x.rank == 1 else dim)
        areas = pointwise(b, "mul.Tensor", (means, view(b, steps, [*steps.shape, *after])))
    if b.target.startswith("aten.trapezoid"):
        return reduce(b, "sum", areas, dim)
    results = [(areas.shape, areas.dtype)]
    total: Value = _SCAN.append(b, torch.ops.aten.cumsum.default, {"x": areas, "dim": dim}, results)
    return total
