"""Which tensors a device keeps in a memory format of their own, and when that takes a copy: kernels make it, and the
account of memory, which compiles this (``flexsearch.compiled``), counts it."""

from __future__ import annotations

from typing import Any


def has_channels_last(rank: int, dtype: str, device: str) -> bool:
    """Whether kernels on a kind of ``device`` read tensors of a rank and type with the channels last: images and
    convolution weights on a CPU, where that is fastest (6-10 % of a whole AlexNet or ResNet-50 step)."""
    return device == "cpu" and rank == 4 and dtype in ("float32", "bfloat16")


def takes_copy(channels: Any, places: Any) -> Any:
    """Whether an image with so many channels and places (height times width) in the order of its dimensions has to be
    copied to have its channels last. With one of either, both orders are the same."""
    return channels > 1 and places > 1
