"""Pieces equal the whole: however an operator is split, its pieces add up to its output, and so do the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tests.kernel_cases_along
import tests.kernel_cases_images
import tests.kernel_cases_index
import tests.kernel_cases_more
from flexsearch.errors import ImportModelError
from flexsearch.graph.importer import import_model
from flexsearch.graph.notation import Box, Interval
from flexsearch.graph.ops import KernelContext, build_kernel, norm_functions
from flexsearch.graph.ops.batch_norm import batch_norm_at_once
from flexsearch.graph.ops.local import in_types
from flexsearch.graph.ops.random import keep_mask
from flexsearch.graph.piece import Piece, make_piece, whole_piece
from tests.kernel_cases import CASES, Case, rand

assert tests.kernel_cases_along and tests.kernel_cases_images and tests.kernel_cases_more  # register their cases

RANDOM = settings(
    derandomize=True, max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

Result = tuple[list[Tensor], list[Tensor]]
"""Outputs, and gradients of the inputs (zero where there is none)."""


def region(x: Tensor, box: Box) -> Tensor:
    return x[tuple(slice(low, high) for low, high in box)]


def run_pieces(
    case: Case, pieces: Sequence[Piece], gradients: Sequence[Tensor], disturb: Callable[[Tensor], Tensor] = lambda y: y
) -> Result:
    """Run every piece on its regions and add up what it gives."""
    shapes = [tuple(x.shape) for x in case.operands]
    outputs = [torch.zeros_like(g) for g in gradients]
    totals = [torch.zeros_like(x) for x in case.operands]
    for piece in pieces:
        kernel = build_kernel(case.op, piece, shapes, KernelContext(seed=1, step=2))
        local = [None if b is None else region(x, b).clone() for x, b in zip(case.operands, piece.inputs, strict=True)]
        for i, x in enumerate(local):
            if x is not None and x.is_floating_point() and i not in case.no_grad:
                x.requires_grad_()
        result = kernel(*local)
        results = result if isinstance(result, tuple) else (result,)
        assert len(results) == len(piece.outputs)
        for y, box, output in zip(results, piece.outputs, outputs, strict=True):
            part = region(output, box)
            assert y.shape == part.shape
            part += disturb(y.detach()).to(part.dtype)
        parts = zip(results, gradients, piece.outputs, strict=True)
        wanted = [(y, region(g, box)) for y, g, box in parts if y.requires_grad]
        if wanted:
            torch.autograd.backward([y for y, _ in wanted], [g for _, g in wanted])
        for x, box, total in zip(local, piece.inputs, totals, strict=True):
            if x is not None and box is not None and x.grad is not None:
                region(total, box).add_(x.grad)
    return outputs, totals


def run_reference(case: Case, gradients: Sequence[Tensor]) -> Result | None:
    leaves = [x.clone() for x in case.operands]
    for i, x in enumerate(leaves):
        if x.is_floating_point() and i not in case.no_grad:
            x.requires_grad_()
    result = case.reference(*leaves)
    if result is None:
        return None
    results = result if isinstance(result, tuple) else (result,)
    wanted = [(y, g) for y, g in zip(results, gradients, strict=True) if y.requires_grad]
    if wanted:
        torch.autograd.backward([y for y, _ in wanted], [g for _, g in wanted])
    return [y.detach().double() for y in results], [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def assert_same(found: Result, expected: Result) -> None:
    for side in (0, 1):
        for x, y in zip(found[side], expected[side], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def split(case: Case, intervals: Mapping[str, Sequence[Interval]]) -> list[Piece]:
    shapes = [tuple(x.shape) for x in case.operands]
    return [
        make_piece(case.op, dict(zip(intervals, combination, strict=True)), shapes, case.output_shapes)
        for combination in product(*intervals.values())
    ]


@st.composite
def cuts(draw: Any, case: Case) -> dict[str, list[Interval]]:
    """Uneven intervals for up to three axes that can be split."""
    chosen = draw(st.lists(st.sampled_from(case.op.splittable or ("",)), unique=True, max_size=3))
    intervals = {axis: [(0, size)] for axis, size in case.op.sizes.items()}
    for axis in set(chosen) & set(case.op.splittable):
        size = case.op.sizes[axis]
        points = [0, *sorted(draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))), size]
        intervals[axis] = list(pairwise(points))
    return intervals


@pytest.mark.parametrize("name", sorted(CASES))
def test_pieces_add_up_to_the_whole_and_to_plain_torch(name: str) -> None:
    @RANDOM
    @given(st.data(), st.integers(0, 2**31))
    def check(data: Any, seed: int) -> None:
        torch.manual_seed(seed)
        case: Case = data.draw(CASES[name])
        gradients = [torch.randn(shape, dtype=torch.float64) for shape in case.output_shapes]
        shapes = [tuple(x.shape) for x in case.operands]
        whole = run_pieces(case, [whole_piece(case.op, shapes, case.output_shapes)], gradients)
        expected = run_reference(case, gradients)
        if expected is not None:
            assert_same(whole, expected)
        assert_same(run_pieces(case, split(case, data.draw(cuts(case))), gradients), whole)

    check()


def test_the_check_notices_a_disturbed_piece() -> None:
    torch.manual_seed(0)
    case = tests.kernel_cases.case("linear", "b.. i, o i, +o -> b.. o", [rand(4, 6), rand(5, 6), rand(5)], F.linear)
    gradients = [rand(4, 5)]
    whole = run_reference(case, gradients)
    assert whole is not None
    pieces = split(case, {"b0": [(0, 1), (1, 4)], "i": [(0, 2), (2, 6)], "o": [(0, 5)]})
    assert_same(run_pieces(case, pieces, gradients), whole)
    with pytest.raises(AssertionError):
        assert_same(run_pieces(case, pieces, gradients, lambda y: y * (1 + 1e-7)), whole)
    with pytest.raises(AssertionError):
        assert_same(run_pieces(case, pieces[1:], gradients), whole)


def test_a_kind_without_a_kernel_is_named() -> None:
    case = tests.kernel_cases.case("linear", "b.. i, o i -> b.. o", [rand(4, 6), rand(5, 6)], F.linear)
    op = case.op.model_copy(update={"kind": "frobnicate"})
    with pytest.raises(ImportModelError, match=r"frobnicate.*flexsearch\.register"):
        build_kernel(op, whole_piece(op, [(4, 6), (5, 6)], [(4, 5)]), [(4, 6), (5, 6)], KernelContext())


def _keep(p: float, seed: int = 0, step: int = 0, salt: int = 0, shape: tuple[int, ...] = (64, 8, 128, 16)) -> Tensor:
    box = tuple((0, n) for n in shape)
    return keep_mask(shape, box, p, KernelContext(seed, step), salt, torch.device("cpu"))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_keeps_each_element_with_the_given_probability(p: float) -> None:
    kept = torch.stack([_keep(p, step=step) for step in range(8)]).double()
    deviation = sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.mean()) - (1 - p)) < 4 * deviation
    for dim in range(5):  # neighbours, and masks of neighbouring steps, are independent
        centred = kept - (1 - p)
        size = kept.shape[dim]
        correlation = (centred.narrow(dim, 0, size - 1) * centred.narrow(dim, 1, size - 1)).mean() / (p * (1 - p))
        assert abs(float(correlation)) < 5 / sqrt(kept.numel() * (size - 1) / size)


def test_dropout_masks_differ_by_seed_step_and_operator() -> None:
    masks = [_keep(0.5), _keep(0.5, seed=1), _keep(0.5, step=1), _keep(0.5, salt=1)]
    for i, a in enumerate(masks):
        assert torch.equal(a, masks[i])
        for b in masks[:i]:
            assert 0.49 < float((a == b).double().mean()) < 0.51


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
def test_batch_statistics_keep_their_digits_in_float32(mean: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(8, 3, 16, 16) + mean).requires_grad_()
    case = tests.kernel_cases.case("batch_statistics", "n c s.. -> M c", [x.detach()], lambda x: torch.zeros(2, 3))
    kernel = build_kernel(case.op, whole_piece(case.op, [x.shape], [(2, 3)]), [tuple(x.shape)], KernelContext())
    statistics = kernel(x)
    assert statistics.dtype == torch.float64
    exact = x.detach().double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(statistics[1] - statistics[0] ** 2, exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("at_once", [False, True])
def test_batch_norm_in_two_operators_is_that_of_torch(
    dtype: torch.dtype, layout: torch.memory_format, at_once: bool
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 6, 5) * 2 + 1).to(dtype).to(memory_format=layout)
    weight, bias, gradient = torch.randn(3).to(dtype), torch.randn(3).to(dtype), torch.randn(4, 3, 6, 5).to(dtype)
    first = tests.kernel_cases.case("batch_statistics", "n c s.. -> M c", [x], lambda x: torch.zeros(2, 3))
    second = tests.kernel_cases.case(
        "batch_norm",
        "n c s.., M c, c, c -> n c s..",
        [x, torch.zeros(2, 3), weight, bias],
        lambda x, *_: x,
        {"eps": 1e-5},
    )
    kernels = []
    for case in (first, second):
        shapes = [tuple(o.shape) for o in case.operands]
        kernels.append(build_kernel(case.op, whole_piece(case.op, shapes, case.output_shapes), shapes, KernelContext()))
    found = [t.clone().requires_grad_() for t in (x, weight, bias)]
    plain = [t.float().requires_grad_() for t in (x, weight, bias)]
    if at_once:
        statistics, y = batch_norm_at_once([first.op, second.op], kernels)(*found)
        torch.testing.assert_close(statistics, kernels[0](x), rtol=1e-5, atol=1e-5)
    else:
        y = kernels[1](found[0], kernels[0](found[0]), *found[1:])
    z = F.batch_norm(plain[0], None, None, *plain[1:], training=True)
    y.backward(gradient)
    z.backward(gradient.float())
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(y.float(), z, rtol=tolerance, atol=tolerance)
    for a, b in zip(found, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=tolerance, atol=tolerance * float(b.grad.abs().max()))


@pytest.mark.parametrize("by_torch", [False, True])
def test_running_statistics_are_updated_with_the_normalisation(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a node of autograd in Python, and by PyTorch's own, as on a GPU: all is as PyTorch has it."""
    monkeypatch.setattr(norm_functions, "by_torch", lambda _: by_torch)
    x = (torch.randn(4, 3, 6, 5, generator=torch.Generator().manual_seed(0)) + 1).to(memory_format=torch.channels_last)
    graph = import_model(torch.nn.BatchNorm2d(3, momentum=0.3), (x,), torch.sum)
    operators = [op for op in graph.operators if op.kind.startswith("batch_")]
    kernels = []
    for op in operators:
        shapes, outputs = ([graph.tensor[name].shape for name in names] for names in (op.inputs, op.outputs))
        kernels.append(build_kernel(op, whole_piece(op, shapes, outputs), shapes, KernelContext()))
    ours = [t.clone().requires_grad_() for t in (x, torch.rand(3), torch.rand(3))]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    running, expected = ([torch.zeros(3), torch.ones(3)] for _ in range(2))
    statistics, y, *updated = batch_norm_at_once(operators, kernels)(*ours, *running)
    z = F.batch_norm(theirs[0], *expected, *theirs[1:], training=True, momentum=0.3)
    gradient = torch.rand(4, 3, 6, 5)
    y.backward(gradient)
    z.backward(gradient)
    assert statistics is None and all(a is b for a, b in zip(updated, running, strict=True))
    assert isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction) != by_torch
    gradients = [[t.grad for t in operands] for operands in (ours, theirs)]
    torch.testing.assert_close([y, *running, *gradients[0]], [z, *expected, *gradients[1]])


