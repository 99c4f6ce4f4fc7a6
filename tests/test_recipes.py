"""Recipes within plans: which replicas form a group, what their rows send, what a step under them takes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flexsearch.api import Setting
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered
from flexsearch.strategy import Options, Stage, States, Strategy, make_config
from flexsearch.strategy.records import WeightRecipe
from flexsearch.topology import Topology

MLP = OperatorGraph.load("mlp")
FOUR = Setting.of(MLP, Topology.load("ethernet-1g:4"))
WEIGHTS = [t.name for t in MLP.of_kind("parameter")]


def options(recipes: Mapping[str, str]) -> Options:
    """Recipes by pattern of weights."""
    return Options(recipes=tuple(WeightRecipe(weights=(name,), recipe=text) for name, text in recipes.items()))


def plan(recipes: Mapping[str, str] | str, devices: int = 4, setting: Setting = FOUR, **degrees: int) -> Strategy:
    """Linear layers split by "samples" and "outputs", all else by the samples alone; ``recipes``: of all weights, or by
    pattern."""
    samples, outputs = degrees.get("samples", devices), degrees.get("outputs", 1)
    configs = {}
    for op in setting.graph.operators:
        wanted = {op.axes_of("sample")[0]: samples} | ({"o": outputs} if "o" in op.sizes else {})
        mesh = range(devices) if "o" in op.sizes else range(0, devices, outputs)
        configs[op.name] = make_config(op, wanted, mesh)
    recipes = {"*": recipes} if isinstance(recipes, str) else recipes
    return Strategy.make(setting.graph, setting.topology, configs, options(recipes))


def lowered(recipes: Mapping[str, str] | str, **how: int) -> Lowered:
    return FOUR.lower(plan(recipes, **how))


# ---- groups


def test_replicas_of_all_weights_are_one_vector() -> None:
    (group,) = lowered("top-k:density=0.01").recipe_groups
    parameters = MLP.of_kind("parameter")
    assert group.names == tuple(WEIGHTS)
    assert group.devices == group.positions == (0, 1, 2, 3) and group.hosts == (0, 1, 2, 3)
    assert group.sizes.shapes == tuple(t.shape for t in parameters) and group.sizes.itemsize == 4


def test_a_weight_follows_the_first_entry_that_names_it() -> None:
    one, rest = lowered({"*fc1.weight": "gossip", "*": "sign"}).recipe_groups
    assert one.names == ("layers.fc1.weight",) and one.recipe.words == "gossip"
    assert rest.names == tuple(WEIGHTS[1:]) and rest.recipe.words == "sign"
    assert [g.names for g in lowered({"*.bias": "gossip"}).recipe_groups] == [tuple(WEIGHTS[1::2])]


def test_pieces_of_weights_on_different_devices_are_vectors_of_their_own() -> None:
    left, right = lowered("top-k:density=0.01", samples=2, outputs=2).recipe_groups
    assert (left.devices, right.devices) == ((0, 2), (1, 3))
    assert left.boxes[0] == ((0, 2048), (0, 4096)) and right.boxes[0] == ((2048, 4096), (0, 4096))
    assert left.sizes.shapes[0] == (2048, 4096)
    assert not lowered("gossip", samples=1, outputs=4).recipe_groups  # nothing is replicated


def test_replicas_of_a_stage_are_found_wherever_they_are() -> None:
    setting = Setting.of(MLP, FOUR.topology)
    names = [op.name for op in MLP.operators]
    stages = (Stage(tuple(names[:2]), (0, 2), 2), Stage(tuple(names[2:]), (1, 3), 2))
    configs = {op.name: make_config(op, {}, (0,) if k < 2 else (1,)) for k, op in enumerate(MLP.operators)}
    strategy = Strategy.make(MLP, FOUR.topology, configs, options({"*": "gossip"}), stages=stages, microbatches=2)
    first, second = setting.lower(strategy).recipe_groups
    assert (first.devices, first.names) == ((0, 2), tuple(WEIGHTS[:2]))
    assert (second.devices, second.names) == ((1, 3), tuple(WEIGHTS[2:]))


def test_dedicated_servers_are_devices_that_the_plan_leaves_unused() -> None:
    (group,) = lowered("server:shards=1,on=devices", devices=2).recipe_groups
    assert (group.devices, group.servers, group.positions) == ((0, 1), (2,), (0, 1, 2))


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (plan({"nothing*": "gossip"}), r"nothing\* names no weight"),
        (plan("server:on=devices"), "a dedicated server is on no host"),
        (plan("top-k:k=200000000"), "k of top-k"),
        (plan("all-reduce:form=halving-doubling", devices=3), "power of two"),
        (plan("gossip", devices=3), "the shares of its replicas in .* are not equal"),
    ],
)
def test_groups_that_cannot_follow_their_recipe_are_refused(strategy: Strategy, why: str) -> None:
    with pytest.raises(FlexsearchError, match=why) as refusal:
        assert FOUR.lower(strategy).recipe_groups
    assert refusal.value.remedy


def other(strategy: Strategy, name: str, **changes: object) -> Strategy:
    """The same with another config for one operator."""
    op = MLP.operators[[op.name for op in MLP.operators].index(name)]
    configs = {**strategy.configs, name: make_config(op, **changes)}  # type: ignore[arg-type]
    return Strategy.make(MLP, strategy.cluster, configs, strategy.options)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"degrees": {"b0": 4}, "devices": range(4), "states": States.OPTIMIZER}, "its states are sharded"),
        ({"degrees": {"b0": 2}, "devices": range(4)}, "compute the same samples"),
        ({"degrees": {"b0": 4}, "devices": range(4), "shares": {"b0": (2, 1, 1, 1)}}, "are not equal"),
    ],
)
def test_replicas_without_a_gradient_of_their_own_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(FlexsearchError, match=why) as refusal:
        assert FOUR.lower(other(plan("gossip"), "layers.fc1", **changes)).recipe_groups
    assert "fc1" in str(refusal.value) and refusal.value.remedy


def test_exact_recipes_may_have_uneven_shares() -> None:
    (group,) = lowered("all-reduce:form=ring", devices=3).recipe_groups
    assert group.devices == (0, 1, 2)


# ---- rows


def test_weights_with_a_recipe_are_in_no_bucket_of_exact_synchronisation() -> None:
    exact = {
        lowered({"*.weight": "gossip"}).weights[member.key].tensor
        for what in lowered({"*.weight": "gossip"}).tasks.communication
        if what is not None and what.purpose == "synchronise"
        for member in what.members
    }
    assert exact == set(WEIGHTS[1::2])
