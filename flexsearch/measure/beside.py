"""What ranks compute while the probe communicates: what it takes longer by, communications take from computing.

Processor time does not tell: on gloo, ranks that wait leave it to the kernel, which handles what arrives whenever a
processor is free. Ranks that compute are interrupted for it, and find other data in the caches. With 1 Gbit/s on two
cores, an all-reduce took 0.36 ns of its own threads for each byte sent or received, and 0.9 ns from computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

LAYERS: Final = 16
"""Of the network, each of which is computed once forward and once backward."""
Between = Callable[[Tensor], Tensor]


class Network:
    """A small network of linear layers; what it holds is more than the caches of a core, but not of a processor."""

    def __init__(self) -> None:
        shapes = (128, 256), (256, 128)
        self._weights = [[(torch.randn(shape) / 16).requires_grad_() for shape in shapes] for _ in range(LAYERS)]
        self._rows = torch.ones(256, 128)

    def step(self, between: Between | None = None) -> None:
        """A forward and a backward pass. ``between`` is given each layer's result and each gradient of its operand,
        and returns them: it cuts the passes into calls of autograd of their own."""
        x, passes = self._rows.clone().requires_grad_(), []
        leaf = x
        for first, second in self._weights:
            x = torch.relu(x @ first) @ second
            if between is not None:
                passes.append((x, [leaf, first, second]))
                x = leaf = between(x).requires_grad_()
        if between is None:
            passes = [(x, [leaf, *(weight for layer in self._weights for weight in layer)])]
        gradient = self._rows
        for computed, wanted in reversed(passes):
            gradient = torch.autograd.grad(computed, wanted, gradient)[0]
            if between is not None:
                gradient = between(gradient)

    def steps_s(self, count: int) -> float:
        """Seconds that so many steps take."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - began
