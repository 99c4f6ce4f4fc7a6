"""Gradients on a rank: how they enter a backward pass, and how they are added up, in a step and over several."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from flexsearch.backward import accumulate
from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.instructions import Slot
from flexsearch.runtime.stored import Stored


class StepLoss(Tensor):
    """The loss of a step, whose gradients have been computed, or something computed from it: an ordinary tensor but for
    ``backward``."""

    def backward(self, *arguments: Any, **more: Any) -> None:
        """Refused, unless it depends on what somebody else wants gradients of, as a penalty does."""
        if not self.requires_grad:
            raise RuntimeFailure(
                "step(batch) has run the backward pass already: the gradients are in step.parameters()",
                "Leave out loss.backward(). For a mean over k batches call step(batch, scale=1 / k); no GradScaler is "
                "needed.",
            )
        super().backward(*arguments, **more)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Place(NamedTuple):
    """Where a gradient goes. ``in_place``: others add to the ``slot``, too, in its memory. ``held``: the type that it
    is cast to; None: it is held as it is made."""

    slot: Slot
    in_place: bool
    held: torch.dtype | None = None


def accumulated(
    values: list[Any], leaves: Sequence[Tensor], places: Sequence[Place], outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of leaves from those of ``outputs``, but for those that are cast, and those that autograd has added to
    a sum over microbatches: each as soon as it is there, so that no more than one of them is beside the sums."""
    sums = [values[place.slot] if place.in_place and place.held is None else None for place in places]
    hooks = []
    for leaf, total, place in zip(leaves, sums, places, strict=True):
        if place.held is not None:
            hook = _casting(values, place)
            hooks.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if total is not None:
            if leaf.untyped_storage().nbytes() < leaf.nbytes:
                leaf.data = total  # without memory of its own: autograd wants one laid out alike
            leaf.grad = total
    accumulate(outputs, gradients)
    for hook in hooks:
        hook.remove()
    leaf_gradients: list[Tensor | None] = []
    for leaf, total in zip(leaves, sums, strict=True):
        leaf_gradients.append(leaf.grad if total is None else None)
        leaf.grad = None
    return leaf_gradients


def _casting(values: list[Any], place: Place) -> Callable[[Tensor], None]:
    """Takes the gradient of a leaf, and casts it, or adds it to a sum without a cast of its own."""

    def run(leaf: Tensor) -> None:
        gradient, leaf.grad, before = leaf.grad, None, values[place.slot]
        assert gradient is not None
        values[place.slot] = gradient.to(place.held) if before is None else before.add_(gradient)

    return run


def empty(leaf: Tensor) -> None:
    """Let go of a leaf's memory, not of its shape: autograd's graph holds the leaf itself."""
    leaf.data = leaf.data.new_empty(()).expand(leaf.shape)


def add(
    values: list[Any], places: Sequence[Place], gradients: Sequence[Tensor | None],
    alive: Sequence[Tensor | None], entered: Sequence[weakref.ref[torch.UntypedStorage]] = (),
) -> None:  # fmt: skip
    """Add gradients to slots. Autograd may hand out one tensor for several values, among them those that are still
    ``alive``, or were ``entered`` and may be: what is added to gets memory of its own."""
    owners: Counter[int] | None = None
    for (slot, in_place, held), gradient in zip(places, gradients, strict=True):
        before = values[slot]
        if gradient is None:
            continue
        if before is not None and in_place:
            values[slot] = before.add_(gradient)
        elif held is not None:
            values[slot] = gradient.to(held)
        elif before is not None or in_place:
            if owners is None:
                owners = Counter(_memory(x) for x in (*gradients, *alive) if x is not None)
                owners.update(storage.data_ptr() for ref in entered if (storage := ref()) is not None)
            whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
            own = whole and owners[_memory(gradient)] == 1
            if before is None:
                values[slot] = gradient if own else gradient.clone()
            else:
                values[slot] = gradient.add_(before) if own else before + gradient
        else:
            values[slot] = gradient


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def set_aside(weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Take the gradients of earlier steps out of weights."""
    earlier = {}
    for name, parameter in weights.items():
        if (gradient := parameter.grad) is not None:
            earlier[name], parameter.grad = gradient, None
    return earlier


def is_shared(gradient: Tensor, seen: set[int]) -> bool:
    """Whether autograd has handed out one tensor for several weights, or one element for many: clipping and optimizers
    write gradients. ``seen``: where the memory of the step's others is; this one's is added."""
    where = gradient.data_ptr()
    if where in seen or (not gradient.is_contiguous() and _repeats(gradient)):
        return True
    seen.add(where)
    return False


def add_earlier(stored: Stored, earlier: Mapping[str, Tensor], scale: float) -> None:
    """Gradients of earlier steps and, times ``scale``, of this one, unless a weight has been frozen since the plan was
    made; zero where no step reads, as on one device, where weight decay and momentum reach it, too."""
    for parameter in stored.weights.values():
        if not parameter.requires_grad:
            parameter.grad = None
        elif scale != 1.0 and parameter.grad is not None:
            parameter.grad = parameter.grad * scale
    for name, gradient in earlier.items():
        parameter = stored.weights[name]
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    for _, rest in (region for regions in stored.rest.values() for region in regions):
        if rest.requires_grad and rest.grad is None:
            rest.grad = torch.zeros_like(rest)


def _repeats(tensor: Tensor) -> bool:
    """Whether several elements of a tensor lie at one place."""
    return any(step == 0 < size - 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
