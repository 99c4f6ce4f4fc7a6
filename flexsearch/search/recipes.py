"""Plans with the recipes that a user allows: the best exact plans, each with every recipe that makes sense for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Final

from flexsearch.cost import Costs
from flexsearch.cost.communication import Pricing
from flexsearch.cost.exchanges import price
from flexsearch.errors import FlexsearchError, RecipeError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, lower
from flexsearch.simulate import Simulation, over_memory, simulate
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.records import WeightRecipe
from flexsearch.sync import parse_recipe, parts_by_name
from flexsearch.sync.compression import Sizes
from flexsearch.topology import Topology

EXACT: Final = (
    "all-reduce:form=ring", "all-reduce:form=tree", "all-reduce:form=halving-doubling", "all-reduce:form=hierarchical",
    "server", "server:shards=2", "server:shards=4",
)  # fmt: skip
"""Recipes that need no permission: they compute the mean of gradients in every step."""
TRIED: Final[Mapping[str, tuple[str, ...]]] = {
    "local-sgd": ("local-sgd:period=4", "local-sgd:period=16"),
    "diloco": ("diloco:period=16",),
    "async": ("async+server", "async+server:shards=4"),
    "stale": ("stale:bound=2+server", "stale:bound=2+server:shards=4"),
    "gossip": ("gossip", "gossip:what=weights"), "ring": ("ring", "ring:what=weights"),
    "threshold": ("threshold",), "adaptive-threshold": ("adaptive-threshold:density=0.01",),
    "top-k": ("top-k:density=0.01", "top-k:density=0.001"),
    "gtop-k": ("gtop-k:density=0.01", "gtop-k:density=0.001"),
    "random-k": ("random-k:density=0.01",), "qsgd": ("qsgd:bits=4",), "16-bit": ("16-bit",),
    "sign": ("sign:feedback=on",), "powersgd": ("powersgd:rank=2",),
}  # fmt: skip
"""What is tried of each lossy part that is allowed by its name. Taken: orders of magnitude that their papers use."""
ALL: Final = "all"
LARGE: Final = 0.9
"""Recipes are also tried on the largest weights alone, those that hold so much of all elements together."""


@dataclass(frozen=True)
class Allowed:
    """A plan with a recipe. ``recipe``: as written; ``weights``: patterns of those that it is for."""

    recipe: str
    weights: tuple[str, ...]
    strategy: Strategy
    simulation: Simulation
    lowered: Lowered


def read_allowed(text: str) -> tuple[str, ...]:
    """Names and recipes, separated by commas; what has an equals sign and no colon is an option of the recipe before
    it. Raises RecipeError."""
    entries: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if entries and "=" in item and ":" not in item:
            entries[-1] += f",{item}"
        elif item:
            entries.append(item)
    if not entries:
        raise RecipeError("--allow names no recipe", f"Give some of {', '.join(TRIED)}, or {ALL}.")
    recipes_of(entries)
    return tuple(entries)


def recipes_of(allow: Sequence[str]) -> list[str]:
    """The lossy recipes that some names, or whole recipes, allow: each alone, and their combinations of different
    levels. Raises RecipeError for an unknown name, or a recipe that makes no sense."""
    return [text for row in combinations(allow) for text in row]


def combinations(allow: Sequence[str]) -> list[list[str]]:
    """As :func:`recipes_of`: those alone, then combinations of two of them, then of three."""
    chosen: list[str] = []
    for name in allow:
        if name == ALL:
            chosen += [text for row in TRIED.values() for text in row]
        elif name in TRIED:
            chosen += TRIED[name]
        else:
            _refuse_unknown(name)
            parse_recipe(name)
            chosen.append(name)
    rows = [list(dict.fromkeys(chosen))]
    for _ in range(2):  # three levels
        rows.append([f"{a}+{b}" for a in rows[-1] for b in rows[0] if b not in a.split("+")])
    seen: set[frozenset[str]] = set()
    distinct: list[list[str]] = []
    for row in rows:
        distinct.append([])
        for text in row:
            if (parts := frozenset(text.split("+"))) not in seen and _makes_sense(text):
                seen.add(parts)
                distinct[-1].append(text)
    return distinct


def best_allowed(
    graph: OperatorGraph, topology: Topology, costs: Costs, plans: Sequence[Strategy], allow: Sequence[str],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Allowed]:  # fmt: skip
    """Every plan with every recipe that is exact or that ``allow`` names, the fastest first; those that do not fit into
    memory are left out. ``on_progress``: called with how many are simulated, of how many. Raises RecipeError."""
    cases = list(product(plans, [*EXACT, *recipes_of(allow)], _groups(graph)))
    plans_with = []
    for number, (plan, text, weights) in enumerate(cases):
        if on_progress is not None:
            on_progress(number, len(cases))
        if (one := _tried(graph, topology, costs, plan, text, weights)) is not None:
            plans_with.append(one)
    return sorted(plans_with, key=lambda one: one.simulation.makespan_s)


def _tried(
    graph: OperatorGraph, topology: Topology, costs: Costs, plan: Strategy, text: str, weights: tuple[str, ...]
) -> Allowed | None:  # fmt: skip
    """A plan with a recipe for some weights; None: it makes no sense there, or does not fit."""
    strategy = with_recipe(plan, text, weights)
    try:
        lowered = lower(graph, strategy, topology, costs)
        if not lowered.recipe_groups:
            return None
        simulation = simulate(lowered)
    except FlexsearchError:
        return None
    return None if over_memory(simulation, topology) else Allowed(text, weights, strategy, simulation, lowered)


def with_recipe(plan: Strategy, recipe: str, weights: Sequence[str] = ("*",)) -> Strategy:
    """The same plan, in which replicas of ``weights`` (patterns of names) synchronise by ``recipe``, and all others
    exactly. Raises RecipeError; what the replicas cannot follow is refused when the plan is simulated."""
    parse_recipe(recipe)
    recipes = (WeightRecipe(weights=tuple(weights), recipe=recipe),)
    return with_options(plan, plan.options.model_copy(update={"recipes": recipes}))


def exchange_seconds(topology: Topology, recipe: str, nbytes: int) -> float:
    """Seconds that all devices of a topology take to synchronise vectors of so many bytes (float32) by a recipe once,
    without encoding them: its phases one after the other, as plans price them; a mean over changing neighbours. Raises
    RecipeError, also if workers go by themselves."""
    parsed, members = parse_recipe(recipe).planned, range(len(topology.devices))
    sizes, hosts = Sizes(((nbytes // 4,),), 4), topology.host_of
    parsed.check(len(members), sizes, [int(hosts[d]) for d in members])
    if parsed.asynchronous is not None:
        raise RecipeError(f"with {parsed.words} workers go by themselves", "Simulate a plan with it: with_recipe.")
    pricing, rounds = Pricing(topology), parsed.partners.cycle(len(members))
    steps = [parsed.warm_up + (k + 1) * parsed.period - 1 for k in range(rounds)]
    phases = [parsed.exchanges(len(members), [int(hosts[d]) for d in members], sizes, step) or [] for step in steps]
    return sum(price(pricing, members, phase).duration_s for row in phases for phase in row) / rounds


def with_options(plan: Strategy, options: Options) -> Strategy:
    """The same plan under other options."""
    file = plan.to_file().model_copy(update={"prediction": None, "search": None, "measurement": None})
    other = Strategy.from_file(file)
    other.options = options
    return other


def _groups(graph: OperatorGraph) -> Iterator[tuple[str, ...]]:
    """All weights; the largest ones alone, if these are few."""
    yield ("*",)
    tensors = sorted(graph.of_kind("parameter"), key=lambda t: -t.nbytes)
    total, held, large = sum(t.nbytes for t in tensors), 0, list[str]()
    for tensor in tensors:
        if held >= LARGE * total:
            break
        held += tensor.nbytes
        large.append(tensor.name)
    if 2 * len(large) < len(tensors):
        yield tuple(large)


def _makes_sense(text: str) -> bool:
    """Whether a combination is a recipe, and lossy."""
    try:
        return parse_recipe(text).lossy
    except RecipeError:
        return False


def _refuse_unknown(name: str) -> None:
    """Raise RecipeError for a name that is no recipe's."""
    first = name.split("+")[0].partition(":")[0]
    if first in parts_by_name() or first in ("warm-up", "momentum-correction"):
        return
    close = get_close_matches(first[:60], [*TRIED, ALL], n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"There are {', '.join(TRIED)} and {ALL}."
    raise RecipeError(f"--allow: there is no recipe {first[:60]!a}", f"{hint} A whole recipe is taken, too.")
