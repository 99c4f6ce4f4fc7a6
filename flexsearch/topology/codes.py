"""Which training code the figures of a device describe, and those of another one.

What a step takes depends on the code as on the GPU: whether normalisation, losses and updates are one kernel each or
chains of kernels, and whether a host launches them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from flexsearch.files import FileModel, load, shipped
from flexsearch.quantities import Count, Factor, LatencySeconds, Name, Text

CodeKind = Literal["fused", "eager", "compiled", "captured"]
"""``fused``: attention, normalisation, losses and updates are one kernel each, as in Megatron-LM; ``eager``: those that
PyTorch runs without compilation, under autocast in half precision; ``compiled``: by torch.compile, the optimizer not;
``captured``: the same, and whole steps are captured as graphs, so that hosts launch nothing."""
CodeError = Annotated[float, Field(ge=0.0, le=1.0)]


class Code(FileModel):
    """What a topology file says of the code of its figures. ``describes``: which one, in words. ``error``: relative
    standard error of a step of another code of this kind; a step of one's own that was measured has none of it.
    ``origin``: what the error follows from. Both None: as ``profiles/codes.json`` says of the kind."""

    kind: CodeKind
    describes: Text
    error: CodeError | None = None
    origin: Text | None = None

    @property
    def standard_error(self) -> float:
        """``error``, of the kind if the file gives none."""
        return code_change(self.kind).error if self.error is None else self.error

    @property
    def reason(self) -> str:
        """What the error follows from."""
        if self.error is None:
            return code_change(self.kind).origin
        return self.origin or "as the file says"


class CodeChange(FileModel):
    """What another code makes of a device that is described with fused kernels. By kind of operator or optimizer:
    ``kernels`` of its chain, and ``passes_half`` and ``passes_full``: the bytes that it moves, over those of one
    kernel, where it computes in half precision or not. ``casts``: launches for each weight that is cast to half
    precision before a step, and its gradient back. ``launch_s``: that a host takes for an operator at least.
    ``start_s``: from the end of a kernel to the next; None: as the device has it. ``pads``: whether it pads matrix
    products to sizes that tensor cores read fast. ``error``, ``origin``: see ``Code``.
    """

    describes: Text
    kernels: dict[Name, Annotated[Count, Field(ge=1)]] = Field(default_factory=dict)
    passes_half: dict[Name, Factor] = Field(default_factory=dict)
    passes_full: dict[Name, Factor] = Field(default_factory=dict)
    casts: Count = 0
    launch_s: LatencySeconds = 0.0
    start_s: LatencySeconds | None = None
    pads: bool = False
    error: CodeError
    origin: Text


class CodeChanges(FileModel):
    """``profiles/codes.json``: by kind of code."""

    format: Literal["flexsearch.codes/1"] = "flexsearch.codes/1"
    source: Text
    codes: dict[CodeKind, CodeChange]


@cache
def code_change(kind: CodeKind) -> CodeChange:
    """What a code makes of fused kernels."""
    path = shipped("profiles", "codes")
    assert path is not None
    return load(CodeChanges, path, "codes").codes[kind]
