"""Optimizers in the loop that would be other ones without a word: those that look at whole tensors where ranks hold
pieces of weights, and those of the model's own parameters, which a step does not train."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.ops.local import extent
from flexsearch.runtime.faults import Failures, with_all
from flexsearch.runtime.regions import whole
from flexsearch.runtime.stored import Stored

_OF_WEIGHTS = frozenset({"adafactor", "came", "lamb", "larc", "lars", "muon", "novograd", "shampoo", "soap"})
"""They compute with norms, or products, of whole weights."""
_OF_ALL = "lbfgs"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ALIKE = "an optimizer that treats elements alike, such as AdamW or SGD"
_PLAN = "Plan with all weights on all ranks (`flexsearch compare GRAPH -t TOPOLOGY --save data-parallel` writes one)"


class Optimizers:
    """Looks once at each optimizer that steps over parameters of a step. ``empty``: the parameter of a rank without
    weights; ``diverges``: whether replicas may have gradients of their own. It lives as long as the step."""

    def __init__(
        self, model: nn.Module, stored: Stored, empty: nn.Parameter, failures: Failures, diverges: bool
    ) -> None:
        self._model, self._stored, self._empty, self.failures = weakref.ref(model), stored, empty, failures
        self._diverges = diverges
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Those that were looked at, with their number of groups then."""
        _watch()
        _ALL.add(self)

    def check(self, optimizer: Optimizer, closure: bool) -> None:
        """Before a step of an optimizer, with a ``closure`` or without. Raises RuntimeFailure if it would compute
        something else than on one device."""
        if self._seen.get(optimizer) == len(optimizer.param_groups):
            return
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        error = self.refusal(optimizer, ids) or (None if closure else self.idle(type(optimizer).__name__, ids))
        if error is not None:
            with self.failures.watch():
                raise error
        self._seen[optimizer] = len(optimizer.param_groups)

    def agree(self, optimizer: Optimizer | None) -> None:
        """The same for the optimizer that every step of this rank calls, None if it has no weights. All ranks must call
        it: all raise, if one does."""
        own = [id(p) for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        error = self.refusal(optimizer, own) if optimizer is not None else None
        errors: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        with with_all("comparing the optimizers"):
            dist.all_gather_object(errors, error and (error.message, error.remedy))
        if (first := next(filter(None, errors), None)) is not None:
            raise RuntimeFailure(*first)

    def refusal(self, optimizer: Optimizer, ids: Collection[int]) -> RuntimeFailure | None:
        """Why an optimizer must not step over parameters (by id). Where it has all trained ones of this rank, all ranks
        answer alike, from the plan: one that holds whole weights must not go on alone."""
        what = looks_at(type(optimizer))
        if not what:
            return None
        graph, kind, of_all = self._stored.graph, type(optimizer).__name__, what == _ALL_WEIGHTS
        matrices = isinstance(optimizer, torch.optim.Muon)  # it takes no others
        mine = {
            id(p): _weight(name) for name, p in self._stored.parameters
            if graph.tensor[_weight(name)].requires_grad and (p.dim() == 2 or not matrices)
        }  # fmt: skip
        chosen = {mine[key] for key in mine.keys() & ids}
        if not chosen and id(self._empty) not in ids:
            return None
        everything = mine.keys() <= set(ids)
        if of_all and self._diverges:
            return RuntimeFailure(
                f"{kind} evaluates a loss as often as its gradients ask for, and replicas that synchronise by a "
                "recipe have gradients of their own",
                f"Use a recipe with the mean of all in every step, or use {ALIKE}.",
            )
        for name, reason, planned in self._reasons(of_all):
            if name in chosen or (everything and (len(graph.tensor[name].shape) == 2 or not matrices)):
                remedy = f"{_PLAN}, or use {ALIKE}." if planned else f"Use {ALIKE}, at least for this weight."
                return RuntimeFailure(f"{kind} looks at {what}, and {reason}", remedy)
        return None

    def _reasons(self, of_all: bool) -> Iterator[tuple[str, str, bool]]:
        """Trained weights that some rank does not hold as the model does, why, and whether another plan would. The same
        on all ranks. ``of_all``: it must hold each."""
        stored, ranks = self._stored, range(dist.get_world_size())
        shapes = {original: stored.shapes[name] for name, original in stored.names.items()}
        for name, layout in stored.layouts.items():
            spec = stored.graph.tensor[name]
            if spec.kind != "parameter" or not spec.requires_grad:
                continue
            piece = next((entry for entry in stored.read_layout(name) if entry.box != whole(spec.shape)), None)
            without = next((rank for rank in ranks if all(entry.device != rank for entry in layout)), None)
            if len(layout) != len(stored.read_layout(name)):
                yield name, f"steps read a part of {name!r} alone, so that the rest is a parameter of its own", False
            elif piece is not None:
                held = f"rank {piece.device} holds {tuple(extent(piece.box))} of {name!r}"
                yield name, f"{held}, which is {tuple(spec.shape)}", True
            elif tuple(spec.shape) != shapes[name]:
                yield name, f"{name!r} is kept as {tuple(spec.shape)}, where the model has {shapes[name]}", False
            elif of_all and without is not None:
                yield name, f"rank {without} does not hold {name!r}", True

    def idle(self, what: str, ids: Collection[int]) -> RuntimeFailure | None:
        """What to say of ``what`` that gets parameters (by id) of the model, which no step and nothing else has given a
        gradient."""
        model = self._model()
        others = [p for p in model.parameters() if id(p) in ids] if model is not None else []
        if not others or any(p.grad is not None for p in others):
            return None
        return RuntimeFailure(
            f"{what} got parameters of the model, of which a step makes no gradients: it would change nothing",
            "Give it step.parameters(), or an optimizer step.parameter_groups(decay=...).",
        )


_ALL_WEIGHTS = "all weights together"


def looks_at(kind: type[Optimizer]) -> str:
    """What an optimizer computes with besides single elements, as far as the names of its class and those above it say;
    else nothing. PyTorch's are among these; what others do is not known."""
    words = {word.lower() for base in kind.__mro__ for word in _WORD.findall(base.__name__)}
    return _ALL_WEIGHTS if _OF_ALL in words else "whole weights" if words & _OF_WEIGHTS else ""


def _weight(name: str) -> str:
    """The weight of which a parameter is a piece, or rows that no step reads."""
    return name.partition(".unread.")[0]


_ALL: weakref.WeakSet[Optimizers] = weakref.WeakSet()
"""Of all steps of this process that are alive."""


def _before(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """PyTorch calls it before each step of any optimizer."""
    if not torch.compiler.is_compiling():
        for optimizers in tuple(_ALL):
            optimizers.check(optimizer, any(x is not None for x in (*arguments[1:], *options.values())))


def refuse_idle(what: str, parameters: Iterable[Tensor]) -> None:
    """Raise RuntimeFailure if ``what`` gets parameters of a model that a step was made of, and none has a gradient."""
    rows = list(parameters)
    ids = {id(p) for p in rows}
    for optimizers in tuple(_ALL) if all(p.grad is None for p in rows) else ():
        if (error := optimizers.idle(what, ids)) is not None:
            with optimizers.failures.watch():
                raise error


@cache
def _watch() -> None:
    """Once for a process, as PyTorch goes through its hooks while garbage is collected: none may be removed then."""
    register_optimizer_step_pre_hook(_before)
