"""The same graph in another precision: what mixed-precision training (Micikevicius et al., ICLR 2018) makes of every
tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import isfinite
from typing import Any, Final, Literal

from pydantic import PrivateAttr

from flexsearch.graph.model import Operator, OperatorGraph, Tensor
from flexsearch.graph.ops import kind_of, saved_tensors

Precision = Literal["as-is", "bf16", "fp16"]
"""``as-is``: what the graph says."""
Gradients = Literal["as-is", "float32"]
"""Type in which gradients of weights are added up, sent and read by the update; ``as-is``: that in which operators
make them."""

DTYPES: Final[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16"}
"""Element type by precision."""

LARGEST: Final[Mapping[str, float]] = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0}
"""The largest finite number of an element type."""

FLOAT32_KINDS: Final = frozenset({
    "batch_norm_running", "batch_statistics", "bce_loss", "bce_with_logits", "cross_entropy", "ctc_loss", "huber_loss",
    "kl_div", "l1_loss", "log_softmax", "mse_loss", "multilabel_margin_loss", "nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "valid_count",
})  # fmt: skip
"""Kinds whose results stay float32, as under torch.autocast: losses and statistics of normalisation. Softmax inside a
model does not: fused kernels write it in half precision (Megatron-LM), although plain autocast does not."""
FLOAT32_WEIGHTS: Final = frozenset({"batch_norm"})
"""Kinds whose kernels take float32 weights beside activations of half precision, as under torch.autocast."""


class PreciseGraph(OperatorGraph):
    """A graph in another precision. A plan is made for the graph of the model, and the precision is an option of the
    plan, so the digest is that of the given graph. A part of it (``with_batch``) has no such graph, and its own
    digest."""

    _source: OperatorGraph | None = PrivateAttr(None)

    def content_hash(self) -> str:
        """Digest of the graph that this one was made of."""
        return super().content_hash() if self._source is None else self._source.content_hash()

    def __eq__(self, other: object) -> bool:
        """By fields alone: the two graphs know each other."""
        if not isinstance(other, PreciseGraph) or type(other) is not type(self):
            return False
        return all(getattr(self, field) == getattr(other, field) for field in OperatorGraph.model_fields)

    __hash__ = OperatorGraph.__hash__


class WideGradientsGraph(PreciseGraph):
    """One whose gradients of weights are held in float32, as by Megatron-LM and by FSDP2 with that ``reduce_dtype``."""

    @cached_property
    def gradient(self) -> Mapping[str, Tensor]:
        """Those of parameters in half precision are wider than these."""
        narrow = (t for t in self.of_kind("parameter") if t.dtype in LARGEST)
        return {**self.tensor, **{t.name: t.model_copy(update={"dtype": "float32"}) for t in narrow}}


def with_precision(graph: OperatorGraph, precision: Precision, gradients: Gradients = "as-is") -> OperatorGraph:
    """``graph`` with parameters, constants and activations of float32 in half precision. Inputs, buffers, losses and
    statistics of normalisation stay as they are, and so does what is computed from them alone. ``gradients``: of
    weights, as they are held.

    The same graph gives the same object again; ``as-is`` gives back the graph that another precision was made of."""
    source = graph._source or graph if isinstance(graph, PreciseGraph) else graph
    if precision == "as-is":
        return source
    cached: dict[tuple[str, str], OperatorGraph] = source.__dict__.setdefault("_in_precision", {})
    if (precision, gradients) not in cached:
        kind = PreciseGraph if gradients == "as-is" else WideGradientsGraph
        cached[precision, gradients] = _converted(source, DTYPES[precision], kind)
    return cached[precision, gradients]


def _converted(source: OperatorGraph, low: str, kind: type[PreciseGraph]) -> OperatorGraph:
    dtype = {t.name: t.dtype for t in source.tensors}
    for tensor in source.of_kind("parameter", "constant"):
        readers = {source.operators[reader].kind for reader, _ in source.consumers[tensor.name]}
        if tensor.dtype == "float32" and not (readers and readers <= FLOAT32_WEIGHTS):
            dtype[tensor.name] = low
    for op, rule in zip(source.operators, saved_tensors(source), strict=True):
        keeps = _stays(source, op, dtype)
        for name in op.outputs:
            if rule.alias or kind_of(op).is_free(op):  # the same memory
                dtype[name] = dtype[op.inputs[0]]
            elif source.tensor[name].dtype == "float32" and not keeps and name != source.loss:
                dtype[name] = low
    tensors = tuple(
        Tensor(**{field: getattr(t, field) for field in Tensor.model_fields} | {"dtype": dtype[t.name]})
        for t in source.tensors
    )
    operators = tuple(
        _with_numbers_in_range(op, LARGEST[low]) if any(dtype[name] == low for name in op.outputs) else op
        for op in source.operators
    )
    fields = {field: getattr(source, field) for field in OperatorGraph.model_fields}
    precise = kind(**fields | {"tensors": tensors, "operators": operators})
    precise._source = source
    return precise


def _with_numbers_in_range(op: Operator, most: float) -> Operator:
    """An operator without numbers beyond the largest that its type has: masks are filled with the least of float32."""
    attributes = _in_range(op.attributes, most)
    return op if attributes == op.attributes else op.model_copy(update={"attributes": attributes})


def _in_range(value: Any, most: float) -> Any:
    if isinstance(value, dict):
        return {key: _in_range(one, most) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_range(one, most) for one in value]
    return min(max(value, -most), most) if isinstance(value, float) and isfinite(value) else value


def _stays(graph: OperatorGraph, op: Operator, dtype: Mapping[str, str]) -> bool:
    """Whether results of an operator are float32: by its kind, or as all activations that it reads are."""
    if op.kind in FLOAT32_KINDS:
        return True
    read = [dtype[n] for n in op.inputs if graph.tensor[n].kind == "activation" and graph.tensor[n].floating]
    return bool(read) and all(operand_dtype == "float32" for operand_dtype in read)
