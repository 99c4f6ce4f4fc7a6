"""Scaled dot product attention of a piece of the batch, the heads, the query positions and the value features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box, Dimension
from flexsearch.graph.ops.attributes import Scalar, Share, Signed
from flexsearch.graph.ops.base import (
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    integers,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Attention(OperatorKind):
    """``softmax(q @ k.mT * scale + mask) @ v``; axes ``q`` and ``K`` are the positions of queries and keys.

    ``grouped``: each of ``k`` heads of the keys serves ``g`` heads of the queries.
    """

    name = "attention"
    targets = ("aten.scaled_dot_product_attention",)
    roles = {"h": "parameter", "k": "parameter", "g": "parameter", "q": "attribute"}
    words = {"h": "heads", "k": "heads", "g": "heads of a group", "q": "sequence", "v": "head features"}
    inputs = (3, 4)
    backward, again = 2.5, 0.5  # scores are computed again
    matrix = fused_attention = True

    class attributes(Attributes):
        causal: bool = False
        grouped: bool = False
        has_mask: bool = False
        scale: Scalar | None = None
        dropout: Share = 0.0
        salt: Signed = 0

    def trace(
        self,
        b: Builder,
        query: Value,
        key: Value,
        value: Value,
        attn_mask: Value | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Value:
        grouped = enable_gqa and query.rank > 2 and query.shape[-3] != key.shape[-3]
        operands = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        attributes = {
            "causal": is_causal,
            "scale": scale,
            "dropout": dropout_p,
            "grouped": grouped,
            "has_mask": attn_mask is not None,
            "salt": b.salt,
        }
        sizes = {"k": key.shape[-3], "g": query.shape[-3] // key.shape[-3]} if grouped else None
        pattern = _pattern(operands, b.shape, grouped)
        return b.emit(self.name, operands, b.shape, pattern, attributes, sizes=sizes, short="sdpa")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        none = f"attention of shapes {list(shapes)} is none"
        operands = (*op.access.inputs, *op.access.outputs)
        if min(map(len, shapes)) < 2 or len(op.inputs) != 3 + attributes.has_mask:
            return none
        texts = [[str(d) for d in operand.dimensions] for operand in operands]
        ends = [["q", "E"], ["K", "E"], ["K", "v"], ["q", "v"]]
        if [text[-2:] for text in (*texts[:3], texts[-1])] != ends:
            return none
        if attributes.has_mask and not all(t in ("1", n) for t, n in zip(texts[3][-2:], "qK", strict=True)):
            return none
        lead = texts[-1][:-2]
        if attributes.grouped and lead[-1:] != ["(k g)"]:
            return "grouped attention needs heads"
        served = [*lead[:-1], "k"] if attributes.grouped else lead
        allowed = [lead, served, served, lead]
        for number, (text, names) in enumerate(zip(texts[:-1], allowed, strict=False)):
            own = text[:-2]
            exact = attributes.grouped and number < 3
            if len(own) > len(names) or any(
                t != n and (exact or t != "1") for t, n in zip(own, names[len(names) - len(own) :], strict=True)
            ):
                return f'pattern "{op.pattern}" is not that of attention'
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Two matrix products and a softmax of 5 operations per score; a causal mask is counted as full work."""
        scores = prod(extents[a] for a in op.access.outputs[0].names() if a != "v") * extents["K"]
        return scores * (2 * (extents["E"] + extents["v"]) + 5)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """Causal rows ``low..high`` of the queries see keys up to ``high`` only: the rest is cut off beforehand.

        On a CPU, values with fewer features than queries get zeros behind them, as the kernel that saves no scores
        takes as many (``attention_narrow``). Its output lies as the queries do: heads inside of positions, so that to
        merge heads copies nothing.
        """
        if float(str(op.attributes.get("dropout") or 0)) > 0:
            return _dropping(op, piece, shapes, context)
        from flexsearch.graph.ops.attention_narrow import fits, narrow_attention

        low, high = piece.axes["q"]
        keys = shapes[1][-2]
        causal, grouped = bool(op.attributes.get("causal")), bool(op.attributes.get("grouped"))
        scale: Any = op.attributes.get("scale")
        seen = min(high, keys) if causal else keys
        triangle = causal and low < seen - 1  # later rows see all keys
        combined = _mask_of(low, high, seen) if triangle else None
        on_cpu = context.device.type == "cpu"
        lacking = shapes[0][-1] - _length(piece.inputs[2]) if on_cpu else 0

        def attend(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
            if on_cpu and q.dim() == 4 and q.is_contiguous():  # it has been moved
                q = q.transpose(1, 2).contiguous().transpose(1, 2)
            if lacking <= 0:
                return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **call)
            if not grouped and fits(q, k, v, call.get("attn_mask")):
                return narrow_attention(q, k, v, scale=scale, **call)
            wide = F.pad(v, (0, lacking))
            return F.scaled_dot_product_attention(q, k, wide, scale=scale, enable_gqa=grouped, **call)[..., :-lacking]

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            if seen < keys:
                k, v = k[..., :seen, :], v[..., :seen, :]
                mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :seen]
            if triangle and low == 0 and mask is None:
                return attend(q, k, v, is_causal=True)
            if combined is not None:
                mask = combined(q.device, mask)
            return attend(q, k, v, attn_mask=mask)

        return run

    def samples(self) -> Iterable[Sample]:
        attend = F.scaled_dot_product_attention
        q, k, v = rand(2, 4, 5, 3), rand(2, 4, 6, 3), rand(2, 4, 6, 3)
        yield Sample(attend, (q, k, v))
        yield Sample(lambda q, k, v, m: attend(q, k, v, m, scale=0.3), (q, k, v, rand(2, 1, 5, 6)))
        yield Sample(lambda q, k, v, m: attend(q, k, v, m > 0), (q, k, v, integers(2, 5, 6)))
        yield Sample(lambda q, k, v: attend(q, k, v, is_causal=True), (q, k, v))
        yield Sample(lambda q, k, v: attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True), (q, k, v))
        yield Sample(lambda q, k, v: attend(q[0], k[0], v[0]), (q, k, v))
        yield Sample(lambda q, k, v: attend(q, k[:1], v[:, :1]), (q, k, v))
        yield Sample(lambda q, k, v: attend(q, k, v, dropout_p=0.4), (q, k, v))
        yield Sample(lambda q, k, v, m: attend(q, k, v, m, dropout_p=0.4), (q, k, v, rand(4, 1, 6)))
        yield Sample(
            lambda q, k, v, m: attend(q, k[:, :2], v[:, :2], m > 0, dropout_p=0.4, enable_gqa=True),
            (q, k, v, integers(2, 2, 1, 5, 6)),
        )
        yield Sample(lambda q, k, v: attend(q, k, v, dropout_p=0.4, is_causal=True), (q, k, v))


