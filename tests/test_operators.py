"""The operator table: FLOPs and roles follow from one line per kind; reshapes split where both sides agree."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.errors import ImportModelError
from flexsearch.graph import Axis, Operator, OperatorGraph, parse
from flexsearch.graph.notation import infer_sizes
from flexsearch.graph.operators import ATEN_KINDS, OPERATORS, axis_roles, backward_flops, forward_flops, register


def operator(kind: str, pattern: str, **sizes: int) -> Operator:
    access = parse(pattern)
    axes = tuple(Axis(name=a, size=sizes[a], role="attribute") for a in access.axes)
    names = tuple(f"x{i}" for i in range(len(access.inputs)))
    return Operator(name="op", kind=kind, pattern=pattern, axes=axes, inputs=names, outputs=("y",))


def test_a_contraction_costs_two_flops_per_point_and_backward_once_more_for_each_factor() -> None:
    op = operator("linear", "b i, o i, +o -> b o", b=4, o=5, i=6)
    assert forward_flops(op, op.sizes) == 2 * 4 * 5 * 6
    assert forward_flops(op, {"b": 2, "o": 5, "i": 3}) == 2 * 2 * 5 * 3
    assert backward_flops(op, op.sizes, (True, True, True)) == 2 * 240 + 20
    assert backward_flops(op, op.sizes, (False, True, False)) == 240
    assert backward_flops(op, op.sizes, (False, False, False)) == 0


def test_a_convolution_counts_its_window_and_group_once() -> None:
    pattern = "n (g c) (h+KH) (w+KW), (g o) c KH KW -> n (g o) h w"
    op = operator("conv2d", pattern, n=2, g=2, c=3, o=4, h=5, w=5, KH=3, KW=3)
    assert forward_flops(op, op.sizes) == 2 * 2 * (2 * 4) * 3 * 25 * 9


def test_attention_is_two_products_and_a_softmax() -> None:
    op = operator("attention", "b h q E, b h K E, b h K v -> b h q v", b=2, h=3, q=4, K=5, E=6, v=7)
    assert forward_flops(op, op.sizes) == 2 * 3 * 4 * 5 * (2 * (6 + 7) + 5)


def test_moving_data_is_free_and_anything_else_costs_one_per_output() -> None:
    assert forward_flops(operator("view", "a (b C) -> a b C", a=2, b=3, C=4), {"a": 2, "b": 3, "C": 4}) == 0
    op = operator("pointwise", "a b, b -> a b", a=2, b=3)
    assert forward_flops(op, op.sizes) == 6 and backward_flops(op, op.sizes, (True, False)) == 6
    assert forward_flops(operator("mine", "a b -> a", a=2, b=3), {"a": 2, "b": 3}) == 2


def test_published_forward_flops_of_the_shipped_models() -> None:
    """torchvision publishes multiply-adds per image: AlexNet 0.71 G, VGG-16 15.47 G, ResNet-50 4.09 G, ResNet-101
    7.80 G, Inception-v3 5.71 G."""
    for name, published in {
        "alexnet": 0.714e9, "vgg16": 15.47e9, "resnet50": 4.089e9, "resnet101": 7.801e9, "inception_v3": 5.713e9,
    }.items():  # fmt: skip
        graph = OperatorGraph.load(name)
        flops = sum(forward_flops(op, op.sizes) for op in graph.operators if op.kind in ("conv2d", "linear"))
        assert flops / 2 / graph.batch == pytest.approx(published, rel=0.005)


def test_every_forward_and_backward_of_the_shipped_graphs_can_be_counted() -> None:
    for name in ("lenet", "resnet50", "gpt2", "bert", "nmt"):
        graph = OperatorGraph.load(name)
        for op in graph.operators:
            assert op.kind in OPERATORS
            needs = [n in graph.differentiable for n in op.inputs]
            for value in (forward_flops(op, op.sizes), backward_flops(op, op.sizes, needs)):
                assert value >= 0 and math.isfinite(value)


def test_roles_come_from_the_batch_then_the_table_then_the_access() -> None:
    access = parse("b0 b1 i, o i, +o -> b0 b1 o")
    assert axis_roles("linear", access, {"b0"}) == {
        "b0": "sample", "b1": "attribute", "o": "parameter", "i": "reduction",
    }  # fmt: skip
    assert axis_roles("mse_loss", parse("a b, a b -> "), {"a"}) == {"a": "sample", "b": "reduction"}
    assert axis_roles("einsum", parse("a i, i k -> a k"), {"a"}, [False, True])["k"] == "parameter"
    assert axis_roles("einsum", parse("a i, i k -> a k"), {"a"}, [False, False])["k"] == "attribute"


def test_registration_checks_its_arguments_and_replaces_an_earlier_line() -> None:
    try:
        register("mine", "a.. -> a..", aten="lib.old.default")
        register("mine", "b.. c -> b..", {"c": "reduction"}, lambda op, extents: 7.0, aten="lib.new.default")
        assert "lib.old.default" not in ATEN_KINDS and ATEN_KINDS["lib.new.default"] == "mine"
        assert forward_flops(operator("mine", "b c -> b", b=2, c=3), {"b": 2, "c": 3}) == 7
    finally:
        OPERATORS.pop("mine", None)
        ATEN_KINDS.pop("lib.new.default", None)
    with pytest.raises(ImportModelError, match="'linear' belongs to flexsearch"):
        register("linear", "a -> a")
    with pytest.raises(ImportModelError, match='exactly one "->"'):
        register("mine", "a, a")
    with pytest.raises(ImportModelError, match="role 'batch' of axis 'a'"):
        register("mine", "a -> a", {"a": "batch"})  # type: ignore[dict-item]
    with pytest.raises(ImportModelError, match=r"LIBRARY\.OPERATOR\.OVERLOAD"):
        register("mine", "a -> a", aten="myop")
    assert "mine" not in OPERATORS


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same number of elements: both regroup one list of prime factors, in two orders."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6))

    def shape(factors: list[int]) -> tuple[int, ...]:
        result = [1]
        for factor in factors:
            if draw(st.booleans()):
                result.append(1)
            result[-1] *= factor
        return tuple(result)

    return shape(primes), shape(draw(st.permutations(primes)) if draw(st.booleans()) else primes)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(reshapes())
def test_a_piece_of_a_reshape_is_the_same_elements_on_both_sides(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    torch = pytest.importorskip("torch")
    from flexsearch.graph.ops.shape import view_pattern

    source, target = shapes
    pattern, known = view_pattern(source, target)
    access = parse(pattern)
    sizes = infer_sizes(access, [source], [target], known)
    x = torch.arange(math.prod(source)).view(source)
    y = x.view(target)
    whole = {a: (0, n) for a, n in sizes.items()}
    for axis in access.splittable(sizes):
        for interval in ((0, 1), (1, sizes[axis])):
            piece = {**whole, axis: interval}
            regions = []
            for operand, tensor in ((access.inputs[0], x), (access.outputs[0], y)):
                box = access.region(operand, piece, sizes, tensor.shape)
                assert box is not None
                regions.append(tensor[tuple(slice(low, high) for low, high in box)].flatten())
            assert torch.equal(*regions)


@pytest.mark.parametrize(
    ("source", "target", "splittable"),
    [((4, 6), (24,), {4}), ((8, 768), (8, 12, 64), {8, 12}), ((6, 4), (4, 6), {2}), ((3, 4), (4, 3), set()),
     ((2, 1, 3), (2, 3, 1), {2, 3}), ((32, 256, 6, 6), (32, 9216), {32, 256}), ((), (1, 1), set())],
)  # fmt: skip
def test_what_of_a_reshape_can_be_split(source: tuple[int, ...], target: tuple[int, ...], splittable: set[int]) -> None:
    pytest.importorskip("torch")
    from flexsearch.graph.ops.shape import view_pattern

    pattern, sizes = view_pattern(source, target)
    assert {sizes[a] for a in parse(pattern).splittable(sizes)} == splittable


def test_the_table_needs_no_torch() -> None:
    code = "import sys, flexsearch.graph.operators; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fields_of_every_kind_are_checked_when_a_file_is_loaded() -> None:
    from flexsearch.graph.kinds import KINDS
    from flexsearch.graph.operators import shipped

    assert set(KINDS) == {kind for kind in OPERATORS if shipped(kind)}
