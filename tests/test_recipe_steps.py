"""Plans whose replicas synchronise by recipes, run on ranks: losses and weights are those of replicas that are stepped
one by one in one process, with the recipe's own functions on all of their rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower import lower_for_ranks
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.strategy import Options, Strategy, StrategyFile, make_config
from flexsearch.strategy.records import WeightRecipe
from flexsearch.sync import Simulated
from flexsearch.topology import Topology
from tests.ranks import pool

BATCH, STEPS, LR, BETA = 8, 6, 0.3, 0.9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.first(x)))
        return hidden


def batch(seed: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (samples,), generator=generator)


@cache
def imported(samples: int = BATCH) -> Imported:
    return import_with_constants(Net(), batch(0, samples), F.cross_entropy)


def plan(
    recipes: str | dict[str, str], replicas: int = 2, pieces: int = 1, devices: int = 0, samples: int = BATCH,
    alike: str = "",
) -> str:  # fmt: skip
    """``replicas`` of layers that are split into ``pieces`` by their outputs, on the first of ``devices``; all compute
    the whole of the layer ``alike``."""
    graph, configs = imported(samples).graph, {}
    topology = Topology.load(f"ethernet-1g:{devices or replicas * pieces}")
    for op in graph.operators:
        splits = pieces > 1 and "o" in op.sizes
        degrees = {op.axes_of("sample")[0]: replicas} if op.axes_of("sample") and op.name != alike else {}
        mesh = range(replicas * pieces) if splits else range(0, replicas * pieces, pieces)
        configs[op.name] = make_config(op, degrees | ({"o": pieces} if splits else {}), mesh)
    named = {"*": recipes} if isinstance(recipes, str) else recipes
    options = Options(recipes=tuple(WeightRecipe(weights=(name,), recipe=text) for name, text in named.items()))
    return Strategy.make(graph, topology, configs, options).to_file().model_dump_json()


def read(file: str) -> Strategy:
    return Strategy.from_file(StrategyFile.model_validate_json(file))


def groups_of(file: str) -> tuple[RecipeGroup, ...]:
    strategy = read(file)
    return lower_for_ranks(
        imported().graph, strategy, strategy.cluster, Costs(imported().graph, strategy.cluster)
    ).recipe_groups


# ---- what ranks do


def stepped(file: str, traced: Imported, momentum: float = BETA, one_call: bool = False) -> tuple[Parallel, Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LR, momentum=momentum)

    step = distribute(Net(), traced, read(file), make if one_call else None, example=(*batch(0), F.cross_entropy))
    return step, None if one_call else make(step.parameters())


def _trained(
    file: str, traced: Imported, momentum: float, one_call: bool
) -> tuple[list[float], dict[str, Tensor], int]:  # fmt: skip
    step, optimizer = stepped(file, traced, momentum, one_call)
    losses = []
    for number in range(STEPS):
        if optimizer is None:
            losses.append(step.step(*batch(number)).item())
        else:
            losses.append(step(batch(number)).loss.item())
            optimizer.step()
            optimizer.zero_grad()
    sent = sum(member.sent for member in step.synchronisation.members)
    return losses, step.state_dict(), sent


# ---- the same in one process


def replicas_of(
    groups: Sequence[RecipeGroup], replicas: int, momentum: float = BETA
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, mean weights, and bytes sent."""
    models = [Net() for _ in range(replicas)]
    named = [dict(model.named_parameters()) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum) for model in models]
    simulated = [Simulated(replicas, group.hosts) for group in groups]

    def rows(group: RecipeGroup, gradients: bool) -> Tensor:
        return torch.stack([
            torch.cat([
                (own[name].grad if gradients else own[name].detach())[slices(box)].reshape(-1)  # type: ignore[index]
                for name, box in zip(group.names, group.boxes, strict=True)
            ]) for own in named
        ])  # fmt: skip

    def put(group: RecipeGroup, matrix: Tensor, gradients: bool) -> None:
        for own, row in zip(named, matrix, strict=True):
            places = list(zip(group.names, group.boxes, strict=True))
            parts = torch.split(row, [own[name][slices(box)].numel() for name, box in places])
            for (name, box), part in zip(places, parts, strict=True):
                whole = own[name].grad if gradients else own[name].data
                assert whole is not None
                whole[slices(box)] = part.view(whole[slices(box)].shape)

    states = [group.recipe.start(rows(group, False), group.sizes) for group in groups]
    losses, share = [], BATCH // replicas
    for number in range(STEPS):
        x, target = batch(number)
        values = []
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            at = slice(k * share, (k + 1) * share)
            values.append(F.cross_entropy(model(x[at]), target[at]))
            values[-1].backward()  # type: ignore[no-untyped-call]
        losses.append(torch.stack(values).mean().item())
        for name in set(named[0]) - {name for group in groups for name in group.names}:
            mean = torch.stack([own[name].grad for own in named]).mean(0)  # type: ignore[misc]
            for own in named:
                own[name].grad = mean.clone()
        for g, group in enumerate(groups):
            matrix, states[g] = group.recipe.before_update(states[g], simulated[g], rows(group, True), group.sizes)
            put(group, matrix, True)
        for optimizer in optimizers:
            optimizer.step()
        for g, group in enumerate(groups):
            matrix, states[g] = group.recipe.after_update(states[g], simulated[g], rows(group, False), group.sizes)
            put(group, matrix, False)
    state = {name: torch.stack([own[name].detach() for own in named]).mean(0) for name in named[0]}
    return losses, state, sum(phase.sent for one in simulated for phase in one.exchanges)


def slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def compare(
    file: str, replicas: int, ranks: int, momentum: float = BETA, one_call: bool = False, exact: bool = False
) -> None:
    losses, state, sent = replicas_of(groups_of(file), replicas, momentum)
    answers: list[Any] = pool(ranks).run(_trained, file, imported(), momentum, one_call)
    for own, weights, _ in answers:
        assert own == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            assert float((weights[name] - value).abs().max()) <= 1e-9 * float(value.abs().max()), name
    assert sum(bytes_ for _, _, bytes_ in answers) == sent
    if exact:
        assert losses == pytest.approx(single(momentum), rel=1e-9)


def single(momentum: float = BETA) -> list[float]:
    """Losses of one device."""
    return replicas_of((), 1, momentum)[0]


EXACT = ["all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "server", "server:shards=2"]
LOSSY = [
    "local-sgd:period=2", "diloco:period=2", "gossip", "ring:what=weights", "top-k:density=0.1", "gtop-k:k=9",
    "random-k:k=7", "qsgd:bits=4", "sign:feedback=on", "powersgd:rank=1", "threshold:tau=0.01",
    "adaptive-threshold:density=0.1", "local-sgd:period=2+gossip+top-k:density=0.2+warm-up:steps=2",
    "top-k:density=0.1+warm-up:steps=2",
]  # fmt: skip


@pytest.mark.parametrize("recipe", EXACT)
def test_exact_recipes_compute_what_one_device_does(recipe: str) -> None:
    compare(plan(recipe), 2, 2, exact=True)


@pytest.mark.parametrize("recipe", LOSSY)
def test_replicas_follow_their_recipe(recipe: str) -> None:
    compare(plan(recipe), 2, 2)


def test_momentum_is_corrected() -> None:
    compare(plan("top-k:density=0.1+momentum-correction:momentum=0.9"), 2, 2, momentum=0.0)


@pytest.mark.parametrize("recipe", ["all-reduce:form=ring", "local-sgd:period=2", "gossip", "top-k:density=0.1"])
def test_recipes_go_with_plans_that_split_layers_too(recipe: str) -> None:
    """2 replicas of 2 pieces: pieces of weights are vectors of their own."""
    file = plan(recipe, replicas=2, pieces=2)
    assert [group.devices for group in groups_of(file)] == [(0, 2), (1, 3)]
    compare(file, 2, 4, exact=recipe.startswith("all"))


def test_layers_that_all_replicas_compute_alike_need_no_recipe() -> None:
    file = plan("all-reduce:form=ring", alike="first")
    assert [group.names for group in groups_of(file)] == [("last.weight", "last.bias")]
    for losses, _, _ in pool(2).run(_trained, file, imported(), BETA, False):
        assert losses == pytest.approx(single(), rel=1e-9)


def test_weights_follow_different_recipes_or_none() -> None:
    compare(plan({"first.weight": "top-k:density=0.1", "last.*": "local-sgd:period=2"}), 2, 2)


def test_a_step_in_one_call_synchronises_too() -> None:
    compare(plan("local-sgd:period=2+top-k:density=0.2"), 2, 2, one_call=True)
    compare(plan("top-k:density=0.1"), 2, 2, one_call=True)


def test_dedicated_servers_are_ranks_of_a_plan() -> None:
    """The devices that a plan leaves unused go through the same loop, without weights."""
    for one_call in (False, True):
        compare(plan("server:on=devices+top-k:density=0.1", devices=3), 2, 3, one_call=one_call)
    compare(plan("local-sgd:period=2+server:shards=2,on=devices", devices=4), 2, 4)


@pytest.mark.parametrize(("recipe", "momentum"), [("local-sgd:period=1", 0.0), ("top-k:density=1", BETA)])
def test_limits_are_exact_data_parallelism(recipe: str, momentum: float) -> None:
    compare(plan(recipe), 2, 2, momentum, exact=True)


def test_gossip_with_equal_shares_of_all_is_exact(tmp_path: Any) -> None:
    file = tmp_path / "K.json"
    file.write_text(str([[0.25] * 4] * 4))
    compare(plan(f"matrix:file={file}", replicas=4), 4, 4, exact=True)


# ---- the user's loop


def _loop(file: str, traced: Imported) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """What misuse is refused with; weights after accumulated gradients, and after two optimizers."""
    refusals = []
    step, _ = stepped(file, traced)
    step(batch(0))
    with torch.no_grad():
        for parameter in step.parameters():
            parameter.sub_(0.1)
    with pytest.raises(RuntimeFailure) as refusal:
        step(batch(1))
    refusals.append(str(refusal.value))
    step, _ = stepped(file, traced)
    first = torch.optim.SGD(list(step.parameters())[:1], lr=LR)
    step(batch(0))
    first.step()
    with pytest.raises(RuntimeFailure) as refusal:
        first.step()
    refusals.append(str(refusal.value))

    step, _ = stepped(file, traced)
    both = [torch.optim.SGD(group, lr=LR, momentum=BETA) for group in _halves(list(step.parameters()))]
    for number in range(STEPS):
        step(batch(number))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    apart = step.state_dict()

    step, optimizer = stepped(file, traced)
    for number in range(0, STEPS, 2):
        step(batch(number), scale=0.5)
        step(batch(number + 1), scale=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return refusals, apart, step.state_dict()


def _halves(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return parameters[::2], parameters[1::2]


def test_a_loop_may_accumulate_and_have_several_optimizers_but_not_update_unseen() -> None:
    file = plan("local-sgd:period=2")
    _, expected, _ = replicas_of(groups_of(file), 2)
    answers: list[Any] = pool(2).run(_loop, file, imported())
    for (unseen, twice), apart, accumulated in answers:
        assert "no step of a torch.optim.Optimizer" in unseen and "parallelize(optimizer=...)" in unseen
        assert "stepped twice while 3 of 4 weights" in twice
        for name, value in expected.items():
            assert float((apart[name] - value).abs().max()) <= 1e-9
            assert torch.isfinite(accumulated[name]).all()
    assert all(torch.equal(answers[0][2][name], answers[1][2][name]) for name in expected)


# ---- checkpoints


def _saving(file: str, traced: Imported, folder: str) -> list[list[float]]:
    """State of the model after all steps, and after half of them, a checkpoint, and the rest with it in another step;
    losses of the rest."""
    histories, halfway = [], STEPS // 2
    for begin in (0, halfway):
        step, optimizer = stepped(file, traced)
        if begin:
            step.load(folder, optimizer)
        for number in range(begin, STEPS):
            if number == halfway and not begin:
                step.save(folder, optimizer)
            step(batch(number))
            optimizer.step()
            optimizer.zero_grad()
        state = [*step.parameters(), *step.state_dict().values()]
        histories.append(torch.cat([x.detach().flatten() for x in state]).tolist())
    return histories


@pytest.mark.parametrize(
    "recipe",
    ["local-sgd:period=2+gossip+top-k:density=0.2", "diloco:period=4", "gossip", "powersgd:rank=1",
     "top-k:density=0.1+warm-up:steps=2", "qsgd:bits=4", "server:on=devices+top-k:density=0.1"],
)  # fmt: skip
def test_the_same_plan_goes_on_to_the_bit(recipe: str, tmp_path: Any) -> None:
    devices = 3 if "devices" in recipe else 2
    for whole, resumed in pool(devices).run(_saving, plan(recipe, devices=devices), imported(), str(tmp_path)):
        assert whole == resumed


def _loading(file: str, other: str, traced: Imported, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    step, optimizer = stepped(file, traced)
    for number in range(3):
        step(batch(number))
        optimizer.step()
        optimizer.zero_grad()
    step.save(folder, optimizer)
    before = step.state_dict()
    step, optimizer = stepped(other, traced)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step.load(folder, optimizer)
    step(batch(3))
    optimizer.step()
    return before, step.state_dict(), " ".join(str(w.message) for w in warned)


def test_another_plan_begins_with_the_mean_of_the_replicas(tmp_path: Any) -> None:
    frozen = plan("local-sgd:period=3"), plan("gossip")
    for before, after, warned in pool(2).run(_loading, *frozen, imported(), str(tmp_path)):
        assert "recipes begin anew" in warned
        assert any(not torch.equal(before[name], after[name]) for name in before)
    exact = plan({"first.*": "all-reduce:form=ring"})
    for _, after, warned in pool(2).run(_loading, plan("local-sgd:period=2"), exact, imported(), str(tmp_path / "b")):
        assert "recipes begin anew" in warned and all(torch.isfinite(x).all() for x in after.values())
