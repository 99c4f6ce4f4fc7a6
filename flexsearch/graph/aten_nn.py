"""Handlers of layers: convolutions, pooling, normalisation, embedding, attention, dropout, losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from flexsearch.graph.aten import Builder, Value, aten, broadcast_shapes, letters
from flexsearch.graph.aten_math import broadcast, pointwise
from flexsearch.graph.aten_shape import expand, pad, view
from flexsearch.graph.operators import OPERATORS


def _each(value: Any, count: int, default: int = 1) -> list[int]:
    """An argument that may be one number, a list of one or of ``count``, or empty (``default``)."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed or [default] * count


def _windows(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> dict[str, int]:
    """The numbers that the windows of convolutions and pools in the table stand for."""
    names = zip(("s", "t"), ("d", "e"), ("p", "q"), stride, dilation, padding, strict=False)
    return {key: value for s, d, p, *numbers in names for key, value in zip((s, d, p), numbers, strict=True)}


def _template(kind: str, x: Value, spatial: int) -> str:
    """The table's pattern, without ``n`` for an operand that is not batched."""
    pattern = OPERATORS[kind].pattern
    assert pattern is not None
    return pattern if x.rank == spatial + 2 else pattern.replace("n ", "")


@aten("conv1d", "conv2d")
def _conv(
    b: Builder, input: Value, weight: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Value:  # fmt: skip
    spatial = weight.rank - 2
    stride, dilation = _each(stride, spatial), _each(dilation, spatial)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [total // 2 for total in totals]
        extra = [total % 2 for total in totals]
        if any(extra):  # torch pads the odd element at the end
            sizes = [s + e for s, e in zip(input.shape[-spatial:], extra, strict=True)]
            wider = replace(b, results=(((*input.shape[:-spatial], *sizes), input.dtype),))
            input = pad(wider, input, [n for e in reversed(extra) for n in (0, e)])
    padding = [0] * spatial if padding == "valid" else _each(padding, spatial, 0)
    kind = f"conv{spatial}d"
    return b.emit(
        kind,
        [x for x in (input, weight, bias) if x is not None],
        b.shape,
        _template(kind, input, spatial),
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        parameters=_windows(stride, padding, dilation),
        sizes={"g": groups, "c": weight.shape[1], "o": weight.shape[0] // groups},
        short=kind,
    )


@aten("convolution")
def _convolution(b: Builder, transposed: bool, input: Value, weight: Value, **call: Any) -> Value:
    if transposed or weight.rank not in (3, 4):
        raise b.error("is a transposed or 3-D convolution, which has no place in the table; import it with --opaque")
    call.pop("output_padding")
    return _conv(b, input, weight, **call)


def _pool(b: Builder, x: Value, kind: str, kernel: Any, stride: Any, padding: Any, **attributes: Any) -> Value:
    spatial = int(kind[-2])
    kernel = _each(kernel, spatial)
    stride = _each(stride, spatial) if stride else kernel
    padding, dilation = _each(padding, spatial, 0), _each(attributes.pop("dilation", 1), spatial)
    window = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return b.emit(
        kind,
        [x],
        b.shape,
        _template(kind, x, spatial),
        {**window, **attributes},
        parameters=_windows(stride, padding, dilation),
        sizes=dict(zip(("KH", "KW"), kernel, strict=False)),
        short=kind,
    )


@aten("max_pool1d", "max_pool2d", "max_pool2d_with_indices")
def _max_pool(
    b: Builder, self: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    kind = "max_pool1d" if "1d" in b.target else "max_pool2d"
    pooled = _pool(b, self, kind, kernel_size, stride, padding, dilation=dilation, ceil_mode=ceil_mode)
    return pooled if len(b.results) == 1 else (pooled, None)


@aten("avg_pool1d", "avg_pool2d")
def _avg_pool(
    b: Builder, self: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    extra = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor_override": divisor_override}
    return _pool(b, self, "avg_pool1d" if "1d" in b.target else "avg_pool2d", kernel_size, stride, padding, **extra)


@aten(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d"
)
def _adaptive_pool(b: Builder, self: Value, output_size: Any) -> Any:
    spatial = 1 if "1d" in b.target else 2
    kind = f"{'max' if 'max' in b.target else 'avg'}_pool{spatial}d"
    source, target = self.shape[-spatial:], b.shape[-spatial:]
    if source == target:
        pooled = self
    elif all(s % t == 0 for s, t in zip(source, target, strict=True)):
        kernel = [s // t for s, t in zip(source, target, strict=True)]
        extra: dict[str, Any] = {"ceil_mode": False}
        if "avg" in kind:
            extra |= {"count_include_pad": True, "divisor_override": None}
        pooled = _pool(b, self, kind, kernel, kernel, 0, **extra)
    else:
        kind = f"adaptive_{kind}"
        pattern = _template(kind, self, spatial)
        pooled = b.emit(kind, [self], b.shape, pattern, {"output_size": list(target)}, short=kind)
    return pooled if len(b.results) == 1 else (pooled, None)


@aten(
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_no_training"
)
def _batch_norm(
    b: Builder, input: Value, weight: Value | None, bias: Value | None, eps: float, momentum: float,
    running_mean: Value | None = None, running_var: Value | None = None, training: bool = False,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Batch normalisation as three operators, so that statistics of split batches are partial sums like any other.

    With groups, each equal part of the batch has statistics of its own; the running ones are those of the first.
    Returns what the torch operator does: output, two saved statistics (None), and the new running ones.
    """
    affine = [x for x in (weight, bias) if x is not None]
    attributes = {"eps": eps, "affine": bool(affine)}
    if not training:
        assert running_mean is not None and running_var is not None
        operands = [input, *affine, running_mean, running_var]
        pattern = f"n c s.., {'c, ' * len(operands[2:])}c -> n c s.."
        out = b.emit("batch_norm_inference", operands, input.shape, pattern, attributes, short="batch_norm")
        return out, None, None
    batch, channels, *space = input.shape
    groups = b.batch_norm_groups
    if batch % groups:
        raise b.error(f"has a batch of {batch}, which batch_norm_groups={groups} does not divide into equal parts")
    count = prod((batch // groups, *space))
    # One group has no axis of its own, so that its statistics may be added up over any split of the batch.
    samples, rows = ("(g n)", "g M") if groups > 1 else ("n", "M")
    sizes = {"g": groups} if groups > 1 else None
    grouped = (groups,) if groups > 1 else ()
    statistics = b.emit(
        "batch_statistics", [input], (*grouped, 2, channels), f"{samples} c s.. -> {rows} c", {"count": count},
        dtype="float64", sizes=sizes, short="statistics", auxiliary=True,
    )  # fmt: skip
    pattern = f"{samples} c s.., {rows} c{', c' * len(affine)} -> {samples} c s.."
    operands = [input, statistics, *affine]
    out = b.emit("batch_norm", operands, input.shape, pattern, attributes, sizes=sizes, short="batch_norm")
    if running_mean is None or running_var is None:
        return out, None, None
    mean, var = b.emit_all(
        "batch_norm_running",
        [statistics, running_mean, running_var],
        [(running_mean.shape, running_mean.dtype), (running_var.shape, running_var.dtype)],
        f"{'1 ' * len(grouped)}M c, c, c -> c, c",
        attributes={"momentum": momentum, "count": count},
        short="running",
        auxiliary=True,
    )
    return out, None, None, mean, var


@aten("_native_batch_norm_legit.default")
def _batch_norm_stats(b: Builder, **call: Any) -> tuple[Value | None, ...]:
    return _batch_norm(b, **call)


def _norm(
    b: Builder, kind: str, x: Value, weight: Value | None, bias: Value | None, pattern: str, operand: str, **more: Any
) -> Value:
    affine = [p for p in (weight, bias) if p is not None]
    template = f"{pattern}{f', {operand}' * len(affine)} -> {pattern}"
    attributes = {**more, "has_weight": weight is not None, "has_bias": bias is not None}
    sizes = {"g": more["groups"]} if "groups" in more else None
    return b.emit(kind, [x, *affine], x.shape, template, attributes, sizes=sizes, short=kind)


@aten("layer_norm", "rms_norm")
def _layer_norm(
    b: Builder, input: Value, normalized_shape: Sequence[int], weight: Value | None = None, bias: Value | None = None,
    eps: float | None = None, **_: Any,
) -> Value:  # fmt: skip
    kind = b.target.split(".")[1]
    width = len(normalized_shape)
    whole = " ".join(name.upper() for name in letters(width, "d"))
    batch = " ".join(f"b{i}" for i in range(input.rank - width))
    return _norm(b, kind, input, weight, bias, f"{batch} {whole}", whole, eps=eps)


@aten("group_norm")
def _group_norm(
    b: Builder, input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, **_: Any,
) -> Value:  # fmt: skip
    return _norm(b, "group_norm", input, weight, bias, "n (g C) S..", "(g C)", groups=num_groups, eps=eps)


@aten("instance_norm")
def _instance_norm(
    b: Builder, input: Value, weight: Value | None = None, bias: Value | None = None,
    running_mean: Value | None = None, running_var: Value | None = None, eps: float = 1e-5, **_: Any,
) -> Value:  # fmt: skip
    """Without running statistics, a group normalisation with a group for each channel."""
    if running_mean is not None or running_var is not None:
        raise b.error("keeps running statistics, which has no place in the table; set track_running_stats=False")
    return _norm(b, "group_norm", input, weight, bias, "n (g C) S..", "(g C)", groups=input.shape[1], eps=eps)


@aten("embedding")
def _embedding(b: Builder, weight: Value, indices: Value, padding_idx: int = -1, **_: Any) -> Value:
    attributes = {"padding_idx": padding_idx if padding_idx >= 0 else None}
    return b.emit("embedding", [indices, weight], b.shape, attributes=attributes, dtype=weight.dtype)


@aten("scaled_dot_product_attention")
def _attention(
    b: Builder, query: Value, key: Value, value: Value, attn_mask: Value | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    count = query.rank - 2
    lead = ["b", "h"][:count] if count <= 2 else [*(f"b{i}" for i in range(count - 1)), "h"]
    grouped = enable_gqa and query.rank > 3 and query.shape[-3] != key.shape[-3]
    batch = b.shape[:-2]
    names = {"q": lead, "k": lead}
    if grouped:
        names = {"q": [*lead[:-1], "(k g)"], "k": [*lead[:-1], "k"]}

    def axes(x: Value, own: list[str], last: str) -> str:
        own = own[len(own) - (x.rank - 2) :]
        lengths = zip(own, x.shape, batch[len(batch) - len(own) :], strict=False)
        return " ".join([*(n if s == t or grouped else "1" for n, s, t in lengths), last])

    patterns = [axes(query, names["q"], "q E"), axes(key, names["k"], "K E"), axes(value, names["k"], "K v")]
    operands = [query, key, value]
    if attn_mask is not None:
        ends = zip(("q", "K"), attn_mask.shape[-2:], (query.shape[-2], key.shape[-2]), strict=True)
        last = " ".join(n if s == t else "1" for n, s, t in ends)
        heads = names["q"][len(lead) - (attn_mask.rank - 2) :]
        sizes = batch[len(batch) - len(heads) :]
        own = [n if s == t else "1" for n, s, t in zip(heads, attn_mask.shape, sizes, strict=False)]
        patterns.append(" ".join([*own, last]))
        operands.append(attn_mask)
    attributes: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "grouped": grouped}
    attributes |= {"has_mask": attn_mask is not None, "salt": _salt(b)}
    pattern = f"{', '.join(patterns)} -> {' '.join([*names['q'], 'q v'])}"
    known = {"k": key.shape[-3], "g": query.shape[-3] // key.shape[-3]} if grouped else None
    return b.emit("attention", operands, b.shape, pattern, attributes, sizes=known, short="sdpa")


def _salt(b: Builder) -> int:
    """A number that no other operator of the graph has: how many were emitted before."""
    return len(b.drafts)


@aten("native_dropout", "dropout")
def _dropout(b: Builder, input: Value, p: float, train: bool | None = True) -> Any:
    out = input
    if train is not False and p > 0:
        out = b.emit("dropout", [input], input.shape, attributes={"p": p, "salt": _salt(b)}, short="dropout")
    return out if len(b.results) == 1 else (out, None)


_REDUCTIONS = ("none", "mean", "sum")


def _class_loss(
    b: Builder, kind: str, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int, **more: Any
) -> Value:
    """Cross-entropy or negative log-likelihood; the mean over valid targets divides by a count made beforehand."""
    probabilities = target.dtype.startswith(("float", "bfloat"))
    spatial = x.rank - 2
    batch = "" if x.rank == 1 else " ".join(["n", *(f"s{i}" for i in range(spatial))])
    classes = "C" if x.rank == 1 else " ".join(["n", "C", *(f"s{i}" for i in range(spatial))])
    operands, patterns = [x, target], [classes, classes if probabilities else batch]
    has_count = _REDUCTIONS[reduction] == "mean" and not probabilities
    if has_count:
        operands.append(_valid_count(b, target, weight, ignore_index, x.dtype))
        patterns.append("")
    if weight is not None:
        operands.append(weight)
        patterns.append("C")
    attributes = {
        "reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index, **more,
        "has_count": has_count, "has_weight": weight is not None,
    }  # fmt: skip
    if kind == "cross_entropy":
        attributes["probabilities"] = probabilities
    pattern = f"{', '.join(patterns)} -> {batch if _REDUCTIONS[reduction] == 'none' else ''}"
    return b.emit(kind, operands, b.shape, pattern, attributes, short=kind)


def _valid_count(b: Builder, target: Value, weight: Value | None, ignore_index: int, dtype: str) -> Value:
    operands = [target] if weight is None else [target, weight]
    axes = " ".join(f"n{i}" for i in range(target.rank))
    return b.emit(
        "valid_count", operands, (), f"{axes}{', C' if weight is not None else ''} -> ",
        {"ignore_index": ignore_index, "dtype": dtype}, dtype=dtype, short="valid_count", auxiliary=True,
    )  # fmt: skip


@aten("cross_entropy_loss")
def _cross_entropy(
    b: Builder, self: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    more = {"label_smoothing": label_smoothing}
    return _class_loss(b, "cross_entropy", self, target, weight, reduction, ignore_index, **more)


@aten("nll_loss_nd", "nll_loss", "nll_loss2d")
def _nll_loss(
    b: Builder, self: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100
) -> Value:
    return _class_loss(b, "nll_loss", self, target, weight, reduction, ignore_index)


@aten("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss_forward(b: Builder, **call: Any) -> tuple[Value | None, ...]:
    return _class_loss(b, "nll_loss", call.pop("self"), **call), None


_ELEMENT_LOSSES = {
    "mse_loss": "mse_loss",
    "l1_loss": "l1_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
    "binary_cross_entropy": "bce_loss",
    "binary_cross_entropy_with_logits": "bce_with_logits",
    "kl_div": "kl_div",
}


@aten(*_ELEMENT_LOSSES)
def _element_loss(b: Builder, self: Value, target: Value, reduction: int = 1, **options: Any) -> Value:
    """A loss of corresponding elements: their mean (over the global count), their sum, or themselves."""
    kind = _ELEMENT_LOSSES[b.target.split(".")[1]]
    shape = broadcast_shapes(self.shape, target.shape)
    extra = [options.pop(name, None) for name in ("weight", "pos_weight")]
    operands = [expand(b, x, shape) for x in (self, target)] + [x for x in extra if x is not None]
    attributes: dict[str, Any] = {"reduction": _REDUCTIONS[reduction], **options}
    if kind.startswith("bce"):
        attributes |= {"has_weight": extra[0] is not None, "has_pos_weight": extra[1] is not None}
    elementwise = broadcast(operands, shape)
    pattern = elementwise if reduction == 0 else f"{elementwise.split(' -> ')[0]} -> "
    return b.emit(kind, operands, b.shape, pattern, attributes, short=kind)


@aten("log_sigmoid_forward")
def _log_sigmoid(b: Builder, self: Value) -> tuple[Value, None]:
    return pointwise(b, "log_sigmoid.default", (self,)), None


@aten("prelu", "_prelu_kernel")
def _prelu(b: Builder, self: Value, weight: Value) -> Value:
    """max(0, x) + weight * min(0, x), one weight or one for each channel (dimension 1)."""
    shaped = weight
    if weight.rank == 1 and self.rank > 1:
        shaped = view(b, weight, [1, weight.shape[0]] + [1] * (self.rank - 2))
    negative = pointwise(b, "mul.Tensor", (self, shaped))
    return pointwise(b, "where.self", (pointwise(b, "gt.Scalar", (self, 0)), self, negative))
