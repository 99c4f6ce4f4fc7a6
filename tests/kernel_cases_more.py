"""More cases: normalisation, moving elements, losses. Importing this module adds them to ``CASES``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_cases import Case, case, family, few, rand


def _moments(c: int) -> Tensor:
    """Mean and mean square of some data."""
    x = rand(5, c)
    return torch.stack((x.mean(0), (x * x).mean(0)))


@family
def batch_statistics(draw: Any) -> Case:
    x = rand(draw(few(1, 4)), draw(few(1, 4)), *[draw(few(1, 4)) for _ in range(draw(few(0, 2)))])
    dims = [0, *range(2, x.dim())]
    return case("batch_statistics", "n c s.. -> M c", [x], lambda x: torch.stack((x.mean(dims), (x * x).mean(dims))))


@family
def batch_norm(draw: Any) -> Case:
    c, affine = draw(few(1, 4)), draw(st.booleans())
    x = rand(draw(few(1, 4)), c, *[draw(few(1, 4)) for _ in range(draw(few(0, 2)))])
    statistics = _moments(c)

    def reference(x: Tensor, s: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        shape = [1, c] + [1] * (x.dim() - 2)
        y = (x - s[0].view(shape)) / (s[1] - s[0] ** 2 + 1e-5).sqrt().view(shape)
        return y if weight is None or bias is None else y * weight.view(shape) + bias.view(shape)

    operands = [x, statistics] + ([rand(c), rand(c)] if affine else [])
    return case("batch_norm", "n c s.., M c, c, c -> n c s..", operands, reference, {"eps": 1e-5, "affine": affine})


@family
def batch_norm_running(draw: Any) -> Case:
    c, n = draw(few(1, 4)), draw(few(2, 9))
    statistics = _moments(c)

    def reference(s: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return 0.9 * mean + 0.1 * s[0], 0.9 * var + 0.1 * (s[1] - s[0] ** 2) * n / (n - 1)

    return case(
        "batch_norm_running", "M c, c, c -> c, c", [statistics, rand(c), rand(c).abs()], reference,
        {"momentum": 0.1, "count": n}, no_grad=[0, 1, 2],
    )  # fmt: skip


@family
def batch_norm_inference(draw: Any) -> Case:
    c, affine = draw(few(1, 4)), draw(st.booleans())
    x = rand(draw(few(1, 4)), c, *[draw(few(1, 4)) for _ in range(draw(few(0, 2)))])
    operands = [x, *([rand(c), rand(c)] if affine else []), rand(c), rand(c).abs() + 1]

    def reference(x: Tensor, *others: Tensor) -> Tensor:
        weight, bias = (others[0], others[1]) if affine else (None, None)
        return F.batch_norm(x, others[-2], others[-1], weight, bias, False, 0.1, 1e-5)

    n = len(operands)
    return case(
        "batch_norm_inference", "n c s.., c, c, c, c -> n c s..", operands, reference,
        {"eps": 1e-5, "affine": affine}, no_grad=[n - 2, n - 1],
    )  # fmt: skip


@family
def layer_norm(draw: Any) -> Case:
    kind = draw(st.sampled_from(["layer_norm", "rms_norm"]))
    size = [draw(few(2, 4)) for _ in range(draw(few(1, 2)))]
    x = rand(*[draw(few(1, 4)) for _ in range(draw(few(1, 2)))], *size)
    operands = [x] + [rand(*size)] * draw(few(0, 2 if kind == "layer_norm" else 1))
    template = "b.. D.., D.., D.. -> b.. D.." if kind == "layer_norm" else "b.. D.., D.. -> b.. D.."
    if len(operands) == 1:  # nothing tells the spreads apart
        dims = [f"D{i}" for i in range(len(size))]
        lead = [f"b{i}" for i in range(x.dim() - len(size))]
        template = f"{' '.join(lead + dims)} -> {' '.join(lead + dims)}"
    call: Any = getattr(F, kind)
    if kind == "layer_norm":
        return case(kind, template, operands, lambda x, *o: call(x, size, *o, eps=1e-5), {"eps": 1e-5})
    eps = draw(st.sampled_from([None, 1e-3]))
    return case(kind, template, operands, lambda x, w=None: call(x, size, w, eps), {"eps": eps})


@family
def group_norm(draw: Any) -> Case:
    g, c = draw(few(1, 4)), draw(few(1, 3))
    x = rand(draw(few(1, 4)), g * c, *[draw(few(2, 4)) for _ in range(draw(few(1, 2)))])
    operands = [x] + ([rand(g * c), rand(g * c)] if draw(st.booleans()) else [])
    return case(
        "group_norm", "n (g C) S.., (g C), (g C) -> n (g C) S..", operands,
        lambda x, w=None, b=None: F.group_norm(x, g, w, b, 1e-5), {"groups": g, "eps": 1e-5}, sizes={"g": g},
    )  # fmt: skip


@family
def view(draw: Any) -> Case:
    a, b, c = (draw(few(1, 4)) for _ in range(3))
    views = [
        ("a b C", "a (b C)", ((a, b, c), (a, b * c))), ("a (b C)", "a b C", ((a, b * c), (a, b, c))),
        ("(a B) c", "a B c", ((a * b, c), (a, b, c))), ("a b", "a 1 b", ((a, b), (a, 1, b))),
        ("a 1 b", "a b", ((a, 1, b), (a, b))),
    ]  # fmt: skip
    source, target, shapes = draw(st.sampled_from(views))
    return case("view", f"{source} -> {target}", [rand(*shapes[0])], lambda x: x.reshape(shapes[1]),
                sizes={"a": a, "b": b, "c": c, "B": b, "C": c})  # fmt: skip


@family
def permute(draw: Any) -> Case:
    dims = draw(st.permutations([0, 1, 2]))
    output = " ".join("abc"[d] for d in dims)
    x = rand(*[draw(few(1, 4)) for _ in range(3)])
    return case("permute", f"a b c -> {output}", [x], lambda x: x.permute(dims), {"dims": list(dims)})


@family
def expand(draw: Any) -> Case:
    a, b, c = (draw(few(1, 4)) for _ in range(3))
    return case("expand", "1 c -> a b c", [rand(1, c)], lambda x: x.expand(a, b, c))


@family
def slicing(draw: Any) -> Case:
    start, step, count = draw(few(0, 3)), draw(few(1, 3)), draw(few(1, 4))
    rest, index = draw(few(0, 2)), draw(few(0, 3))
    x = rand(index + 1, start + step * (count - 1) + 1 + rest, draw(few(1, 3)))
    if draw(st.booleans()):
        return case(
            "slice", f"({index}) ({step}*h+{start}) c -> h c", [x],
            lambda x: x[index, start : start + step * count : step][:count], sizes={"h": count},
        )  # fmt: skip
    return case(
        "slice", f"a ({step}*h+{start}) c -> a h c", [x],
        lambda x: x[:, start : start + step * count : step][:, :count], sizes={"h": count},
    )  # fmt: skip


@family
def cat(draw: Any) -> Case:
    lengths = [draw(few(1, 4)) for _ in range(draw(few(1, 4)))]
    a, c = draw(few(1, 3)), draw(few(1, 3))
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    operands = ", ".join(f"a (h-{offset}) c" if offset else "a (h) c" for offset in offsets)
    return case(
        "cat", f"{operands} -> a h c", [rand(a, n, c) for n in lengths], lambda *xs: torch.cat(xs, 1), {"dim": 1}
    )


@family
def index(draw: Any) -> Case:
    """By one or two operands, which broadcast, or by a range of an axis of the indices and an operand."""
    x = rand(*[draw(few(1, 4)) for _ in range(3)])
    negative = draw(st.booleans())
    shape = [draw(few(1, 4)) for _ in range(2)]
    places = {(): "", (shape[0],): "i", tuple(shape): "i j", (shape[0], 1): "i 1", (1, shape[1]): "1 j"}

    def indices(dim: int, *size: int) -> Tensor:
        return torch.randint(-x.shape[dim] if negative else 0, x.shape[dim], size)

    attributes: dict[str, Any] = {"negative": negative, "first": 0, "rank": 2}
    form = draw(st.sampled_from(["one", "outer", "apart", "range"]))
    if form == "one":
        dim, own = draw(few(0, 2)), draw(st.sampled_from([(), (shape[0],), tuple(shape)]))
        read = ["V" if i == dim else n for i, n in enumerate("abc")]
        written = " ".join([*"abc"[:dim], places[own], *"abc"[dim + 1 :]])
        entries: list[Any] = [{"operand": 0} if i == dim else None for i in range(3)]
        attributes |= {"rank": len(own), "first": dim, "indices": entries}
        return case(
            "index", f"{' '.join(read)}, {places[own]} -> {written}", [x, indices(dim, *own)],
            lambda x, i: x[(*((slice(None),) * dim), i)], attributes,
        )  # fmt: skip
    if form == "range":
        x = rand(shape[0], *x.shape[1:])
        entries = [{"axis": 0}, None, {"operand": 0}]
        return case(
            "index", "i b V, i j -> i j b", [x, indices(2, *shape)],
            lambda x, k: x[torch.arange(len(x))[:, None], :, k], attributes | {"indices": entries},
        )  # fmt: skip
    if form == "apart":
        entries = [{"operand": 0}, None, {"operand": 1}]
        operands = [x, indices(0, *shape), indices(2, shape[0], 1)]
        return case(
            "index", "V b W, i j, i 1 -> i j b", operands, lambda x, i, k: x[i, :, k], attributes | {"indices": entries}
        )
    entries = [None, {"operand": 0}, {"operand": 1}]
    operands = [x, indices(1, shape[0], 1), indices(2, 1, shape[1])]
    return case(
        "index", "a V W, i 1, 1 j -> a i j", operands, lambda x, i, k: x[:, i, k],
        attributes | {"indices": entries, "first": 1},
    )  # fmt: skip


@family
def gather(draw: Any) -> Case:
    dim = draw(few(0, 2))
    x = rand(*[draw(few(1, 4)) for _ in range(3)])
    shape = [draw(few(1, 5)) if i == dim else n for i, n in enumerate(x.shape)]
    index = torch.randint(x.shape[dim], shape)
    read = " ".join("V" if i == dim else n for i, n in enumerate("abc"))
    return case("gather", f"{read}, a b c -> a b c", [x, index], lambda x, i: x.gather(dim, i), {"dim": dim})


@family
def unfold(draw: Any) -> Case:
    size, step, count, rest = draw(few(1, 4)), draw(few(1, 5)), draw(few(1, 4)), draw(few(0, 3))
    x = rand(draw(few(1, 3)), step * (count - 1) + size + min(rest, step - 1), draw(few(1, 3)))
    return case(
        "unfold", f"a ({step}*h+k) c -> a h c k", [x], lambda x: x.unfold(1, size, step), {"dim": 1, "step": step},
        sizes={"h": count, "k": size},
    )  # fmt: skip


@family
def pad(draw: Any) -> Case:
    left, right, n = draw(few(0, 4)), draw(few(0, 4)), draw(few(1, 4))
    return case(
        "pad", f"a (h-{left}) -> a h", [rand(draw(few(1, 3)), n)], lambda x: F.pad(x, (left, right), value=2.5),
        {"pad": [left, right], "value": 2.5, "dtype": "float64"},
    )  # fmt: skip


@family
def class_loss(draw: Any) -> Case:
    kind = draw(st.sampled_from(["cross_entropy", "nll_loss"]))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    n, c, s = draw(few(1, 4)), draw(few(2, 5)), [draw(few(1, 4)) for _ in range(draw(few(0, 2)))]
    x, axes = rand(n, c, *s), " ".join(["n", "C", "s", "t"][: 2 + len(s)])
    rest = axes.replace("C ", "").replace(" C", "")
    smoothing = draw(st.sampled_from([0.0, 0.2])) if kind == "cross_entropy" else 0.0
    attributes: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "probabilities": False}
    weight = rand(c).abs() if draw(st.booleans()) else None
    extra: dict[str, Any] = {"label_smoothing": smoothing} if kind == "cross_entropy" else {}
    call: Any = getattr(F, kind)
    output = rest if reduction == "none" else ""
    if kind == "cross_entropy" and draw(st.booleans()):
        operands = [x, rand(n, c, *s).softmax(1)] + ([weight] if weight is not None else [])
        return case(
            kind, f"{axes}, {axes}{', C' if weight is not None else ''} -> {output}", operands,
            lambda x, t, w=None: call(x, t, w, reduction=reduction, **extra),
            attributes | {"probabilities": True}, no_grad=[2],
        )  # fmt: skip
    target = torch.randint(c, (n, *s))
    target[torch.rand(target.shape) < 0.3] = -100
    target.view(-1)[0] = 0
    counted = (target != -100).double() * (1 if weight is None else weight[target.clamp(min=0)])
    operands, texts = [x, target], [axes, rest]
    if reduction == "mean":
        operands.append(counted.sum())
        texts.append("")
    if weight is not None:
        operands.append(weight)
        texts.append("C")

    def reference(x: Tensor, t: Tensor, *others: Tensor) -> Any:
        y = call(x, t, weight, reduction="none" if reduction == "none" else "sum", **extra)
        return y / others[0] if reduction == "mean" else y

    fixed = [len(operands) - 1] if weight is not None else []
    attributes |= {"ignore_index": -100}
    made = case(kind, f"{', '.join(texts)} -> {output}", operands, reference, attributes, no_grad=fixed)
    if reduction == "mean":  # the count is right: the same as plain torch
        torch.testing.assert_close(reference(*operands), call(x, target, weight, **extra), rtol=1e-9, atol=0)
    return made


@family
def valid_count(draw: Any) -> Case:
    target = torch.randint(4, (draw(few(1, 5)), draw(few(1, 4))))
    attributes = {"ignore_index": 2, "dtype": "float64"}
    if draw(st.booleans()):
        return case("valid_count", "n s -> ", [target], lambda t: (t != 2).sum().double(), attributes)
    weight = rand(4).abs()
    return case("valid_count", "n s, C -> ", [target, weight], lambda t, w: w[t[t != 2]].sum(), attributes, no_grad=[1])


@family
def elementwise_loss(draw: Any) -> Case:
    kinds = {
        "mse_loss": F.mse_loss, "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss, "huber_loss": F.huber_loss,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
    }  # fmt: skip
    kind, reduction = draw(st.sampled_from(sorted(kinds))), draw(st.sampled_from(["mean", "sum", "none"]))
    call: Any = kinds[kind]
    x = rand(draw(few(1, 4)), draw(few(1, 4)))
    target = torch.rand(x.shape, dtype=torch.float64)
    operands, weights, texts = [x, target], [], ["a b", "a b"]
    if kind == "bce_with_logits":
        weights = [name for name in ("weight", "pos_weight") if draw(st.booleans())]
        operands += [rand(x.shape[1]).abs() for _ in weights]
        texts += ["b"] * len(weights)
    return case(
        kind, f"{', '.join(texts)} -> {'a b' if reduction == 'none' else ''}", operands,
        lambda x, t, *o: call(x, t, reduction=reduction, **dict(zip(weights, o, strict=True))),
        {"reduction": reduction, **{f"has_{name}": True for name in weights}}, no_grad=[2, 3],
    )  # fmt: skip


@family
def lstm_cell(draw: Any) -> Case:
    """Weights with the gates as a dimension of their own, or below each other."""
    b, i, k = draw(few(1, 4)), draw(few(1, 4)), draw(few(1, 5))
    shapes = [(k, i), (k, k), *([(k,), (k,)] if draw(st.booleans()) else [])]
    grouped = [draw(st.booleans()) for _ in shapes]
    weights = [
        rand(4, *shape) if g else rand(4 * shape[0], *shape[1:]) for g, shape in zip(grouped, shapes, strict=True)
    ]
    rows = [f"{'G h' if g else '(G h)'} {rest}" for g, rest in zip(grouped, ("I", "K", "", ""), strict=False)]

    def reference(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        w_ih, w_hh, *biases = (w.reshape(4 * k, *w.shape[1 + g :]) for g, w in zip(grouped, weights, strict=True))
        gates = x @ w_ih.T + h @ w_hh.T + sum(biases)
        i, f, g, o = gates.split(k, dim=1)
        new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * new.tanh(), new

    pattern = f"b I, b K, b h, {', '.join(rows)} -> b h, b h"
    return case("lstm_cell", pattern, [rand(b, i), rand(b, k), rand(b, k), *weights], reference, sizes={"G": 4})
