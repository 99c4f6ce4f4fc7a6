"""What autograd saves for a backward pass, held where it can be let go of before the graph is."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def aside(saved: list[Tensor | None]) -> saved_tensors_hooks:
    """Has autograd save tensors in a list that can be cleared, though its graph is retained. A backward pass takes each
    of them out of it as it gets there."""

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    def take(place: int) -> Tensor:
        tensor, saved[place] = saved[place], None
        assert tensor is not None
        return tensor

    return saved_tensors_hooks(pack, take)
