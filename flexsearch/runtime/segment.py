"""Runs a segment: the kernels of its operators, and its backward pass as a task of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from flexsearch.graph.kernels_norm import fused_batch_norm
from flexsearch.graph.ops import KernelContext, build_kernel
from flexsearch.lower import Lowered
from flexsearch.runtime.program import Key, Segment

Kernel = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass
class Pass:
    """What a forward pass leaves for the backward pass: leaves that need gradients and results that get them."""

    leaves: list[tuple[Key, Tensor]]
    seeds: list[tuple[str, Tensor]]


def _keeping(both: Callable[..., tuple[Tensor, Tensor]], made: list[Tensor]) -> Kernel:
    """The first result of ``both``; the second is kept in ``made``."""

    def run(*operands: Tensor) -> Tensor:
        first, second = both(*operands)
        made.append(second)
        return first

    return run


def _kept(made: list[Tensor]) -> Kernel:
    """What ``_keeping`` kept, whatever the operands are."""
    return lambda *_: made.pop()


class SegmentRunner:
    """Runs the pieces of a segment's operators on local tensors."""

    def __init__(self, lowered: Lowered, device: int, segment: Segment, context: KernelContext) -> None:
        self.segment = segment
        graph = lowered.graph
        self.steps: list[tuple[Kernel, tuple[int | None, ...]]] = []
        for o, arguments in zip(segment.operators, segment.arguments, strict=True):
            op = graph.operators[o]
            piece = lowered.placed[o].placement.piece_on(device)
            kernel = build_kernel(op, piece, [graph.tensor[name].shape for name in op.inputs], context)
            self.steps.append((kernel, arguments))
        self._fuse_batch_norms(lowered, device)

    def _fuse_batch_norms(self, lowered: Lowered, device: int) -> None:
        """Let batch normalisations that have their statistics from this very segment compute both at once."""
        operators = [lowered.graph.operators[o] for o in self.segment.operators]
        first = list(accumulate([len(op.outputs) for op in operators], initial=0))
        sent = {result for result, _ in self.segment.seeds}
        for j, op in enumerate(operators):
            if op.kind != "batch_statistics" or first[j] in sent:
                continue
            readers = [k for k, arguments in enumerate(self.segment.arguments) if ~first[j] in arguments]
            norms = [k for k in readers if operators[k].kind == "batch_norm"]
            if len(norms) != 1 or any(operators[k].kind != "batch_norm_running" for k in readers if k not in norms):
                continue
            k = norms[0]
            piece = lowered.placed[self.segment.operators[k]].placement.piece_on(device)
            x, _, *affine = self.segment.arguments[k]
            early = all(a is not None and (a >= 0 or ~a < first[j]) for a in affine)
            if x != self.segment.arguments[j][0] or not early or ("g" in op.sizes and piece.extent("g") > 1):
                continue
            (apart, _), (normalise, arguments) = self.steps[j], self.steps[k]
            made: list[Tensor] = []
            self.steps[j] = _keeping(fused_batch_norm(operators[k], apart, normalise), made), (x, *affine)
            self.steps[k] = _kept(made), arguments

    def forward(self, values: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Pass]:
        """Results that leave the segment (detached), and what the backward pass needs."""
        leaves = []
        tracked = []
        for leaf in self.segment.leaves:
            tensor = values[leaf.value].detach()
            if leaf.gradient is not None:
                tensor.requires_grad_()
                tracked.append((leaf.gradient, tensor))
            leaves.append(tensor)
        results: list[Tensor] = []
        with torch.set_grad_enabled(self.segment.backward):
            for kernel, arguments in self.steps:
                made = kernel(*[None if a is None else leaves[a] if a >= 0 else results[~a] for a in arguments])
                results.extend(made if isinstance(made, tuple) else (made,))
        exports = {Key("home", name): results[r].detach() for r, name in self.segment.exports}
        seeds = [(name, results[r]) for r, name in self.segment.seeds if results[r].requires_grad]
        return exports, Pass(tracked, seeds)

    def backward(self, saved: Pass, gradients: Mapping[str, Tensor]) -> list[tuple[Key, Tensor]]:
        """Gradients with respect to the leaves, given those of the results by tensor name."""
        outputs = [(tensor, gradients[name]) for name, tensor in saved.seeds if name in gradients]
        if not outputs or not saved.leaves:
            return []
        found = torch.autograd.grad(
            [tensor for tensor, _ in outputs],
            [tensor for _, tensor in saved.leaves],
            [gradient for _, gradient in outputs],
            allow_unused=True,
        )
        return [(key, gradient) for (key, _), gradient in zip(saved.leaves, found, strict=True) if gradient is not None]
