"""What recipes keep on devices: their state from step to step, and what they hold while they run."""

from __future__ import annotations

from collections.abc import Iterator

from flexsearch.cost.updates import STATE_COPIES
from flexsearch.lower import Lowered
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.simulate.spans import BUFFERS, OPTIMIZER, moment_of
from flexsearch.sync.work import held_bytes, kept_bytes

Kept = tuple[int, int, int, int, int]
"""Device, first and last moment, bytes, part of memory: as a span of ``lifetimes``."""


def recipe_spans(lowered: Lowered) -> Iterator[Kept]:
    """The spans of a plan's recipes. State counts as the optimizer's, for the whole step. The vector, what arrives and
    what it is decoded to are there while the recipe runs: before the update, or after it."""
    if not lowered.options.recipes:
        return
    update = len(lowered.plain_rows.schedule.kind) - 1
    before, now = int(moment_of(update - 1)), int(moment_of(update))
    end = now + 1
    for group in lowered.recipe_groups:
        recipe, members = group.recipe.planned, len(group.devices)
        kept = kept_bytes(recipe, group.sizes)
        first, last = (end, end) if recipe.updates else (before, now)
        held = held_bytes(recipe, group.sizes, members, group.hosts)
        for device in group.devices:
            yield device, 0, end, kept, int(OPTIMIZER)
            yield device, first, last, held, int(BUFFERS)
            if recipe.asynchronous is not None:  # states of the optimizer, which the plan counts here, are the servers'
                states = STATE_COPIES[lowered.options.optimizer] * group.sizes.n * _itemsize(lowered, group)
                yield device, 0, end, -states, int(OPTIMIZER)
        yield from _servers(lowered, group, before, now)


def _itemsize(lowered: Lowered, group: RecipeGroup) -> int:
    """Of elements as an optimizer keeps them: of float32, where the plan computes in 16 bits."""
    return group.sizes.itemsize if lowered.options.precision == "as-is" else max(4, group.sizes.itemsize)


def _servers(lowered: Lowered, group: RecipeGroup, before: int, now: int) -> Iterator[Kept]:
    """Of a server: of an asynchronous one, weights and states of the optimizer; what workers push.
    ``before``, ``now``: moments of the loss and of the update."""
    recipe, members = group.recipe.planned, len(group.devices)
    server = recipe.server
    if server is None:
        return
    for owner, (a, b) in zip(server.owners(members), server.bounds(group.sizes.n), strict=True):
        part, alone = (b - a) * group.sizes.itemsize, recipe.asynchronous is not None
        tensors = 1 + STATE_COPIES[lowered.options.optimizer] if alone else 0
        own = tensors * (b - a) * _itemsize(lowered, group)
        pushed = (recipe.compression.nbytes(group.sizes.part(b - a)) or 0) * (1 if alone else members)
        yield group.positions[owner], 0, now + 1, own, int(OPTIMIZER)
        yield group.positions[owner], before, now, pushed + part, int(BUFFERS)
