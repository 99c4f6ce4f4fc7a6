"""Connections of their own for gloo's messages to lower ranks of the same host, where each rank has its own core.

A connection has one lock. Gloo's thread that watches connections, which finds that lock taken by a thread that sends,
asks again at once; where it has driven out the other from their core, it does so until its share of it is used up, up
to 16 ms later (Linux 6.18). So nothing should be received over a connection that much is sent on. Small messages were
measured to be better off with one for both directions (perhaps as its data acknowledges what has come), and so were
ranks that share cores. Between hosts it costs time, for a reason not found: over 1 Gbit/s the first 2 MiB
message of a step took 25 to 30 ms instead of 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

LARGE_BYTES: Final = 2**20
"""Of the messages of one communication to one rank."""
_downwards: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}


class Directions:
    """The process groups of this rank's messages. ``hosts``: of each rank, the name; inside a host, each direction has
    its own, for which all ranks must come here at the same place. None: never."""

    def __init__(self, hosts: Sequence[str] | None, timeout: timedelta) -> None:
        self._hosts = hosts
        self._downwards: dist.ProcessGroup | None = None
        if hosts is not None and len(set(hosts)) < len(hosts):
            world = dist.group.WORLD
            if world not in _downwards:
                _downwards[world] = dist.new_group(timeout=timeout)
            self._downwards = _downwards[world]

    def group(self, source: int, destination: int, nbytes: int) -> dist.ProcessGroup | None:
        """That of messages of so many bytes together from one rank to another; None is the group of all."""
        hosts = self._hosts
        if hosts is None or source < destination or nbytes < LARGE_BYTES or hosts[source] != hosts[destination]:
            return None
        return self._downwards
