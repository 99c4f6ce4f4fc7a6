"""What the recipes of a plan do in a training step: after the backward pass, and after the optimizer's step."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.lower import Lowered
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.recipes.member import Member
from flexsearch.runtime.recipes.ranks import Ranks
from flexsearch.runtime.recipes.saved import saved_state, take_state, wanted_state
from flexsearch.runtime.recipes.served import LONG, MakeOptimizer, Served
from flexsearch.runtime.stored import Stored


class Synchronisation:
    """The recipe groups that this rank takes part in. ``empty``: the parameter of a rank without weights. All ranks
    must make it together. ``names``: of all weights that follow a recipe, also on other ranks."""

    def __init__(
        self, lowered: Lowered, stored: Stored, empty: nn.Parameter, failures: Failures, timeout_s: float,
        tolerate: bool = False, make: MakeOptimizer | None = None,
    ) -> None:  # fmt: skip
        rank, self._failures = dist.get_rank(), failures
        groups = lowered.recipe_groups
        self.names = {name for group in groups for name in group.names}
        self.asynchronous = any(group.recipe.asynchronous is not None for group in groups)
        """Whether workers go by themselves, and optimizers are the servers'."""
        if self.asynchronous:
            _check_asynchronous(groups, make)
        if tolerate:
            _check_tolerant(groups)
        self.members: list[Member] = []
        for group in groups:
            ranks = Ranks(group.devices, group.servers, group.hosts, timeout_s, tolerate)
            processes = dist.new_group(list(group.positions), timeout=LONG) if self.asynchronous else None
            if rank not in group.positions:
                continue
            own = [stored.weights[name] for name in group.names] if rank in group.devices else []
            dtype, device = dtype_of(stored.graph.tensor[group.names[0]].dtype), stored.device
            if processes is not None and make is not None:
                served = Served(group, ranks, own, dtype, device, processes, make, timeout_s, tolerate)
                self.members.append(served)
            else:
                self.members.append(Member(group, ranks, own, dtype, device))
        self._tracked = [p for member in self.members for p in member.parameters] or [empty] * bool(self.members)
        self._stepped: set[int] = set()
        """Parameters (by id) whose optimizer has stepped since the others' have."""
        self._versions: dict[int, int] = {}
        self._closed = False
        self.restart()
        if self.asynchronous:
            _call_at_exit(self)
        elif self.members:
            _call_after_steps(self)

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def diverges(self) -> bool:
        """Whether replicas may have gradients or weights of their own."""
        return any(not member.agrees for member in self.members)

    @property
    def optimizer(self) -> Optimizer | None:
        """Of the part of the weights that this rank serves."""
        return next((m.shard.optimizer for m in self.members if isinstance(m, Served) and m.shard is not None), None)

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
        for member in self.members:
            member.check()
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
        """Begin anew, from the weights that there are. All ranks must call it."""
        for member in self.members:
            member.start()
        if self.asynchronous:
            dist.barrier()
        self._stepped.clear()
        self.note()

    def saved(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """For a checkpoint, this rank's. All ranks must call it."""
        if self.asynchronous:
            dist.barrier()
        return saved_state(self.members, optimizer, dist.get_rank()) if self.members else {}

    def wanted(self, saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """What to read of a checkpoint with this metadata, whose names begin so."""
        return wanted_state(saved, dist.get_rank(), prefix) if self.members else {}

    def load(self, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
        """Go on from what was read, after the weights. All ranks must call it."""
        self.restart()
        if self.members:
            take_state(self.members, optimizer, state, dist.get_rank())
        if self.asynchronous:
            dist.barrier()
            for member in self.members:
                member.pull()
        self.note()

    def close(self) -> None:
        """Take no more steps. A server waits for the other workers."""
        if not self._closed:
            self._closed = True
            for member in self.members:
                member.close()

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
        """In the block, replicas that have weights of their own have the mean of all, or those of the server. All ranks
        must enter it."""
        if self.asynchronous:
            dist.barrier()
            for member in self.members:
                member.pull()
            self.note()
            yield
            return
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


def _check_asynchronous(groups: Sequence[RecipeGroup], make: MakeOptimizer | None) -> None:
    """Raise RuntimeFailure for what workers that go by themselves cannot do."""
    words = next(group.recipe.words for group in groups if group.recipe.asynchronous is not None)
    if make is None:
        raise RuntimeFailure(
            f"under {words} the optimizer runs at the server, as gradients arrive",
            "Pass parallelize(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)), and call "
            "step.step(inputs, targets).",
        )
    if other := [group for group in groups if group.recipe.asynchronous is None]:
        raise RuntimeFailure(
            f"workers wait for each other to synchronise {other[0].names[0]!r} by {other[0].recipe.words}, and not for "
            f"others by {words}",
            "Give all weights a recipe in which workers go by themselves, or none.",
        )
    if dist.get_backend() != "gloo":
        raise RuntimeFailure(f"{words} needs the backend gloo", "Use a topology whose backend is gloo.")


def _check_tolerant(groups: Sequence[RecipeGroup]) -> None:
    """Raise RuntimeFailure unless others can go on when one dies."""
    for group in groups:
        recipe = group.recipe
        if recipe.asynchronous is None and (recipe.partners.exact or recipe.warm_up):
            raise RuntimeFailure(
                f"nobody can go on without one of the replicas under {recipe.words}: it needs the mean of all",
                "Leave out tolerate, or use async+server, gossip, ring or matrix (without warm-up).",
            )
    if not groups:
        raise RuntimeFailure(
            "nobody can go on without one of the replicas of a plan that synchronises exactly",
            "Leave out tolerate, or plan with recipes (async+server, gossip, ring or matrix).",
        )


def _call_at_exit(synchronisation: Synchronisation) -> None:
    """Have servers wait for workers that are not done, before the interpreter ends."""
    reference = weakref.ref(synchronisation)

    def leave() -> None:
        if (alive := reference()) is not None:
            with suppress(RuntimeFailure):
                alive.close()

    atexit.register(leave)


def _call_after_steps(synchronisation: Synchronisation) -> None:
    """Tell it of the steps of all optimizers, as long as it lives."""
    reference = weakref.ref(synchronisation)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if (alive := reference()) is not None:
            alive.stepped(optimizer)

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(synchronisation, handle.remove)
