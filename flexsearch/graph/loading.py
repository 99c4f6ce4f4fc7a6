"""``MODULE:CALLABLE`` or ``hf:NAME``: how commands are told which model to import or run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from flexsearch.errors import FlexsearchError, ImportModelError
from flexsearch.graph.huggingface import is_huggingface, load_huggingface


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
_AS = "Write MODULE:CALLABLE, as flexsearch.zoo:alexnet or my/model.py:build, or hf:MODEL_TYPE, as hf:gpt2."


def load_callable(spec: str, **arguments: Any) -> Loaded:
    """Call what ``spec`` names, "package.module:callable" or "path/to/file.py:callable", with ``arguments``; or build
    the model of transformers that it names, "hf:gpt2" (:func:`flexsearch.graph.huggingface.load_huggingface`).

    It returns (model, inputs, targets, loss), or (model, inputs) with a model that returns the loss. If the module lies
    in the current folder or is a file, it and what lies beside it can be imported from now on.
    Raises ImportModelError that says which part of ``spec`` does not exist, or what came instead.
    """
    if is_huggingface(spec):
        return Loaded(*load_huggingface(spec, **arguments), targets=None, loss=None)
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ImportModelError(f"{spec!r} does not name a model", _AS)
    target: Any = _module(place)
    for part in name.split("."):
        if not hasattr(target, part):
            raise ImportModelError(f"{place} has no {part!r} (from {spec!r})", _instead(target, part))
        target = getattr(target, part)
    if not callable(target):
        raise ImportModelError(f"{spec} is a {type(target).__name__}, not a callable", f"It must return {_EXPECTED}.")
    if isinstance(target, nn.Module):
        raise ImportModelError(f"{spec} is a model without inputs", f"Name a function that returns {_EXPECTED}.")
    with _user_code(spec):
        result = target(**arguments)
    return _loaded(spec, result)


def _instead(target: Any, part: str) -> str:
    """What may have been meant by ``part``, which ``target`` lacks: the most alike, or the functions made there."""
    callables = {name: value for name, value in vars(target).items() if callable(value) and not name.startswith("_")}
    alike = get_close_matches(part, callables, n=3)
    if alike:
        return f"Did you mean {' or '.join(alike)}?"
    place = getattr(target, "__name__", None)
    defined = [name for name, value in callables.items() if getattr(value, "__module__", None) == place]
    functions = [name for name in defined if isinstance(callables[name], FunctionType)]
    names = sorted(functions or defined or callables)
    return f"It has: {', '.join(names[:20])}." if names else f"It has no function; write one that returns {_EXPECTED}."


@contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Whatever the user's code raises in the block becomes an ImportModelError, also if it tries to end the process."""
    try:
        yield
    except FlexsearchError:
        raise
    except SystemExit as error:
        raise ImportModelError(f"{what} ended the process: sys.exit({error.code!r})", _where(error)) from error
    except Exception as error:
        raise ImportModelError(f"{what} raised {type(error).__name__}: {error}", _where(error)) from error


def _where(error: BaseException) -> str:
    """The last line of the user's own code that an error came through, as a sentence."""
    if isinstance(error, SyntaxError) and error.filename:  # the file was read, but no line of it run
        return f"It happened in {error.filename}, line {error.lineno}."
    own = str(Path(__file__).resolve().parent.parent)
    lines = [
        f"{frame.filename}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own, "<")) and "site-packages" not in frame.filename
    ]
    return f"It happened in {lines[-1]}." if lines else ""


def _loaded(spec: str, result: Any) -> Loaded:
    expected = f"It must return {_EXPECTED}."
    if not isinstance(result, tuple | list) or len(result) not in (2, 4):
        raise ImportModelError(f"{spec} returned a {type(result).__name__}", expected)
    model, inputs, targets, loss = (*result, None, None) if len(result) == 2 else result
    if not isinstance(model, nn.Module):
        raise ImportModelError(f"the first item that {spec} returned is a {type(model).__name__}", expected)
    if loss is not None and not callable(loss):
        raise ImportModelError(f"{spec} returned a loss that is a {type(loss).__name__}, not a callable", expected)
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, tuple | list | Mapping):
        raise ImportModelError(
            f"{spec} returned inputs that are a {type(inputs).__name__}, not a tuple of tensors", expected
        )
    return Loaded(model, dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs), targets, loss)


def _module(place: str) -> ModuleType:
    """The module of a file, or of a dotted name: one in the current folder, or an installed one."""
    if place.endswith(".py") or "/" in place:
        path = Path(place)
        if not path.is_file():
            raise ImportModelError(f"there is no file {place}", _AS)
        return _file(place, path)
    return _named(place)


def _file(place: str, path: Path) -> ModuleType:
    name = f"flexsearch_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportModelError(f"{place} is not a Python file", _AS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for the classes it defines
    _import_from(str(path.resolve().parent))
    with _imported(place):
        spec.loader.exec_module(module)
    return module


def _named(place: str) -> ModuleType:
    first, here = place.partition(".")[0], str(Path.cwd())
    ours = first in sys.stdlib_module_names or first in sys.modules or place.startswith(".")
    if not ours and PathFinder.find_spec(first, [here]) is not None:
        _import_from(here)
    with _imported(place):
        return importlib.import_module(place)


def _import_from(folder: str) -> None:
    """Let the user's modules import what lies beside them: after the standard library, which nothing may stand in for,
    before installed packages, as Python does."""
    if folder not in sys.path:
        packages = [k for k, p in enumerate(sys.path) if Path(p).name in ("site-packages", "dist-packages")]
        sys.path.insert(packages[0] if packages else len(sys.path), folder)
        importlib.invalidate_caches()


@contextmanager
def _imported(place: str) -> Iterator[None]:
    try:
        with _user_code(f"importing {place}"):
            yield
    except ImportModelError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        remedy = "Give an installed module, one in this folder, or a path to a .py file."
        if cause.name and cause.name not in (place, *(place[:k] for k, c in enumerate(place) if c == ".")):
            remedy = f"{place} imports it: install it for this Python ({sys.executable})."
        raise ImportModelError(f"cannot import {place}: no module named {cause.name!r}", remedy) from cause
