"""Checks of options, and what they are refused with."""

from __future__ import annotations

from flexsearch.errors import RecipeError


def whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise RecipeError unless a value is a whole number in a range."""
    allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise RecipeError(f"{name} is {value!r}", f"Give a whole number {allowed}.")


def number(name: str, value: object, above: float = 0.0, most: float = float("inf"), least: bool = False) -> None:
    """Raise RecipeError unless a value is a number above (``least``: or equal to) one and at most another."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value <= most and value < float("inf")
    if not good or not (value >= above if least else value > above):  # type: ignore[operator]
        upper = f" and at most {most:g}" if most < float("inf") else ""
        raise RecipeError(
            f"{name} is {value!r}", f"Give a number {'of at least' if least else 'above'} {above:g}{upper}."
        )


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise RecipeError unless a value is one of some words."""
    if value not in allowed:
        raise RecipeError(f"{name} is {value!r}", f"Give one of {', '.join(allowed)}.")
