"""Tensors and operators of a graph in the making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue

from flexsearch.graph.model import Role
from flexsearch.graph.notation import Access

if TYPE_CHECKING:
    import torch

TensorKind = Literal["input", "parameter", "buffer", "constant", "activation"]
Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the graph in the making.

    ``sample``: which dimensions run over the batch (first). ``weight``: made of parameters and constants alone.
    ``grad``: depends on a trained parameter. ``data``: of a constant. ``name``: of an activation given at the end.
    """

    shape: Shape
    dtype: str
    kind: TensorKind = "activation"
    name: str = ""
    sample: tuple[bool, ...] = ()
    weight: bool = False
    grad: bool = False
    requires_grad: bool = False
    data: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.sample:
            self.sample = (False,) * len(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(eq=False, slots=True)
class Draft:
    """An operator in the making. ``short``: its name within its module; ``auxiliary``: not what its module is for."""

    kind: str
    access: Access
    sizes: dict[str, int]
    roles: dict[str, Role]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, JsonValue]
    short: str
    auxiliary: bool
    module: str
    source: str
