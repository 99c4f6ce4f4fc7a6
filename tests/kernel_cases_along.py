"""More cases: what works along dimensions. Importing this module adds them to ``CASES``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_cases import Case, case, family, few, rand


def _reduced(draw: Any, shape: list[int], whole: bool) -> tuple[list[int], bool, str, str]:
    """Some dimensions, whether they stay, and the two sides of the pattern of a reduction along them."""
    dims = sorted(draw(st.sets(few(0, len(shape) - 1), min_size=1)))
    keep = draw(st.booleans())
    names = "abcd"[: len(shape)]
    read = " ".join(n.upper() if whole and i in dims else n for i, n in enumerate(names))
    written = " ".join("1" if i in dims else n for i, n in enumerate(names) if keep or i not in dims)
    return dims, keep, read, written


def _shape(draw: Any) -> list[int]:
    return [draw(few(1, 5)) for _ in range(draw(few(1, 3)))]


@family
def power_sum(draw: Any) -> Case:
    shape, order = _shape(draw), draw(st.sampled_from([1.0, 2.0, 3.0, 2.5]))
    dims, keep, read, written = _reduced(draw, shape, whole=False)
    x = rand(*shape)
    return case(
        "power_sum", f"{read} -> {written}", [x], lambda x: x.abs().pow(order).sum(dims, keep),
        {"ord": order, "dims": dims, "keepdim": keep},
    )  # fmt: skip


@family
def root(draw: Any) -> Case:
    order = draw(st.sampled_from([1.0, 2.0, 3.0]))
    return case("root", "a.. -> a..", [rand(*_shape(draw)).abs()], lambda x: x ** (1 / order), {"ord": order})


@family
def squared_deviation(draw: Any) -> Case:
    """Also about numbers that are not the means: the gradient with respect to them is then not zero."""
    shape = _shape(draw)
    dims, keep, read, written = _reduced(draw, shape, whole=False)
    x, shift = rand(*shape) + draw(st.sampled_from([0, 100])), draw(st.sampled_from([0, 1]))
    mean = x.mean(dims, True) + shift
    centre = " ".join("1" if i in dims else n for i, n in enumerate(read.split()))
    return case(
        "squared_deviation", f"{read}, {centre} -> {written}", [x, mean], lambda x, m: (x - m).square().sum(dims, keep),
        {"dims": dims, "keepdim": keep},
    )  # fmt: skip


@family
def reduction_call(draw: Any) -> Case:
    shape = _shape(draw)
    dims, keep, read, written = _reduced(draw, shape, whole=True)
    attributes = {"target": "aten.logsumexp.default", "args": [{"tensor": 0}, dims, keep]}
    return case("reduction", f"{read} -> {written}", [rand(*shape)], lambda x: x.logsumexp(dims, keep), attributes)


@family
def smallest(draw: Any) -> Case:
    shape = _shape(draw)
    dim = draw(few(0, len(shape) - 1))
    read = " ".join(n.upper() if i == dim else n for i, n in enumerate("abc"[: len(shape)]))
    written = " ".join(n for i, n in enumerate("abc"[: len(shape)]) if i != dim)
    return case("argmin", f"{read} -> {written}", [rand(*shape)], lambda x: x.argmin(dim), {"dims": [dim]})


@family
def triangle(draw: Any) -> Case:
    shape = [*_shape(draw)[:1], draw(few(1, 6)), draw(few(1, 6))]
    diagonal, upper = draw(few(-7, 7)), draw(st.booleans())
    call: Any = torch.triu if upper else torch.tril
    attributes = {"diagonal": diagonal, "upper": upper}
    return case("triangle", "a.. -> a..", [rand(*shape)], lambda x: call(x, diagonal), attributes)


@family
def cdist(draw: Any) -> Case:
    r, c, m, b = draw(few(1, 5)), draw(few(1, 5)), draw(few(1, 4)), draw(few(1, 3))
    p = draw(st.sampled_from([0.0, 1.0, 2.0, 2.5, float("inf")]))
    left, right = draw(st.sampled_from([("b", "b"), ("1", "b"), ("b", "1"), ("", "b"), ("", "")]))
    sizes = {"b": [b], "1": [1], "": []}
    operands = [rand(*sizes[left], r, m), rand(*sizes[right], c, m)]
    batch = "b" if "b" in (left, right) else ""
    return case(
        "cdist", f"{left} r M, {right} c M -> {batch} r c", operands, lambda x, y: torch.cdist(x, y, p),
        {"p": "inf" if p == float("inf") else p}, no_grad=[0, 1] if p == 0 else [],
    )  # fmt: skip


@family
def cross(draw: Any) -> Case:
    a, b = draw(few(1, 4)), draw(few(1, 4))
    other = draw(st.sampled_from([("a", a), ("1", 1)]))
    return case(
        "cross", f"a D b, {other[0]} D b -> a D b", [rand(a, 3, b), rand(other[1], 3, b)],
        lambda x, y: torch.linalg.cross(x, y, dim=1), {"dim": -2},
    )  # fmt: skip


@family
def scan(draw: Any) -> Case:
    dim, shape = draw(few(0, 1)), [draw(few(1, 5)), draw(few(1, 5))]
    name = draw(st.sampled_from(["cumsum", "logcumsumexp", "flip", "cummax"]))
    call: Any = getattr(torch, name)
    text = "A b" if dim == 0 else "a B"
    result = f"{text}, {text}" if name == "cummax" else text
    attributes = {"target": f"aten.{name}.default", "args": [{"tensor": 0}, [dim] if name == "flip" else dim]}

    def reference(x: Tensor) -> Any:
        return tuple(call(x, dim)) if name == "cummax" else call(x, [dim] if name == "flip" else dim)

    return case("scan", f"{text} -> {result}", [rand(*shape)], reference, attributes)


@family
def sort(draw: Any) -> Case:
    shape, k = [draw(few(1, 5)), draw(few(2, 5))], draw(few(1, 2))
    if draw(st.booleans()):
        attributes = {"target": "aten.topk.default", "args": [{"tensor": 0}, k, 1, True, True]}
        return case("sort", "a B -> a C, a C", [rand(*shape)], lambda x: tuple(x.topk(k, 1)), attributes)
    attributes = {"target": "aten.sort.default", "args": [{"tensor": 0}, 1, True]}
    return case("sort", "a B -> a B, a B", [rand(*shape)], lambda x: tuple(x.sort(1, True)), attributes)


@family
def search(draw: Any) -> Case:
    table, values = rand(draw(few(1, 4)), draw(few(1, 6))).sort(1)[0], draw(few(1, 5))
    right = draw(st.booleans())
    attributes = {
        "target": "aten.searchsorted.Tensor", "args": [{"tensor": 0}, {"tensor": 1}], "kwargs": {"right": right}
    }  # fmt: skip
    return case(
        "search", "a S, a v -> a v", [table, rand(len(table), values)],
        lambda t, x: torch.searchsorted(t, x, right=right), attributes,
    )  # fmt: skip


@family
def safe_softmax(draw: Any) -> Case:
    x = rand(draw(few(1, 4)), draw(few(1, 5)))
    x[0] = -torch.inf
    return case(
        "safe_softmax", "a B -> a B", [x], lambda x: x.softmax(1).nan_to_num(), {"dim": 1}, no_grad=[0]
    )  # fmt: skip


@family
def margin_loss(draw: Any) -> Case:
    n, c, reduction = draw(few(1, 4)), draw(few(1, 5)), draw(st.sampled_from(["mean", "sum", "none"]))
    target = torch.randint(-1, c, (n, c))
    written = "n" if reduction == "none" else ""
    return case(
        "multilabel_margin_loss", f"n C, n C -> {written}", [rand(n, c), target],
        lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), {"reduction": reduction},
    )  # fmt: skip


@family
def soft_margin_loss(draw: Any) -> Case:
    shape, reduction = [draw(few(1, 4)), draw(few(1, 4))], draw(st.sampled_from(["mean", "sum", "none"]))
    target = torch.randint(2, shape).double() * 2 - 1
    return case(
        "soft_margin_loss", f"a b, a b -> {'a b' if reduction == 'none' else ''}", [rand(*shape), target],
        lambda x, t: F.soft_margin_loss(x, t, reduction=reduction), {"reduction": reduction}, no_grad=[1],
    )  # fmt: skip