define(Attention())


def _pattern(operands: list[Value], shape: tuple[int, ...], grouped: bool) -> str:
    """Pattern of a call; dimensions of length 1 are broadcast."""
    query, key, value, *masks = operands
    count = len(shape) - 2
    lead = ["b", "h"][:count] if count <= 2 else [*(f"b{i}" for i in range(count - 1)), "h"]
    batch = shape[:-2]
    heads = {"q": [*lead[:-1], "(k g)"], "k": [*lead[:-1], "k"]} if grouped else {"q": lead, "k": lead}

    def axes(x: Value, names: list[str], last: str) -> str:
        own = names[len(names) - (x.rank - 2) :]
        lengths = zip(own, x.shape, batch[len(batch) - len(own) :], strict=False)
        return " ".join([*(n if s == t or (grouped and x not in masks) else "1" for n, s, t in lengths), last])

    patterns = [axes(query, heads["q"], "q E"), axes(key, heads["k"], "K E"), axes(value, heads["k"], "K v")]
    for mask in masks:
        ends = zip(("q", "K"), mask.shape[-2:], (query.shape[-2], key.shape[-2]), strict=True)
        patterns.append(axes(mask, heads["q"], " ".join(n if s == t else "1" for n, s, t in ends)))
    return f"{', '.join(patterns)} -> {' '.join([*heads['q'], 'q v'])}"


