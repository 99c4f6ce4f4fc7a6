"""A model becomes the operators it is made of, under names people know, and the graph computes what the model does."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.errors import FlexsearchError, ImportModelError
from flexsearch.graph import Box, OperatorGraph, Tracing, whole_piece
from flexsearch.graph.importer import Imported, import_model, import_with_constants, load_callable
from flexsearch.graph.ops import KernelContext, OperatorKind, build_kernel, register, unregister
from flexsearch.graph.ops.base import TRACES
from flexsearch.graph.shipped import SHIPPED, make
from tests.ranks import pool
from tests.small_models import Checked, Dropped


class Fn(nn.Module):
    """A function of the input and of parameters w0, w1, ... as a model."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.parameters())


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def region(box: Box | None) -> tuple[slice, ...]:
    assert box is not None
    return tuple(slice(low, high) for low, high in box)


def execute(imported: Imported, model: nn.Module, inputs: Any, targets: Any = ()) -> dict[str, Tensor]:
    """All tensors of the graph, each operator run whole."""
    graph = imported.graph
    names = (*imported.input_names, *imported.target_names)
    values: dict[str, Tensor] = dict(zip(names, (*inputs, *targets), strict=True))
    values |= {**imported.constants, **dict(model.named_buffers())}
    values |= {n: p.view(graph.tensor[n].shape) for n, p in model.named_parameters() if n in graph.tensor}
    for op in graph.operators:
        shapes = [graph.tensor[n].shape for n in op.inputs]
        outs = [graph.tensor[n].shape for n in op.outputs]
        piece = whole_piece(op, shapes, outs)
        kernel = build_kernel(op, piece, shapes, KernelContext())
        result = kernel(*(values[n][region(box)] for n, box in zip(op.inputs, piece.inputs, strict=True)))
        for name, tensor in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True):
            assert tensor.shape == graph.tensor[name].shape, name
            assert tensor.dtype == getattr(torch, graph.tensor[name].dtype), name
            values[name] = tensor
    return values


def check_same(model: nn.Module, inputs: Any, loss: Any = None, targets: Any = None) -> OperatorGraph:
    """The graph's loss and gradients are the model's."""
    imported = import_with_constants(model, inputs, loss, targets=targets)
    reference = copy.deepcopy(model)  # a step changes buffers
    output = reference(*inputs)
    wanted = output if loss is None else loss(output) if targets is None else loss(output, targets)
    found = execute(imported, model, inputs, () if targets is None else (targets,))[imported.graph.loss]
    torch.testing.assert_close(found, wanted)
    if wanted.requires_grad:
        want, have = (
            torch.autograd.grad(value, [p for p in m.parameters() if p.requires_grad], allow_unused=True)
            for value, m in ((wanted, reference), (found, model))
        )
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(0 if a is None else a.norm(), 0 if b is None else b.norm(), check_dtype=False)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b)
    return imported.graph


def patterns(graph: OperatorGraph) -> list[tuple[str, str]]:
    """Kind and pattern of all operators but the test's own weighting of the output."""
    return [(op.kind, op.pattern) for op in graph.operators]


X = (4, 6, 8)
I = (2, 4, 9, 9)  # noqa: E741
Case = tuple[Callable[..., Tensor], list[tuple[int, ...]], list[tuple[str, str]]]

