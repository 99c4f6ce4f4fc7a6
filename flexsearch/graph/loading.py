"""``MODULE:CALLABLE``: how commands are told which model to import or run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from flexsearch.errors import ImportModelError


class Loaded(NamedTuple):
    """A training step: ``loss(model(*inputs), targets)``; without loss the model itself returns it.

    ``inputs``: tuple of arguments or dict of keyword arguments. ``loss`` is called without targets if those are None.
    """

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[..., torch.Tensor] | None


_EXPECTED = (
    "(model, inputs, targets, loss), as the builders in flexsearch.zoo return, or (model, inputs) "
    "if the model's forward returns the loss itself"
)


def load_callable(spec: str, **arguments: Any) -> Loaded:
    """Call what ``spec`` names, "package.module:callable" or "path/to/file.py:callable", with ``arguments``.

    It returns (model, inputs, targets, loss), or (model, inputs) with a model that returns the loss.
    Raises ImportModelError that says which part of ``spec`` does not exist, or what came instead.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ImportModelError(f"{spec!r} must read MODULE:CALLABLE, as flexsearch.zoo:alexnet or my/model.py:build")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            callables = [n for n, x in vars(found).items() if callable(x) and not n.startswith("_")]
            known = f" It has: {', '.join(sorted(callables)[:20])}." if callables else ""
            raise ImportModelError(f"{place} has no {part!r} (from {spec!r}).{known}")
        found = getattr(found, part)
    if not callable(found):
        raise ImportModelError(f"{spec} is a {type(found).__name__}, not a callable that returns {_EXPECTED}")
    if isinstance(found, nn.Module):
        raise ImportModelError(f"{spec} is a model without inputs; name a function that returns {_EXPECTED}")
    try:
        result = found(**arguments)
    except Exception as error:  # the user's code may raise anything
        raise ImportModelError(f"{spec} raised {type(error).__name__}: {error}") from error
    return _loaded(spec, result)


def _loaded(spec: str, result: Any) -> Loaded:
    if not isinstance(result, tuple | list) or len(result) not in (2, 4):
        raise ImportModelError(f"{spec} must return {_EXPECTED}; it returned a {type(result).__name__}")
    model, inputs, targets, loss = (*result, None, None) if len(result) == 2 else result
    if not isinstance(model, nn.Module):
        raise ImportModelError(f"{spec} must return {_EXPECTED}; its first item is a {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise ImportModelError(f"{spec} returned a loss that is a {type(loss).__name__}, not a callable")
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, tuple | list | Mapping):
        raise ImportModelError(f"{spec} returned inputs that are a {type(inputs).__name__}, not a tuple of tensors")
    return Loaded(model, dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs), targets, loss)


def _module(place: str) -> ModuleType:
    """The module of a dotted name (found from the current folder, too) or of a file."""
    if place.endswith(".py") or "/" in place:
        path = Path(place)
        if not path.is_file():
            raise ImportModelError(f"there is no file {place}")
        name = f"flexsearch_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportModelError(f"{place} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses and pickle look for the classes it defines
        return _run(place, lambda: (spec.loader.exec_module(module), module)[1])  # type: ignore[union-attr]
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return _run(place, lambda: importlib.import_module(place))
    finally:
        if added:
            sys.path.remove(here)


def _run(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise ImportModelError(
            f"cannot import {place}: no module named {error.name!r}. Give an installed module, one in this folder, "
            "or a path to a .py file."
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise ImportModelError(f"cannot import {place}: {type(error).__name__}: {error}") from error
