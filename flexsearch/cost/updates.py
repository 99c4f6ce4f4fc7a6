"""What an optimizer keeps of the weights, and what its update takes."""

from __future__ import annotations

from typing import Any, Final

from flexsearch.compiled import lean
from flexsearch.cost.ticks import whole
from flexsearch.graph.model import Tensor
from flexsearch.graph.precision import Precision

STREAMS: Final = {"sgd": 3, "momentum": 5, "adam": 7}
"""Bytes that an update reads and writes, per byte of weights: weight, gradient and state in, weight and state out. With
weights of half precision beside float32 masters and states it is as much for each element: gradient in (2), master in
and out (8), weight out (2), states."""
WIDER_STREAMS: Final = 0.5
"""The same of what it reads more where gradients are held in float32: 4 instead of 2 for each element."""
CAST_STREAMS: Final = 3
"""Bytes that casts of their own read and write for each byte of float32 weights: 4 and 2 for a weight, 2 and 4 for its
gradient."""
STATE_COPIES: Final = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors of optimizer state for each weight."""


def state_bytes(weight: Tensor, optimizer: str, precision: Precision) -> int:
    """Bytes that the optimizer keeps for each element of a weight. In half precision these are float32 states and a
    float32 master copy (Rajbhandari et al., SC 2020, section 3.1: 12 bytes for adam)."""
    if precision != "as-is" and weight.itemsize == 2:
        return 4 * (STATE_COPIES[optimizer] + 1)
    return weight.itemsize * STATE_COPIES[optimizer]


def bytes_in_training(weight: Tensor, gradient: Tensor, optimizer: str, precision: Precision) -> float:
    """Bytes of a weight, its gradient and what the optimizer keeps of it."""
    return weight.nbytes + gradient.nbytes + weight.nbytes / weight.itemsize * state_bytes(weight, optimizer, precision)


@lean
def cast_ticks(once: Any, microbatches: Any) -> Any:
    """Ticks of casting gradients to float32 for one of so many microbatches, all but the first of which add to a sum:
    a mean, so that all take equally long. ``once``: of a cast alone, which reads 2 and writes 4 for each element; what
    adds reads 4 more."""
    return once + once * 2 * (microbatches - 1) // (3 * microbatches)


@lean
def update_seconds(nbytes: Any, tensors: Any, per_byte: Any, per_tensor: Any) -> Any:
    """Seconds of an update of ``nbytes`` of weights in ``tensors`` tensors."""
    return whole(nbytes * per_byte + tensors * per_tensor)
