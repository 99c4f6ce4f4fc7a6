"""What kernels share: how a piece's region sits in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box, Interval
from flexsearch.graph.ops.formats import has_channels_last, takes_copy
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.piece import Piece


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


def numbers(op: Operator, name: str, count: int, default: int) -> list[int]:
    """An attribute with one integer per spatial dimension; a single number stands for all of them."""
    value: Any = op.attributes.get(name)
    if value is None or value == []:
        return [default] * count
    values = [int(v) for v in value] if isinstance(value, list) else [int(value)]
    return values * count if len(values) == 1 else values


def in_types(
    kernel: Callable[..., Any], operand_types: Sequence[torch.dtype], types: Sequence[torch.dtype]
) -> Callable[..., Any]:
    """A kernel of mixed precision: it computes in the type of its first real result, and writes all in these
    ``types``. ``operand_types``: those of its operands. A kernel that has ``in_type`` reads operands of any
    type: it gives one that computes in a type."""
    computed = next((dtype for dtype in types if dtype.is_floating_point), None)
    if (in_type := getattr(kernel, "in_type", None)) is not None:
        kernel, operand_types = in_type(computed), ()
    casts = [k for k, dtype in enumerate(operand_types) if computed is not None and dtype.is_floating_point]
    casts = [k for k in casts if operand_types[k] != computed]
    written: bool | None = None

    def run(*operands: torch.Tensor | None) -> Any:
        nonlocal written
        if casts:
            read = list(operands)
            for k in casts:
                if (x := read[k]) is not None:
                    read[k] = x.to(computed)
            returned = kernel(*read)
        else:
            returned = kernel(*operands)
        if written:
            return returned
        results = returned if isinstance(returned, tuple) else (returned,)
        if written is None:  # what a kernel makes of the same types is always of the same types
            written = all(x.dtype == dtype for x, dtype in zip(results, types, strict=True))
        cast = tuple(x.to(dtype) for x, dtype in zip(results, types, strict=True))
        return cast if isinstance(returned, tuple) else cast[0]

    return run


def in_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in a type. Finite values that it has no number for become its largest: what a mask is filled with is
    the least of float32, and would become infinite, of which softmax makes NaN."""
    if not (tensor.is_floating_point() and dtype.is_floating_point) or tensor.dtype == dtype:
        return tensor.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(dtype)


def preferred(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the memory format in which the kernels are fastest (``formats``). Kernels pass the format on."""
    if preferred_format(tensor.dim(), tensor.dtype, tensor.device) != torch.channels_last:
        return tensor
    _, channels, height, width = tensor.shape
    return tensor.contiguous(memory_format=torch.channels_last) if takes_copy(channels, height * width) else tensor


def preferred_format(rank: int, dtype: torch.dtype, device: torch.device) -> torch.memory_format:
    """The memory format that ``preferred`` gives a tensor: channels last only where oneDNN computes the convolutions;
    PyTorch's own gain nothing."""
    images = has_channels_last(rank, str(dtype).removeprefix("torch."), device.type)
    if images and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return torch.channels_last
    return torch.contiguous_format
