"""Recipes as text: parts joined by "+", each with options: "local-sgd:period=16+gossip+threshold:tau=0.01"."""

from __future__ import annotations

import re
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Final, get_type_hints

from flexsearch.errors import RecipeError
from flexsearch.sync.all_reduce import AllReduce
from flexsearch.sync.compression import Compression
from flexsearch.sync.gossip import Gossip, Matrix, Ring
from flexsearch.sync.gtop_k import GTopK
from flexsearch.sync.half import Half
from flexsearch.sync.partners import Partners
from flexsearch.sync.power_sgd import PowerSGD
from flexsearch.sync.qsgd import QSGD
from flexsearch.sync.random_k import RandomK
from flexsearch.sync.recipe import Recipe
from flexsearch.sync.server import Server
from flexsearch.sync.sign import Sign
from flexsearch.sync.threshold import AdaptiveThreshold, Threshold
from flexsearch.sync.timing import Asynchronous, DiLoCo, LocalSGD, Stale, Timing
from flexsearch.sync.top_k import TopK

_PARTS: Final[tuple[type[Timing] | type[Partners] | type[Compression], ...]] = (
    LocalSGD, DiLoCo, Asynchronous, Stale, AllReduce, Server, Gossip, Ring, Matrix,
    Threshold, AdaptiveThreshold, TopK, GTopK, RandomK, QSGD, Half, Sign, PowerSGD,
)  # fmt: skip
_LEVELS: Final = {"when": Timing, "with whom": Partners, "how much": Compression}
_WHOLE: Final = {"warm-up": ("steps", int), "momentum-correction": ("momentum", float)}
"""Parts that belong to no level: their option, and its type."""
_MOST: Final = 2000
"""Letters of a recipe."""


def parts_by_name() -> dict[str, type[Timing] | type[Partners] | type[Compression]]:
    """Every part of a level, by name."""
    return {part.name: part for part in _PARTS}


def parse_recipe(text: str) -> Recipe:
    """The recipe of a text. Raises RecipeError that names the part and the remedy."""
    if len(text) > _MOST:
        raise RecipeError(f"a recipe of {len(text)} letters", f"Give at most {_MOST}.")
    by_name = parts_by_name()
    chosen: dict[str, Any] = {}
    for part in text.split("+"):
        name, _, rest = part.strip().partition(":")
        if name in _WHOLE:
            option, kind = _WHOLE[name]
            values = _options(name, rest, {option: kind})
            if option not in values:
                raise RecipeError(f"{name} needs {option}", f"Write {name}:{option}=...")
            level, value = name, values[option]
        elif name in by_name:
            maker = by_name[name]
            hints = get_type_hints(maker)
            hints = {field.name: hints[field.name] for field in fields(maker) if field.name != "rows"}
            level = next(level for level, kind in _LEVELS.items() if issubclass(maker, kind))
            value = maker(**_options(name, rest, hints))
        else:
            raise _unknown(name, [*by_name, *_WHOLE])
        if level in chosen:
            raise RecipeError(f"{text!r} says twice {level}: {name} is one too many", "Give one part for each level.")
        chosen[level] = value
    named = {"when": "timing", "with whom": "partners", "how much": "compression", "warm-up": "warm_up",
             "momentum-correction": "correction"}  # fmt: skip
    return Recipe(**{named[level]: value for level, value in chosen.items()})


def _unknown(name: str, names: list[str]) -> RecipeError:
    close = get_close_matches(name[:100], names, n=3, cutoff=0.5)
    shown = name if name.isprintable() and len(name) <= 60 else ascii(name[:60])
    hint = f"Did you mean {' or '.join(close)}?" if close else f"There are {', '.join(names)}."
    return RecipeError(f'there is no part "{shown}" of a recipe', hint)


def _options(name: str, text: str, types: dict[str, Any]) -> dict[str, Any]:
    """``key=value,key=value`` by the types of the options."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in types or not equals:
            raise RecipeError(f'{name} has no option "{item}"', f"It has {', '.join(f'{k}=...' for k in types)}.")
        values[key] = _value(f"{key} of {name}", value, types[key])
    return values


def _value(what: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("on", "off", "true", "false"):
            raise RecipeError(f"{what} is {text!r}", "Give on or off.")
        return text.lower() in ("on", "true")
    integer = "int" in str(kind) and "float" not in str(kind)
    pattern = r"[+-]?\d{1,18}" if integer else r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not re.fullmatch(pattern, text):
        raise RecipeError(f"{what} is {text!r}", f"Give a {'whole ' if integer else ''}number.")
    return int(text) if integer else float(text)
