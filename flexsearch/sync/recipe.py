"""A recipe: when, with whom, and how much, put together; its state; a step of it.

A step of every recipe in which workers go together is, for an optimizer that works element by element:

    gradients, state = recipe.before_update(state, group, gradients)
    weights = optimizer(weights, gradients)
    weights, state = recipe.after_update(state, group, weights)

What workers push to an asynchronous server is ``recipe.pushed``; who comes when is not the recipe's to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from flexsearch.errors import RecipeError
from flexsearch.sync.all_reduce import AllReduce
from flexsearch.sync.compression import Compression, Everything, Sizes
from flexsearch.sync.exchange import Exchange, Group, Payload
from flexsearch.sync.options import number, whole
from flexsearch.sync.partners import Partners
from flexsearch.sync.server import Server
from flexsearch.sync.timing import Asynchronous, DiLoCo, EveryStep, LocalSGD, Timing

if TYPE_CHECKING:
    from torch import Tensor

EXACT: Final = AllReduce()
_EVERY_STEP: Final = EveryStep()
_EVERYTHING: Final = Everything()


@dataclass(frozen=True)
class State:
    """What a recipe keeps between steps. ``step``: steps so far; ``rounds``: synchronisations after the warm-up so far.
    (rows, n): the ``residual`` that was not sent, the ``velocity`` of momentum correction, the ``reference`` weights of
    the last synchronisation, the ``outer`` momentum; None where there is none. ``memory``: of the compression."""

    step: int = 0
    rounds: int = 0
    residual: Tensor | None = None
    velocity: Tensor | None = None
    reference: Tensor | None = None
    outer: Tensor | None = None
    memory: Any = None


@dataclass(frozen=True)
class Recipe:
    """``warm_up``: first steps in which the mean of gradients is exact. ``correction``: momentum that workers apply to
    their gradients before these are compressed (Lin et al., 2018), instead of the optimizer's; 0: none.
    Raises RecipeError for a combination that makes no sense, with the reason."""

    timing: Timing = _EVERY_STEP
    partners: Partners = EXACT
    compression: Compression = _EVERYTHING
    correction: float = 0.0
    warm_up: int = 0

    def __post_init__(self) -> None:
        whole("steps of warm-up", self.warm_up, 0)
        number("momentum of momentum-correction", self.correction, most=0.999, least=True)
        for refused, why, remedy in self._refusals():
            if refused:
                raise RecipeError(f"{self.words} makes no sense: {why}", remedy)
        if self.partners.servers or not self.partners.exact:
            self.partners.refuse_alone(self.compression)

    @property
    def words(self) -> str:
        """The levels by name: "local-sgd+gossip+top-k"."""
        parts = [p.name for p in (self.timing, self.partners, self.compression) if p.name not in _USUAL]
        return "+".join(parts) or self.partners.name

    @property
    def changes(self) -> str:
        """What it changes in the mathematics, in words; empty: nothing."""
        told = [part.changes for part in (self.timing, self.partners, self.compression) if part.changes]
        if told and self.compression.feedback:
            told.append("what was not sent is added to the next vector")
        return "; ".join(told)

    @property
    def asynchronous(self) -> Asynchronous | None:
        """How workers go by themselves, if they do."""
        return self.timing if isinstance(self.timing, Asynchronous) else None

    @property
    def server(self) -> Server | None:
        """The server, if there is one."""
        return self.partners if isinstance(self.partners, Server) else None

    @property
    def lossy(self) -> bool:
        """Whether it computes something else than the mean of gradients in every step."""
        whole_ = isinstance(self.compression, Everything) and self.partners.exact
        return not (whole_ and isinstance(self.timing, EveryStep))

    @property
    def period(self) -> int:
        """Steps from one synchronisation to the next."""
        return max(1, self.timing.steps)

    @property
    def planned(self) -> Recipe:
        """The same, or where bytes depend on the numbers, one that sends as many as plans expect."""
        return replace(self, compression=self.compression.planned)

    @property
    def updates(self) -> bool:
        """Whether replicas change their weights by themselves, and these are synchronised, not gradients."""
        return self.partners.weights or isinstance(self.timing, LocalSGD)

    def _refusals(self) -> list[tuple[bool, str, str]]:
        """(Whether it is so, why that makes no sense, the remedy) of every combination that may be refused."""
        c, p, t = self.compression, self.partners, self.timing
        compressed, served = not isinstance(c, Everything), p.servers
        periodic, alone = isinstance(t, LocalSGD), self.asynchronous is not None
        return [
            (alone and not served, "workers that go by themselves meet at a server", f"Write {t.name}+server."),
            (alone and self.warm_up > 0, "exact steps need workers that wait for each other", "Leave out warm-up."),
            (alone and self.correction > 0, "the server's optimizer has momentum", "Leave out momentum-correction."),
            (p.weights and compressed,
             "weights that are compressed in each step do not come to agree", "Write what=gradients."),
            (isinstance(t, DiLoCo) and not p.exact,
             "its outer optimizer needs the mean of all workers", "Use local-sgd, or all-reduce or server."),
            ((periodic or alone) and not c.keeps_size,
             "a majority of signs has no size, which changes of weights and single updates need",
             "Write sign:feedback=on, or synchronise in every step."),
            (self.correction > 0 and not compressed, "there is nothing to correct without compression",
             "Leave out momentum-correction, or add a compression such as top-k."),
            (self.correction > 0 and not c.feedback, "momentum is corrected in what was not sent yet",
             f"Write {c.name}:feedback=on."),
            (self.correction > 0 and periodic, "the optimizer's momentum is in what workers change weights by",
             "Leave out momentum-correction."),
        ]  # fmt: skip

    def check(self, size: int, sizes: Sizes, hosts: Sequence[int], devices: int | None = None) -> None:
        """Raise RecipeError if ``size`` workers cannot follow it, on ``hosts`` (numbers by position), among so many
        ``devices`` (default: as many as workers), for vectors of such ``sizes``."""
        if size < 2:
            raise RecipeError(
                f"{self.words} synchronises workers, and there is one", "Use two or more (--workers, another topology)."
            )
        self.partners.check(size, tuple(hosts), devices if devices is not None else size)
        server = self.server
        parts = server.bounds(sizes.n) if server is not None else [(0, sizes.n)]
        if min(b - a for a, b in parts) < 1:
            raise RecipeError(f"{len(parts)} servers share {sizes.n} elements", "Give fewer shards.")
        for a, b in parts:
            self.compression.check(sizes.part(b - a) if len(parts) > 1 else sizes)

    def warnings(self, steps: int, size: int) -> list[str]:
        """What to know before ``size`` workers take so many steps."""
        most = steps**0.25 / size**0.75
        if isinstance(self.timing, LocalSGD) and self.timing.period > max(1.0, most):
            return [
                f"a period of {self.timing.period} is above T^(1/4) / N^(3/4) = {most:.2g} (T = {steps} steps, "
                f"N = {size} workers), up to which Local-SGD is proved to converge as fast as synchronous SGD (Yu et "
                "al., 2019)"
            ]
        return []

    # ---- a step

    def start(self, weights: Tensor, sizes: Sizes) -> State:
        """The state before the first step; ``weights``: (rows, n)."""
        zeros = weights.detach() * 0
        return State(
            residual=zeros if self.compression.feedback else None, velocity=zeros if self.correction else None,
            reference=weights.detach().clone() if isinstance(self.timing, LocalSGD) else None,
            outer=zeros if isinstance(self.timing, DiLoCo) else None, memory=self.compression.start(sizes, weights),
        )  # fmt: skip

    def sends_gradients(self, state: State) -> bool:
        """Whether ``before_update`` changes gradients in the step at hand."""
        return state.step < self.warm_up or not self.updates

    def sends_weights(self, state: State) -> bool:
        """Whether ``after_update`` reads weights in the step at hand; else it only counts it."""
        if not isinstance(self.timing, LocalSGD):
            return self.partners.weights and state.step >= self.warm_up
        since = state.step + 1 - self.warm_up
        return since <= 0 or since % self.timing.period == 0

    def before_update(self, state: State, group: Group, gradients: Tensor, sizes: Sizes) -> tuple[Tensor, State]:
        """Gradients, (rows, n), that the optimizer takes."""
        if state.step < self.warm_up:
            if state.velocity is not None:
                gradients = self.correction * state.velocity + gradients
                state = replace(state, velocity=gradients)
            return EXACT.mean(gradients, group), state
        if self.updates:
            return gradients, state
        return self._send(state, group, gradients, sizes)

    def after_update(self, state: State, group: Group, weights: Tensor, sizes: Sizes) -> tuple[Tensor, State]:
        """Weights, (rows, n), that the next step begins with."""
        sends, state = self.sends_weights(state), replace(state, step=state.step + 1)
        if not sends:
            return weights, state
        if not isinstance(self.timing, LocalSGD):
            mixed, _, _ = self.partners.average(weights, group, self.compression, None, state.rounds, sizes)
            return mixed, replace(state, rounds=state.rounds + 1)
        if state.step <= self.warm_up:
            return weights, replace(state, reference=weights.clone())
        if isinstance(self.timing, DiLoCo):
            weights, state = self._outer(self.timing, state, group, weights, sizes)
        elif isinstance(self.compression, Everything) and (self.partners.exact or self.partners.weights):
            weights, _, _ = self.partners.average(weights, group, self.compression, None, state.rounds, sizes)
            state = replace(state, rounds=state.rounds + 1)
        else:
            assert state.reference is not None
            change, state = self._send(state, group, weights - state.reference, sizes)
            assert state.reference is not None
            weights = state.reference + change
        return weights, replace(state, reference=weights.clone())

    def _outer(
        self, timing: DiLoCo, state: State, group: Group, weights: Tensor, sizes: Sizes
    ) -> tuple[Tensor, State]:  # fmt: skip
        assert state.reference is not None
        assert state.outer is not None
        gradient, state = self._send(state, group, state.reference - weights, sizes)
        assert state.reference is not None
        assert state.outer is not None
        outer = timing.momentum * state.outer + gradient
        weights = state.reference - timing.lr * (gradient + timing.momentum * outer)
        return weights, replace(state, outer=outer)

    def _send(self, state: State, group: Group, x: Tensor, sizes: Sizes) -> tuple[Tensor, State]:
        """What each row gets for what it has to send, (rows, n)."""
        velocity = state.velocity
        if velocity is not None:
            x = velocity = self.correction * velocity + x
        if state.residual is not None:
            x = state.residual + x
        result, sent, memory = self.partners.average(x, group, self.compression, state.memory, state.rounds, sizes)
        if velocity is not None:
            velocity = velocity * (sent == 0)  # factor masking: it would bring what was sent once more
        residual = x - sent if state.residual is not None else None
        return result, replace(
            state, residual=residual, velocity=velocity, memory=memory, rounds=state.rounds + 1
        )  # fmt: skip

    def pushed(self, row: int, residual: Tensor | None, gradient: Tensor, step: int, sizes: Sizes) -> Pushed:
        """What worker ``row`` pushes to an asynchronous server in its step, for its gradient and residual, (1, n)."""
        server = self.server
        assert server is not None
        x = gradient if residual is None else gradient + residual
        bounds = server.bounds(sizes.n)
        payloads = [self.compression.encode(x[:, a:b], step, (row,)) for a, b in bounds]
        arrived = x.new_zeros(x.shape)
        for payload, (a, b) in zip(payloads, bounds, strict=True):
            arrived[:, a:b] = self.compression.decode(payload, b - a)
        return Pushed(payloads, arrived, x - arrived if residual is not None else None)

    # ---- what it sends

    def exchanges(
        self, members: int, hosts: Sequence[int], sizes: Sizes, step: int
    ) -> list[Exchange] | None:  # fmt: skip
        """The phases of communication in a step (0: the first), in order; None where bytes depend on the numbers. Not
        of recipes in which workers go by themselves."""
        if step < self.warm_up:
            return EXACT.exchanges(members, tuple(hosts), Everything(), sizes, step)
        rounds, rest = divmod(step - self.warm_up + 1, self.period)
        if rest:
            return []
        return self.partners.exchanges(members, tuple(hosts), self.compression, sizes, rounds - 1)


@dataclass(frozen=True)
class Pushed:
    """``payloads`` of the servers, what ``arrived``, (1, n), and the worker's new ``residual``."""

    payloads: list[Payload]
    arrived: Tensor
    residual: Tensor | None


_USUAL = ("every-step", "all-reduce", "everything")
