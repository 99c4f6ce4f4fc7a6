"""Hooks that the user has put on a model or on a step's parameters since the plan was made: a plan would not call them.
Those on gradients from before are refused when it is made, and what forward hooks from before compute is a part of
it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.stored import Stored

_GRADIENTS = "Remove it, and change gradients after step(batch), before the optimizer's step."
_VALUES = (
    "Remove it. If it changes what the model computes, put it there before the plan is made; to look at values, have "
    "the model return them: step(batch, outputs=True)."
)
_OF_MODULES = {
    "_forward_pre_hooks": ("forward pre-hook", _VALUES), "_forward_hooks": ("forward hook", _VALUES),
    "_backward_pre_hooks": ("backward pre-hook", _GRADIENTS), "_backward_hooks": ("backward hook", _GRADIENTS),
}  # fmt: skip
_OF_TENSORS = "_backward_hooks", "_post_accumulate_grad_hooks"


class Hooks:
    """Those of a step's parameters, and of ``model`` as long as it is in use."""

    def __init__(self, model: nn.Module, stored: Stored, failures: Failures) -> None:
        self._model, self._stored, self._failures = weakref.ref(model), stored, failures
        self._before = {hook: what for hook, what, _ in self._existing()}
        self._last = -1
        if self._before and stored.rank == 0:
            warnings.warn(
                f"{next(iter(self._before.values()))}: what it computes is in the plan, and steps do not call it",
                stacklevel=2,
            )

    def check(self) -> None:
        """Raise RuntimeFailure if there is one that was not there before."""
        if self._last != _registered():
            for hook, what, remedy in self._existing():
                if hook not in self._before:
                    with self._failures.watch():  # it may be on this rank alone
                        raise RuntimeFailure(f"{what}, which a plan does not call", remedy)
            self.note()

    def note(self) -> None:
        """All hooks that have been registered so far are known, or PyTorch's own in a backward pass: none need be
        looked for until there is another one."""
        self._last = _registered()

    def _existing(self) -> Iterator[tuple[int, str, str]]:
        """Number of each hook, on what it is, and what to do instead."""
        model = self._model()
        for name, module in model.named_modules() if model is not None else ():
            for attribute, (kind, remedy) in _OF_MODULES.items():
                for hook, function in getattr(module, attribute, {}).items():
                    if type(function).__module__.startswith("torch.nn.utils."):  # weight_norm, prune
                        continue
                    yield hook, f"{f'layer {name!r}' if name else 'the model'} has a {kind}", remedy
        for name, parameter in model.named_parameters() if model is not None else ():
            yield from _of_tensor(f"parameter {name!r} of the model", parameter)
        for name, parameter in self._stored.parameters:
            yield from _of_tensor(f"parameter {name!r} of the step", parameter)


def _of_tensor(what: str, tensor: Tensor) -> Iterator[tuple[int, str, str]]:
    for attribute in _OF_TENSORS:
        for hook in getattr(tensor, attribute, None) or ():
            yield hook, f"{what} has a hook on its gradient", _GRADIENTS


def _registered() -> int:
    """How many hooks there have been in this process: PyTorch numbers them."""
    return RemovableHandle.next_id