# name: function of the input (first shape) and of parameters (other shapes); its operators.
CASES: dict[str, Case] = {
    "linear": (F.linear, [X, (5, 8), (5,)], [("linear", "b0 b1 i, o i, +o -> b0 b1 o")]),
    "linear without bias": (F.linear, [X, (5, 8)], [("linear", "b0 b1 i, o i -> b0 b1 o")]),
    "addmm": (
        lambda x, w, c: torch.addmm(c, x, w, beta=2, alpha=3),
        [(4, 8), (8, 5), (5,)],
        [("addmm", "+o, b i, i o -> b o")],
    ),
    "matmul": (torch.matmul, [X, (8, 3)], [("einsum", "b0 i j, j k -> b0 i k")]),
    "matmul, broadcast batch": (
        torch.matmul,
        [(4, 3, 2, 8), (1, 3, 8, 5)],
        [("einsum", "b0 b1 i j, 1 b1 j k -> b0 b1 i k")],
    ),
    "bmm": (torch.bmm, [X, (4, 8, 5)], [("einsum", "b0 i j, b0 j k -> b0 i k")]),
    "matrix times vector": (torch.matmul, [X, (8,)], [("einsum", "b0 i j, j -> b0 i")]),
    "einsum": (
        lambda x, w: torch.einsum("bIj, Ijk -> bkI", x, w),
        [X, (6, 8, 3)],
        [("einsum", "a b c, b c d -> a d b")],
    ),
    "einsum, ellipsis": (
        lambda x, w: torch.einsum("...j,kj", x, w),
        [X, (3, 8)],
        [("einsum", "b_0 b_1 a, b a -> b_0 b_1 b")],
    ),
    "conv2d": (
        lambda x, w, c: F.conv2d(x, w, c, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
        [I, (6, 2, 3, 3), (6,)],
        [("conv2d", "n (g c) (2*h+KH-1) (w+2*KW), (g o) c KH KW, +(g o) -> n (g o) h w")],
    ),
    "conv1d": (
        lambda x, w: F.conv1d(x, w, stride=2),
        [X, (5, 6, 3)],
        [("conv1d", "n (g c) (2*h+KH), (g o) c KH -> n (g o) h")],
    ),
    "conv, same": (
        lambda x, w: F.conv1d(x, w, padding="same"),
        [X, (5, 6, 4)],
        [("pad", "a b (c) -> a b c"), ("conv1d", "n (g c) (h+KH-1), (g o) c KH -> n (g o) h")],
    ),
    "conv, not batched": (
        F.conv2d,
        [(4, 9, 9), (6, 4, 3, 3)],
        [("conv2d", "(g c) (h+KH) (w+KW), (g o) c KH KW -> (g o) h w")],
    ),
    "max_pool2d": (
        lambda x, w: F.max_pool2d(x * w, 3, 2, 1),
        [I, ()],
        [("max_pool2d", "n c (2*h+KH-1) (2*w+KW-1) -> n c h w")],
    ),
    "max_pool1d": (lambda x, w: F.max_pool1d(x * w, 2), [X, ()], [("max_pool1d", "n c (2*h+KH) -> n c h")]),
    "avg_pool2d": (
        lambda x, w: F.avg_pool2d(x * w, (3, 2), 2, 1, ceil_mode=True),
        [I, ()],
        [("avg_pool2d", "n c (2*h+KH-1) (2*w+KW-1) -> n c h w")],
    ),
    "adaptive, divisible": (
        lambda x, w: F.adaptive_avg_pool2d(x * w, (3, 1)),
        [I, ()],
        [("avg_pool2d", "n c (3*h+KH) (9*w+KW) -> n c h w")],
    ),
    "adaptive, not": (
        lambda x, w: F.adaptive_avg_pool2d(x * w, (2, 4)),
        [I, ()],
        [("adaptive_avg_pool2d", "n c H W -> n c P Q")],
    ),
    "adaptive max": (
        lambda x, w: F.adaptive_max_pool2d(x * w, 3),
        [I, ()],
        [("max_pool2d", "n c (3*h+KH) (3*w+KW) -> n c h w")],
    ),
    "layer_norm": (
        lambda x, w, c: F.layer_norm(x, (6, 8), w, c),
        [X, (6, 8), (6, 8)],
        [("layer_norm", "b0 D E, D E, D E -> b0 D E")],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [X, (8,)], [("rms_norm", "b0 b1 D, D -> b0 b1 D")]),
    "group_norm": (
        lambda x, w, c: F.group_norm(x, 2, w, c),
        [I, (4,), (4,)],
        [("group_norm", "n (g C) S0 S1, (g C), (g C) -> n (g C) S0 S1")],
    ),
    "instance_norm": (lambda x, w: F.instance_norm(x * w), [I, ()], [("group_norm", "n (g C) S0 S1 -> n (g C) S0 S1")]),
    "softmax": (lambda x, w: F.softmax(x * w, 1), [X, ()], [("softmax", "a B c -> a B c")]),
    "log_softmax": (lambda x, w: F.log_softmax(x * w, -1), [X, ()], [("log_softmax", "a b C -> a b C")]),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x, x * w, x, is_causal=True),
        [(4, 3, 5, 8), ()],
        [("attention", "b h q E, b h K E, b h K v -> b h q v")],
    ),
    "attention, 3-D": (
        lambda x, w: F.scaled_dot_product_attention(x, w, w),
        [X, (4, 5, 8)],
        [("attention", "b q E, b K E, b K v -> b q v")],
    ),
    "attention, grouped": (
        lambda x, w: F.scaled_dot_product_attention(x, w, w, enable_gqa=True),
        [(4, 6, 5, 8), (4, 2, 5, 8)],
        [("attention", "b (k g) q E, b k K E, b k K v -> b (k g) q v")],
    ),
    "attention, mask": (
        lambda x, w: F.scaled_dot_product_attention(x, x * w, x, attn_mask=torch.ones(5, 5).tril() > 0, scale=0.3),
        [(4, 3, 5, 8), ()],
        [("attention", "b h q E, b h K E, b h K v, q K -> b h q v")],
    ),
    "relu in place": (
        lambda x, w: (x * w).add_(1).relu_(),
        [X, ()],
        [("pointwise", "a b c -> a b c"), ("pointwise", "a b c -> a b c")],
    ),
    "broadcasting": (torch.add, [X, (6, 1)], [("pointwise", "a b c, b 1 -> a b c")]),
    "scalars": (lambda x, w: (x * w).sum() * w, [X, ()], [("sum", "a b c -> "), ("pointwise", ",  -> ")]),
    "where, masked_fill": (
        lambda x, w: torch.where(x > 0, (x * w).masked_fill(torch.eye(6, 8) > 0, -5.0), 0.0),
        [X, ()],
        [
            ("pointwise", "a b c,  -> a b c"),
            ("pointwise", "a b c, b c -> a b c"),
            ("pointwise", "a b c, a b c -> a b c"),
        ],
    ),
    "glu": (
        lambda x, w: F.glu(x * w),
        [X, ()],
        [
            ("slice", "a b (c) -> a b c"),
            ("slice", "a b (c+4) -> a b c"),
            ("pointwise", "a b c -> a b c"),
            ("pointwise", "a b c, a b c -> a b c"),
        ],
    ),
    "flatten": (lambda x, w: (x * w).flatten(1), [I, ()], [("view", "a b C D -> a (b C D)")]),
    "heads": (lambda x, w: (x * w).view(4, 6, 2, 4), [X, ()], [("view", "a b (c D) -> a b c D")]),
    "reshape across": (lambda x, w: (x * w).reshape(4, 4, 12), [X, ()], [("view", "a (b C) D -> a (b E) F")]),
    "reshape, factors do not nest": (
        lambda x, w: (x * w).reshape(6, 4),
        [(4, 6), ()],
        [("view", "(a B) C -> (a D) E")],
    ),
    "squeeze, unsqueeze": (
        lambda x, w: (x * w)[:, None].squeeze(2),
        [(4, 1, 8), ()],
        [("view", "a 1 b -> a 1 1 b"), ("view", "a 1 1 b -> a 1 b")],
    ),
    "unsqueeze": (lambda x, w: (x * w).unsqueeze(1), [X, ()], [("view", "a b c -> a 1 b c")]),
    "unflatten": (lambda x, w: (x * w).unflatten(0, (2, 2)), [X, ()], [("view", "(a B) c d -> a B c d")]),
    "permute": (lambda x, w: (x * w).permute(2, 0, 1), [X, ()], [("permute", "a b c -> c a b")]),
    "transpose": (lambda x, w: (x * w).transpose(0, -1), [X, ()], [("permute", "a b c -> c b a")]),
    "t": (lambda x, w: (x * w).t().mT.movedim(0, 1), [(4, 8), ()], [("permute", "a b -> b a")] * 3),
    "expand": (lambda x, w: (x * w).expand(3, 4, -1, 8), [(4, 1, 8), ()], [("expand", "b c d -> a b c d")]),
    "expand, broadcast": (lambda x, w: (x * w).expand(4, 6, 8), [(4, 1, 8), ()], [("expand", "a 1 c -> a b c")]),
    "slice": (
        lambda x, w: (x * w)[:, 1:6:2, ..., 3:],
        [X, ()],
        [("slice", "a (2*b+1) c -> a b c"), ("slice", "a b (c+3) -> a b c")],
    ),
    "select": (lambda x, w: (x * w)[:, -1], [X, ()], [("slice", "a (5) c -> a c")]),
    "split": (lambda x, w: (x * w).split(4, 1)[1], [X, ()], [("slice", "a (b+4) c -> a b c")]),
    "chunk": (lambda x, w: (x * w).chunk(3, 2)[2], [X, ()], [("slice", "a b (c+6) -> a b c")]),
    "unbind": (lambda x, w: (x * w).unbind(1)[0], [X, ()], [("slice", "a 1 c -> a c")]),
    "narrow": (lambda x, w: (x * w).narrow(1, 1, 4), [X, ()], [("slice", "a (b+1) c -> a b c")]),
    "cat": (lambda x, w: torch.cat((x, w), 1), [X, (4, 2, 8)], [("cat", "a (b) c, a (b-6) c -> a b c")]),
    "stack": (
        lambda x, w: torch.stack((x, w), 1),
        [X, X],
        [("view", "a b c -> a 1 b c"), ("view", "a b c -> a 1 b c"), ("cat", "a (b) c d, a (b-1) c d -> a b c d")],
    ),
    "cat with an empty tensor": (
        lambda x, w: torch.cat((torch.tensor([], dtype=torch.float64), x * w, (x * w)[:, 6:]), 1),
        [X, ()],
        [],
    ),
    "cat of several dtypes": (
        lambda x, w: torch.cat((x * w, (x > 0)), 1),
        [X, ()],
        [("pointwise", "a b c -> a b c")] * 2 + [("cat", "a (b) c, a (b-6) c -> a b c")],
    ),
    "parts without elements": (
        lambda x, w: torch.cat((*(x * w).split((2, 0, 4), 1)[:2], (x * w)[:, 3:3].float().double() * 2), 1),
        [X, ()],
        [("slice", "a (b) c -> a b c")],
    ),
    "sum over nothing": (
        lambda x, w: x * w + (x * w)[:, :0].sum(1, keepdim=True),
        [X, ()],
        [("pointwise", "a b c, a 1 c -> a b c")],
    ),
    "unfold": (lambda x, w: (x * w).unfold(1, 3, 2), [X, ()], [("unfold", "a (2*b+k0) c -> a b c k0")]),
    "unfold, the last dimension": (
        lambda x, w: (x * w).unfold(-1, 4, 1),
        [X, ()],
        [("unfold", "a b (c+k0) -> a b c k0")],
    ),
    "im2col": (
        lambda x, w: F.unfold(x * w, 3, dilation=(1, 2), padding=(1, 0), stride=2),
        [I, ()],
        [("im2col", "n c (2*h+KH-1) (2*w+2*KW) -> n (c KH KW) (h w)")],
    ),
    "pad": (lambda x, w: F.pad(x * w, (1, 2, 0, -1), value=3.0), [X, ()], [("pad", "a (b) (c-1) -> a b c")]),
    "pad, reflect": (
        lambda x, w: F.pad(x * w, (1, 2), mode="reflect"),
        [X, ()],
        [("border_pad", "a b (c+C-5) -> a b c")],
    ),
    "repeat": (
        lambda x, w: (x * w).repeat(1, 2, 1),
        [X, ()],
        [
            ("view", "a b c -> 1 a 1 b 1 c"),
            ("expand", "a b 1 d e f -> a b c d e f"),
            ("view", "1 a b C 1 d -> a (b C) d"),
        ],
    ),
    "repeat_interleave": (
        lambda x, w: (x * w).repeat_interleave(2, 1),
        [X, ()],
        [("view", "a b c -> a b 1 c"), ("expand", "a b 1 d -> a b c d"), ("view", "a b C d -> a (b C) d")],
    ),
    "roll": (
        lambda x, w: (x * w).roll(2, 1),
        [X, ()],
        [("slice", "a (b+4) c -> a b c"), ("slice", "a (b) c -> a b c"), ("cat", "a (b) c, a (b-2) c -> a b c")],
    ),
    "sum": (lambda x, w: (x * w).sum((0, 2), keepdim=True), [X, ()], [("sum", "a b c -> 1 b 1")]),
    "mean": (lambda x, w: (x * w).mean(1), [X, ()], [("mean", "a b c -> a c")]),
    "amax": (lambda x, w: (x * w).amax((1, 2)), [X, ()], [("amax", "a B C -> a")]),
    "max": (lambda x, w: (x * w).max(), [X, ()], [("amax", "A B C -> ")]),
    "max along": (
        lambda x, w: (x * w).relu().max(2)[0],
        [X, ()],
        [("pointwise", "a b c -> a b c"), ("reduction", "a b C -> a b, a b")],
    ),
    "argmax": (
        lambda x, w: (x * w).argmax(1).double() * w,
        [X, ()],
        [("argmax", "a B c -> a c"), ("pointwise", "a b -> a b"), ("pointwise", "a b,  -> a b")],
    ),
    "var": (
        lambda x, w: (x * w).var(1, keepdim=True),
        [X, ()],
        [("mean", "a b c -> a 1 c"), ("squared_deviation", "a b c, a 1 c -> a 1 c"), ("pointwise", "a b c -> a b c")],
    ),
    "norm": (lambda x, w: (x * w).norm(dim=1), [X, ()], [("power_sum", "a b c -> a c"), ("root", "a0 a1 -> a0 a1")]),
    "cumsum": (lambda x, w: (x * w).cumsum(1), [X, ()], [("scan", "a B c -> a B c")]),
    "topk": (lambda x, w: (x * w).topk(3, 1)[0], [X, ()], [("sort", "a B c -> a B_0 c, a B_1 c")]),
    "tril": (lambda x, w: (x * w).tril(), [X, ()], [("triangle", "a0 a1 a2 -> a0 a1 a2")]),
    "diagonal": (
        lambda x, w: (x * w).diagonal(0, 1, 2),
        [X, ()],
        [("slice", "a b (c) -> a b c"), ("einsum", "a B B -> a B")],
    ),
    "index_select": (lambda x, w: (x * w)[:, [1, 3, 0]], [X, ()], [("index", "a V1 c, i0 -> a i0 c")]),
    "index from the end": (lambda x, w: (x * w)[:, [-1, 0, -2]], [X, ()], [("index", "a V1 c, i0 -> a i0 c")]),
    "index of several dimensions": (
        lambda x, w: (x * w)[:, torch.tensor([[0, -1], [2, 5]])],
        [X, ()],
        [("index", "a V1 c, i0 i1 -> a i0 i1 c")],
    ),
    "index of the batch and a choice": (
        lambda x, w: (x * w)[torch.arange(4), (x * w).sum(2).argmax(1)],
        [X, ()],
        [
            ("pointwise", "a b c,  -> a b c"),
            ("sum", "a b c -> a b"),
            ("argmax", "a B -> a"),
            ("index", "i0 V1 c, i0 -> i0 c"),
        ],
    ),
    "index by ranges": (
        lambda x, w: (x * w)[torch.arange(4)[:, None, None], torch.arange(1, 6, 2), :, None],
        [X, ()],
        [("view", "a b c -> a b c 1"), ("slice", "a (2*b+1) c d -> a b c d"), ("view", "a b c 1 -> a 1 b c 1")],
    ),
    "index, an outer product": (
        lambda x, w: (x * w)[:, torch.tensor([[3], [0]]), torch.tensor([1, 7, 7])],
        [X, ()],
        [("index", "a V1 V2, i0 1, i1 -> a i0 i1")],
    ),
    "index, apart": (
        lambda x, w: (x * w)[torch.tensor([3, 0, 0]), :, torch.tensor([1, 7, 7])],
        [X, ()],
        [("index", "V0 b V2, i0, i0 -> i0 b")],
    ),
    "diagonal by indices": (
        lambda x, w: (x * w)[:, torch.arange(6), torch.arange(6)],
        [X, ()],
        [("slice", "a b (c) -> a b c"), ("index", "a i0 i0 -> a i0")],
    ),
    "gather": (
        lambda x, w: (x * w).gather(1, torch.arange(24).view(4, 6, 1) % 6),
        [X, ()],
        [("slice", "a b (c) -> a b c"), ("gather", "a V c, a b c -> a b c")],
    ),
    "bits": (
        lambda x, w: x * w * ((x > 0) & (x < 1) | (x > 2)),
        [X, ()],
        [("pointwise", "a b c -> a b c")] * 2
        + [("pointwise", "a b c, a b c -> a b c")]
        + [("pointwise", "a b c -> a b c")]
        + [("pointwise", "a b c, a b c -> a b c")] * 2,
    ),
    "cast": (lambda x, w: (x * w).float().double(), [X, ()], [("pointwise", "a b c -> a b c")] * 2),
    "copies are nothing": (lambda x, w: (x * w).contiguous().clone().view(4, 6, 8).to(torch.float64), [X, ()], []),
    "detach": (
        lambda x, w: (x * w).detach() * w,
        [X, ()],
        [("detach", "a0 a1 a2 -> a0 a1 a2"), ("pointwise", "a b c,  -> a b c")],
    ),
    "assigning to a slice": (
        lambda x, w: _assigned(x, w),
        [X, ()],
        [("slice", "a (b+1) c -> a b c"), ("slice", "a 1 c -> a c"), ("pointwise", "a b -> a b")],
    ),
}


