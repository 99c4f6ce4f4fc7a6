"""What the recipes of a plan do in a training step: after the backward pass, and after the optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.lower import Lowered
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.recipes.member import Member
from flexsearch.runtime.recipes.ranks import Ranks
from flexsearch.runtime.stored import Stored


class Synchronisation:
    """The recipe groups that this rank takes part in. ``empty``: the parameter of a rank without weights. All ranks
    must make it together. ``names``: of all weights that follow a recipe, also on other ranks."""

    def __init__(
        self, lowered: Lowered, stored: Stored, empty: nn.Parameter, failures: Failures, timeout_s: float,
        tolerate: bool = False,
    ) -> None:  # fmt: skip
        rank, self._failures = dist.get_rank(), failures
        self.names = {name for group in lowered.recipe_groups for name in group.names}
        self.members: list[Member] = []
        for group in lowered.recipe_groups:
            ranks = Ranks(group.devices, group.servers, group.hosts, timeout_s, tolerate)
            if rank in group.positions:
                own = [stored.weights[name] for name in group.names] if rank in group.devices else []
                dtype = dtype_of(stored.graph.tensor[group.names[0]].dtype)
                self.members.append(Member(group, ranks, own, dtype, stored.device))
        self._tracked = [p for member in self.members for p in member.parameters] or [empty] * bool(self.members)
        self._stepped: set[int] = set()
        """Parameters (by id) whose optimizer has stepped since the others' have."""
        self._versions: dict[int, int] = {}
        self.note()
        if self.members:
            _call_after_steps(self)

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def diverges(self) -> bool:
        """Whether replicas may have gradients or weights of their own."""
        return any(not member.agrees for member in self.members)

    def synchronise_gradients(self) -> None:
        """After the backward pass."""
        for member in self.members:
            member.synchronise_gradients()

    def stepped(self, optimizer: Optimizer) -> None:
        """After a step of any optimizer: once all weights that follow a recipe have been updated, theirs."""
        tracked = {id(p) for p in self._tracked}
        own = {id(p) for group in optimizer.param_groups for p in group["params"]} & tracked
        if not own:
            return
        with self._failures.watch():
            if own & self._stepped:
                raise RuntimeFailure(
                    f"an optimizer has stepped twice while {len(tracked - self._stepped)} of {len(tracked)} weights "
                    "that synchronise by a recipe were not updated once",
                    "Give all of step.parameters() to optimizers, and step each of them once.",
                )
            self._stepped |= own
            if self._stepped == tracked:
                self.synchronise_weights()
        self.note()

    def synchronise_weights(self) -> None:
        """After all weights have been updated."""
        for member in self.members:
            member.synchronise_weights()
        self._stepped.clear()
        self.note()

    def check(self) -> None:
        """Raise RuntimeFailure if weights have changed without an optimizer's step: their recipe was left out then."""
        if any(p._version != self._versions[id(p)] for p in self._tracked):
            raise RuntimeFailure(
                "weights that synchronise by a recipe have changed, but no step of a torch.optim.Optimizer that holds "
                "them was seen, after which the recipe has its turn",
                "Update them by an optimizer, or pass parallelize(optimizer=...) and call step.step(inputs, targets).",
            )

    def note(self) -> None:
        """Remember the weights as they are: what has changed them is known."""
        self._versions = {id(p): p._version for p in self._tracked}

    def restart(self) -> None:
        """Begin anew, from weights that were loaded."""
        for member in self.members:
            member.start()
        self._stepped.clear()
        self.note()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Steps in the block leave the recipes' states as they were."""
        states = [member.state for member in self.members]
        try:
            yield
        finally:
            for member, state in zip(self.members, states, strict=True):
                member.state = state

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """In the block, replicas that have weights of their own have the mean of all. All ranks must enter it."""
        apart = [member for member in self.members if not member.agrees]
        before = [member.weights for member in apart]
        for member, mean in zip(apart, [member.mean() for member in apart], strict=True):
            member.weights = mean
        try:
            yield
        finally:
            for member, row in zip(apart, before, strict=True):
                member.weights = row
            self.note()


def _call_after_steps(synchronisation: Synchronisation) -> None:
    """Tell it of the steps of all optimizers, as long as it lives."""
    reference = weakref.ref(synchronisation)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if (alive := reference()) is not None:
            alive.stepped(optimizer)

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(synchronisation, handle.remove)
