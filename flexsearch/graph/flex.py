"""flex_attention, written with ordinary operators before a program is made functional.

``torch.export`` keeps ``flex_attention`` as a higher-order operator with two graphs: how a score is changed, and which
keys a query sees. A graph file carries no code, so these graphs become operators over the indices of batch, head, query
and key. Where a score is only added to, or not changed, the attention stays one operator with a mask, for which fused
kernels exist, and everything can be split as in any attention; other changes need the scores written out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import log
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx


@contextmanager
def traceable_attention() -> Iterator[None]:
    """For a while, flex_attention may be traced wherever its operands are: its kernel, which computes no gradients on a
    CPU and nothing on meta, is never called. Masks are kept that ``transformers`` would leave out if all were true, and
    that ``nn.Transformer`` would replace by a flag if they are causal: both look at their values."""
    changes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("torch.nn.attention.flex_attention", "_validate_device", lambda *_: None),
        ("torch.nn.modules.transformer", "_detect_is_causal_mask", lambda mask, causal=None, size=None: bool(causal)),
        ("transformers.masking_utils", "fast_all", lambda mask: False),
    )
    loaded = [(sys.modules[name], attribute, value) for name, attribute, value in changes if name in sys.modules]
    places = [place for place in loaded if hasattr(place[0], place[1])]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def drop_block_masks(program: torch.export.ExportedProgram) -> None:
    """Take away what a functional program computes for nothing: which blocks of scores a kernel may leave out."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def write_out_flex_attention(program: torch.export.ExportedProgram) -> bool:
    """Replace every ``flex_attention`` of a program by :func:`attention`; returns whether there is one."""
    module, there = program.graph_module, False
    for node in list(module.graph.nodes):
        if node.op != "call_function" or str(node.target) != "flex_attention":
            continue
        there = True
        query, key, value, score_mod, block_mask, scale, _options, score_buffers, mask_buffers = node.args
        others = any(user.target is not getitem or (user.args[1] != 0 and user.users) for user in node.users)
        score_graph, mask_graph = (getattr(module, own.target) for own in (score_mod, block_mask[-1]))
        node.target = partial(attention, score_graph, mask_graph, others)
        node.target.__name__ = "flex_attention"
        node.args = (query, key, value, scale, score_buffers, mask_buffers)
        for own in {score_mod, block_mask[-1]}:
            if not own.users:
                module.graph.erase_node(own)
    module.recompile()
    return there


def attention(
    score_mod: fx.GraphModule,
    mask_mod: fx.GraphModule,
    others: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor | None, ...]:
    """What the higher-order operator returns: the output (B, H, Q, V) and, where ``others`` are wanted, the logarithm
    to base 2 of the sum of exponentials of each row (B, H, Q) and the greatest score of each, divided by log(2)."""
    shape = (*query.shape[:3], key.shape[2])
    form, bias = _form(score_mod)
    causal, always = _is_causal(mask_mod), _is_always(mask_mod)
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    if form != "other" and not others:
        added = None if bias is None else _over_indices(bias, shape, query.device, score_buffers, skip=1)
        simple = causal and added is None
        mask = None if always or simple else _over_indices(mask_mod, shape, query.device, mask_buffers)
        if added is not None:
            mask = added if mask is None else torch.where(mask, added, -torch.inf)
            mask = mask.to(query.dtype)
        mask = None if mask is None else mask.expand(*mask.shape[:2], *shape[2:])
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=simple, scale=scale, enable_gqa=grouped
        )
        return out, None, None
    if grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = _changed(query.to(precision) @ key.to(precision).mT * scale, score_mod, score_buffers)
    if not always:
        scores = torch.where(_over_indices(mask_mod, shape, query.device, mask_buffers), scores, -torch.inf)
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ value
    if not others:
        return out, None, None
    return out, scores.logsumexp(-1) / log(2), scores.amax(-1) / log(2)


def _form(score_mod: fx.GraphModule) -> tuple[str, fx.GraphModule | None]:
    """How a graph changes a score, its first argument: "same", "sum" and the graph of what is added, or "other"."""
    score = next(node for node in score_mod.graph.nodes if node.op == "placeholder")
    result = _result(score_mod)
    if result is score:
        return "same", None
    if result.target is not torch.ops.aten.add.Tensor or result.kwargs or len(result.args) != 2:
        return "other", None
    places = [i for i, x in enumerate(result.args) if x is not score]
    if len(places) != 1 or len(score.users) != 1 or not isinstance(result.args[places[0]], fx.Node):
        return "other", None
    bias = deepcopy(score_mod)
    added = _result(bias).args[places[0]]
    output = next(node for node in bias.graph.nodes if node.op == "output")
    output.args = (added,)
    bias.graph.eliminate_dead_code()
    bias.recompile()
    return "sum", bias


def _result(module: fx.GraphModule) -> fx.Node:
    """The node that a graph of one result returns."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    result: Any = output.args[0]
    only: fx.Node = result[0] if isinstance(result, list | tuple) else result
    return only


def _is_always(mask_mod: fx.GraphModule) -> bool:
    """Whether a mask is the constant one, as that of a call without a mask."""
    result = _result(mask_mod)
    ones = (torch.ops.aten.new_ones.default, torch.ops.aten.ones.default, torch.ops.aten.ones_like.default)
    return result.target in ones


def _is_causal(mask_mod: fx.GraphModule) -> bool:
    """Whether a mask is "the query is not before the key"."""
    places = [node for node in mask_mod.graph.nodes if node.op == "placeholder"]
    result, query, key = _result(mask_mod), places[2], places[3]
    forward = result.target is torch.ops.aten.ge.Tensor and result.args == (query, key)
    return forward or (result.target is torch.ops.aten.le.Tensor and result.args == (key, query))


def _over_indices(
    module: fx.GraphModule, shape: Sequence[int], device: torch.device, buffers: Sequence[Any], skip: int = 0
) -> Tensor:
    """A graph of (batch, head, query, key) for all indices: its results, of length 1 where an index is not read.

    ``skip``: arguments before the indices, which it does not read.
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"][skip : skip + 4]
    read = [bool(node.users) for node in places]
    indices = [torch.arange(n, device=device) if r else torch.zeros((), dtype=torch.int64, device=device)
               for n, r in zip(shape, read, strict=True)]  # fmt: skip
    before: list[Any] = [None] * skip
    function: Callable[..., Any] = lambda *places: module(*before, *places, *buffers)  # noqa: E731
    for axis in (3, 2, 1, 0):
        if read[axis]:
            function = torch.vmap(function, in_dims=tuple(0 if i == axis else None for i in range(4)))
    result: Tensor = function(*indices)
    for axis in (0, 1, 2, 3):
        if not read[axis]:
            result = result.unsqueeze(axis)
    return result


def _changed(scores: Tensor, score_mod: fx.GraphModule, buffers: Sequence[Any]) -> Tensor:
    """Scores (B, H, Q, K) after ``score_mod``."""
    function: Callable[..., Any] = lambda score, *places: score_mod(score, *places, *buffers)  # noqa: E731
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(0, *(0 if i == axis else None for i in range(4))))
    result: Tensor = function(scores, *(torch.arange(n, device=scores.device) for n in scores.shape))
    return result
