"""The LSTM cell: a piece computes all four gates of its hidden features from the whole input and the whole state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, register_kernel
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


@register_kernel("lstm_cell")
def lstm_cell(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """(x, h, c, weights, biases) -> (h, c), as torch.lstm_cell, whose weights have the gates below each other."""
    state = piece.inputs[2]
    assert state is not None
    whole = state[1] == (0, shapes[2][1])
    grouped = [len(shape) - (2 if k < 2 else 1) for k, shape in enumerate(shapes[3:])]

    def run(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        w_ih, w_hh, *biases = (w.flatten(0, 1) if g else w for w, g in zip(weights, grouped, strict=True))
        if whole:
            made: tuple[Tensor, Tensor] = torch.lstm_cell(x, (h, c), w_ih, w_hh, *biases)
            return made
        b_ih, b_hh = biases or (None, None)
        gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(new), new

    return run
