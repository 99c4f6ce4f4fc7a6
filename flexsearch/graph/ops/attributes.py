"""Bounded types of the fields that attributes of kinds have, and those that several families share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flexsearch.graph.model import Dtype
from flexsearch.graph.ops.base import Attributes

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Signed = Annotated[int, Field(ge=-(2**62), le=2**62)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Scalar = Annotated[float, Field(ge=-1e300, le=1e300)]
Each = Positive | Annotated[list[Positive], Field(max_length=3)] | None
"""One number for each spatial dimension, or one for all."""
Padding = Natural | Annotated[list[Natural], Field(max_length=3)] | None
Place = Annotated[int, Field(ge=-64, lt=64)]
"""A dimension of a tensor."""


class Along(Attributes):
    """Of what works along one dimension."""

    dim: Place
    dtype: Dtype | None = None
