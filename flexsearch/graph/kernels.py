"""The local computation of one piece of an operator, for every kind of the operator table.

>>> kernel = build_kernel(op, piece, [global shapes of the inputs], KernelContext())
>>> contribution = kernel(*regions)
"""

from __future__ import annotations

from flexsearch.graph import (  # importing a family registers its kernels
    kernels_attention,
    kernels_linear,
    kernels_loss,
    kernels_norm,
    kernels_pointwise,
    kernels_random,
    kernels_rnn,
    kernels_shape,
    kernels_window,
)
from flexsearch.graph.kernels_base import Kernel, KernelContext, build_kernel, preferred, register_kernel

FAMILIES = (
    kernels_attention,
    kernels_linear,
    kernels_loss,
    kernels_norm,
    kernels_pointwise,
    kernels_random,
    kernels_rnn,
    kernels_shape,
    kernels_window,
)

__all__ = ["FAMILIES", "Kernel", "KernelContext", "build_kernel", "preferred", "register_kernel"]
