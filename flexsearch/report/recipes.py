"""Recipes by which weights of a plan synchronise, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexsearch.lower import Lowered
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.report.units import nbytes, seconds
from flexsearch.simulate.mean import steady
from flexsearch.sync.threshold import Threshold


def recipe_words(lowered: Lowered) -> Iterator[str]:
    """A line for each recipe: what synchronises by it, and what it changes; and what is assumed."""
    for entry, groups in _by_entry(lowered).items():
        recipe, one = groups[0].recipe, groups[0]
        names = list(dict.fromkeys(name for group in groups for name in group.names))
        what = names[0] if len(names) == 1 else f"{len(names)} weights ({nbytes(_bytes(groups))})"
        times = f", {len(groups)} times" if len(groups) > 1 else ""
        changed = recipe.changes or "nothing in the mathematics"
        text = lowered.options.recipes[entry].recipe
        yield f"{text}: {what} on {len(one.devices)} replicas{times}. It changes: {changed}."
        if isinstance(recipe.compression, Threshold):
            share = 100 * recipe.compression.expect
            yield f"It is assumed that {share:g} % of the entries reach the threshold (threshold:expect=...)."
    if lowered.asynchronous:
        steady_state = steady(lowered)
        how = "exactly" if steady_state.exact else "about, as their state does not repeat"
        yield (
            f"Devices go by themselves: one step of each takes {seconds(steady_state.step_s)} on average ({how}); the "
            f"fastest takes {max(steady_state.rates):.3g} steps/s, the slowest {min(steady_state.rates):.3g}."
        )


def recipe_data(lowered: Lowered) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "recipe": lowered.options.recipes[entry].recipe, "lossy": groups[0].recipe.lossy,
            "changes": groups[0].recipe.changes, "replicas": len(groups[0].devices), "groups": len(groups),
            "weights": list(dict.fromkeys(name for group in groups for name in group.names)),
        }
        for entry, groups in _by_entry(lowered).items()
    ]  # fmt: skip


def _by_entry(lowered: Lowered) -> dict[int, list[RecipeGroup]]:
    groups: dict[int, list[RecipeGroup]] = {}
    for group in lowered.recipe_groups if lowered.options.recipes else ():
        groups.setdefault(group.entry, []).append(group)
    return groups


def _bytes(groups: list[RecipeGroup]) -> int:
    """Of a replica's vectors, together."""
    return sum(group.sizes.n * group.sizes.itemsize for group in groups)
