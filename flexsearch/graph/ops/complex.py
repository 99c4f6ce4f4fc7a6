"""Complex numbers: made of two real ones and taken apart, and Fourier transforms, whose dimensions are whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2, prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import AlongCall, Form
from flexsearch.graph.ops.base import (
    ALIAS,
    NOTHING,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    input_elements,
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.join import pad, unfold
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.pointwise import pointwise
from flexsearch.graph.ops.shape import permute, pick
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class ViewAsComplex(OperatorKind):
    """Pairs of real numbers along the last dimension, which goes away, as complex ones."""

    name = "view_as_complex"
    targets = ("aten.view_as_complex",)
    pattern = "a.. T -> a.."
    saved = ALIAS
    trivial = True
    free = True
    backward_reads = "nothing"

    def trace(self, b: Builder, x: Value) -> Value:
        return b.emit(self.name, [x], b.shape, dtype=b.dtype)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        pairs = shapes[0] == (*shapes[1], 2) and op.access.inputs[0].dimensions[-1].axes == ("T",)
        return "" if pairs else f"pairs of shape {list(shapes[0])} do not make shape {list(shapes[1])}"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return lambda x: torch.view_as_complex(x.contiguous())

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: _rotated(x, torch.view_as_complex(x.reshape(4, 5, 3, 2))), (rand(4, 5, 6),))


def _rotated(x: Tensor, pairs: Tensor) -> Tensor:
    """Rotary position embedding as in Meta's code for Llama."""
    angles = torch.outer(torch.arange(pairs.shape[1]), 0.1 ** torch.arange(pairs.shape[2]).double())
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * turn).flatten(2)


class ViewAsReal(OperatorKind):
    """The real and the imaginary part of complex numbers along a new last dimension."""

    name = "view_as_real"
    targets = ("aten.view_as_real",)
    pattern = "a.. -> a.. T"
    saved = ALIAS
    trivial = True
    free = True
    backward_reads = "nothing"

    def trace(self, b: Builder, x: Value) -> Value:
        return b.emit(self.name, [x], b.shape, dtype=b.dtype)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        pairs = shapes[1] == (*shapes[0], 2) and op.access.outputs[0].dimensions[-1].axes == ("T",)
        return "" if pairs else f"numbers of shape {list(shapes[0])} do not make pairs of shape {list(shapes[1])}"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return lambda x: torch.view_as_real(x)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, y: torch.view_as_real(torch.complex(x, y)), (rand(4, 6), rand(4, 6)))
        z: Any = torch.complex
        yield Sample(lambda x, y: (z(x, y).real, z(x, y).imag, z(x, y).conj() * x), (rand(4, 6), rand(4, 6)))
        yield Sample(lambda x, y: torch.view_as_real((x + 1j * y) / (2 - 0.5j) + 3j), (rand(4, 6), rand(4, 6)))
        yield Sample(lambda x, y: (torch.polar(x.abs(), y) @ z(x, y).mH).abs(), (rand(4, 6), rand(4, 6)))
        yield Sample(lambda x, y: torch.linalg.vecdot(z(x, y), z(y, x)).angle(), (rand(4, 6), rand(4, 6)))
        yield Sample(lambda x, y: (z(x, y).norm(dim=1), z(x, y).abs().mean(), z(x, y).sum(0)), (rand(4, 6), rand(4, 6)))


def _spectrum(x: Tensor) -> Tensor:
    """Of all of each frame."""
    return torch.stft(x, 5, window=torch.ones(5, dtype=x.dtype), normalized=True, return_complex=True)


_ONE = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
_SEVERAL = tuple(f"{name}{n}" for name in _ONE for n in ("2", "n"))


