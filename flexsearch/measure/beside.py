"""What ranks compute while the probe communicates: what it takes longer by, communications take from computing.

Processor time does not tell: on gloo, ranks that wait leave it to the kernel, which handles what arrives whenever a
processor is free. Ranks that compute are interrupted for it, and find other data in the caches. With 1 Gbit/s on two
cores, an all-reduce took 0.36 ns of its own threads for each byte sent or received, and 0.9 ns from computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flexsearch.backward import entry_of, gradients_of, handed_over

PARTS: Final = 16
"""Of the network, each of which is computed once forward and once backward."""
HEADS: Final = 4
Between = Callable[[Tensor], Tensor]
Weights = Sequence[Tensor]


def _attention(x: Tensor, weights: Weights) -> Tensor:
    """Of 8 sequences of 32 tokens, with what goes before and after it in a decoder."""
    scale, joint, out = weights
    projected = F.rms_norm(x, x.shape[-1:], scale) @ joint
    query, key, value = (part.view(8, 32, HEADS, -1).transpose(1, 2) for part in projected.chunk(3, dim=-1))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return x + attended.transpose(1, 2).flatten(0, 1).flatten(1) @ out


def _gated(x: Tensor, weights: Weights) -> Tensor:
    """A feed-forward layer."""
    scale, gate, up, down = weights
    normal = F.rms_norm(x, x.shape[-1:], scale)
    return x + (F.silu(normal @ gate) * (normal @ up)) @ down


class Network:
    """A small decoder, in as many kinds of operators as ranks run between two communications: what these find in the
    caches is part of what is measured. Of its usual ``width`` it holds more than the caches of a core, but not of a
    processor."""

    def __init__(self, width: int = 128) -> None:
        inner = 43 * width // 16
        shapes = [(width,), (width, 3 * width), (width, width)], [(width,), *[(width, inner)] * 2, (inner, width)]
        self._parts = [
            (part, [(torch.randn(shape) / 16).requires_grad_() for shape in shapes[k % 2]])
            for k, part in enumerate((_attention, _gated) * (PARTS // 2))
        ]
        self._rows = torch.ones(256, width)

    def step(self, between: Between | None = None) -> None:
        """A forward and a backward pass. With ``between``, both are cut behind every part, as those of ranks are where
        they communicate in one of them: it is given the results of every other part, and of the rest the gradients of
        their operands, and returns them. So there is one call of it for each part."""
        x = leaf = self._rows.clone().requires_grad_()
        passes: list[tuple[GradientEdge, list[Tensor]]] = []
        wanted = [leaf]
        for k, (part, weights) in enumerate(self._parts):
            x = part(x, weights)
            wanted += weights
            if between is not None or k == PARTS - 1:
                edge = entry_of(x)
                assert edge is not None
                passes.append((edge, wanted))
                x = leaf = (between(x) if between is not None and k % 2 else x).detach().requires_grad_()
                wanted = [leaf]
        gradient: Tensor | None = self._rows
        for k, (edge, wanted) in reversed(tuple(enumerate(passes))):
            assert gradient is not None
            gradient = gradients_of([edge], [handed_over(gradient, edge)], wanted, False)[0]
            if between is not None and gradient is not None and not k % 2:
                gradient = between(gradient)

    def steps_s(self, count: int) -> float:
        """Seconds that so many steps take."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - began


class Bucket:
    """Small tensors that ranks send and receive together, with what they do for each in a closure of its own, as the
    instructions of a step are. Between sending and receiving ranks compute, so that this code has left the caches."""

    def __init__(self, count: int = 64, rows: int = 32) -> None:
        self._slots: list[Any] = [torch.ones(rows, 32) for _ in range(count)]
        self._kept: list[Any] = [None] * count
        self._weights = [torch.ones(rows, 32, requires_grad=True) for _ in range(count)]
        self._half, self._flat = rows // 2, torch.empty(0)
        of_tensor = self._place, self._join, self._deliver
        self._steps = [[partial(step, k) for step in of_tensor] for k in range(count)]

    def summed_s(self, compute: Callable[[], object]) -> float:
        """Processor seconds for each tensor of an all-reduce: copied into one buffer, and a part of it after that."""
        began = time.thread_time()
        self._flat = torch.empty(len(self._slots) * 2 * self._half * 32)
        for k, tensor in enumerate(self._slots):
            self._part(k, 2 * self._half).copy_(tensor.detach())
        return self._finished_s(began, compute, [(place, deliver) for place, _, deliver in self._steps])

    def moved_s(self, compute: Callable[[], object]) -> float:
        """The same of messages, from or to a rank that keeps half of each tensor: it is cut, and what comes is joined
        with what is kept."""
        began = time.thread_time()
        for k, tensor in enumerate(self._slots):
            self._kept[k] = tensor.detach()[: self._half].clone()
        self._flat = torch.cat([tensor.detach()[self._half :].to(tensor.dtype).reshape(-1) for tensor in self._slots])
        return self._finished_s(began, compute, [(join, deliver) for _, join, deliver in self._steps])

    def _finished_s(
        self, began: float, compute: Callable[[], object], steps: Sequence[Sequence[Callable[[], None]]]
    ) -> float:  # fmt: skip
        sent_s = time.thread_time() - began
        compute()
        began = time.thread_time()
        for of_tensor in steps:
            for step in of_tensor:
                step()
        return (sent_s + time.thread_time() - began) / len(steps)

    def _part(self, k: int, rows: int) -> Tensor:
        size = rows * 32
        return self._flat[k * size : (k + 1) * size].view(rows, 32)

    def _place(self, k: int) -> None:
        self._slots[k] = self._part(k, 2 * self._half)

    def _join(self, k: int) -> None:
        joined = torch.empty(2 * self._half, 32)
        joined[: self._half] = self._kept[k]
        joined[self._half :] = self._part(k, self._half)
        self._slots[k], self._kept[k] = joined, None

    def _deliver(self, k: int) -> None:
        gradient, self._slots[k] = self._slots[k], None
        self._weights[k].grad = gradient
        self._slots[k] = gradient.detach()