@pytest.mark.parametrize("how", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_of_many_classes_is_read_in_parts(how: str, dtype: torch.dtype) -> None:
    """Its kernel keeps the scores alone, and casts those of half precision part by part."""
    torch.manual_seed(0)
    x, target = torch.randn(83, 4001).to(dtype), torch.randint(4001, (83,))
    target[5:9] = -100
    case = tests.kernel_cases.case(
        "cross_entropy", "n C, n -> n" if how == "none" else "n C, n -> ", [x, target],
        lambda x, t: F.cross_entropy(x, t, reduction=how), {"reduction": how, "ignore_index": -100},
    )  # fmt: skip
    shapes = [tuple(o.shape) for o in case.operands]
    piece = whole_piece(case.op, shapes, case.output_shapes)
    kernel = in_types(build_kernel(case.op, piece, shapes, KernelContext()), [dtype, torch.int64], [torch.float32])
    if dtype == torch.float64:
        kernel = build_kernel(case.op, piece, shapes, KernelContext())
    found, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    divisor = 83 / 79 if how == "mean" else 1.0  # without a count, those that are ignored count, too
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (y,) = made if isinstance(made := kernel(found, target), tuple) else (made,)
    expected = F.cross_entropy(plain.float() if dtype == torch.bfloat16 else plain, target, reduction=how) / divisor
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(expected))
    assert sum(t.nbytes for t in kept if t.is_floating_point()) <= x.nbytes + 83 * 8
    digits = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=digits, atol=digits)
    assert found.grad is not None and plain.grad is not None
    torch.testing.assert_close(found.grad, plain.grad, rtol=1e-2 if dtype == torch.bfloat16 else digits, atol=1e-7)
