"""A segment at work: its operators' kernels, and a backward pass that is called like any other task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsearch.graph.kernels import KernelContext, build_kernel
from flexsearch.lower import Lowered
from flexsearch.runtime.program import Key, Segment

Kernel = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass
class Pass:
    """What a forward pass leaves for the backward pass: leaves that need gradients and results that get them."""

    leaves: list[tuple[Key, Tensor]]
    seeds: list[tuple[str, Tensor]]


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
        return [
            (key, gradient) for (key, _), gradient in zip(saved.leaves, found, strict=True) if gradient is not None
        ]
