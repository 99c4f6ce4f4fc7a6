"""Recipes within plans: which replicas form a group, what their rows send, what a step under them takes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from flexsearch.cost import Profile
from flexsearch.cost.communication import Pricing
from flexsearch.cost.compute import STATE_COPIES
from flexsearch.cost.exchanges import streaming_seconds, work_seconds
from flexsearch.cost.profile import ProfileDevice, WorkRate
from flexsearch.errors import FlexsearchError, RecipeError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, TaskKind
from flexsearch.lower.several import several
from flexsearch.search.recipes import (
    TRIED,
    best_allowed,
    exchange_seconds,
    read_allowed,
    recipes_of,
    with_recipe,
)
from flexsearch.setting import Setting
from flexsearch.simulate import critical_path, simulate
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.mean import steady
from flexsearch.simulate.simulation import makespan, simulate_step
from flexsearch.strategy import Options, Stage, States, Strategy, make_config
from flexsearch.strategy.records import WeightRecipe
from flexsearch.sync import Exchange, parse_recipe
from flexsearch.sync.compression import Sizes
from flexsearch.sync.kinds import KINDS, Work, work
from flexsearch.sync.work import after, before, between
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.kernels import recipe_passes
from tests.conftest import Cli
from tests.engine_oracle import Simulation as Oracle

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


def test_weights_whose_replicas_make_the_same_gradient_need_no_recipe() -> None:
    alike = other(plan("gossip"), "layers.fc1", degrees={}, devices=range(4))
    (group,) = FOUR.lower(alike).recipe_groups
    assert group.names == tuple(name for name in WEIGHTS if "fc1" not in name)


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


RECIPES = (
    "all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "server:shards=2", "gossip", "ring",
    "top-k:density=0.01", "gtop-k:density=0.01", "random-k:density=0.1", "qsgd", "16-bit", "sign", "powersgd",
    "local-sgd:period=4+gossip+top-k:density=0.01", "diloco:period=2",
)  # fmt: skip


@pytest.mark.parametrize("text", RECIPES)
def test_rows_send_what_the_recipe_says(text: str) -> None:
    here = lowered(text)
    (group,) = here.recipe_groups
    (block,) = here.rows.recipes.values()
    said = next(found for step in range(8) if (found := group.recipe.exchanges(4, group.hosts, group.sizes, step)))
    assert block.exchanges == tuple(said)
    recipe_rows = [what for what in here.tasks.communication if what is not None and what.recipe]
    assert sum(what.nbytes for what in recipe_rows) == sum(one.sent for one in said)


@pytest.mark.parametrize("text", (*RECIPES, "async+server", "stale:bound=1+server:shards=2"))
def test_the_engine_runs_rows_of_recipes_by_its_definition(text: str) -> None:
    rows = lowered(text).rows
    oracle = Oracle(rows.schedule, rows.machine, rows.segments, rows.segment)
    assert Engine(rows.schedule, rows.machine).run(rows.segments, rows.segment) == oracle.run()
    longer = several(lowered(text), 3)
    oracle = Oracle(longer.schedule, longer.machine, longer.segments, longer.segment)
    assert Engine(longer.schedule, longer.machine, fold=False).run(longer.segments, longer.segment) == oracle.run()


@pytest.mark.parametrize("text", ("gossip", "top-k:density=0.01", "server", "local-sgd:period=4", "async+server"))
def test_the_critical_path_of_a_recipe_fills_the_step(text: str) -> None:
    here = lowered(text)
    assert critical_path(here)[-1].end == simulate_step(here).makespan_s


def test_the_backends_all_reduce_is_the_exact_plan_without_overlap() -> None:
    here = lowered("all-reduce")
    found = simulate_step(here)
    kinds, (group,) = here.tasks.kind, here.recipe_groups
    backward = max(end for end, kind in zip(found.end, kinds, strict=True) if kind == TaskKind.BACKWARD)
    update = max(e - s for s, e, kind in zip(found.start, found.end, kinds, strict=True) if kind == TaskKind.UPDATE)
    reduced = Pricing(FOUR.topology).all_reduce(range(4), group.sizes.nbytes).duration_s
    own = before(group.recipe, group.sizes, Exchange("all_reduce", 4, (group.sizes.nbytes,)))
    done = own, after(group.recipe, group.sizes, 4, 0)
    copied = sum(work_seconds(some, FOUR.topology.devices[0], {}) for some in done)
    assert found.makespan_s == pytest.approx(backward + copied + reduced + update, rel=1e-7)
    exact = simulate(FOUR.lower(plan({})))
    assert found.moved_bytes == exact.moved_bytes and found.makespan_s > exact.makespan_s


# ---- what is computed


def rate(s_per_byte: float, start_s: float = 0.0) -> WorkRate:
    return WorkRate(n=4, median=0.1, p90=0.2, s_per_byte=s_per_byte, start_s=start_s)


def measured(**rates: WorkRate) -> Setting:
    """The machine of this module, with a profile that has nothing but rates of kinds of work."""
    device = ProfileDevice(kind="cpu", model="a core", stands_for=(FOUR.topology.devices[0].model,))
    return Setting.of(MLP, FOUR.topology, Profile(device=device, torch="2", recipe_work=rates))


def test_measured_rates_price_the_kinds_that_the_profile_has() -> None:
    (group,) = lowered("top-k:density=0.01").recipe_groups
    encoded = before(group.recipe, group.sizes, Exchange("all_gather", 4, (8,) * 4))
    device = FOUR.topology.devices[0]
    formula = work_seconds(encoded, device, {})
    slow = work_seconds(encoded, device, {"select": rate(1e-6, 0.5)})
    without = work_seconds(Work({k: v for k, v in encoded.items() if k != "select"}), device, {})
    assert slow == pytest.approx(without + 0.5 + 1e-6 * group.sizes.nbytes) and formula > without
    assert work_seconds(encoded, device, {"of another version": rate(1.0)}) == formula
    assert work_seconds(work(copy=0), device, {"copy": rate(1.0, 1.0)}) == 0.0
    assert work_seconds(work(add=1e6), device, {}) == streaming_seconds(device, 3 * 10**6)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_every_kind_of_work_has_a_figure_for_every_kind_of_device(device: Literal["cpu", "cuda"]) -> None:
    assert recipe_passes(device).keys() == set(KINDS)


def test_a_plan_takes_as_much_longer_as_its_encoding_was_measured_to() -> None:
    sizes = lowered("top-k:density=0.01").recipe_groups[0].sizes
    plain, slow = (measured(select=rate(s)).lower(plan("top-k:density=0.01")) for s in (1e-9, 3e-9))
    assert makespan(slow) - makespan(plain) == pytest.approx(2e-9 * sizes.nbytes, rel=1e-6)
    assert makespan(measured(pack=rate(1.0)).lower(plan("gossip"))) == makespan(lowered("gossip"))


SIZES = Sizes(((64, 32), (10,)), 4)


@pytest.mark.parametrize("text", (*RECIPES, "threshold:tau=1", "adaptive-threshold", "sign:feedback=on", "server+qsgd"))
def test_every_kind_of_work_of_a_recipe_has_a_formula(text: str) -> None:
    recipe = parse_recipe(text).planned
    step = recipe.warm_up + recipe.period - 1
    exchanges = recipe.exchanges(4, (0, 1, 2, 3), SIZES, step)
    assert exchanges
    done = before(recipe, SIZES, exchanges[0]) + after(recipe, SIZES, 4, 64)
    for place in (0.25, 0.5, 0.75):
        done += between(recipe, SIZES, 4, 64, place)
    assert done.keys() <= set(KINDS) and all(isinstance(count, int) and count >= 0 for count in done.values())
    assert done["copy"] >= 2 * SIZES.nbytes  # gradients to one vector, and back


# ---- the mean step


def test_a_period_is_priced_as_its_steps_one_after_the_other() -> None:
    here = lowered("local-sgd:period=4+gossip")  # distances 1, 2
    steps = [makespan(here.at_step(step)) for step in range(8)]
    assert simulate(here).makespan_s == pytest.approx(sum(steps) / 8, rel=1e-12)
    assert sum(len(b.exchanges) for b in here.at_step(0).rows.recipes.values()) == 0
    assert simulate(here).moved_bytes == sum(simulate_step(here.at_step(k)).moved_bytes for k in range(8)) // 8


def served(compute: float, push: float, pull: float, workers: int, steps: int) -> list[list[float]]:
    """Ends of steps of workers with a dedicated server whose link takes one message each way at a time."""
    into = out = 0.0
    events = [(compute, w, 0, "push") for w in range(workers)]
    ends: list[list[float]] = [[] for _ in range(workers)]
    while events:
        now, w, k, what = heapq.heappop(events)
        if what == "push":
            into = max(now, into) + push
            heapq.heappush(events, (into, w, k, "pull"))
        else:
            out = max(now, out) + pull
            ends[w].append(out)
            if k + 1 < steps:
                heapq.heappush(events, (out + compute, w, k + 1, "push"))
    return ends


def test_asynchronous_workers_take_what_a_simulation_by_hand_says() -> None:
    here = FOUR.lower(plan("async+server:on=devices", devices=2))
    one = simulate_step(here)
    pushes = [t for t, what in enumerate(here.tasks.communication) if what is not None and what.recipe and what.senders]
    pulls = [
        t for t, what in enumerate(here.tasks.communication) if what is not None and what.recipe and what.receivers
    ]
    push, pull = (float((one.end - one.start)[rows[0]]) for rows in (pushes, pulls))
    alone = [d for t, d in enumerate(here.tasks.duration) if here.tasks.device[t] == 0]
    ends = served(sum(alone), push, pull, 2, 40)
    expected = (ends[0][-1] - ends[0][10]) / 29
    assert steady(here).exact
    assert steady(here).step_s == pytest.approx(expected, rel=2e-2)  # handling bytes takes the processor some time, too


def updates(here: Lowered) -> list[float]:
    """Seconds of the update by device."""
    tasks = here.tasks
    rows = (t for t, kind in enumerate(tasks.kind) if kind == TaskKind.UPDATE)
    return [tasks.duration[t] for t in sorted(rows, key=lambda t: tasks.device[t])]


def test_weights_whose_server_updates_them_are_not_updated_by_workers() -> None:
    assert min(updates(lowered("server"))) > 0
    assert updates(lowered("async+server")) == [0.0] * 4
    rest, biases = lowered({"*.weight": "async+server"}), [t for t in MLP.of_kind("parameter") if len(t.shape) == 1]
    of_rest = FOUR.costs.update(sum(t.nbytes for t in biases), len(biases), 0, rest.options.optimizer)
    assert updates(rest) == [of_rest] * 4


def test_workers_with_a_bound_wait_for_the_slowest_one() -> None:
    slow = {dtype: flops / 50 for dtype, flops in FOUR.topology.devices[3].flops.items()}
    devices = (*FOUR.topology.devices[:3], FOUR.topology.devices[3].model_copy(update={"flops": slow}))
    setting = Setting.of(MLP, edited(FOUR.topology, devices=devices))
    rates = {}
    for text in ("async+server:shards=4", "stale:bound=1+server:shards=4"):
        rates[text] = steady(setting.lower(plan(text, setting=setting))).rates
    free, bound = rates.values()
    assert max(free) > 1.5 * min(free)  # who is fast goes ahead
    assert max(bound) == pytest.approx(min(bound), rel=0.05)


# ---- memory, refusals, the search


def test_states_of_recipes_are_in_the_account() -> None:
    plain, kept = simulate(lowered("all-reduce")).memory[0], simulate(lowered("top-k:density=0.01")).memory[0]
    (group,) = lowered("all-reduce").recipe_groups
    assert kept.optimizer - plain.optimizer == group.sizes.n * 4  # the residual
    assert simulate(lowered("diloco")).memory[0].optimizer - plain.optimizer == 2 * group.sizes.n * 4


def test_states_of_the_optimizer_are_where_it_runs() -> None:
    here = FOUR.lower(plan("async+server:on=devices", devices=2))
    (group,) = here.recipe_groups
    states = STATE_COPIES[here.options.optimizer] * group.sizes.nbytes
    worker, server = simulate(here).memory[0], simulate(here).memory[2]
    assert states and worker.optimizer == 0
    assert server.optimizer == states + group.sizes.nbytes


def test_changes_of_plans_with_recipes_are_refused() -> None:
    with pytest.raises(FlexsearchError, match="recipes"):
        FOUR.difference(plan("gossip"), plan({}))
    with pytest.raises(FlexsearchError, match="recipes"):
        FOUR.choice(plan("gossip"), "layers.fc1")
    told = FOUR.explain(plan("local-sgd:period=8"))
    assert told.mean_s is not None and told.mean_s < told.row.simulation.makespan_s
    assert FOUR.step(plan("local-sgd:period=8")).makespan_s == told.mean_s


def test_the_best_allowed_plan_is_lossy_only_by_permission() -> None:
    found = best_allowed(MLP, FOUR.topology, FOUR.costs, [plan({})], ["local-sgd"])
    assert found[0].recipe == "local-sgd:period=16"
    assert {one.recipe for one in found if parse_recipe(one.recipe).lossy} == set(TRIED["local-sgd"])
    assert [one.simulation.makespan_s for one in found] == sorted(one.simulation.makespan_s for one in found)


def test_what_is_allowed_is_read_as_written() -> None:
    assert read_allowed("diloco:period=8,lr=0.5,top-k") == ("diloco:period=8,lr=0.5", "top-k")
    assert "local-sgd:period=4+gossip" in recipes_of(["local-sgd", "gossip"])
    for wrong, why in (("local-sdg", "Did you mean local-sgd"), ("", "names no recipe"), ("top-k:k=0", "k of top-k")):
        with pytest.raises(FlexsearchError, match=why):
            read_allowed(wrong)


def test_a_plan_gets_a_recipe_and_keeps_all_else() -> None:
    exact = FOUR.baseline("data-parallel")
    with_one = with_recipe(exact, "server:shards=2", ["*weight"])
    assert with_one.configs == exact.configs and not exact.options.recipes
    assert with_one.options.model_copy(update={"recipes": ()}) == exact.options
    assert with_one.options.recipes[0].weights == ("*weight",) and FOUR.row("", with_one).simulation.makespan_s > 0
    with pytest.raises(RecipeError, match="qsdg"):
        with_recipe(exact, "qsdg")


def test_an_exchange_costs_what_its_phases_cost() -> None:
    """A ring is so many messages of a part in turn; of gossip, distances 1 and 2 count half each; a period counts
    once."""
    pricing = Pricing(FOUR.topology)
    part = pricing.transfer("exchange", [(k, (k + 1) % 4, 1000) for k in range(4)]).duration_s
    assert exchange_seconds(FOUR.topology, "all-reduce:form=ring", 4000) == pytest.approx(6 * part)
    one = exchange_seconds(FOUR.topology, "gossip", 4000)
    assert exchange_seconds(FOUR.topology, "local-sgd:period=8+gossip", 4000) == pytest.approx(one)
    both = [[(k, (k + d) % 4, 4000) for k in range(4) for d in {way, 4 - way}] for way in (1, 2)]
    assert one == pytest.approx(sum(pricing.transfer("exchange", row).duration_s for row in both) / 2)
    with pytest.raises(RecipeError, match="go by themselves"):
        exchange_seconds(FOUR.topology, "async+server", 4000)


def test_optimize_writes_the_exact_plan_and_the_allowed_one(cli: Cli, here: Path) -> None:
    ran = cli("optimize", "mlp", "-t", "ethernet-1g:4", "-b", 50, "--allow", "local-sgd", "--json")
    assert ran.code == 0 and ran.json["allowed"]["recipe"] == "local-sgd:period=16"
    assert not Strategy.load(here / "strategy.json").options.recipes
    assert Strategy.load(here / "strategy.allowed.json").options.recipes[0].recipe == "local-sgd:period=16"
    assert cli("optimize", "mlp", "--allow", "local-sdg").code == 2
