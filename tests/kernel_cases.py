"""Operators made by hand, with random attributes: a strategy of cases for each kind, and what plain torch gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from flexsearch.graph.model import Axis, Operator
from flexsearch.graph.notation import instantiate


@dataclass
class Case:
    """``operands``: the whole input tensors; ``reference``: the same function in plain torch."""

    op: Operator
    operands: list[Tensor]
    output_shapes: list[tuple[int, ...]]
    reference: Callable[..., Any]
    no_grad: frozenset[int] = field(default_factory=frozenset)


def case(
    kind: str,
    template: str,
    operands: Sequence[Tensor],
    reference: Callable[..., Any],
    attributes: Mapping[str, Any] | None = None,
    parameters: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    no_grad: Sequence[int] = (),
) -> Case:
    """A case whose output shapes are those of the reference."""
    result = reference(*operands)
    made = [tuple(y.shape) for y in (result if isinstance(result, tuple) else (result,))]
    pattern, known = instantiate(template, [x.shape for x in operands], made, parameters, sizes)
    op = Operator(
        name="op",
        kind=kind,
        pattern=pattern,
        axes=tuple(Axis(name=a, size=n, role="attribute") for a, n in known.items()),
        inputs=tuple(f"x{i}" for i in range(len(operands))),
        outputs=tuple(f"y{i}" for i in range(len(made))),
        attributes=dict(attributes or {}),
    )
    return Case(op, list(operands), made, reference, frozenset(no_grad))


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES: dict[str, Any] = {}


def family(function: Callable[[Any], Case]) -> Callable[[Any], Case]:
    """Register a function from hypothesis' ``draw`` to a case."""
    CASES[function.__name__] = st.composite(function)()
    return function


def few(low: int, high: int) -> Any:
    return st.integers(low, high)


@family
def linear(draw: Any) -> Case:
    lead = [draw(few(1, 4)) for _ in range(draw(few(0, 2)))]
    i, o = draw(few(1, 6)), draw(few(1, 6))
    operands = [rand(*lead, i), rand(o, i)] + [rand(o)] * draw(few(0, 1))
    return case("linear", "b.. i, o i, +o -> b.. o", operands, F.linear)


@family
def addmm(draw: Any) -> Case:
    b, i, o = (draw(few(1, 5)) for _ in range(3))
    alpha, beta = draw(st.sampled_from([1, 0.5])), draw(st.sampled_from([1, 2.0]))
    bias = draw(st.sampled_from([("+b o", (b, o)), ("+o", (o,))]))
    return case(
        "addmm",
        f"{bias[0]}, b i, i o -> b o",
        [rand(*bias[1]), rand(b, i), rand(i, o)],
        lambda y, a, w: torch.addmm(y, a, w, alpha=alpha, beta=beta),
        {"alpha": alpha, "beta": beta},
    )


_EINSUMS = [
    "a b i j, a b j k -> a b i k", "i j, j k -> i k", "a i j, j k -> a i k", "i j, a j k -> a i k",
    "1 b i j, a b j k -> a b i k", "a 1 i j, 1 b j k -> a b i k", "a i d, a j d -> a i j", "a j i, a j k -> a i k",
    "a b q d, a k b d -> a b q k", "i, i -> ", "i, j -> i j", "i j -> j i", "i j, j -> i", "a i j -> a", "i i -> i",
    "a b, b c, c d -> a d", "j i, k j -> i k", "a i j, a j -> a i", "a b c, c -> b a",
]  # fmt: skip


@family
def einsum(draw: Any) -> Case:
    template = draw(st.sampled_from(_EINSUMS))
    left, right = template.split("->")
    size = {name: draw(few(1, 4)) for name in "abcdijkq"}
    operands = [rand(*[size.get(n, 1) for n in text.split()]) for text in left.split(",")]

    def reference(*xs: Tensor) -> Tensor:
        texts = [text.split() for text in left.split(",")]
        kept = [x.squeeze([i for i, n in enumerate(t) if n == "1"]) for x, t in zip(xs, texts, strict=True)]
        plain = [t if isinstance(t, str) else "".join(n for n in t if n != "1") for t in texts]
        return torch.einsum(f"{','.join(plain)}->{right.replace(' ', '')}", *kept)

    return case("einsum", template, operands, reference)


@family
def attention(draw: Any) -> Case:
    n, k, g, q, s, e, v = (draw(few(1, 4)) for _ in range(7))
    grouped, causal = draw(st.booleans()), draw(st.booleans())
    scale = draw(st.sampled_from([None, 0.3]))
    p = draw(st.sampled_from([0.0, 0.4]))
    head = "(k g)" if grouped else "k"
    template = f"b {head} q E, b k S E, b k S v, MASK -> b {head} q v"
    operands = [rand(n, k * g if grouped else k, q, e), rand(n, k, s, e), rand(n, k, s, v)]
    shapes = {"1 1 q S": (1, 1, q, s), "b 1 q S": (n, 1, q, s), "q S": (q, s), "b 1 1 S": (n, 1, 1, s)}
    mask, kind = draw(st.sampled_from(sorted(shapes))), draw(st.sampled_from(["", "bool", "float"]))
    if kind:
        operands.append(rand(*shapes[mask]) > -0.5 if kind == "bool" else rand(*shapes[mask]))

    def reference(q_: Tensor, k_: Tensor, v_: Tensor, mask_: Tensor | None = None) -> Tensor:
        both = torch.ones(q, s, dtype=torch.bool).tril() if causal else torch.ones(q, s, dtype=torch.bool)
        if mask_ is not None:
            both = mask_ & both if mask_.dtype == torch.bool else mask_.masked_fill(~both, -torch.inf)
        return F.scaled_dot_product_attention(q_, k_, v_, attn_mask=both, scale=scale, enable_gqa=grouped)

    attributes = {"causal": causal, "grouped": grouped, "scale": scale, "dropout": p, "salt": 7}
    sizes = {"k": k, "g": g} if grouped else {}
    made = case("attention", template.replace("MASK", mask), operands, reference, attributes, sizes=sizes)
    if p:  # dropout: checked against the whole piece, which has the same mask
        made.reference = lambda *xs: None
    return made