def _assigned(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y[:, 0] = 2.0
    return y


@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_the_expected_pattern_and_computes_the_same(name: str) -> None:
    function, (shape, *weights), expected = CASES[name]
    graph = check_same(Fn(lambda *xs: (function(*xs) ** 2).sum(), *weights), (randn(*shape),))
    own = patterns(graph)[:-2]  # without the square and the sum
    if weights == [()]:  # the multiplication that gives the input a gradient
        assert own.pop(0)[0] == "pointwise"
    if name != "assigning to a slice":
        assert own == expected
    else:
        assert own[-1][0] == "cat"


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, list[tuple[str, str]]]] = {
    "cross_entropy": (F.cross_entropy, "classes", [("valid_count", "n0 -> "), ("cross_entropy", "n C, n,  -> ")]),
    "smoothed, summed": (
        lambda y, t: F.cross_entropy(y, t, reduction="sum", label_smoothing=0.1),
        "classes",
        [("cross_entropy", "n C, n -> ")],
    ),
    "class weights": (
        nn.CrossEntropyLoss(torch.arange(1.0, 6).double()),
        "classes",
        [("valid_count", "n0, C -> "), ("cross_entropy", "n C, n, , C -> ")],
    ),
    "probabilities": (F.cross_entropy, "numbers", [("cross_entropy", "n C, n C -> ")]),
    "nll_loss": (
        lambda y, t: F.nll_loss(F.log_softmax(y, 1), t),
        "classes",
        [("log_softmax", "a B -> a B"), ("valid_count", "n0 -> "), ("nll_loss", "n C, n,  -> ")],
    ),
    "mse_loss": (nn.MSELoss(), "numbers", [("mse_loss", "a b, a b -> ")]),
    "l1_loss": (F.l1_loss, "numbers", [("l1_loss", "a b, a b -> ")]),
    "smooth_l1_loss": (nn.SmoothL1Loss(beta=0.5), "numbers", [("smooth_l1_loss", "a b, a b -> ")]),
    "bce_with_logits": (
        lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
        "numbers",
        [("pointwise", "a b -> a b"), ("bce_with_logits", "a b, a b -> ")],
    ),
    "none": (
        lambda y, t: F.mse_loss(y, t, reduction="none").sum(),
        "numbers",
        [("mse_loss", "a b, a b -> a b"), ("sum", "a b -> ")],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_part_of_the_graph(name: str) -> None:
    loss, kind, expected = LOSSES[name]
    targets = torch.tensor([0, 4, -100, 2]) if kind == "classes" else randn(4, 5)
    graph = check_same(Fn(F.linear, (5, 8)), (randn(4, 8),), loss, targets)
    assert [p for p in patterns(graph) if p[0] != "linear"] == expected
    batch = {op.access.inputs[0].dimensions[0].axes[0]: op for op in graph.operators}
    assert all(op.roles[axis] == "sample" for axis, op in batch.items()), "the batch stays the batch where it is summed"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=torch.float64)
        self.bn = nn.BatchNorm2d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).pow(2).mean()


