"""The old registry of handlers. Goes when the last family has moved to :mod:`flexsearch.graph.ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from flexsearch.graph.ops.builder import (  # noqa: F401
    Builder,
    broadcast_shapes,
    empty,
    letters,
    normal_dims,
    opaque,
)
from flexsearch.graph.ops.calls import dtype_name, encode_call  # noqa: F401
from flexsearch.graph.ops.pointwise import cast  # noqa: F401
from flexsearch.graph.ops.value import Draft, Shape, Value  # noqa: F401

Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}
"""Torch operator, without or (first choice) with its overload, to its handler."""


def aten(*names: str) -> Callable[[H], H]:
    """Register a handler for operators of the ``aten`` namespace: "linear" for all overloads, or "max.dim"."""

    def decorate(handler: H) -> H:
        HANDLERS.update({f"aten.{name}": handler for name in names})
        return handler

    return decorate


def find_handler(target: str) -> Handler | None:
    """Handler of a torch operator given as "aten.linear.default"."""
    return HANDLERS.get(target) or HANDLERS.get(target.rsplit(".", 1)[0])


def bind(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operator's schema, defaults filled in."""
    schema = target._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update({a.name: value for a, value in zip(schema, args, strict=False)})
    bound.update(kwargs)
    return bound
