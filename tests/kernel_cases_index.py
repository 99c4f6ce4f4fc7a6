"""Cases of what looks up, scatters, counts and draws. Importing this module adds them to ``CASES``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_cases import Case, case, family, few, rand


@family
def scatter(draw: Any) -> Case:
    form = draw(st.sampled_from(["none", "sum", "prod", "mean", "amax", "amin"]))
    dim, own, scalar = draw(few(0, 2)), draw(st.booleans()) or form == "none", draw(st.booleans())
    x = rand(*[draw(few(1, 4)) for _ in range(3)])
    count = draw(few(1, x.shape[dim] if form == "none" else 6))
    shape = [count if i == dim else n for i, n in enumerate(x.shape)]
    index = torch.randint(x.shape[dim], shape)
    if form == "none":  # each element at most once
        index = torch.rand(x.shape).argsort(dim).narrow(dim, 0, count)
    source = torch.tensor(2.5, dtype=torch.float64) if scalar and form in ("none", "sum") else rand(*shape)
    added = form == "sum" and own
    places = " ".join(("s" if added else "S") if i == dim else n for i, n in enumerate("abc"))

    def reference(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        values = source.expand(shape)
        if form == "none":
            return x.scatter(dim, index, values)
        return x.scatter_reduce(dim, index, values, form, include_self=own)

    return case(
        "scatter", f"{'+' * added}a b c, {places}, {places if source.dim() else ''} -> a b c", [x, index, source],
        reference, {"dim": dim, "reduce": form, "include_self": own},
    )  # fmt: skip


@family
def index_put(draw: Any) -> Case:
    """Two dimensions looked up, apart or not, by operands that broadcast; or one, with a range of the other."""
    x, add = rand(*[draw(few(1, 4)) for _ in range(3)]), draw(st.booleans())
    s, t = ("s", "t") if add else ("S", "T")
    form = draw(st.sampled_from(["apart", "together", "range"]))
    attributes: dict[str, Any] = {"accumulate": add, "negative": True, "rank": 2, "first": int(form == "together")}
    if form == "range":
        picks = torch.rand(x.shape[0], x.shape[2]).argsort(1)[:, : draw(few(1, 2))]
        if add:
            picks = torch.randint(-x.shape[2], x.shape[2], (x.shape[0], 4))
        attributes["indices"] = [{"axis": 0}, None, {"operand": 0}]
        rows = torch.arange(x.shape[0])[:, None]
        pattern = f"{'+' * add}a b c, a {t}, a {t} b -> a b c"
        return case(
            "index_put", pattern, [x, picks, rand(*picks.shape, x.shape[1])],
            lambda x, i, v: torch.ops.aten.index_put(x, [rows, None, i], v, add), attributes,
        )  # fmt: skip
    dims = (0, 2) if form == "apart" else (1, 2)
    first, second = (torch.randperm(x.shape[d])[: draw(few(1, 3))] for d in dims)
    first, second = first[:, None], second[None] - x.shape[dims[1]]
    entries: list[Any] = [None, None, None]
    entries[dims[0]], entries[dims[1]] = {"operand": 0}, {"operand": 1}
    values = rand(len(first), 1, x.shape[1]) if form == "apart" else rand(x.shape[0], 1, second.shape[1])
    written = f"{s} 1 b" if form == "apart" else f"a 1 {t}"
    where = [first, None, second] if form == "apart" else [None, first, second]
    return case(
        "index_put", f"{'+' * add}a b c, {s} 1, 1 {t}, {written} -> a b c", [x, first, second, values],
        lambda x, i, j, v: torch.ops.aten.index_put(x, where, v, add), attributes | {"indices": entries},
    )  # fmt: skip


@family
def embedding_bag(draw: Any) -> Case:
    mode, rows, width = draw(st.sampled_from(["sum", "mean", "max"])), draw(few(1, 6)), draw(few(1, 4))
    index = torch.randint(rows, (draw(few(1, 4)), draw(few(1, 4))))
    row = draw(st.none() | few(0, rows - 1))
    weights = [rand(*index.shape)] if mode == "sum" and draw(st.booleans()) else []
    s, v = "S" if mode == "max" or (mode == "mean" and row is not None) else "s", "V" if mode == "max" else "v"
    return case(
        "embedding_bag", f"b {s}, {v} d{f', b {s}' if weights else ''} -> b d", [index, rand(rows, width), *weights],
        lambda i, w, f=None: F.embedding_bag(i, w, mode=mode, padding_idx=row, per_sample_weights=f),
        {"mode": mode, "padding_idx": row},
    )  # fmt: skip


@family
def ragged_bag(draw: Any) -> Case:
    mode, rows, width = draw(st.sampled_from(["sum", "mean", "max"])), draw(few(1, 6)), draw(few(1, 4))
    index, last = torch.randint(rows, (draw(few(1, 8)),)), draw(st.booleans())
    row = draw(st.none() | few(0, rows - 1))
    starts = [0, *sorted(draw(st.lists(st.integers(0, len(index)), max_size=3)))]
    offsets = torch.tensor([*starts, len(index)] if last else starts)
    weights = [rand(*index.shape)] if mode == "sum" and draw(st.booleans()) else []
    s, v = "S" if mode == "max" or (mode == "mean" and row is not None) else "s", "V" if mode == "max" else "v"
    operands = [index, rand(rows, width), offsets, *weights]
    return case(
        "ragged_bag", f"{s}, {v} d, O{f', {s}' if weights else ''} -> b d", operands,
        lambda i, w, o, f=None: F.embedding_bag(
            i, w, o, mode=mode, padding_idx=row, per_sample_weights=f, include_last_offset=last
        ),
        {"mode": mode, "padding_idx": row, "last": last},
    )  # fmt: skip


@family
def one_hot(draw: Any) -> Case:
    classes, shape = draw(few(1, 6)), [draw(few(1, 4)) for _ in range(draw(few(0, 2)))]
    return case("one_hot", "a.. -> a.. c", [torch.randint(classes, shape)], lambda i: F.one_hot(i, classes))


@family
def histogram(draw: Any) -> Case:
    x, bins = rand(draw(few(1, 6)), draw(few(1, 4))), draw(few(1, 5))
    low, high = draw(st.sampled_from([(-1.0, 0.5), (0.0, 0.0), (0.0, 3.0)]))
    if draw(st.booleans()):
        x = torch.randint(4, x.shape)
    read = "A B" if low == high else "a b"
    return case(
        "histogram", f"{read} -> n", [x], lambda x: torch.histc(x.double(), bins, low, high).to(x.dtype),
        {"low": low, "high": high}, no_grad=[0],
    )  # fmt: skip


@family
def mask_positions(draw: Any) -> Case:
    mask = torch.rand(draw(few(1, 4)), draw(few(1, 4))) < 0.5
    count = mask.flatten().cumsum(0).view(mask.shape) - 1
    return case("mask_positions", "A B -> A B", [mask], lambda m: count.clamp(min=0))


@family
def drawn(draw: Any) -> Case:
    """Numbers that PyTorch draws otherwise: only the pieces are compared with the whole."""
    kind = draw(st.sampled_from(["normal", "exponential", "randint"]))
    shape = [draw(few(1, 6)) for _ in range(draw(few(1, 3)))]
    place = torch.zeros((), dtype=torch.int64 if kind == "randint" else torch.float64)
    attributes = {"salt": 3} | ({"low": -2, "high": 9} if kind == "randint" else {})
    made = case(kind, f" -> {' '.join('abc'[: len(shape)])}", [place], lambda x: x.expand(shape), attributes)
    made.reference = lambda *xs: None
    return made
