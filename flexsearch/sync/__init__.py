"""Floor 0: synchronisation recipes, by which replicas of weights come to agree.

As an operator of ``graph.ops``, a recipe is one object in one place: what may be said of it (options, combinations that
make no sense), what it sends (exchanges between positions, in bytes), and its arithmetic, as pure functions over
tensors of one row for each replica that is held: all of them when they are simulated in one process, one on a rank. The
tensors bring their own methods, so nothing here imports torch.

A recipe has three levels, each with a class of parts: *when* replicas synchronise (``timing``), *with whom*
(``partners``), and *how much* they send (``compression``). ``recipe`` puts them together."""

from flexsearch.sync.exchange import Exchange, Group, Payload, Simulated
from flexsearch.sync.parse import parse_recipe, parts_by_name
from flexsearch.sync.recipe import Recipe, State

__all__ = ["Exchange", "Group", "Payload", "Recipe", "Simulated", "State", "parse_recipe", "parts_by_name"]
