"""How many samples the batch at hand has, where the loader has fetched a smaller one than the plan's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.faults import with_all
from flexsearch.runtime.feed import Feed


class BatchSize:
    """Knows the size of the batch fetched last until another one is fetched, however often it is used."""

    def __init__(self, feed: Feed, rank: int, device: torch.device) -> None:
        self._feed, self._rank, self._device = feed, rank, device
        self._fetched = feed.graph.batch
        self._ended = False

    def fetched(self, samples: int) -> None:
        """The loader has fetched a batch of so many samples."""
        self._fetched, self._ended = samples, False

    def ended(self) -> None:
        """It has no more."""
        self._ended = True

    def of(self, named: Mapping[str, Tensor], samples: int | None, alone: bool) -> int:
        """Samples of the batch at hand: as many as the user says (``samples``), or as seem to be meant. ``alone``:
        ranks do not wait for each other. Raises RuntimeFailure for a number that the plan cannot serve."""
        count = samples if samples is not None else self._meant(named, alone)
        if not isinstance(count, int) or isinstance(count, bool):
            raise RuntimeFailure(f"samples={count!r} is no number of samples", "Give a whole number.")
        if not 0 < count <= self._feed.graph.batch:
            raise RuntimeFailure(
                f"a batch of {count} samples, where the plan is for {self._feed.graph.batch}",
                "Give at most as many, or plan for a larger batch.",
            )
        return count

    def _meant(self, named: Mapping[str, Tensor], alone: bool) -> int:
        """As many as were fetched last, or the plan's.

        A batch of the user's own may come between, or behind the last one fetched. A rank without samples cannot tell
        which it is, so after a smaller batch was fetched, all ranks must call this; those that are ``alone`` decide
        each for itself.
        """
        full, fetched = self._feed.graph.batch, self._fetched
        if fetched == full:
            return full
        own, own_of_full = (high - low for low, high in (self._feed.range_of(self._rank, n) for n in (fetched, full)))
        count = full + 1  # no opinion
        for name, tensor in named.items():
            if rows := self._feed.rows.get(name, 0):
                length = tensor.shape[0] // rows if tensor.dim() else 0
                count = full if length in (full, own_of_full) and length != own else fetched
                break
        if not alone:
            votes = torch.tensor([count], device=self._device)
            with with_all("agreeing on the size of a batch"):
                dist.all_reduce(votes, op=dist.ReduceOp.MIN)
            count = int(votes)
        if count == full and self._ended:
            self._fetched = full
        return count if count <= full else fetched
