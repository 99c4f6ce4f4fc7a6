"""What tracing takes from PyTorch that is private to it. Where a version has one of these no more, it does without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

from torch import Tensor, nn


def _module(name: str) -> Any:
    """A module; None: there is none."""
    try:
        return import_module(name)
    except ImportError:
        return None


_FAKE_TENSORS = getattr(_module("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
_EFFECTS = getattr(_module("torch._library.simple_registry"), "singleton", None)
_EXPORT = _module("torch.export._trace")
_CONVERT = "_apply" if hasattr(nn.Module, "_apply") else None
"""The method that all of a module's ways to convert its tensors call (``to``, ``half``, ...)."""


def fake_tensors() -> AbstractContextManager[Any] | None:
    """What makes tensors on the CPU that have a shape and no memory, while it is entered. None: tensors on the meta
    device do, but for Python's numbers (``stand_ins``)."""
    mode: AbstractContextManager[Any] | None = None
    if _FAKE_TENSORS is not None:
        mode = _FAKE_TENSORS(allow_non_fake_inputs=True)
    return mode


def converting_by(
    convert: Callable[[nn.Module, Callable[[Tensor], Tensor], bool], nn.Module],
) -> AbstractContextManager[Any]:
    """While it is entered, modules convert their tensors by ``convert(module, function, whether its children's too)``.
    Without, a conversion in a trace ends in an error of torch's own."""

    def instead(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return convert(module, function, recurse)

    return mock.patch.object(nn.Module, _CONVERT, instead) if _CONVERT is not None else nullcontext()


@contextmanager
def without_effect(operator: str) -> Iterator[None]:
    """While it is entered, calls of an operator may be left out of a trace, and have no order. Without, they stay."""
    if _EFFECTS is None:
        yield
        return
    effect = _EFFECTS.find(operator).effect
    before = effect.effect
    effect.register(None)
    try:
        yield
    finally:
        effect.register(before)


@contextmanager
def export_prints_nothing() -> Iterator[None]:
    """While it is entered, ``torch.export`` prints no graphs that it could not finish."""
    printing = vars(_EXPORT) if _EXPORT is not None else dict[str, Any]()
    printing["print"] = lambda *_args, **_options: None
    try:
        yield
    finally:
        del printing["print"]
