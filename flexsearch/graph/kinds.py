"""What an operator of each kind needs besides a pattern that fits: attributes of the right types, operands that agree.

Checked when a graph file is loaded: kernels and cost rules read attributes without asking again. Kinds that users
register have rules of their own, which a file cannot tell; it must then name the torch operator (``target``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from flexsearch.graph.model import Dtype
from flexsearch.quantities import Size

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Signed = Annotated[int, Field(ge=-(2**62), le=2**62)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Scalar = Annotated[float, Field(ge=-1e300, le=1e300)]
Each = Positive | Annotated[list[Positive], Field(max_length=3)] | None
Padding = Natural | Annotated[list[Natural], Field(max_length=3)] | None
Place = Annotated[int, Field(ge=-64, lt=64)]
"""A dimension of a tensor."""


class Attributes(BaseModel):
    """Base of the attributes of a kind. Others than those listed mean nothing and do no harm."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Window(Attributes):
    """Of a convolution or a pool: a number for each spatial dimension, or one for all."""

    kernel_size: Each = None
    stride: Each = None
    padding: Padding = None
    dilation: Each = None
    groups: Positive = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: Positive | None = None


class Statistics(Attributes):
    count: Annotated[int, Field(ge=1, lt=2**48)]


class Running(Statistics):
    momentum: Share


class Norm(Attributes):
    eps: Annotated[float, Field(ge=0.0, le=1e6)]
    has_weight: bool = False
    has_bias: bool = False
    affine: bool = False
    normalized_shape: list[Size] | None = None


class RootNorm(Norm):
    eps: Annotated[float, Field(ge=0.0, le=1e6)] | None = None  # type: ignore[assignment]  # None: that of the dtype


class GroupNorm(Norm):
    groups: Positive


class Embedding(Attributes):
    padding_idx: Signed | None = None


class Attention(Attributes):
    causal: bool = False
    grouped: bool = False
    has_mask: bool = False
    scale: Scalar | None = None
    dropout: Share = 0.0
    salt: Signed = 0


class Dropout(Attributes):
    p: Share
    salt: Signed = 0


class Along(Attributes):
    dim: Place
    dtype: Dtype | None = None
    start: Signed = 0
    step: Positive = 1
    index: Signed = 0


class Slice(Along):
    dim: Place = 0


class Range(Attributes):
    """How one dimension is looked up: by an operand, or by a range along an axis of the indices (None: one element)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    operand: Natural | None = None
    axis: Natural | None = None


class Lookup(Attributes):
    indices: list[Range | None]
    rank: Annotated[int, Field(ge=0, lt=64)]
    first: Annotated[int, Field(ge=0, lt=64)]
    negative: bool


class Unfold(Attributes):
    dim: Place
    step: Positive


class Drawn(Attributes):
    salt: Signed


class Reduction(Attributes):
    dims: Place | list[Place] | None = None
    keepdim: bool = False
    dtype: Dtype | None = None


class Permutation(Attributes):
    dims: list[Place]


class Expansion(Attributes):
    shape: list[Annotated[int, Field(ge=-1, lt=2**48)]] | None = None


class Pad(Attributes):
    pad: list[Signed] = []
    value: Scalar | Literal["inf", "-inf", "nan"] | None = None
    dtype: Dtype | None = None


class Product(Attributes):
    alpha: Scalar = 1.0
    beta: Scalar = 1.0


class Count(Attributes):
    ignore_index: Signed = -100
    dtype: Dtype = "float32"


class Loss(Attributes):
    reduction: Literal["none", "mean", "sum"] = "mean"
    ignore_index: Signed = -100
    label_smoothing: Share = 0.0
    probabilities: bool = False
    has_count: bool = False
    has_weight: bool = False
    has_pos_weight: bool = False
    log_target: bool = False
    beta: Annotated[float, Field(ge=0.0, le=1e300)] = 1.0
    delta: Annotated[float, Field(gt=0.0, le=1e300)] = 1.0


class Call(Attributes):
    """Of an operator that is a call of torch: ``{"tensor": 0}`` in the arguments is operand 0."""

    target: str
    args: list[JsonValue] = []
    kwargs: dict[str, JsonValue] = {}


MANY: Final = 4096
KINDS: Final[Mapping[str, tuple[type[Attributes], int, int, int]]] = {
    "conv1d": (Window, 2, 3, 1), "conv2d": (Window, 2, 3, 1),
    "linear": (Attributes, 2, 3, 1), "addmm": (Product, 3, 3, 1), "einsum": (Attributes, 1, MANY, 1),
    "attention": (Attention, 3, 4, 1), "lstm_cell": (Attributes, 5, 7, 2),
    "max_pool1d": (Window, 1, 1, 1), "avg_pool1d": (Window, 1, 1, 1),
    "max_pool2d": (Window, 1, 1, 1), "avg_pool2d": (Window, 1, 1, 1),
    "adaptive_avg_pool1d": (Attributes, 1, 1, 1), "adaptive_max_pool1d": (Attributes, 1, 1, 1),
    "adaptive_avg_pool2d": (Attributes, 1, 1, 1), "adaptive_max_pool2d": (Attributes, 1, 1, 1),
    "batch_statistics": (Statistics, 1, 1, 1), "batch_norm": (Norm, 2, 4, 1), "batch_norm_running": (Running, 3, 3, 2),
    "batch_norm_inference": (Norm, 3, 5, 1), "layer_norm": (Norm, 1, 3, 1), "rms_norm": (RootNorm, 1, 2, 1),
    "group_norm": (GroupNorm, 1, 3, 1), "embedding": (Embedding, 2, 2, 1),
    "softmax": (Along, 1, 1, 1), "log_softmax": (Along, 1, 1, 1), "dropout": (Dropout, 1, 1, 1),
    "pointwise": (Call, 1, MANY, 1), "opaque": (Call, 1, MANY, MANY),
    "detach": (Attributes, 1, 1, 1), "view": (Attributes, 1, 1, 1), "permute": (Permutation, 1, 1, 1),
    "expand": (Expansion, 1, 1, 1), "slice": (Slice, 1, 1, 1), "cat": (Along, 1, MANY, 1), "pad": (Pad, 1, 1, 1),
    "sum": (Reduction, 1, 1, 1), "mean": (Reduction, 1, 1, 1), "amax": (Reduction, 1, 1, 1),
    "amin": (Reduction, 1, 1, 1), "argmax": (Reduction, 1, 1, 1), "valid_count": (Count, 1, 2, 1),
    "cross_entropy": (Loss, 2, 4, 1), "nll_loss": (Loss, 2, 4, 1), "mse_loss": (Loss, 2, 2, 1),
    "l1_loss": (Loss, 2, 2, 1), "smooth_l1_loss": (Loss, 2, 2, 1), "huber_loss": (Loss, 2, 2, 1),
    "index": (Lookup, 1, MANY, 1), "gather": (Along, 2, 2, 1), "uniform": (Drawn, 1, 1, 1),
    "unfold": (Unfold, 1, 1, 1), "im2col": (Window, 1, 1, 1),
    "bce_loss": (Loss, 2, 3, 1), "bce_with_logits": (Loss, 2, 4, 1), "kl_div": (Loss, 2, 2, 1),
}  # fmt: skip
"""By kind: attributes, least and most operands, number of results (MANY: any)."""
