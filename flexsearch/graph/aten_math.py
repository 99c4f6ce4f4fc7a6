"""Handlers of arithmetic: pointwise operators, casts, matrix products, reductions, and what works along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexsearch.graph.aten import (
    Builder,
    Handler,
    Shape,
    Value,
    aten,
    broadcast_shapes,
    cast,
    dtype_name,
    encode_call,
    letters,
    normal_dims,
)
from flexsearch.graph.aten import opaque as emit_opaque
from flexsearch.graph.aten_shape import cut, view
from flexsearch.graph.targets import POINTWISE, trust


def pointwise(b: Builder, target: str | Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Value:
    """An elementwise operator; ``target`` names it ("add.Tensor") or is the torch operator itself."""
    if isinstance(target, str):
        packet, overload = target.split(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)
    attributes, tensors = encode_call(target, args, kwargs or {})
    shape = broadcast_shapes(*(v.shape for v in tensors))
    dtype = dtype_name(kwargs["dtype"]) if kwargs and kwargs.get("dtype") else _result_dtype(target, args, kwargs or {})
    short = str(target).split(".")[1].strip("_")
    return b.emit("pointwise", tensors, shape, broadcast(tensors, shape), attributes, dtype=dtype, short=short)


def broadcast(tensors: Sequence[Value], shape: Shape) -> str:
    """Pattern of operands that broadcast to ``shape``."""
    names = letters(len(shape))
    operands = [" ".join(fit(names, shape, x.shape)) for x in tensors]
    return f"{', '.join(operands)} -> {' '.join(names)}"


def fit(names: Sequence[str], shape: Shape, own: Shape) -> list[str]:
    """Axis names of an operand of shape ``own`` that broadcasts to ``shape``, of which the axes are ``names``."""
    lead = len(shape) - len(own)
    return [n if s == t else "1" for n, s, t in zip(names[lead:], own, shape[lead:], strict=True)]


def _result_dtype(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Dtype by torch's own promotion: the operator on the meta device, where 0-dim operands count as such."""

    def stand_in(value: Any) -> Any:
        if isinstance(value, Value):
            return torch.empty((1,) * min(value.rank, 1), dtype=getattr(torch, value.dtype), device="meta")
        return [stand_in(v) for v in value] if isinstance(value, list | tuple) else value

    result = target(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})
    return dtype_name(result.dtype)


@aten("_to_copy", "to", "type_as")
def _to_copy(b: Builder, self: Value, **_: Any) -> Value:
    return cast(b, self, b.dtype)


