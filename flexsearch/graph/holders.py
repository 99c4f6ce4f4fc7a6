"""What keeps attributes from one call of a model to the next: its modules, its loss, and objects of Python that are
attributes of these, in lists and dicts too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
_STATELESS: Final = (Tensor, type, ModuleType)
"""Of objects that are no holders: what they are."""
_MOST: Final = 100_000
"""The most values that are looked at: an attribute may lead to a whole data set."""


@dataclass(frozen=True, eq=False, slots=True)
class Holder:
    """What keeps attributes. ``path``: where it is, from the model on. ``attributes``: its own dict of them."""

    path: str
    attributes: dict[str, Any]
    is_module: bool

    def own(self) -> dict[str, Any]:
        """Its attributes, apart from those of every module."""
        return {k: v for k, v in self.attributes.items() if not (self.is_module and k in _OF_EVERY_MODULE)}


def holders_of(model: nn.Module, loss: Any = None) -> list[Holder]:
    """The model's modules, in the order of ``named_modules``, then its loss and the objects that all these lead to, the
    nearest first."""
    holders = [Holder(path, vars(module), True) for path, module in model.named_modules()]
    seen = {id(module) for module in model.modules()}
    queue = deque((_join(holder.path, name), x) for holder in holders for name, x in holder.own().items())
    queue.append(("loss", getattr(loss, "__self__", loss)))
    for _ in range(_MOST):
        if not queue:
            break
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        if inside := _items(value):
            seen.add(id(value))
            queue.extend((f"{path}[{key!r}]", x) for key, x in inside)
        elif (attributes := attributes_of(value)) is not None:
            seen.add(id(value))
            holders.append(Holder(path, attributes, isinstance(value, nn.Module)))
            queue.extend((_join(path, name), x) for name, x in holders[-1].own().items())
    return holders


def leaves_of(value: Any, outer: tuple[int, ...] = ()) -> Iterator[Any]:
    """What a nest of lists, tuples and dicts holds."""
    if not (inside := _items(value)):
        yield value
    elif id(value) not in outer:  # it may hold itself
        for _, x in inside:
            yield from leaves_of(x, (*outer, id(value)))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Of a container its items, and where they are."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple | deque) else []


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None of what has none, or is no state: functions and types, what is
    PyTorch's."""
    kind = type(value)
    if issubclass(kind, _STATELESS) or (kind.__module__.partition(".")[0] in ("torch", "builtins", "functools")):
        return None
    try:  # a proxy would ask what it stands for
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