def test_batch_norm_has_statistics_that_are_partial_sums_and_updates_its_buffers() -> None:
    model, x = Normed(), randn(2, 3, 6, 6)
    graph = check_same(model, (x,))
    kinds = {op.name: (op.kind, op.pattern) for op in graph.operators}
    assert kinds["bn.statistics"] == ("batch_statistics", "n c s0 s1 -> M c")
    assert kinds["bn"] == ("batch_norm", "n c s0 s1, M c, c, c -> n c s0 s1")
    assert kinds["bn.running"] == ("batch_norm_running", "M c, c, c -> c, c")
    assert graph.buffer_updates == {"bn.running_mean": "bn.running.0", "bn.running_var": "bn.running.1"}
    assert graph.counters == ("bn.num_batches_tracked",)
    imported = import_with_constants(model, (x,))
    values = execute(imported, model, (x,))
    model(x)
    torch.testing.assert_close(values["bn.running.0"], model.bn.running_mean)
    torch.testing.assert_close(values["bn.running.1"], model.bn.running_var)


def test_batch_norm_groups_normalise_each_part_of_the_batch_on_its_own_as_ddp_does() -> None:
    model, x = Normed(), randn(6, 3, 6, 6)
    imported = import_with_constants(model, (x,), tracing=Tracing(batch_norm_groups=3))
    kinds = {op.name: (op.kind, op.pattern) for op in imported.graph.operators}
    assert kinds["bn.statistics"] == ("batch_statistics", "(g n) c s0 s1 -> g M c")
    assert kinds["bn"] == ("batch_norm", "(g n) c s0 s1, g M c, c, c -> (g n) c s0 s1")
    assert kinds["bn.running"] == ("batch_norm_running", "1 M c, c, c -> c, c")
    assert imported.graph.tracing.batch_norm_groups == 3
    values = execute(imported, model, (x,))
    first = copy.deepcopy(model)
    losses = [(first if k == 0 else model)(part) for k, part in enumerate(x.chunk(3))]  # equal parts: their mean
    torch.testing.assert_close(values[imported.graph.loss], torch.stack(losses).mean())
    torch.testing.assert_close(values["bn.running.0"], first.bn.running_mean)
    torch.testing.assert_close(values["bn.running.1"], first.bn.running_var)


