"""What all kernels share: the registry, the run-time context, and how a piece's region sits in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexsearch.errors import ImportModelError
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box, Interval
from flexsearch.graph.piece import Piece

Shapes = Sequence[tuple[int, ...]]
"""Global shapes of an operator's inputs."""

Kernel = Callable[..., Any]
"""Takes one tensor per operand, exactly of the piece's region (None where the region is None), and gives the piece's
contribution to its output region: a tensor, or a tuple of them for several outputs. Differentiable by autograd."""


@dataclass
class KernelContext:
    """What a kernel reads at call time. ``seed`` and ``step`` determine every dropout mask; ``dtype`` and ``device``
    are those of a result that is made from no operand at all (a piece that lies wholly in constant padding)."""

    seed: int = 0
    step: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


Builder = Callable[[Operator, Piece, Shapes, KernelContext], Kernel]

_BUILDERS: dict[str, Builder] = {}


def register_kernel(*kinds: str) -> Callable[[Builder], Builder]:
    """Decorator: the builder of the given operator kinds. A later registration replaces an earlier one."""

    def add(builder: Builder) -> Builder:
        _BUILDERS.update(dict.fromkeys(kinds, builder))
        return builder

    return add


def build_kernel(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The local computation of ``piece`` of ``op``, whose inputs have the global ``shapes``.

    Paddings, offsets and divisors are settled here, once; dropout reads ``context`` at each call. Adding the results of
    all pieces at their output regions gives the operator's output. Raises ImportModelError for a kind without a kernel.
    """
    builder = _BUILDERS.get(op.kind)
    if builder is None:
        raise ImportModelError(
            f"operator {op.name!r} ({op.source or op.module}) has kind {op.kind!r}, which has no kernel; "
            "register one with flexsearch.graph.kernels.register_kernel"
        )
    return builder(op, piece, [tuple(shape) for shape in shapes], context)


def extent(box: Box) -> tuple[int, ...]:
    """Shape of a region."""
    return tuple(high - low for low, high in box)


def cut(op: Operator, piece: Piece, operand: int, dimension: int) -> Interval:
    """How many indices before and after the region of an input's window lie outside the tensor: the padding."""
    box = piece.inputs[operand]
    assert box is not None
    window = op.access.inputs[operand].dimensions[dimension]
    if window.merged or not window.axes:
        return 0, 0
    low, high = window.window(piece.axes)
    return box[dimension][0] - low, high - box[dimension][1]


def inputs_count(op: Operator) -> int:
    """Number of elements the inputs of an elementwise operator broadcast to: the divisor of a global mean."""
    return prod(op.sizes[a] for a in {a for operand in op.access.inputs for a in operand.names()})


def summed_count(op: Operator) -> int:
    """Number of elements that are reduced into each element of the output."""
    return prod(op.sizes[a] for a in op.access.summed)


def integers(op: Operator, name: str, count: int, default: int) -> list[int]:
    """An attribute with one integer per spatial dimension; a single number stands for all of them."""
    value: Any = op.attributes.get(name)
    if value is None or value == []:
        return [default] * count
    values = [int(v) for v in value] if isinstance(value, list) else [int(value)]
    return values * count if len(values) == 1 else values


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` or ``"torch.float32"`` as a dtype."""
    value = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(value, torch.dtype):
        raise ImportModelError(f"{name!r} is no dtype of PyTorch")
    return value


def first_tensor(operands: Sequence[Any]) -> Tensor | None:
    """The first operand that is present."""
    return next((x for x in operands if isinstance(x, Tensor)), None)


def preferred(tensor: Tensor) -> Tensor:
    """``tensor`` in the memory format in which the kernels are fastest: channels last for images and convolution
    weights on a CPU (6-10 % of a whole AlexNet or ResNet-50 step), as it is elsewhere. Kernels pass the format on.

    Only where oneDNN computes the convolutions; PyTorch's own gain nothing.
    """
    images = tensor.dim() == 4 and tensor.dtype in (torch.float32, torch.bfloat16)
    if images and tensor.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
