"""Process groups of gloo for messages between ranks: one for each direction.

A connection of gloo has one lock. Its thread that watches connections, which finds that lock taken by a thread that
sends, asks again at once; where it has driven out the other from their core, it does so until Linux takes the core from
it, up to 16 ms later (Linux 6.18, 250 ticks a second). So nothing should be received over the connection that is sent
on: what goes to lower ranks has connections of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

_downwards: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}


def connect(timeout: timedelta) -> None:
    """Make the connections, unless they are there. All ranks must call it at the same place."""
    if dist.group.WORLD not in _downwards:
        _downwards[dist.group.WORLD] = dist.new_group(timeout=timeout)


def one_way(source: int, destination: int) -> dist.ProcessGroup | None:
    """The group for messages from one rank to another; None is that of all."""
    return None if source < destination else _downwards[dist.group.WORLD]


def let_arrive() -> None:
    """Let gloo's threads see what has come before something is sent, as which receives the others have posted."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