def test_batch_norm_groups_must_divide_the_batch() -> None:
    with pytest.raises(ImportModelError, match="batch of 6, which batch_norm_groups=4 does not divide"):
        import_model(Normed(), (randn(6, 3, 6, 6),), batch_norm_groups=4)
    with pytest.raises(ImportModelError, match="at least 1, not 0"):
        import_model(Normed(), (randn(6, 3, 6, 6),), batch_norm_groups=0)


def test_a_model_in_eval_mode_normalises_by_its_running_statistics() -> None:
    graph = check_same(Normed().eval(), (randn(2, 3, 6, 6),))
    assert ("batch_norm_inference", "n c s0 s1, c, c, c, c -> n c s0 s1") in patterns(graph)
    assert not graph.buffer_updates and not graph.counters


def test_batch_norm_without_weights_or_running_statistics() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, affine=False, track_running_stats=False)).double()
    graph = check_same(model, (randn(2, 3, 6),), lambda y: y.pow(3).sum())
    assert ("batch_norm", "n c s0, M c -> n c s0") in patterns(graph)


SMALL: dict[str, Callable[..., zoo.ZooModel]] = {
    "lenet": partial(zoo.lenet, batch=2),
    "alexnet": partial(zoo.alexnet, batch=2, size=64, classes=7, hidden=16),
    "resnet": partial(zoo.resnet50, batch=2, size=32, classes=7, width=4, blocks=(1, 1, 1, 1)),
    "gpt2": partial(zoo.gpt2, batch=2, seq=6, layers=2, hidden=16, heads=2, vocab=20),
    "bert": partial(zoo.bert, batch=2, seq=6, layers=1, hidden=16, heads=2, vocab=20),
    "inception": partial(zoo.inception_v3, batch=2, size=75, classes=7, width=1),
    "rnntc": partial(zoo.rnntc, batch=2, steps=3, hidden=4, vocab=9, layers=2),
    "rnnlm": partial(zoo.rnnlm, batch=2, steps=3, hidden=4, vocab=9),
    "nmt": partial(zoo.nmt, batch=2, steps=3, hidden=4, vocab=9),
    "llama": partial(
        zoo.llama7b, batch=2, seq=6, layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=20, device="cpu"
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_zoo_computes_the_same_as_a_graph(name: str) -> None:
    model, inputs, targets, loss = SMALL[name]()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    check_same(model.double(), inputs, loss, targets)


def test_layers_keep_their_names_and_lines() -> None:
    model, inputs, targets, loss = SMALL["gpt2"]()
    graph = import_model(model, inputs, loss, targets=targets)
    names = [op.name for op in graph.operators]
    assert {"wte", "blocks.0.attn.q_proj", "blocks.1.attn.sdpa", "blocks.1.mlp.gelu", "lm_head"} <= set(names)
    # Targets are fed and counted where the loss is.
    assert names[-4:] == ["loss.view_1", "loss.view", "loss.valid_count", "loss.cross_entropy"]
    assert graph.loss == names[-1]
    op = graph.operators[graph.index["blocks.1.attn.sdpa"]]
    assert op.module == "blocks.1.attn" and op.outputs == (op.name,)
    assert op.source.startswith("zoo/transformer.py:") and op.roles["h"] == "parameter" and op.roles["b"] == "sample"
    assert [t.name for t in graph.of_kind("input")] == ["input", "target"]


def test_tied_weights_are_one_parameter_and_dead_code_is_gone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.unused = nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x) * self.frozen
            self.unused(y).sum()
            return self.head(y).logsumexp(-1).mean()

    graph = check_same(Tied(), (torch.tensor([[1, 2], [3, 4]]),))
    assert [(t.name, t.requires_grad) for t in graph.of_kind("parameter")] == [
        ("embed.weight", True),
        ("frozen", False),
    ]
    assert len(graph.consumers["embed.weight"]) == 2
    assert [op.name for op in graph.operators] == ["embed", "mul", "head", "logsumexp", "mean"]


def test_constants_are_folded_and_their_values_returned() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))
            self.register_buffer("ids", torch.arange(9.0))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(5, 5, device=x.device).tril()
            return (x * self.w * (self.ids[:5] + 1) @ mask + torch.zeros_like(x)).sum()

    imported = import_with_constants(Masked(), torch.ones(2, 5))
    assert [t.shape for t in imported.graph.of_kind("constant")] == [(5,), (5, 5), (1, 1)]
    assert torch.equal(imported.constants["constant"], torch.arange(1.0, 6))
    check_same(Masked(), (torch.ones(2, 5),))
    away = import_with_constants(Masked().to("meta"), torch.ones(2, 5, device="meta"))
    assert away.graph.content_hash() == imported.graph.content_hash()
    assert torch.equal(away.constants["constant_1"], torch.ones(5, 5).tril())
    assert away.constants["constant"].is_meta  # it depends on a buffer without values


def test_what_a_model_makes_of_numbers_has_values_on_the_meta_device() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.w)[:, [0, -2]] * torch.tensor([0.5, 2.0], device=x.device)
            return (y + y.new_tensor([1.0, 3.0])).square().sum()

    imported = import_with_constants(Chosen(), torch.ones(2, 5))
    away = import_with_constants(Chosen().to("meta"), torch.ones(2, 5, device="meta"))
    assert away.graph.content_hash() == imported.graph.content_hash()
    assert len(imported.constants) == 2  # the index is two slices
    for name, value in imported.constants.items():
        assert torch.equal(away.constants[name], value)


def test_constants_have_the_smallest_form_and_equal_ones_are_one() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(6, 6, device=x.device).tril().expand(4, 2, 6, 6)
            y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask.bool()) * mask[..., :1]
            first = torch.zeros(4, 2, 1, dtype=torch.long, device=x.device).expand(4, 2, 6)
            table = torch.arange(12.0, device=x.device).view(2, 6).t()[:, :1].expand(6, 2).reshape(12)[:8]
            other = torch.as_strided(torch.arange(12, device=x.device).view(3, 4).t(), (8,), (1,), 2)
            return y + torch.gather(x, -1, first[..., None]) + table * other

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, dtype=torch.float64))
            self.a, self.b = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x * self.w)).square().sum()

    graph = check_same(Twice(), (randn(4, 2, 6, 8),))
    assert sorted(t.shape for t in graph.of_kind("constant")) == [(1, 1, 1, 1), (1, 1, 6, 1), (1, 1, 6, 6), (8,)]
    expanded = [op for op in graph.operators if op.kind == "expand"]
    assert [op.roles["a"] for op in expanded] == ["sample", "sample"]


