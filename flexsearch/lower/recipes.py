"""Which replicas of which weights synchronise by a recipe: the groups of a lowered plan.

Weights that the same entry of ``Options.recipes`` names and that lie on the same devices form one group: one vector and
one state of the recipe. Its positions are those devices, ascending; dedicated servers, devices that the plan leaves
unused, come after them. A weight, or a piece of one, that only one device holds needs no synchronisation, nor does one
of which all replicas make the same gradient, as of an embedding of positions, which are the same in all samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from flexsearch.errors import StrategyError
from flexsearch.graph import Box, Flow, Operator
from flexsearch.strategy import OperatorConfig, States
from flexsearch.sync import Recipe
from flexsearch.sync.compression import Sizes
from flexsearch.topology import Topology

if TYPE_CHECKING:
    from flexsearch.lower.pieces import Weight

Lowered = Any
"""``lowering.Lowered``, which asks for its groups here."""

_ALONE: Final = "Let recipes name other weights (synchronisation.recipes: weights), or "


MOST_STEPS: Final = 4096
"""Of a cycle of recipes with different periods: of a longer one, the first steps count."""


@dataclass(frozen=True)
class RecipeGroup:
    """Replicas that synchronise one vector by one recipe. ``entry``: which of ``Options.recipes``. ``weights``: indices
    into ``Lowered.weights``; ``names``; ``boxes``: the region of each that the devices keep; they lie in the vector in
    this order. ``devices``: by position; ``servers``: dedicated ones, the positions after these. ``hosts``: number of
    the host by position of a replica. ``sizes``: of the vector, whose elements are those of the gradients."""

    entry: int
    recipe: Recipe
    weights: tuple[int, ...]
    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    devices: tuple[int, ...]
    servers: tuple[int, ...]
    hosts: tuple[int, ...]
    sizes: Sizes

    @property
    def positions(self) -> tuple[int, ...]:
        """The device of every position, dedicated servers included."""
        return self.devices + self.servers


def recipe_groups(lowered: Lowered) -> tuple[RecipeGroup, ...]:
    """The groups of a plan, by entry and devices. ``lowered`` describes all devices (``lower`` sees to it for plans
    with recipes). Raises StrategyError or RecipeError for replicas that cannot follow their recipe, with the remedy."""
    options, topology = lowered.options, lowered.topology
    parsed = [entry.parsed for entry in options.recipes]
    for named in options.recipes:
        if not any(named.names(weight.tensor) for weight in lowered.weights):
            some = f"Give patterns of names of weights, such as {', '.join(w.tensor for w in lowered.weights[:2])}."
            raise StrategyError(f"synchronisation.recipes: {', '.join(named.weights)} names no weight", some)
    rows: dict[tuple[int, tuple[int, ...], int], list[tuple[int, Box]]] = {}
    for w, weight in enumerate(lowered.weights):
        entry = options.recipe_of(weight.tensor)
        if entry is None or weight.plan.sync is None:
            continue
        number, itemsize = options.recipes.index(entry), lowered.graph.gradient[weight.tensor].itemsize
        for box, devices in _replicas(lowered, weight, parsed[number]):
            rows.setdefault((number, devices, itemsize), []).append((w, box))
    unused = tuple(d for d in range(len(topology.devices)) if d not in set(lowered.devices))
    groups = []
    for (number, devices, itemsize), pieces in sorted(rows.items()):
        recipe = parsed[number]
        sizes = Sizes(tuple(tuple(high - low for low, high in box) for _, box in pieces), itemsize)
        weights, boxes = zip(*pieces, strict=True)
        names = tuple(lowered.weights[w].tensor for w in weights)
        group = group_of(recipe, topology, devices, unused, sizes)
        groups.append(replace(group, entry=number, weights=weights, names=names, boxes=boxes))
    return tuple(groups)


def group_of(
    recipe: Recipe, topology: Topology, devices: tuple[int, ...], unused: tuple[int, ...], sizes: Sizes
) -> RecipeGroup:
    """Replicas of one vector of such sizes; dedicated servers are the first of ``unused`` devices. Raises RecipeError
    if they cannot follow the recipe."""
    hosts = tuple(int(topology.host_of[d]) for d in devices)
    recipe.check(len(devices), sizes, hosts, len(devices) + len(unused))
    server = recipe.server
    dedicated = unused[: server.shards] if server is not None and server.on == "devices" else ()
    return RecipeGroup(0, recipe, (), (), (), devices, dedicated, hosts, sizes)


def cycle(groups: Sequence[RecipeGroup]) -> list[tuple[int, int]]:
    """The different steps of a cycle after all warm-ups, as (step, how many are like it); recipes exchange the same in
    steps that are alike."""
    begin = max((group.recipe.warm_up for group in groups), default=0)
    lengths = [(g.recipe, g.recipe.partners.cycle(len(g.devices))) for g in groups]
    alike: dict[tuple[int, ...], list[int]] = {}
    for step in range(begin, begin + min(MOST_STEPS, lcm(*(r.period * rounds for r, rounds in lengths)))):
        key = []
        for recipe, rounds in lengths:
            done, rest = divmod(step - recipe.warm_up + 1, recipe.period)
            key.append(-1 if rest else (done - 1) % rounds)
        alike.setdefault(tuple(key), []).append(step)
    return [(steps[0], len(steps)) for steps in alike.values()]


def _replicas(lowered: Lowered, weight: Weight, recipe: Recipe) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The regions of a weight that several devices keep, with these."""
    name = weight.tensor
    kept: dict[Box, list[int]] = {}
    for entry in weight.plan.storage:
        kept.setdefault(entry.box, []).append(entry.device)
    readers = [reader for edge in weight.edges for reader in lowered.edges[edge].readers]
    needs = [entry for edge in weight.edges for entry in lowered.edges[edge].need]
    if len({entry.device for entry in needs}) < 2:
        return
    stage_of = lowered.stages.of(len(lowered.configs))
    _refuse(weight.plan.states != States.WHOLE, name, "its states are sharded over the replicas",
            "keep them whole (states: whole)")  # fmt: skip
    _refuse(len({stage_of[operator] for operator, _ in readers}) > 1, name, "several stages of the pipeline read it",
            "put its readers into one stage")  # fmt: skip
    boxes = list(kept)
    _refuse(
        any(_meet(a, b) and a != b for k, a in enumerate(boxes) for b in boxes[k + 1 :])
        or any(entry.device not in kept[box] for entry in needs for box in boxes if _meet(entry.box, box)),
        name, "devices hold different but overlapping parts of it", "split its readers alike",
    )  # fmt: skip
    training = [o for o, p in readers if lowered.graph.flows[o][p] != Flow.VALUE]
    for box, devices in kept.items():
        if len(devices) > 1 and not (training and all(_same_pieces(lowered, o, devices) for o in training)):
            for operator in training:
                _check_shares(lowered, operator, sorted(devices), name, recipe)
            yield box, tuple(sorted(devices))