def _as(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    """``x`` as ``dtype``, if one is asked for."""
    return x if dtype is None else cast(b, x, dtype_name(dtype))


def contract(b: Builder, operands: Sequence[Value], pattern: str, short: str) -> Value:
    """An einsum; the output's shape follows from the pattern."""
    sizes: dict[str, int] = {}
    left, right = pattern.split("->")
    for text, x in zip(left.split(","), operands, strict=True):
        sizes.update({n: s for n, s in zip(text.split(), x.shape, strict=True) if n != "1"})
    shape = tuple(sizes.get(n, 1) for n in right.split())
    return b.emit("einsum", operands, shape, pattern, dtype=b.dtype, short=short)


@aten("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner")
def matmul(b: Builder, self: Value, other: Value | None = None, **named: Any) -> Value:
    """Matrix product of the last two dimensions, batch dimensions broadcast; vectors as in torch.matmul."""
    right = other if other is not None else next(iter(named.values()))  # mat2, vec, tensor, by overload
    if b.target.startswith("aten.inner") and right.rank == 2:
        raise b.error("is a product of matrices along their last dimensions; write it as x @ y.mT")
    rows, columns = ["i"] if self.rank > 1 else [], ["k"] if right.rank > 1 else []
    batch = broadcast_shapes(self.shape[:-2], right.shape[:-2])
    names = [f"b{n}" for n in range(len(batch))]
    left = [*fit(names, batch, self.shape[:-2]), *rows, "j"]
    other_side = [*fit(names, batch, right.shape[:-2]), "j", *columns]
    pattern = f"{' '.join(left)}, {' '.join(other_side)} -> {' '.join([*names, *rows, *columns])}"
    return contract(b, [self, right], pattern, "matmul")


@aten("outer", "ger")
def _outer(b: Builder, self: Value, vec2: Value) -> Value:
    return contract(b, [self, vec2], "i, j -> i j", "outer")


@aten("einsum")
def _einsum(b: Builder, equation: str, tensors: Sequence[Value], **_: Any) -> Value:
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    operands = left.split(",")
    if not arrow:  # implicit output: what occurs once, in alphabetical order
        right = "..." * ("..." in left) + "".join(c for c in sorted(set(left) - set(".,")) if left.count(c) == 1)
    # Upper-case letters mean whole axes in our notation, so every letter gets a name of its own.
    rename = dict(zip(dict.fromkeys(c for c in text if c.isalpha()), letters(52), strict=False))
    ranks = [x.rank - len(o.replace("...", "")) for o, x in zip(operands, tensors, strict=True)]
    spread = max((rank for o, rank in zip(operands, ranks, strict=True) if "..." in o), default=0)

    def axes(operand: str, dots: int) -> list[str]:
        head, _, tail = operand.partition("...")
        return [rename[c] for c in head] + [f"b_{i}" for i in range(spread - dots, spread)] + [rename[c] for c in tail]

    named = [axes(o, rank) for o, rank in zip(operands, ranks, strict=True)]
    if any(len(set(n)) < len(n) for n in named):
        raise b.error(f"takes a diagonal ({equation!r}), which no access pattern can describe")
    size: dict[str, int] = {}
    for own, x in zip(named, tensors, strict=True):
        size.update({n: s for n, s in zip(own, x.shape, strict=True) if s > 1 or n not in size})
    read = [" ".join(fit(o, tuple(size[n] for n in o), x.shape)) for o, x in zip(named, tensors, strict=True)]
    made = axes(right, spread if "..." in right else 0)
    return contract(b, tensors, f"{', '.join(read)} -> {' '.join(made)}", "einsum")


@aten("linear")
def _linear(b: Builder, input: Value, weight: Value, bias: Value | None = None) -> Value:
    operands = [x for x in (input, weight, bias) if x is not None]
    if weight.rank == 1:
        return (
            matmul(b, input, weight) if bias is None else pointwise(b, "add.Tensor", (matmul(b, input, weight), bias))
        )
    return b.emit("linear", operands, b.shape, dtype=b.dtype, short="linear")


@aten("addmm")
def _addmm(b: Builder, self: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1) -> Value:
    pattern = f"+{' '.join(fit('bo', b.shape, self.shape))}, b i, i o -> b o"
    attributes = {"beta": beta, "alpha": alpha}
    return b.emit("addmm", [self, mat1, mat2], b.shape, pattern, attributes, dtype=b.dtype)


@aten("baddbmm")
def _baddbmm(b: Builder, self: Value, batch1: Value, batch2: Value, beta: float = 1, alpha: float = 1) -> Value:
    product = matmul(b, batch1, batch2)
    if alpha != 1:
        product = pointwise(b, "mul.Tensor", (product, alpha))
    return product if beta == 0 else pointwise(b, "add.Tensor", (product, self), {"alpha": beta} if beta != 1 else {})


@aten("glu")
def _glu(b: Builder, self: Value, dim: int = -1) -> Value:
    half = self.shape[dim] // 2
    value, gate = (cut(b, self, dim, start, half) for start in (0, half))
    return pointwise(b, "mul.Tensor", (value, pointwise(b, "sigmoid.default", (gate,))))


def _reduce(b: Builder, kind: str, x: Value, dim: Any, keepdim: bool, whole: bool) -> Value:
    dims = normal_dims(dim, x.rank)
    names = letters(x.rank)
    read = [n.upper() if whole and i in dims else n for i, n in enumerate(names)]
    kept = [("1" if keepdim else "") if i in dims else n for i, n in enumerate(names)]
    shape = tuple(1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims)
    pattern = f"{' '.join(read)} -> {' '.join(k for k in kept if k)}"
    attributes = {"dims": list(dims), "keepdim": keepdim}
    return b.emit(kind, [x], shape, pattern, attributes, dtype=b.dtype, short=kind)


@aten("sum", "mean")
def _sum(b: Builder, self: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    kind = b.target.split(".")[1]
    return _reduce(b, kind, _as(b, self, dtype), dim, keepdim, whole=False)


@aten("amax", "amin")
def _amax(b: Builder, self: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _reduce(b, b.target.split(".")[1], self, dim, keepdim, whole=True)


@aten("max.default", "min.default")
def _max(b: Builder, self: Value) -> Value:
    return _reduce(b, f"a{b.target.split('.')[1]}", self, None, False, whole=True)  # same gradient: shared by ties


@aten("_weight_norm")
def _weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> Value:
    """``v`` scaled to the length ``g``: of all of it (dim -1), or of each of its parts along ``dim``."""
    rest = [d for d in range(v.rank) if dim == -1 or d != dim]
    squares = _reduce(b, "sum", pointwise(b, "mul.Tensor", (v, v)), rest, dim != -1, whole=False)
    return pointwise(b, "mul.Tensor", (v, pointwise(b, "div.Tensor", (g, pointwise(b, "sqrt.default", (squares,))))))


@aten("argmax")
def _argmax(b: Builder, self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:  # the index in the flattened tensor
        flat = _reduce(b, "argmax", view(b, self, [-1]), 0, False, whole=True)
        return view(b, flat, b.shape)
    return _reduce(b, "argmax", self, dim, keepdim, whole=True)


@aten("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
def _softmax(b: Builder, self: Value, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Value:
    x, kind = _as(b, self, dtype), "log_softmax" if "log_softmax" in b.target else "softmax"
    names = letters(x.rank)
    axes = " ".join(n.upper() if i == dim % max(x.rank, 1) else n for i, n in enumerate(names))
    return b.emit(kind, [x], x.shape, f"{axes} -> {axes}", {"dim": dim % max(x.rank, 1)}, short=kind)


def _along(*names: str, last: int = 0) -> None:
    """Operators that mix the elements along dimensions (``dim``, ``dims``, or the ``last`` ones) and no others."""

    @aten(*names)
    def along(b: Builder, **call: Any) -> Any:
        x = call.get("self", call.get("input"))
        assert isinstance(x, Value)
        named = next((call[key] for key in ("dim", "dims", "axis") if key in call), None)
        mixed = tuple(range(x.rank - last, x.rank)) if last else normal_dims(named, x.rank)
        keepdim = any(len(shape) == x.rank for shape, _ in b.results)
        axes = letters(x.rank)
        read = " ".join(n.upper() if i in mixed else n for i, n in enumerate(axes))
        made = []
        for number, (shape, _) in enumerate(b.results):
            kept = [n for i, n in enumerate(axes) if keepdim or i not in mixed]
            position = [i for i in range(x.rank) if keepdim or i not in mixed]
            made.append(
                " ".join(
                    (n.upper() if s == x.shape[i] else "1" if s == 1 else f"{n.upper()}_{number}") if i in mixed else n
                    for n, i, s in zip(kept, position, shape, strict=True)
                )
            )
        return emit_opaque(b, _target(b), *_positional(b, call), lambda _: f"{read} -> {', '.join(made)}")


def _target(b: Builder) -> Any:
    """The torch operator at hand."""
    _, packet, overload = b.target.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _positional(b: Builder, call: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    schema = _target(b)._schema.arguments
    args = [call[a.name] for a in schema if not a.kwarg_only]
    return args, {a.name: call[a.name] for a in schema if a.kwarg_only and call.get(a.name) is not None}


_along(
    "max.dim", "min.dim", "argmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "logsumexp", "median.dim"
)
_along("var.dim", "var.correction", "std.dim", "std.correction", "var_mean.correction", "std_mean.correction")
_along("var.default", "std.default", "prod", "all", "any", "linalg_vector_norm", "norm.ScalarOpt_dim", "count_nonzero")
_along("sort", "argsort", "topk", "kthvalue", "flip", "flipud", "fliplr", "nansum", "nanmean", "aminmax")
_along("tril", "triu", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", last=2)
_along("upsample_nearest1d", "upsample_linear1d", last=1)


def pointwise_handler(target: Any) -> Handler | None:
    """A handler, called as (b, args, kwargs), if ``target`` is elementwise: listed so, or tagged so by torch."""
    library, name = target._schema.name.split("::")
    if name in POINTWISE if library == "aten" else torch.Tag.pointwise in target.tags:
        trust(str(target))  # the user's model has just called it
        return lambda b, args, kwargs: pointwise(b, target, args, kwargs)
    return None
