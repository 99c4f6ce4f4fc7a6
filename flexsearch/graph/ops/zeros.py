"""What attention keeps or makes beside its result. Zeros that it puts on a CPU behind values with fewer features than
queries (``attention_narrow``). The account of memory, which compiles this (``flexsearch.compiled``), counts them."""

from __future__ import annotations

from typing import Any

from flexsearch.graph.model import Operator

PARTS = 8
"""At most so many parts of the samples are computed one after the other."""
PART_BYTES = 1 << 17
"""Least bytes of a part's queries: each part costs about 60 us, of 1 to 2 ms."""


def attends(op: Operator, rank: int) -> bool:
    """Whether one kernel computes an operator, whose result has so many dimensions, as attention. It makes the
    gradients of queries, keys and values, whichever are used, and on a CPU widens narrow values."""
    plain = not op.attributes.get("dropout") and not op.attributes.get("grouped")
    return op.kind == "attention" and rank == 4 and plain


def parts_of(nbytes: Any) -> Any:
    """In how many parts queries of so many bytes are computed. Two would save nothing, as the gradients of one part are
    there beside those of all."""
    count = min(PARTS, nbytes // PART_BYTES)
    return count if count > 2 else 1


def forward_elements(q: Any, k: Any, out: Any, parts: Any) -> Any:
    """Elements beside the result of the forward pass: values as wide as keys, and a result as wide as queries, for a
    part at a time; of one part, before that of the values is cut out. ``q``, ``k``, ``out``: elements of queries, keys
    and the result."""
    return q + k - out if parts == 1 else (q + k) // parts


def backward_elements(q: Any, k: Any, out: Any, parts: Any) -> Any:
    """Elements beside the gradients of the backward pass: values, the result and its gradient as wide as keys and
    queries, and for a part at a time its gradients; of one part, these are those of queries and keys themselves."""
    return 2 * q + 2 * k - k * out // q if parts == 1 else 3 * (q + k) // parts
