"""Linear algebra: factorisations, inverses, determinants, solutions of systems. Matrices are whole; what comes before
their two dimensions can be split, and of systems the right-hand sides, as each has a solution of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from flexsearch.errors import NotationError
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Dimension, instantiate, parse
from flexsearch.graph.ops.base import (
    MANY,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast_shapes, empty, fit, letters
from flexsearch.graph.ops.calls import CallAttributes, check_call, encode_call, local_call
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.shape import view
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload


class Form(NamedTuple):
    """Of a torch operator: how many dimensions of each operand are no batch, FLOPs for each product of rows, columns
    and the shorter of both, which operand is a right-hand side, and how many tensors it returns."""

    inner: tuple[int, ...] = (2,)
    work: float = 2.0
    right: int | None = None
    results: int = 1


_FORMS: Mapping[str, Form] = {
    "aten.linalg_cholesky_ex": Form(work=1 / 3, results=2),
    "aten.cholesky_inverse": Form(),
    "aten.linalg_inv_ex": Form(results=2),
    "aten._linalg_det": Form(work=2 / 3, results=3),
    "aten._linalg_slogdet": Form(work=2 / 3, results=4),
    "aten.linalg_lu": Form(work=2 / 3, results=3),
    "aten.linalg_lu_factor_ex": Form(work=2 / 3, results=3),
    "aten.lu_unpack": Form((2, 1), 0.0, results=3),
    "aten.linalg_qr": Form(work=4.0, results=2),
    "aten.linalg_householder_product": Form((2, 1), work=4.0),
    "aten._linalg_eigh": Form(work=9.0, results=2),
    "aten.linalg_eig": Form(work=25.0, results=2),
    "aten._linalg_svd": Form(work=20.0, results=3),
    "aten.linalg_pinv.atol_rtol_tensor": Form((2, 0, 0), work=22.0),
    "aten.linalg_matrix_exp": Form(work=20.0),
    "aten._linalg_solve_ex": Form((2, 2), 2 / 3, 1, results=4),
    "aten.linalg_solve_triangular": Form((2, 2), 0.0, 1),
    "aten.triangular_solve": Form((2, 2), 0.0, 0, results=2),
    "aten.cholesky_solve": Form((2, 2), 0.0, 0),
    "aten.linalg_lu_solve": Form((2, 1, 2), 0.0, 2),
}
"""By the torch operator, without its overload where all overloads are alike. Others of ``torch.linalg`` are made of
these."""


_SIDES = "rhs"
"""Axis of the right-hand sides of systems."""
_ONLY = Dimension((), ())


def _form(target: str) -> Form | None:
    return _FORMS.get(target) or _FORMS.get(target.rsplit(".", 1)[0])


class LinearAlgebra(OperatorKind):
    """A call of one of the operators above; ``results``: which of what it returns are the outputs."""

    name = "linalg"
    targets = tuple(name for name in _FORMS if name not in ("aten._linalg_solve_ex", "aten.triangular_solve"))
    inputs = (1, 3)
    outputs = MANY
    backward = 2.0
    words = {_SIDES: "right-hand sides"}

    class attributes(CallAttributes):
        results: list[int]

    def trace(self, b: Builder, *args: Any, **call: Any) -> Any:
        return self.append(b, b.overload, b.args, b.kwargs, list(b.results))

    def append(
        self, b: Builder, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
    ) -> Any:
        """Append a call of ``target``, which returns ``results`` (shape, dtype; None for one that is not wanted).
        Those without elements are in no graph."""
        form, (attributes, tensors) = _form(str(target)), encode_call(target, args, kwargs)
        assert form is not None
        numbers = [n for n, result in enumerate(results) if result is not None and prod(result[0])]
        kept = [results[n] for n in numbers]
        pattern = _pattern(form, attributes, [v.shape for v in tensors], [shape for shape, _ in kept])
        values = iter(b.emit_all(self.name, tensors, kept, pattern, {**attributes, "results": numbers}))
        returned = [next(values) if n in numbers else r and empty(*r) for n, r in enumerate(results)]
        return tuple(returned) if len(returned) > 1 else returned[0]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if problem := check_call(op, attributes):
            return problem
        if (form := _form(attributes.target)) is None:
            return f"attributes.target: {attributes.target!r} is none of {', '.join(_FORMS)}"
        numbers = attributes.results
        if len(numbers) != len(op.outputs) or not set(numbers) <= set(range(form.results)):
            return f"attributes.results: {numbers} are not the numbers of {len(op.outputs)} of {form.results} results"
        count = len(op.inputs)
        if count > len(form.inner) or any(len(s) < n for s, n in zip(shapes, form.inner, strict=False)):
            return f"shapes {list(shapes)} are not those of {attributes.target}"
        try:
            own = _pattern(form, op.attributes, shapes[:count], shapes[count:])
            wanted = parse(instantiate(own, shapes[:count], shapes[count:])[0])
        except (NotationError, RuntimeError, IndexError):  # of torch: shapes that do not broadcast
            return f"shapes {list(shapes)} are not those of {attributes.target}"
        operands = zip((*op.access.inputs, *op.access.outputs), (*wanted.inputs, *wanted.outputs), strict=True)
        same = all(d in (e, _ONLY) for o, w in operands for d, e in zip(o.dimensions, w.dimensions, strict=True))
        return "" if same else f'pattern "{op.pattern}" is not "{own}"'

    def flops(self, op: Operator, extents: Extents) -> Any:
        form = _form(str(op.attributes.get("target")))
        assert form is not None
        operands = op.access.inputs
        matrix = operands[1 if form.right == 0 else 0].dimensions[-2:]
        rows, columns = (op.sizes[d.axes[0]] if d.axes else 1 for d in matrix)
        sides = extents.get(_SIDES, 1)
        batch = prod(size for axis, size in extents.items() if not axis[0].isupper()) / sides
        solving = 2.0 * sides * rows**2 if form.right is not None else 0.0
        return batch * (form.work * rows * columns * min(rows, columns) + solving)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call, listed = local_call(op, context), op.attributes["results"]
        numbers = [n for n in listed if isinstance(n, int)] if isinstance(listed, list) else []

        def run(*operands: Tensor) -> Any:
            # LAPACK trusts pivots, and those that are made up (to measure, by a file) may be any numbers.
            if len(operands) > 1 and not operands[1].is_floating_point() and not operands[1].is_complex():
                operands = operands[0], operands[1].clamp(1, operands[0].shape[-2]), *operands[2:]
            returned = call(*operands)
            if isinstance(returned, torch.Tensor):
                return returned
            return returned[numbers[0]] if len(numbers) == 1 else tuple(returned[n] for n in numbers)

        return run

    def samples(self) -> Iterable[Sample]:
        la: Any = torch.linalg
        x, tall = rand(3, 4, 4), rand(3, 5, 4)
        yield Sample(
            lambda x, y, z: (la.solve(_positive(x), y), la.solve(_positive(x), z), *_systems(x, y)),
            (x, rand(4, 3), rand(3, 4)),
        )
        yield Sample(lambda x: (*_spectra(x), *_factors(x), la.pinv(x), la.svdvals(x[0])), (tall,))
        yield Sample(lambda x: (torch.logdet(_positive(x)), la.det(x), la.slogdet(x)[1], la.matrix_exp(x)), (x,))
        yield Sample(lambda x, y: la.householder_product(x, y), (tall, rand(3, 4)))


def _positive(x: Tensor) -> Tensor:
    """A symmetric matrix with eigenvalues above 1."""
    return x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)


def _spectra(x: Tensor) -> tuple[Tensor, ...]:
    """Eigenvalues and singular values, and what does not depend on the signs of vectors."""
    values, vectors = torch.linalg.eigh(_positive(x))
    left, singular, right = torch.linalg.svd(x, full_matrices=False)
    return values, vectors.square(), left @ right, singular, torch.linalg.eigvals(x.mT @ x).abs().sum(-1)


def _factors(x: Tensor) -> tuple[Tensor, ...]:
    """And an inverse."""
    square = _positive(x.mT)
    return (
        *torch.linalg.qr(x),
        *torch.linalg.lu(x)[1:],
        torch.linalg.cholesky(square, upper=True),
        torch.inverse(square),
    )


def _systems(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Solutions by factors; of one matrix, for many samples."""
    la: Any = torch.linalg
    lower = la.cholesky(_positive(x))
    factors, pivots = la.lu_factor(_positive(x))
    by_factors = torch.cholesky_solve(y, lower), torch.cholesky_inverse(lower), la.lu_solve(factors, pivots, x)
    unpacked = torch.lu_unpack(factors, pivots)
    return (
        *unpacked,
        *by_factors,
        la.solve_triangular(lower[0], y, upper=False),
        la.solve(_positive(x)[0], y.mT, left=False),
    )


