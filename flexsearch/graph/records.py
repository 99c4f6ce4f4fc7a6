"""Dataclasses of a model's own among what it returns, which PyTorch does not look into."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(eq=False)
class _Fields:
    """The values of a dataclass by field, and the ``instance`` that had them."""

    values: dict[str, Any]
    instance: Any


pytree.register_pytree_node(
    _Fields,
    lambda record: (list(record.values.values()), record),
    lambda values, record: _Fields(dict(zip(record.values, values, strict=True)), record.instance),
)


def expand_records(tree: Any) -> Any:
    """A nest with the fields of dataclasses as further levels."""

    def one(x: Any) -> Any:
        if not is_dataclass(x) or isinstance(x, type):
            return x
        return _Fields({field.name: expand_records(getattr(x, field.name)) for field in fields(x)}, x)

    return pytree.tree_map(one, tree)


def restore_records(tree: Any) -> Any:
    """The nest that :func:`expand_records` was given, with the values that the levels have now."""

    def one(x: Any) -> Any:
        if not isinstance(x, _Fields):
            return x
        copied = copy.copy(x.instance)
        for name, value in x.values.items():
            object.__setattr__(copied, name, restore_records(value))  # also of one that is frozen
        return copied

    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, _Fields))