_POINTWISE: list[tuple[str, list[Any], int]] = [
    ("aten.gelu.default", [{"tensor": 0}], 1), ("aten.relu.default", [{"tensor": 0}], 1),
    ("aten.add.Tensor", [{"tensor": 0}, {"tensor": 1}], 2), ("aten.mul.Scalar", [{"tensor": 0}, 3], 1),
    ("aten.pow.Scalar", [2, {"tensor": 0}], 1), ("aten.div.Tensor", [{"tensor": 1}, {"tensor": 0}], 2),
    ("aten.where.ScalarOther", ["mask", {"tensor": 0}, {"float": "-inf"}], 1),
]  # fmt: skip


@family
def pointwise(draw: Any) -> Case:
    name, args, count = draw(st.sampled_from(_POINTWISE))
    shape = [draw(few(1, 4)) for _ in range(draw(few(1, 3)))]
    axes = ["a", "b", "c"][: len(shape)]
    operands, texts = [rand(*shape)], [" ".join(axes)]
    kwargs: dict[str, Any] = {"alpha": 0.5} if name == "aten.add.Tensor" else {}
    for _ in range(count - 1):
        drop = draw(few(0, len(shape) - 1))
        ones = [draw(st.booleans()) for _ in range(drop, len(shape))]
        operands.append(rand(*[1 if one else n for one, n in zip(ones, shape[drop:], strict=True)]))
        texts.append(" ".join("1" if one else a for one, a in zip(ones, axes[drop:], strict=True)))
    if args[0] == "mask":
        operands.insert(0, torch.randn(shape) > 0)
        texts.insert(0, texts[0])
        args = [{"tensor": 0}, {"tensor": 1}, {"float": "-inf"}]
    namespace, base, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), base), overload)

    def reference(*xs: Tensor) -> Any:
        bound = [xs[a["tensor"]] if isinstance(a, dict) and "tensor" in a else a for a in args]
        return target(*[float(a["float"]) if isinstance(a, dict) else a for a in bound], **kwargs)

    return case(
        "pointwise", f"{', '.join(texts)} -> {' '.join(axes)}", operands, reference,
        {"target": name, "args": args, "kwargs": kwargs},
    )  # fmt: skip


@family
def opaque(draw: Any) -> Case:
    x = rand(draw(few(2, 4)), draw(few(2, 4)))
    attributes = {"target": "aten.sort.default", "args": [{"tensor": 0}, 0], "kwargs": {"descending": True}}
    return case("opaque", "A B -> A B, A B", [x], lambda x: tuple(torch.sort(x, 0, True)), attributes)


@family
def dropout(draw: Any) -> Case:
    x = rand(*[draw(few(1, 6)) for _ in range(draw(few(1, 4)))])
    made = case("dropout", "a.. -> a..", [x], lambda x: x, {"p": draw(st.sampled_from([0.1, 0.5, 1.0])), "salt": 3})
    made.reference = lambda *xs: None
    return made


@family
def uniform(draw: Any) -> Case:
    shape = [draw(few(1, 6)) for _ in range(draw(few(1, 3)))]
    made = case(
        "uniform",
        f" -> {' '.join('abc'[: len(shape)])}",
        [torch.zeros((), dtype=torch.float64)],
        lambda x: x.expand(shape),
        {"salt": 3},
    )
    made.reference = lambda *xs: None
    return made


@family
def embedding(draw: Any) -> Case:
    v, d = draw(few(1, 7)), draw(few(1, 4))
    index = torch.randint(v, [draw(few(1, 4)) for _ in range(draw(few(1, 2)))])
    padding = draw(st.none() | few(0, v - 1))
    return case(
        "embedding", "b.., v d -> b.. d", [index, rand(v, d)],
        lambda i, w: F.embedding(i, w, padding), {"padding_idx": padding},
    )  # fmt: skip


@family
def softmax(draw: Any) -> Case:
    kind = draw(st.sampled_from(["softmax", "log_softmax"]))
    call: Any = getattr(F, kind)
    axes, dim = ["a", "b", "c"], draw(few(0, 2))
    axes[dim] = "D"
    x = rand(*[draw(few(1, 5)) for _ in axes])
    return case(kind, f"{' '.join(axes)} -> {' '.join(axes)}", [x], lambda x: call(x, dim), {"dim": dim - 3})


@family
def reduction(draw: Any) -> Case:
    kind = draw(st.sampled_from(["sum", "mean", "amax", "amin", "argmax"]))
    rank, keep = draw(few(1, 3)), draw(st.booleans())
    x = rand(*[draw(few(1, 5)) for _ in range(rank)])
    dims: Any = sorted(draw(st.sets(few(0, rank - 1), min_size=1, max_size=1 if kind == "argmax" else rank)))
    axes = [a if kind in ("sum", "mean") or i not in dims else a.upper() for i, a in enumerate("abc"[:rank])]
    output = " ".join("1" if i in dims else a for i, a in enumerate(axes) if keep or i not in dims)
    call: Any = getattr(torch, kind)
    return case(
        kind, f"{' '.join(axes)} -> {output}", [x],
        lambda x: call(x, dims[0] if kind == "argmax" else dims, keep), {"dims": dims, "keepdim": keep},
    )  # fmt: skip