class FourierTransform(AlongCall):
    """About 5 N log2 N FLOPs for the N numbers that are mixed."""

    name = "fft"
    forms: Mapping[str, Form] = {
        **{f"aten.{name}": Form(2, saved=NOTHING) for name in (*_ONE, *_SEVERAL)},
        "aten._fft_c2c": Form(1, saved=NOTHING),
        "aten._fft_r2c": Form(1, saved=NOTHING),
        "aten._fft_c2r": Form(1, saved=NOTHING),
        "aten.fft_fftshift": Form(1, saved=NOTHING),
        "aten.fft_ifftshift": Form(1, saved=NOTHING),
    }
    targets = tuple(forms)

    def trace(self, b: Builder, *args: Any, **call: Any) -> Any:
        if call.get("s") is not None and call.get("dim") is None:
            call["dim"] = list(range(-len(call["s"]), 0))
        return super().trace(b, **call)

    def flops(self, op: Operator, extents: Extents) -> Any:
        elements = input_elements(op, extents) + output_elements(op, extents)
        mixed = prod(op.sizes[a] for a in op.access.inputs[0].names() if a.isupper())
        return 2.5 * elements * log2(max(mixed, 2))

    def samples(self) -> Iterable[Sample]:
        fft: Any = torch.fft
        x = rand(3, 5, 4)
        yield Sample(lambda x: (fft.rfft(x), fft.fft(x, dim=1, norm="ortho"), fft.irfft(fft.rfft(x, 6), 6)), (x,))
        yield Sample(lambda x: (fft.rfft2(x, dim=(1, 0)), fft.irfftn(fft.rfftn(x, dim=(2, 0)), (4, 3), (2, 0))), (x,))
        yield Sample(lambda x: (fft.fft2(x).real, fft.ifftn(fft.rfftn(x, dim=(0, 2)), dim=(0,))), (x,))
        yield Sample(lambda x: (fft.fftshift(x, 1), fft.ifft(x, 7).imag, fft.fftn(x, (6, 6))), (x,))
        call: Any = torch.stft
        yield Sample(lambda x, w: call(x, 6, 2, window=w, win_length=4, return_complex=True), (rand(3, 18), rand(4)))
        yield Sample(lambda x: torch.view_as_real(_spectrum(x)), (rand(12),))


_TRANSFORM = FourierTransform()
for _kind in (ViewAsComplex(), ViewAsReal(), _TRANSFORM):
    define(_kind)


@rewrite("real")
def _real(b: Builder, x: Value) -> Value:
    return pick(b, _pairs(b, x, b.dtype), -1, 0) if x.dtype.startswith("complex") else x


@rewrite("imag")
def _imag(b: Builder, x: Value) -> Value:
    return pick(b, _pairs(b, x, b.dtype), -1, 1)


def _pairs(b: Builder, x: Value, dtype: str) -> Value:
    return b.emit("view_as_real", [x], (*x.shape, 2), dtype=dtype, short="view_as_real")


@rewrite("conj", "_conj", "_conj_physical", "conj_physical")
def conj(b: Builder, x: Value) -> Value:
    """Written out: a tensor that is conjugated when it is next read cannot be sent."""
    return pointwise(b, "conj_physical.default", (x,)) if x.dtype.startswith("complex") else x


@rewrite("_neg_view")
def _neg_view(b: Builder, x: Value) -> Value:
    return pointwise(b, "neg.default", (x,))


@rewrite("mH", "adjoint")
def _adjoint(b: Builder, x: Value) -> Value:
    order = list(range(x.rank))
    return permute(b, conj(b, x), order[:-2] + order[-2:][::-1])


@rewrite("stft")
def _stft(
    b: Builder, x: Value, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Value | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, **_: Any,
) -> Value:  # fmt: skip
    """Transforms of frames that overlap: the frames can be split, as can the batch."""
    length, real = win_length or n_fft, not x.dtype.startswith("complex")
    frames = unfold(b, x, -1, n_fft, hop_length or n_fft // 4)
    if window is not None:
        before = (n_fft - length) // 2
        frames = pointwise(b, "mul.Tensor", (frames, pad(b, window, [before, n_fft - length - before])))
    elif length < n_fft:
        raise b.error("has a window shorter than a frame and no window", "Pass window=torch.ones(win_length).")
    half = real if onesided is None else onesided
    overload = torch.ops.aten.fft_rfft.default if half else torch.ops.aten.fft_fft.default
    shape = (*frames.shape[:-1], n_fft // 2 + 1 if half else n_fft)
    call = {"x": frames, "norm": "ortho" if normalized else None}
    result = (shape, {"float32": "complex64", "float64": "complex128"}.get(x.dtype, x.dtype))
    spectrum: Value = _TRANSFORM.append(b, overload, call, [result])
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    spectrum = permute(b, spectrum, order)
    return spectrum if b.dtype.startswith("complex") else _pairs(b, spectrum, b.dtype)


@rewrite("polar", "complex")
def _complex(b: Builder, **call: Any) -> Value:
    return pointwise(b, b.overload, b.args, b.kwargs)