def _pattern(form: Form, attributes: Mapping[str, Any], shapes: Sequence[Shape], results: Sequence[Shape]) -> str:
    """Batch dimensions, which broadcast, and then matrices of which each dimension is whole, with an axis of its own;
    the right-hand sides of a system are its columns, with ``left=False`` its rows."""
    inner = [*zip(shapes, form.inner, strict=False)]
    batch = broadcast_shapes(*[shape[: len(shape) - n] for shape, n in inner])
    names, whole = letters(len(batch)), (name.upper() for name in letters(64))
    side = -1 if attributes.get("kwargs", {}).get("left", True) else -2

    def written(shape: Shape, count: int, sides: bool) -> str:
        own = [next(whole) for _ in range(count)]
        if sides:
            own[side] = _SIDES
        return " ".join([*fit(names, batch, shape[: len(shape) - count]), *own])

    read = [written(shape, n, k == form.right) for k, (shape, n) in enumerate(inner)]
    outputs = [written(shape, len(shape) - len(batch), form.right is not None) for shape in results]
    return f"{', '.join(read)} -> {', '.join(outputs)}"


_LINALG = LinearAlgebra()
define(_LINALG)


@rewrite("_linalg_solve_ex")
def _solve(b: Builder, A: Value, B: Value, **_: Any) -> tuple[Value | None, ...]:
    """Of a vector, the solution for a matrix of one column: a call takes a batch of vectors for a matrix where the
    shapes allow it, and those of pieces might. Checks that follow read the matrix alone."""
    vectors = B.rank == 1 or (A.rank == B.rank + 1 and B.shape == A.shape[:-1])
    kwargs = {name: value for name, value in b.kwargs.items() if name != "check_errors"}
    columns = view(b, B, (*B.shape, 1)) if vectors else view(b, B, (1,) * (A.rank - B.rank) + B.shape)
    shape, dtype = b.results[0]
    matrix_shape = (*shape, 1) if vectors else shape
    solution: Value = _LINALG.append(b, b.overload, [A, columns], kwargs, [(matrix_shape, dtype), None, None, None])[0]
    factors = _LINALG.append(b, torch.ops.aten.linalg_lu_factor_ex.default, [A], {}, b.results[1:])
    return view(b, solution, shape) if vectors else solution, *factors


@rewrite("triangular_solve")
def _triangular_solve(b: Builder, x: Value, A: Value, **_: Any) -> tuple[Value, Value]:
    solution: Value = _LINALG.append(b, b.overload, b.args, b.kwargs, [b.results[0], None])[0]
    return solution, A


@rewrite("cholesky")
def _cholesky(b: Builder, x: Value, upper: bool = False) -> Value:
    call: Any = torch.ops.aten.linalg_cholesky_ex.default
    factor: Value = _LINALG.append(b, call, [x], {"upper": upper}, [b.results[0], None])[0]
    return factor
