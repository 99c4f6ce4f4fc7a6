"""Workers that go by themselves, and the servers that they meet at: a thread for each worker on the server's rank.

A worker pushes the gradient of the weights that it pulled last, and gets the weights of the moment, at once or, with a
bound, as soon as its lead allows it to begin its next step. A part of the vector is updated when that part of a
gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from threading import Condition, Thread
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flexsearch.errors import RuntimeFailure
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.runtime.optimizers import ALIKE, looks_at
from flexsearch.runtime.recipes.member import Member
from flexsearch.runtime.recipes.ranks import TAG, Ranks, count_of, nbytes_of, packed, unpacked
from flexsearch.sync import Payload, Recipe
from flexsearch.sync.random_k import RandomPayload
from flexsearch.sync.record import Staleness

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

FIXED, PULL, INSTALL, BYE = 0, -1, -2, -3
"""What a worker says before it sends: a gradient (its number of entries, where that is not fixed), or what it wants."""
REQUEST, ANSWER = TAG + 1, TAG + 2
LONG: Final = timedelta(days=7)
"""For which servers wait for workers: those that die are noticed, those that hang have time-outs of their own."""


class Shard:
    """A server's part of the vector: elements ``begin`` to ``end``, and their optimizer."""

    def __init__(
        self, group: RecipeGroup, number: int, make: MakeOptimizer, like: Tensor, timeout_s: float, tolerate: bool
    ) -> None:
        recipe, self.number = group.recipe, number
        assert recipe.server is not None
        assert recipe.asynchronous is not None
        self.begin, self.end = recipe.server.bounds(group.sizes.n)[number]
        self._recipe, self._timeout_s, self._tolerate = recipe, timeout_s, tolerate
        self._share = recipe.asynchronous.share or 1.0 / len(group.devices)
        self._bound = recipe.asynchronous.lead
        self.weights = nn.Parameter(like.new_zeros(self.end - self.begin))
        self.optimizer = make([self.weights])
        if what := looks_at(type(self.optimizer)):
            raise RuntimeFailure(
                f"{type(self.optimizer).__name__} looks at {what}, and a server holds a row of elements of many",
                f"Use {ALIKE}.",
            )
        self.steps = [0] * len(group.devices)
        """By worker, those whose gradients have arrived."""
        self._gone: set[int] = set()
        self._waiting: set[int] = set()
        self._answers: dict[int, Tensor] = {}
        self._pulled_at = [0] * len(group.devices)
        self._updates = self._behind = self._most = self._lead = 0
        self._changed, self.failure = Condition(), ""

    @property
    def staleness(self) -> Staleness:
        """So far."""
        return Staleness(self._behind / max(1, self._updates), self._most, self._lead)

    def push(self, worker: int, payload: Payload) -> Tensor:
        """Update by a gradient, and return the weights with which the worker may begin its next step."""
        gradient = self._recipe.compression.decode(payload, self.end - self.begin)[0]
        with self._changed:
            self._refuse_failed()
            behind = self._updates - self._pulled_at[worker]
            self._behind, self._most = self._behind + behind, max(self._most, behind)
            self.weights.grad = gradient.to(self.weights.dtype) * self._share
            self.optimizer.step()
            self._updates += 1
            self.steps[worker] += 1
            self._waiting.add(worker)
            self._answer()
            if not self._changed.wait_for(lambda: bool(self.failure) or worker in self._answers, self._timeout_s):
                slow = [w for w, steps in enumerate(self.steps) if w not in self._gone and steps == self._slowest]
                raise RuntimeFailure(
                    f"worker {worker} waited {self._timeout_s:g} s for worker {slow[0]}, which is more than "
                    f"{self._bound} steps behind",
                    "Have all workers take equally many steps, or pass a larger parallelize(timeout_s=...).",
                )
            self._refuse_failed()
            return self._answers.pop(worker)

    def pull(self) -> Tensor:
        """The weights of the moment."""
        with self._changed:
            return self.weights.detach().clone()

    def install(self, weights: Tensor) -> None:
        """Begin anew with these weights."""
        with self._changed, torch.no_grad():
            self.weights.copy_(weights)
            self.optimizer.state.clear()
            self.steps = [0] * len(self.steps)
            self._pulled_at = [self._updates] * len(self.steps)

    def saved(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        kept = self.optimizer.state[self.weights]
        tensors = {f"optimizer.{key}": x for key, x in kept.items() if isinstance(x, Tensor)}
        return tensors | {"weights": self.weights.detach(), "steps": torch.tensor(self.steps)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse."""
        with self._changed, torch.no_grad():
            self.weights.copy_(tensors["weights"])
            self.steps = [int(steps) for steps in tensors["steps"]]
            for key, value in tensors.items():
                if key.startswith("optimizer."):
                    self.optimizer.state[self.weights][key.removeprefix("optimizer.")] = value.clone()

    def leave(self, worker: int, why: str = "") -> None:
        """A worker takes no more steps. ``why``: it has died, which ends the run unless that is tolerated."""
        with self._changed:
            self._gone.add(worker)
            self._waiting.discard(worker)
            if why and not self._tolerate:
                self.failure = self.failure or why
            self._answer()

    def _answer(self) -> None:
        """Set aside the weights of this moment for workers that wait and may now begin: the next gradient must not
        reach them, however late their threads wake up."""
        ready = [worker for worker in self._waiting if self._may_begin(worker)]
        weights = self.weights.detach().clone() if ready else self.weights
        for worker in ready:
            self._lead = max(self._lead, self.steps[worker] - self._slowest)
            self._pulled_at[worker], self._answers[worker] = self._updates, weights
            self._waiting.remove(worker)
        self._changed.notify_all()

    @property
    def _slowest(self) -> int:
        return min(steps for worker, steps in enumerate(self.steps) if worker not in self._gone)

    def _may_begin(self, worker: int) -> bool:
        return self._bound is None or self.steps[worker] - self._slowest <= self._bound

    def _refuse_failed(self) -> None:
        if self.failure:
            raise RuntimeFailure(self.failure, "Look at the output of the other ranks, then start all ranks again.")


class Served(Member):
    """As a worker of a group, a server, or both. Its group of processes is made on all ranks at the same place."""

    def __init__(
        self, group: RecipeGroup, ranks: Ranks, parameters: Sequence[nn.Parameter], dtype: torch.dtype,
        device: torch.device, processes: dist.ProcessGroup, make: MakeOptimizer, timeout_s: float, tolerate: bool,
    ) -> None:  # fmt: skip
        self._processes, self._timeout, self._tolerate = processes, timedelta(seconds=timeout_s), tolerate
        self._threads: list[Thread] = []
        assert group.recipe.server is not None
        owners = group.recipe.server.owners(len(group.devices))
        self._bounds, self._positions = group.recipe.server.bounds(group.sizes.n), group.positions
        (self._own,) = ranks.ranks
        self._sent = [0] * ranks.size  # by worker: each is written by one thread
        self._owners = dict(enumerate(owners))
        self.shard: Shard | None = None
        self._step = 0
        if self._own in owners:
            like = torch.zeros(1, dtype=dtype, device=device)
            self.shard = Shard(group, owners.index(self._own), make, like, timeout_s, tolerate)
        super().__init__(group, ranks, parameters, dtype, device)
        if self.shard is not None:
            workers = [r for r in range(ranks.size) if r != self._own]
            self._threads = [Thread(target=self._serve, args=(self.shard, r), daemon=True) for r in workers]
            for thread in self._threads:
                thread.start()

    @property
    def sent(self) -> int:
        """Bytes of gradients and weights that this rank has sent so far; 4 bytes more go before a gradient whose length
        is fixed."""
        return sum(self._sent)

    # ---- as a worker

    def start(self) -> None:
        """Have the servers begin anew with the first worker's weights; others must not step before."""
        if self._own == 0:
            row = self.weights[0]
            for j, (a, b) in enumerate(self._bounds):
                self._ask(j, INSTALL, row[a:b])
            self.pull()
        self._step, self._residual = 0, self.weights * 0 if self.recipe.compression.feedback else None

    def synchronise_gradients(self) -> None:
        """Nothing: a gradient is the server's to use."""

    def synchronise_weights(self) -> None:
        """Push the gradient, and pull weights."""
        if not self.parameters:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        own = self._row(gradients) * self.ranks.size
        pushed = self.recipe.pushed(self._own, self._residual, own, self._step, self.sizes)
        self._residual, self._step = pushed.residual, self._step + 1
        remote = [j for j in self._owners if self._owners[j] != self._own]
        answers = self._ask_all(remote, pushed.payloads)
        row = own.clone()  # the same memory for all parts
        for j, (a, b) in enumerate(self._bounds):
            if self._owners[j] == self._own:
                assert self.shard is not None
                row[0, a:b] = self.shard.push(self._own, pushed.payloads[j])
            else:
                row[0, a:b] = answers(j)
        self.weights = row

    def pull(self) -> None:
        """Take the weights of the moment."""
        if not self.parameters:
            return
        row = self.weights
        for j, (a, b) in enumerate(self._bounds):
            row[0, a:b] = self._ask(j, PULL)
        self.weights = row

    def saved(self) -> dict[str, Tensor]:
        """For a checkpoint, between steps of all workers."""
        tensors = {"step": torch.tensor(self._step)}
        if self._residual is not None:
            tensors["residual"] = self._residual
        if self.shard is not None:
            tensors |= {f"server.{key}": value for key, value in self.shard.saved().items()}
        return tensors

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse, after ``start``."""
        self._step = int(tensors["step"])
        if self._residual is not None:
            self._residual = tensors["residual"].to(self._residual.device)
        if self.shard is not None:
            start = "server."
            self.shard.take({key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)})

    def close(self) -> None:
        """Take no more steps; a server waits until all workers have done so."""
        for j, owner in self._owners.items():
            if self.parameters and owner != self._own:
                with suppress(RuntimeFailure):
                    self._ask(j, BYE)
            elif self.parameters and self.shard is not None:
                self.shard.leave(self._own)
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(0.1)
            if self.shard is not None:
                self.shard._refuse_failed()

    def check(self) -> None:
        """Raise RuntimeFailure if a worker has died and this is not tolerated."""
        if self.shard is not None:
            self.shard._refuse_failed()

    def _ask(self, j: int, what: int, part: Tensor | None = None) -> Tensor:
        """Have server ``j`` do something else than take a gradient. Its weights, where these are wanted."""
        if self._owners[j] == self._own:
            assert self.shard is not None
            if what == INSTALL and part is not None:
                self.shard.install(part)
            return self.shard.pull()
        with self._reaching(j):
            self._send(self._owners[j], torch.tensor([what], dtype=torch.int32), REQUEST)
            if part is not None:
                self._send(self._owners[j], part, REQUEST)
            return self._receive_weights(j)() if what == PULL else self._none[0]

    def _ask_all(self, shards: Sequence[int], payloads: Sequence[Payload]) -> Callable[[int], Tensor]:
        """Send gradients to remote servers; what gives the weights that one answers with."""
        answers = {j: self._receive_weights(j) for j in shards}
        works = []
        for j in shards:
            payload, owner = payloads[j], self._owners[j]
            head = count_of(payload) if payload.length is not None else torch.zeros(4, dtype=torch.uint8)
            with self._reaching(j):
                flat = packed(payload)
                works += [self._isend(owner, part, REQUEST) for part in (head, flat) if part.numel()]
            counted = 4 * (payload.length is not None)
            self._sent[self._own] += flat.numel() + counted

        def answer(j: int) -> Tensor:
            with self._reaching(j):
                return answers[j]()

        self._under_way = works
        return answer

    def _receive_weights(self, j: int) -> Callable[[], Tensor]:
        a, b = self._bounds[j]
        buffer = torch.empty(b - a, dtype=self._none.dtype)
        with self._reaching(j):  # posting fails at once where the other end is known to be gone
            work = dist.irecv(buffer.view(torch.uint8), self._positions[self._owners[j]], self._processes, ANSWER)
        assert work is not None

        def wait() -> Tensor:
            work.wait(self._timeout)
            return buffer

        return wait

    @contextmanager
    def _reaching(self, j: int) -> Iterator[None]:
        try:
            yield
        except RuntimeFailure:
            raise
        except RuntimeError as error:
            raise RuntimeFailure(
                f"rank {dist.get_rank()}: the server on rank {self._positions[self._owners[j]]} has died, hangs or "
                f"cannot be reached ({error})",
                "Look at the output of that rank, then start all ranks again.",
            ) from error

    # ---- as a server

    def _serve(self, shard: Shard, worker: int) -> None:
        """Answer a worker until it says goodbye."""
        try:
            while (head := int(self._receive(worker, 4).view(torch.int32))) != BYE:
                if head == INSTALL:
                    shard.install(self._receive(worker, shard.weights.numel() * shard.weights.element_size()).view(
                        shard.weights.dtype))
                    continue
                weights = shard.pull() if head == PULL else shard.push(worker, self._gradient(shard, worker, head))
                if head != PULL:
                    self._sent[worker] += weights.numel() * weights.element_size()
                self._send(worker, weights, ANSWER)
            shard.leave(worker)
        except RuntimeFailure as error:
            shard.leave(worker, error.message)
        except RuntimeError as error:
            rank = self._positions[worker]
            shard.leave(worker, f"rank {rank}, a worker of this server, has died or cannot be reached ({error})")

    def _gradient(self, shard: Shard, worker: int, count: int) -> Payload:
        like = _template(self.recipe, shard.end - shard.begin, self._none)
        if isinstance(like, RandomPayload):
            like = replace(like, step=shard.steps[worker])
        return unpacked(self._receive(worker, nbytes_of(like, count)), like, count)

    # ---- messages

    def _isend(self, position: int, tensor: Tensor, tag: int) -> Any:
        flat = tensor.detach().contiguous().view(torch.uint8)
        return dist.isend(flat, self._positions[position], self._processes, tag), flat

    def _send(self, position: int, tensor: Tensor, tag: int) -> None:
        work, _ = self._isend(position, tensor, tag)
        work.wait(self._timeout)

    def _receive(self, position: int, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            work = dist.irecv(buffer, self._positions[position], self._processes, REQUEST)
            assert work is not None
            work.wait()
        return buffer


_templates: dict[tuple[str, int, torch.dtype], Payload] = {}


def _template(recipe: Recipe, n: int, like: Tensor) -> Payload:
    """What a gradient of ``n`` elements looks like on its way."""
    key = repr(recipe.compression), n, like.dtype
    if key not in _templates:
        _templates[key] = recipe.compression.encode(like.new_zeros(1, n), 0, (0,))
    return _templates[key]