def _mask_of(low: int, high: int, seen: int) -> Callable[[torch.device, Tensor | None], Tensor]:
    """Mask of causal rows ``low..high`` over ``seen`` keys, together with the mask operand."""
    cache: dict[torch.device, Tensor] = {}

    def combined(device: torch.device, mask: Tensor | None) -> Tensor:
        if device not in cache:
            cache[device] = torch.ones(high - low, seen, dtype=torch.bool, device=device).tril(low)
        rows = cache[device]
        if mask is None:
            return rows
        return mask & rows if mask.dtype == torch.bool else mask.masked_fill(~rows, -torch.inf)

    return combined


def _dropping(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Attention of which probabilities are dropped, by a mask that is that of the whole operator for every piece.

    Fused kernels draw masks that depend on the shape of the call, so this one is computed block by block, each again
    in the backward: memory is linear in the number of positions, as that of fused kernels.
    """
    from flexsearch.graph.ops.attention_blocks import Settings, blockwise_attention
    from flexsearch.graph.ops.random import keep_mask

    p, salt = float(str(op.attributes["dropout"])), int(str(op.attributes.get("salt", 0)))
    scale: Any = op.attributes.get("scale")
    (low, _), box, size = piece.axes["q"], piece.outputs[0], _extents(op, op.access.outputs[0].dimensions[:-1])
    causal, grouped = bool(op.attributes.get("causal")), bool(op.attributes.get("grouped"))
    keys = shapes[1][-2]

    def keep(part: tuple[slice, ...], seen: int, device: torch.device) -> Tensor:
        """Bool mask of a block: ``part`` of the piece's leading dimensions and rows, and the first ``seen`` keys."""
        if p >= 1:
            return torch.zeros((), dtype=torch.bool, device=device)
        if grouped:
            *lead, heads, group, rows = part
            part = (*lead, slice(heads.start * group.stop, heads.stop * group.stop), rows)
        region = tuple((first + s.start, first + s.stop) for (first, _), s in zip(box[:-1], part, strict=True))
        kept = keep_mask((*size, keys), (*region, (0, seen)), p, context, salt, device)
        return kept.reshape(*kept.shape[:-3], -1, group.stop, *kept.shape[-2:]) if grouped else kept

    settings = Settings(scale, p, low if causal else None, keep)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if grouped:
            heads, k, v = k.shape[-3], k.unsqueeze(-3), v.unsqueeze(-3)
            q, mask = _by_group(q, heads), mask if mask is None or mask.dim() < 3 else _by_group(mask, heads)
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))  # type: ignore[no-untyped-call]
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
        if mask is not None:
            mask = mask.reshape((1,) * (q.dim() - mask.dim()) + mask.shape)
        y = blockwise_attention(q, k, v, mask, settings)
        return y.flatten(-4, -3) if grouped else y

    return run


def _length(box: Box | None) -> int:
    """Of the last dimension of a region."""
    assert box is not None
    return box[-1][1] - box[-1][0]


def _by_group(x: Tensor, heads: int) -> Tensor:
    """(..., heads of queries, rows, columns) as (..., heads of keys, heads of a group, rows, columns)."""
    return x.unsqueeze(-3) if x.shape[-3] == 1 else x.reshape(*x.shape[:-3], heads, -1, *x.shape[-2:])


def _extents(op: Operator, dimensions: tuple[Dimension, ...]) -> tuple[int, ...]:
    """Lengths of whole dimensions."""
    return tuple(prod(op.sizes[a] for a in d.axes) for d in dimensions)
