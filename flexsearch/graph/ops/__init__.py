"""The kinds of operators, a module for each family; importing this package defines them all, without torch."""

from flexsearch.graph.ops import join, linear, opaque, pointwise, shape
from flexsearch.graph.ops.base import (
    KINDS,
    Attributes,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    axis_roles,
    backward_flops,
    build_kernel,
    find_trace,
    forward_flops,
    kind_of,
    register,
    rewrite,
    saved_tensors,
    shipped,
    table,
    unregister,
)
from flexsearch.graph.ops.legacy import define_legacy

define_legacy()

FAMILIES = (join, linear, opaque, pointwise, shape)

__all__ = [
    "FAMILIES", "KINDS", "Attributes", "Kernel", "KernelContext", "OperatorKind", "Sample", "Saved", "axis_roles",
    "backward_flops", "build_kernel", "find_trace", "forward_flops", "kind_of", "register", "rewrite",
    "saved_tensors", "shipped", "table", "unregister",
]  # fmt: skip