def test_a_mask_that_fits_no_memory_is_no_obstacle_on_the_meta_device() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[2]
            mask = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
            return F.scaled_dot_product_attention(x * self.w, x, x, attn_mask=mask.expand(2, 4, size, size)).sum()

    size = 1 << 20
    graph = import_model(Masked(), torch.empty(2, 4, size, 8, device="meta"))
    assert [t.shape for t in graph.of_kind("constant")] == [(1, 1, size, size)]


def test_no_gradient_flows_where_the_model_says_so() -> None:
    class Stop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.w * x
            return (scale * self.w).sum()

    graph = check_same(Stop(), (torch.ones(2, 3),))
    assert [op.kind for op in graph.operators].count("detach") == 1


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_the_hash_is_the_same_on_every_call_process_and_device(name: str) -> None:
    def digest(device: str) -> str:
        model, inputs, targets, loss = SMALL[name](device=device)
        return import_model(model, inputs, loss, targets=targets).content_hash()

    devices = ["cpu", "cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]
    code = (
        f"from tests.test_importer import SMALL, import_model\nm, x, t, loss = SMALL[{name!r}]()\n"
        "print(import_model(m, x, loss, targets=t).content_hash())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert {digest(device) for device in devices} == {other.stdout.strip()}, other.stderr


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_graphs_are_what_the_code_makes(name: str) -> None:
    path = Path(__file__).parent.parent / "graphs" / f"{name}.json"
    assert OperatorGraph.load(path).content_hash() == make(name).content_hash(), (
        f"graphs/{name}.json is out of date: run python -m flexsearch.graph.shipped graphs"
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_graphs_load(name: str) -> None:
    graph = OperatorGraph.load(name)
    assert graph.name == name and graph.batch == SHIPPED[name].arguments["batch"]


def test_a_seven_billion_parameter_decoder_imports_without_memory() -> None:
    model, inputs, targets, loss = zoo.llama7b(layers=2)  # of 32, at full width
    graph = import_model(model, inputs, loss, targets=targets)
    parameters = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    layer = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter") if t.name.startswith("layers.0."))
    assert parameters + 30 * layer == 6_738_415_616


def test_an_unknown_operator_is_named_with_its_layer_line_and_remedy() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.pdist(x)

    model = nn.Sequential(nn.Linear(8, 8), Inner())
    with pytest.raises(ImportModelError) as caught:
        import_model(model, torch.ones(4, 8), lambda y: y.sum())
    message = str(caught.value)
    assert "aten._pdist_forward.default" in message and "'1'" in message and "test_importer.py:" in message
    assert "flexsearch.register" in message and "--opaque" in message
    graph = import_model(model, torch.ones(4, 8), lambda y: y.sum(), opaque=True)
    op = next(op for op in graph.operators if op.kind == "opaque")
    assert op.pattern == "A B -> C" and not op.splittable


@pytest.mark.parametrize("name", ["solve", "cholesky", "inv"])
def test_the_check_of_a_matrix_is_left_out_as_others_are(name: str) -> None:
    """PyTorch traces it with a token that stands for the order of effects."""
    function = getattr(torch.linalg, name)

    def factorised(x: Tensor, w: Tensor) -> Tensor:
        square = (x * w).unsqueeze(-1) + torch.eye(8)
        return function(square, x).sum() if name == "solve" else function(square).sum()

    assert "linalg" in [op.kind for op in import_model(Fn(factorised, (8,)), randn(4, 8)).operators]


def test_a_file_that_wants_a_result_that_linear_algebra_has_not_is_refused(tmp_path: Path) -> None:
    graph = import_model(Fn(lambda x, w: torch.linalg.inv((x * w)[:, None] + torch.eye(8)).sum(), (8,)), randn(4, 8))
    graph.save(file := tmp_path / "graph.json")
    text = file.read_text()
    assert '"results": [0, 1]' in text
    file.write_text(text.replace('"results": [0, 1]', '"results": [0, 7]'))
    with pytest.raises(FlexsearchError, match=r"attributes\.results: \[0, 7\] are not the numbers of 2 of 2 results"):
        OperatorGraph.load(file)


def test_linear_algebra_that_decides_by_values_is_refused_with_a_remedy_that_works() -> None:
    def likelihood(x: Tensor, w: Tensor, **options: bool) -> Tensor:
        square = (x * w)[:, :, None] * x[:, None] + torch.eye(8)
        return torch.distributions.MultivariateNormal(torch.zeros(8), square, **options).log_prob(x).sum()

    with pytest.raises(ImportModelError, match="validate_args=False"):
        import_model(Fn(likelihood, (8,)), randn(4, 8))
    import_model(Fn(lambda x, w: likelihood(x, w, validate_args=False), (8,)), randn(4, 8))
    with pytest.raises(ImportModelError, match=r"torch\.linalg\.pinv\(A\) @ B"):
        import_model(Fn(lambda x, w: torch.linalg.lstsq(x * w, x)[0].sum(), (8,)), randn(4, 8))


def test_a_call_that_its_handler_does_not_foresee_is_an_error_or_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(b: Any, **call: Any) -> None:
        raise ValueError("zip() argument 2 is longer than argument 1")

    monkeypatch.setitem(TRACES, "aten.tanh", handler)
    model = Fn(lambda x, w: torch.tanh(x * w).sum(), ())
    with pytest.raises(ImportModelError, match=r"aten\.tanh\.default.*does not fit its pattern.*--opaque"):
        import_model(model, randn(4, 8))
    assert "opaque" in [op.kind for op in import_model(model, randn(4, 8), opaque=True).operators]


class Shift(OperatorKind):
    """A kind as a user writes it."""

    name = "shift"
    targets = ("flextest.shift",)
    pattern = "b.. c, c -> b.. c"
    roles = {"c": "parameter"}


class Shift3d(Shift):
    pattern = "a b c, c -> a b c"


def test_registering_an_operator_cures_the_error() -> None:
    with torch.library._scoped_library("flextest", "FRAGMENT") as library:
        library.define("shift(Tensor x, Tensor w, float by) -> Tensor")
        library.impl("shift", lambda x, w, by: x * w + by, "CompositeExplicitAutograd")
        model = Fn(lambda x, w: torch.ops.flextest.shift(x, w, 2.0).sum(), (8,))
        with pytest.raises(ImportModelError, match=r"flextest\.shift\.default"):
            import_model(model, randn(4, 8))
        try:
            register(Shift)
            graph = import_model(model, randn(4, 8))
            op = graph.operators[0]
            assert (op.kind, op.pattern, op.roles["c"]) == ("shift", "b0 c, c -> b0 c", "parameter")
            assert op.attributes["args"] == [{"tensor": 0}, {"tensor": 1}, 2.0]
            register(Shift3d())
            with pytest.raises(ImportModelError, match=r"shift.*does not fit the pattern of 'shift'"):
                import_model(model, randn(4, 8))
        finally:
            unregister("shift")


def test_mistakes_are_explained() -> None:
    linear = nn.Linear(8, 3)
    x = torch.ones(4, 8)
    with pytest.raises(ImportModelError, match=r"scalar.*shape \(4, 3\)"):
        import_model(linear, x)
    with pytest.raises(ImportModelError, match="targets were given without a loss"):
        import_model(linear, x, targets=x)
    with pytest.raises(ImportModelError, match=r"decides by the values of tensors \(.*test_importer.py:\d+\)"):
        import_model(Fn(lambda x, w: x.sum() if x.sum() > 0 else w.sum(), (1,)), x)
    with pytest.raises(ImportModelError, match=r"cannot be traced.*"):
        import_model(linear, torch.ones(4, 7), lambda y: y.sum())
    with pytest.raises(ImportModelError, match="draws random numbers"):
        import_model(Fn(lambda x, w: (x * torch.multinomial(x.abs(), 8) * w).sum(), ()), x)
    with pytest.raises(ImportModelError, match="returns 2 values"):
        import_model(Fn(lambda x, w: ((x * w).sum(), w), ()), x)
    with pytest.raises(ImportModelError, match="changes a user input in place"):
        import_model(Fn(lambda x, w: (x.mul_(2) * w).sum(), ()), randn(3))
    with pytest.raises(ImportModelError, match="the loss has a parameter of its own"):
        import_model(linear, x, nn.Sequential(nn.Linear(3, 1), nn.Flatten(0), nn.Softmax(0)))
    with pytest.raises(ImportModelError, match="no tensor among the example inputs"):
        import_model(Fn(lambda w: w.sum(), (2,)), ())


def test_a_parameter_outside_of_the_model_is_refused_where_it_would_be_trained() -> None:
    """A graph would have it as a constant: it would get no gradient."""
    linear, outside, x = nn.Linear(8, 3), nn.Linear(3, 2), torch.ones(4, 8)
    weight = linear.weight

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(8, 3)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x).sum()

    def frozen(y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = outside(y).square().mean()
        return (y * scale + outside.weight.detach().sum()).sum() + linear.weight.square().sum()

    for model, loss in (
        (linear, lambda y: outside(y).sum()), (linear, lambda y: y.sum() + weight.square().sum()), (Hidden(), None),
    ):  # fmt: skip
        with pytest.raises(ImportModelError, match=r"a parameter of shape .* is read that is none"):
            import_model(model, x, loss)
    graph = import_model(linear, x, frozen)
    assert len(graph.of_kind("parameter")) == 2 and len(graph.consumers["weight"]) == 2


def test_hooks_on_gradients_are_refused() -> None:
    def hooked(which: Callable[[nn.Sequential], Any]) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
        which(model)
        return model

    x = torch.ones(4, 8)
    for where, model in {
        "parameter '0.weight' has a hook": hooked(lambda m: m[0].weight.register_hook(lambda g: g * 2)),
        "parameter '0.bias' has": hooked(lambda m: m[0].bias.register_post_accumulate_grad_hook(lambda p: None)),
        "layer '1' has a backward": hooked(lambda m: m[1].register_full_backward_hook(lambda m, i, o: None)),
        "the model has a backward": hooked(lambda m: m.register_full_backward_pre_hook(lambda m, o: None)),
        "gradient of an activation": Fn(lambda x, w: ((x * w), (x * w).register_hook(lambda g: g))[0].sum(), (8,)),
    }.items():
        with pytest.raises(ImportModelError, match=where):
            import_model(model, x, (lambda y: y.sum()) if isinstance(model, nn.Sequential) else None)
    forward = hooked(lambda m: m[1].register_forward_hook(lambda m, i, o: o * 2))
    assert len(import_model(forward, x, lambda y: y.sum()).operators) == 4


class Converting(nn.Module):
    """Has its layer compute in a type of its own, as routers of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(8, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype)
        return self.layer(x.to(self.dtype))


def test_a_layer_that_is_converted_as_it_is_called_is_refused_unless_it_is_so_already() -> None:
    x = torch.ones(4, 8)
    kept = import_model(Converting(torch.float32), x, lambda y: y.sum())
    assert "linear" in [op.kind for op in kept.operators]
    model = Converting(torch.float64)
    with pytest.raises(ImportModelError, match=r"weights of a Linear from torch\.float32 .* call the model once"):
        import_model(model, x, lambda y: y.sum())
    model(x)
    import_model(model, x, lambda y: y.sum())


def test_a_number_that_each_call_changes_is_refused_where_the_model_computes_with_it() -> None:
    class Counting(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.linear, self.calls, self.reads = nn.Linear(8, 3), 0, reads

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (self.linear(x) * (self.calls / 10 if self.reads else 2)).sum()

    with pytest.raises(ImportModelError, match=r"'calls', a number that each call changes.*register_buffer\('calls'"):
        import_model(Counting(reads=True), torch.ones(4, 8))
    model = Counting(reads=False)
    assert len(import_model(model, torch.ones(4, 8)).operators) == 3
    assert model.calls == 0


def test_a_weight_that_is_changed_behind_autograds_back_is_refused_in_words() -> None:
    with pytest.raises(ImportModelError, match=r"uses values in a way that no trace follows.*\.data"):
        import_model(Fn(lambda x, w: (w.data.clamp_(-1, 1), (x * w).sum())[1], (8,)), torch.ones(4, 8))


class Steps(nn.Module):
    """Divides by the number of its calls, and keeps something that no step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("latest", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.linear(x) / self.calls
        self.latest.copy_(y.detach().amax(0))
        return y.sum()


def test_buffers_that_a_step_changes_are_read_by_an_operator_and_so_stored() -> None:
    """A counter that nothing reads needs no operator; one that is read is a buffer like others."""
    graph = import_model(Steps(), torch.ones(4, 8))
    assert not graph.counters and sorted(graph.buffer_updates) == ["calls", "latest"]
    assert all(graph.consumers[buffer] for buffer in graph.buffer_updates)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
    graph = import_model(spectral, torch.ones(4, 8), lambda y: y.sum())
    assert len(graph.buffer_updates) == 2 and all(graph.consumers[buffer] for buffer in graph.buffer_updates)


def test_arguments_may_be_named_or_nested() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, extra: list[Tensor], flag: bool = False) -> Tensor:
            return ((x - extra[0]) * self.w + extra[1]).sum()

    pair = [torch.ones(2, 3), torch.zeros(3)]
    imported = import_with_constants(Two(), {"x": torch.ones(2, 3), "extra": pair, "flag": True})
    assert imported.input_names == ("input", "input_1", "input_2")
    found = execute(imported, Two(), (torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((3,), 0.5)))
    assert found[imported.graph.loss].item() == -3.0
    last = imported.graph.operators[1]
    assert [a.role for a in last.axes] == ["sample", "attribute"]


def test_dropout_stays_and_each_has_its_own_salt() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.0))
    graph = import_model(model, torch.ones(2, 3), torch.sum)
    drops = [op for op in graph.operators if op.kind == "dropout"]
    assert [op.name for op in drops] == ["0", "2"] and len({op.attributes["salt"] for op in drops}) == 2
    assert not [op for op in import_model(model.eval(), torch.ones(2, 3), torch.sum).operators if op.kind == "dropout"]


def test_what_wraps_a_model_is_taken_off() -> None:
    model, x = nn.Sequential(nn.Linear(8, 3), nn.Tanh()), torch.ones(4, 8)
    plain = import_model(model, x, torch.sum)
    compiled, called = torch.compile(model), copy.deepcopy(model)
    called.compile()
    for wrapped in (compiled, nn.DataParallel(model), torch.compile(nn.DataParallel(model)), called):
        assert import_model(wrapped, x, torch.sum).content_hash() == plain.content_hash()
    assert called._compiled_call_impl is not None
    assert pool(1).run(_wrapped_by_ddp)[0] == plain.content_hash()


def _wrapped_by_ddp() -> str:
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    return import_model(nn.parallel.DistributedDataParallel(model), torch.ones(4, 8), torch.sum).content_hash()


def test_random_draws_are_operators_with_a_number_for_each_sample() -> None:
    model, x = Dropped(), randn(4, 8)
    imported = import_with_constants(model, (x,), lambda y: y.abs().sum())
    drawn = [op for op in imported.graph.operators if op.kind == "uniform"]
    assert len(drawn) == 2 and len({op.attributes["salt"] for op in drawn}) == 2
    assert [op.roles["a"] for op in drawn] == ["sample", "sample"]
    many = import_with_constants(model, (randn(4000, 8),), lambda y: y.abs().sum())
    values = execute(many, model, (randn(4000, 8),))
    paths, mask = (values[op.outputs[0]] for op in many.graph.operators if op.kind == "uniform")
    for numbers in (paths, mask):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 0.03 and abs(numbers.var() - 1 / 12) < 0.01
    output = values[
        next(op.inputs[0] for op in many.graph.operators if op.attributes.get("target") == "aten.abs.default")
    ]
    dropped = (output == 0).double().mean()
    assert abs(dropped - (1 - 0.5 * 0.75)) < 0.03


class Output(dict[str, Tensor]):
    """As a ModelOutput of Hugging Face."""


def test_the_loss_that_a_model_returns_by_name_is_used() -> None:
    class Model(nn.Module):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.layer, self.key = nn.Linear(8, 3), key

        def forward(self, x: Tensor, labels: Tensor) -> Output:
            logits = self.layer(x)
            return Output({self.key: F.cross_entropy(logits, labels), "logits": logits})

    batch = {"x": torch.ones(4, 8), "labels": torch.tensor([0, 1, 2, 0])}
    graph = import_model(Model("loss"), batch)
    assert graph.operators[-1].kind == "cross_entropy" and graph.loss == graph.operators[-1].outputs[0]
    assert [t.name for t in graph.of_kind("input")] == ["input", "input_1"]
    with pytest.raises(ImportModelError, match=r"returns error, logits and no loss\. Put the labels into the batch"):
        import_model(Model("error"), batch)


def test_an_error_while_tracing_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ImportModelError, match=r"cannot be traced in layer '1\.0'"):
        import_model(model, torch.ones(4, 8), torch.sum)


