"""What a call of a model does to its modules' tensors, which ``torch.export`` loses without a word: buffers that are
assigned, states that are attributes, and parameters whose gradients are switched off for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from flexsearch.errors import ImportModelError
from flexsearch.graph.holders import Holder, attributes_of, leaves_of

_OF_FORM = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Methods that read no values of their other operand."""
_NEW = frozenset(name for what in ("zeros", "ones", "full", "empty") for name in (f"{what}_like", f"new_{what}"))
"""Functions that read no values of their operand."""
_SWITCHES: Final[tuple[Any, ...]] = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class Following(TorchFunctionMode):
    """While tracing, knows which tensors depend on the batch or on trained weights."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._followed = WeakIdKeyDictionary()
        self._follow(batch)

    def _follow(self, tree: Any) -> None:
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor):
                self._followed[x] = True

    def depends(self, tree: Any) -> bool:
        """Whether a tensor of a nest does."""
        return any(isinstance(x, Tensor) and (x.requires_grad or x in self._followed) for x in pytree.tree_leaves(tree))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # the score of a flex attention, which can keep no record
            return result
        name = getattr(func, "__name__", "")
        if name not in _NEW and self.depends(args[:1] if name in _OF_FORM else (args, kwargs)):
            self._follow(args[0] if name == "__setitem__" else result)
        return result


class Assigned:
    """Of the modules of a model and of what they lead to (``holders_of``), from ``start`` to ``put_back`` of a trace.
    ``states``: attributes that at the end are other tensors than before and depend on the batch or on weights, or lists
    and dicts that hold such ones."""

    def __init__(self, model: nn.Module, holders: Sequence[Holder]) -> None:
        self._modules, self._holders = dict(model.named_modules()), holders
        self.states: dict[tuple[Holder, str], Any] = {}

    def start(self) -> None:
        """At the beginning of a trace."""
        self._buffers = {module: dict(module._buffers) for module in self._modules.values()}
        self._states = {holder: _states_of(holder) for holder in self._holders}
        self._attributes = {holder: dict(holder.attributes) for holder in self._holders}
        containers: dict[int, tuple[Any, Any]] = {}
        for holder in self._holders:
            for value in holder.own().values():
                _note_containers(value, containers)
        self._containers = list(containers.values())

    def settle(self, following: Following) -> None:
        """At its end: what was assigned to a buffer is copied into it, and buffers that the call has made go. Raises
        ImportModelError where a buffer gets another form."""
        self.states = {}
        for (path, module), holder in zip(self._modules.items(), self._holders, strict=False):  # these come first
            before = self._buffers[module]
            for name, value in list(module._buffers.items()):
                if (buffer := before.get(name)) is None:
                    _take_out(module, name, name in before)
                    if following.depends(value):
                        self.states[holder, name] = value
                    continue
                if value is not None and value is not buffer:
                    _copy(value, buffer, f"{path}.{name}".lstrip("."))
                module._buffers[name] = buffer
        for holder, earlier in self._states.items():
            for name, leaves in _states_of(holder).items():
                earlier_leaves = earlier.get(name, [])
                if len(leaves) == len(earlier_leaves) and all(map(is_, leaves, earlier_leaves)):
                    continue
                if following.depends(leaves) or _numbers(leaves) != _numbers(earlier_leaves):
                    self.states[holder, name] = pytree.tree_map(lambda x: x, holder.attributes[name])
            for name, value in holder.own().items():
                is_new = value is not self._attributes[holder].get(name)
                if is_new and (own := attributes_of(value)) is not None and following.depends(list(own.values())):
                    self.states[holder, name] = value

    def put_back(self) -> None:
        """Take out again what the call has written into lists, dicts and objects of Python."""
        for container, before in self._containers:
            if len(container) != len(before) or not all(map(is_, *_items(container, before))):
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(before)
        for holder, attributes in self._attributes.items():
            for name, value in list(holder.own().items()):
                if value is attributes.get(name) or not (_is_state(value) or attributes_of(value) is not None):
                    continue
                if name in attributes:
                    holder.attributes[name] = attributes[name]
                else:
                    del holder.attributes[name]


def _take_out(module: nn.Module, name: str, empty: bool) -> None:
    """Have no buffer of this name; ``empty``: as None was registered."""
    if empty:
        module._buffers[name] = None
    else:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)


def _states_of(holder: Holder) -> dict[str, list[Any]]:
    """Its attributes that are tensors or nests of tensors and numbers: what these hold."""
    return {
        name: list(leaves_of(value))
        for name, value in holder.own().items()
        if isinstance(value, Tensor) or _is_container(value) or type(value) is tuple
    }


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | tuple) or _is_container(value)


def _numbers(leaves: list[Any]) -> list[Any]:
    return [x for x in leaves if isinstance(x, int | float)]


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | deque)


def _note_containers(value: Any, copies: dict[int, tuple[Any, Any]]) -> None:
    """Lists and dicts in a value, each with a copy of it."""
    if _is_container(value) and id(value) not in copies:
        copies[id(value)] = value, copy(value)
        for x in value.values() if isinstance(value, dict) else value:
            _note_containers(x, copies)


def _items(*containers: Any) -> list[list[Any]]:
    return [[y for item in x.items() for y in item] if isinstance(x, dict) else list(x) for x in containers]


def _copy(value: Tensor, buffer: Tensor, path: str) -> None:
    if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        raise ImportModelError(
            f"the model assigns a tensor of {value.dtype} and shape {tuple(value.shape)} to its buffer {path!r}, which "
            f"is of {buffer.dtype} and shape {tuple(buffer.shape)}",
            "Register the buffer with the form that it has in the end.",
        )
    with torch.no_grad():
        buffer.copy_(value.detach())


class Switching(TorchFunctionMode):
    """While tracing, reads parameters detached where the model has switched their gradients off
    (``requires_grad_(False)``, for one pass of a discriminator). ``whole``: all calls are traced, none has a
    stand-in."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self._whole = whole
        self._off: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SWITCHES and isinstance(args[0], nn.Parameter):
            return self._switch(args[0], (*args[1:], *(kwargs or {}).values(), True)[0])
        if self._off:
            args, kwargs = pytree.tree_map_only(Tensor, self._read, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _read(self, x: Tensor) -> Tensor:
        return torch.detach(x) if id(x) in self._off else x

    def _switch(self, parameter: nn.Parameter, on: bool) -> nn.Parameter:
        if not self._whole:
            raise RuntimeError("calls of the same layer may differ in what is trained")
        if on and not parameter.requires_grad:
            raise ImportModelError(
                f"the model trains a parameter of shape {tuple(parameter.shape)} from within its call that does not "
                "require gradients",
                "Set requires_grad=True before.",
            )
        if on:
            self._off.pop(id(parameter), None)
        elif parameter.requires_grad:
            self._off[id(parameter)] = parameter
        return parameter

    def settle(self) -> None:
        """At the end of a trace. Raises ImportModelError if a parameter would no longer be trained."""
        if self._off:
            shape = tuple(next(iter(self._off.values())).shape)
            raise ImportModelError(
                f"the model switches off the gradient of a parameter of shape {shape} in its call and leaves it off",
                "Set requires_grad=False before, or switch it on again at the end of the call.",
            )