def _same_pieces(lowered: Lowered, operator: int, devices: Sequence[int]) -> bool:
    """Whether all ``devices`` run the same pieces of an operator."""
    op, config = lowered.graph.operators[operator], lowered.configs[operator]
    first, *others = (set(_parts(op, config, device)[0]) for device in devices)
    return all(other == first for other in others)


def _check_shares(lowered: Lowered, operator: int, devices: Sequence[int], name: str, recipe: Recipe) -> None:
    """Raise StrategyError unless each of ``devices`` makes a gradient of its own, of samples of its own."""
    op, config = lowered.graph.operators[operator], lowered.configs[operator]
    alike = [_parts(op, config, device) for device in devices]
    terms = Counter(term for terms, _, _ in alike for term in terms)
    _refuse(any(count > 1 for count in terms.values()), name, f"replicas of {op.name} compute the same samples",
            "split their samples instead")  # fmt: skip
    if recipe.lossy:
        _refuse(len({rest for _, rest, _ in alike}) > 1, name,
                f"its replicas share out the samples of {op.name} by more than their number",
                "split only the batch among them")  # fmt: skip
        _refuse(len({samples for _, _, samples in alike}) > 1, name,
                f"the shares of its replicas in {op.name} are not equal",
                "give them equal shares of a batch that divides evenly")  # fmt: skip


def _parts(op: Operator, config: OperatorConfig, device: int) -> tuple[tuple[object, ...], frozenset[object], int]:
    """Of the pieces of an operator on a device: each one, the intervals of their axes but those of samples, and how
    many samples they have in all."""
    pieces = [config.intervals(op, k) for k, d in enumerate(config.devices) if d == device]
    inner = set(op.axes_of("sample"))
    rest = frozenset(tuple((a, i) for a, i in piece.items() if a not in inner) for piece in pieces)
    samples = 0
    for piece in pieces:
        count = 1
        for axis in inner:
            count *= piece[axis][1] - piece[axis][0]
        samples += count
    return tuple(tuple(piece.items()) for piece in pieces), rest, samples


def _meet(a: Box, b: Box) -> bool:
    """Whether two regions of a tensor have elements in common."""
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b, strict=True))


def _refuse(refused: bool, name: str, why: str, remedy: str) -> None:
    if refused:
        raise StrategyError(f"weight {name!r} cannot synchronise by a recipe: {why}", f"{_ALONE}{remedy}.")