def test_models_are_loaded_by_name(tmp_path: Path) -> None:
    loaded = load_callable("flexsearch.zoo:mlp", batch=2, features=4, width=4)
    assert import_model(loaded.model, loaded.inputs, loaded.loss, targets=loaded.targets).batch == 2
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def pair(): return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)), torch.ones(3, 2)\n"
        "def wrong(): return 3\n"
        "def broken(): raise OSError('no disk')\n"
        "number = 3\n"
    )
    assert load_callable(f"{file}:pair").loss is None
    for spec, problem in {
        "flexsearch.zoo": "Write MODULE:CALLABLE",
        "flexsearch.zoo:alexnett": "has no 'alexnett'.*mean alexnet",
        f"{file}:unheard_of": "has: broken, pair, wrong.",
        "no_such_module:build": "no module named 'no_such_module'",
        "nowhere/model.py:build": "there is no file",
        f"{file}:wrong": "returned a int.*must return",
        f"{file}:broken": "raised OSError: no disk",
        f"{file}:number": "not a callable",
    }.items():
        with pytest.raises(ImportModelError, match=problem):
            load_callable(spec)


def test_a_layer_used_twice_updates_its_statistics_twice() -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), norm).double()
    imported = import_with_constants(model, randn(4, 6, 8), lambda y: y.pow(3).sum())
    values = execute(imported, model, (randn(4, 6, 8),))
    updates = imported.graph.buffer_updates
    check_same(model, (randn(4, 6, 8),), lambda y: y.pow(3).sum())
    model(randn(4, 6, 8))
    torch.testing.assert_close(values[updates["1.running_var"]], norm.running_var)


