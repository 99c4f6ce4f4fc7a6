"""What tracing takes from PyTorch that is private to it. Where a version has one of these no more, it does without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def _module(name: str) -> Any:
    """A module; None: there is none."""
    try:
        return import_module(name)
    except ImportError:
        return None


_MATERIALIZE = "_materialize_cpp_cia_ops"
"""The function that makes Python objects of all composite operators that are registered."""
_FAKE_TENSORS = getattr(_module("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
_EFFECTS = getattr(_module("torch._library.simple_registry"), "singleton", None)
_EXPORT = _module("torch.export._trace")
_COMPOSITES = _module("torch._export.utils") if hasattr(_module("torch._export.utils"), _MATERIALIZE) else None
_OPERATORS = getattr(_module("torch._ops"), "OperatorBase", None)
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


@contextmanager
def tables_quickly() -> Iterator[None]:
    """While it is entered, ``run_decompositions`` looks up all composite operators once and not once for every library
    of operators, and evaluates no annotations for each of the ten thousand kernels that it replaces. The tables are the
    same; making them took about a third of importing a small model. Without it, PyTorch does this its own way."""
    with _looked_up_once(), _registered_directly():
        yield


@contextmanager
def _looked_up_once() -> Iterator[None]:
    if _COMPOSITES is None:
        yield
        return
    getattr(_COMPOSITES, _MATERIALIZE)()
    with mock.patch.object(_COMPOSITES, _MATERIALIZE, lambda: None):
        yield


@contextmanager
def _registered_directly() -> Iterator[None]:
    if _OPERATORS is None or not hasattr(_OPERATORS, "py_impl"):
        yield
        return
    usual, key_type = _OPERATORS.py_impl, torch._C.DispatchKey
    python = key_type.Python

    def py_impl(operator: Any, key: Any) -> Callable[[Any], Any]:
        kernels = operator.py_kernels
        if not isinstance(key, key_type) or key == python or key in kernels:
            return usual(operator, key)  # type: ignore[no-any-return]

        def register(kernel: Any) -> Any:
            kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return register

    with mock.patch.object(_OPERATORS, "py_impl", py_impl):
        yield