@pytest.mark.parametrize("dim", [0, 2, None])
def test_weight_norm_is_arithmetic_on_weights(dim: int | None) -> None:
    layer = nn.Conv1d(6, 4, 3, dtype=torch.float64)
    model = nn.utils.parametrizations.weight_norm(layer, dim=dim)
    graph = check_same(model, (randn(4, 6, 8),), lambda y: y.pow(2).sum())
    assert "sum" in [op.kind for op in graph.operators]


def test_assertions_about_values_are_left_out_and_other_uses_of_values_refused() -> None:
    example = (torch.ones(2, 4),)
    graph = import_model(Checked(False), example, lambda y: y.sum())
    assert "linear" in {op.kind for op in graph.operators}
    with pytest.raises(ImportModelError, match="makes a number of a tensor's value"):
        import_model(Checked(True), example, lambda y: y.sum())


def test_a_tensor_that_a_batch_has_twice_is_two_inputs_on_any_device() -> None:
    """Labels that are the tokens, for instance, of which the next batch may have others."""
    x, graphs = randn(4, 3), []
    for device in ("cpu", "meta"):
        model = Fn(lambda a, b, w: ((a @ w - b) ** 2).mean(), (3, 3)).to(device)
        graphs += [import_model(model, (x, x)), import_model(model, (x, x.clone()))]
    assert [t.name for t in graphs[0].of_kind("input")] == ["input", "input_1"]
    assert len({graph.content_hash() for graph in graphs}) == 1
