"""The loop that the user owns: gradients, clipping, accumulation, smaller batches, prediction, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import flexsearch
from flexsearch.cost import Costs
from flexsearch.errors import ImportModelError, RuntimeFailure, StrategyError
from flexsearch.graph.importer import Imported, import_model, import_with_constants
from flexsearch.lower import Lowered, lower
from flexsearch.runtime.parallel import Parallel, distribute, parallelize
from flexsearch.runtime.retrace import Source
from flexsearch.runtime.sharing import of_first_rank
from flexsearch.setting import Setting
from flexsearch.strategy import Options, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.random_strategies import strategies
from tests.ranks import pool

BATCH, STEPS = 6, 3
ONE_RANK = Topology.load("ethernet-1g:1")


class Net(nn.Module):
    """A table of which a batch reads some rows, an unused layer, batch statistics, a frozen layer, a vector."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.first = nn.Embedding(9, 4), nn.Linear(4, 7)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(7), nn.Dropout(drop), nn.Linear(7, 5)
        self.head, self.unused = nn.Linear(5, 3, bias=False), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.norm(self.first(x + self.places.weight[2])))
        hidden = torch.tanh(self.frozen(self.drop(hidden)))
        return {"logits": self.head(hidden), "mean": hidden[:, [0, 2]].mean()}


def loss(output: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    """Two losses, of which the sum is trained on."""
    cross, small = F.cross_entropy(output["logits"], target), output["mean"].square()
    return {"loss": cross + 0.1 * small, "cross": cross}


def batch(samples: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


@cache
def imported() -> Imported:
    return import_with_constants(Net(), batch(), loss)


def read(file: str) -> Strategy:
    return Strategy.from_file(StrategyFile.model_validate_json(file))


def plan(name: str, ranks: int, net: nn.Module | None = None) -> str:
    graph = imported().graph if net is None else import_model(net, batch(), loss)
    return baseline(name, graph, Topology.load(f"ethernet-1g:{ranks}")).to_file().model_dump_json()


SOURCE: list[Source] = []
"""Of the net, on this rank: what one plan's step has traced again need not be traced for the next plan's."""


def stepped(file: str, traced: Imported, net: Net | None = None) -> Parallel:
    step = distribute(Net() if net is None else net, traced, read(file), example=(*batch(), loss))
    SOURCE[:] = SOURCE or [step.variants.traceable()]
    step.variants.source = SOURCE[0]
    return step


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As ``parameter_groups`` makes them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=0.05),
}  # fmt: skip
SIZES = (BATCH, BATCH, 4)
"""Samples of each batch: the last one is smaller."""


def plain(kind: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm of the gradient) of each step and the state after the last, in plain PyTorch."""
    model = Net()
    optimizer = MAKE[kind](groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    history = []
    for number, samples in enumerate(SIZES):
        x, target = batch(samples, number)
        value = loss(model(x), target)["loss"]
        value.backward()
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((value.item(), norm.item()))
    return history, model.state_dict()


def trained(file: str, traced: Imported, kind: str, whole: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same on this rank under a plan, fed the whole batch or its own part of it."""
    step = stepped(file, traced)
    optimizer = MAKE[kind](step.parameter_groups(decay=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    history = []
    for number, samples in enumerate(SIZES):
        x, target = batch(samples, number)
        low, high = (0, samples) if whole else step.feed.range_of(step.rank, samples)
        out = step((x[low:high], target[low:high]), samples=samples)
        norm = step.clip_grad_norm_(0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((out.loss.item(), norm.item()))
    return history, step.state_dict()


def assert_close(expected: dict[str, Tensor], state: dict[str, Tensor], digits: float = 1e-9) -> None:
    assert list(expected) == list(state)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=digits, atol=digits / 100)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clipped_training_under_any_plan_is_that_of_one_device(kind: str) -> None:
    """With a scheduler, two groups of parameters, a frozen layer and a smaller last batch."""
    expected, weights = plain(kind)

    @settings(
        max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(data=st.data(), ranks=st.integers(1, 4), whole=st.booleans())
    def check(data: Any, ranks: int, whole: bool) -> None:
        strategy = data.draw(strategies(imported().graph, Topology.load(f"ethernet-1g:{ranks}")))
        file = strategy.to_file().model_dump_json()
        note(file)
        for history, state in pool(ranks).run(trained, file, imported(), kind, whole):
            assert [value for pair in history for value in pair] == pytest.approx(
                [value for pair in expected for value in pair], rel=1e-9
            )
            assert_close(weights, state)

    check()


def _accumulated(file: str, traced: Imported) -> tuple[list[float], dict[str, Tensor]]:
    step = stepped(file, traced)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
    norms = []
    for number in range(3):
        step(batch(seed=number), scale=1 / 3)
        norms.append(step.clip_grad_norm_(1e9).item())
    optimizer.step()
    return norms, step.state_dict()


def _frozen_for_a_while(make: Callable[[], Any], run: Callable[[Any, int], Any], places: str) -> None:
    """Four steps; in the second and third one the table of ``places`` is frozen."""
    step = make()
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5, momentum=0.9)
    for number in range(4):
        for name, parameter in step.named_parameters():
            if name.startswith(places):
                parameter.requires_grad_(number in (0, 3))
        run(step, number)
        optimizer.step()
        optimizer.zero_grad()


def _frozen_on_a_rank(file: str, traced: Imported) -> tuple[dict[str, Tensor], str]:
    made: list[Parallel] = []

    def make() -> Parallel:
        made.append(stepped(file, traced))
        return made[0]

    _frozen_for_a_while(make, lambda step, number: step(batch(4 if number == 2 else BATCH, number),
                                                        samples=4 if number == 2 else BATCH), "places")  # fmt: skip
    state = made[0].state_dict()
    for name, parameter in made[0].named_parameters():
        parameter.requires_grad_(name != "empty")
    with pytest.raises(RuntimeFailure) as error:
        made[0](batch())
    return state, error.value.message


@pytest.mark.parametrize("name", ["data-parallel", "megatron"])
def test_a_weight_may_be_frozen_for_a_while_but_not_one_trained_that_the_plan_froze(name: str) -> None:
    net = Net()

    def run(model: Net, number: int) -> None:
        x, target = batch(4 if number == 2 else BATCH, number)
        loss(model(x), target)["loss"].backward()  # type: ignore[no-untyped-call]

    _frozen_for_a_while(lambda: net, run, "places")
    for state, message in pool(2).run(_frozen_on_a_rank, plan(name, 2), imported()):
        assert_close(net.state_dict(), state)
        assert "was frozen when the plan was made" in message


@pytest.mark.parametrize("name", ["data-parallel", "megatron"])
def test_gradients_add_up_until_they_are_zeroed(name: str) -> None:
    model, norms = Net(), []
    for number in range(3):
        x, target = batch(seed=number)
        (loss(model(x), target)["loss"] / 3).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for found, state in pool(2).run(_accumulated, plan(name, 2), imported()):
        assert found == pytest.approx(norms, rel=1e-9)
        assert_close(model.state_dict(), state)


def _with_penalty(net: Net) -> Callable[[Any, Tensor], Tensor]:
    """A loss that reads the weights of the model that it closes over."""

    def penalised(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return loss(output, target)["loss"] + net.first.weight.square().sum() + net.norm.running_mean.abs().sum()

    return penalised


def _penalised(file: str) -> tuple[list[float], dict[str, Tensor]]:
    net = Net()
    step = parallelize(net, read(file), loss=_with_penalty(net))
    optimizer = torch.optim.SGD(step.parameters(), lr=0.05)
    losses = []
    for number, samples in enumerate(SIZES):
        losses.append(step(batch(samples, number), samples=samples).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, step.state_dict()


def test_a_loss_that_reads_the_models_weights_reads_todays_in_smaller_batches_too() -> None:
    net, losses = Net(), []
    penalised, optimizer = _with_penalty(net), torch.optim.SGD(net.parameters(), lr=0.05)
    graph = import_model(net, batch(), penalised)
    file = baseline("data-parallel", graph, Topology.load("ethernet-1g:2")).to_file().model_dump_json()
    for number, samples in enumerate(SIZES):
        x, target = batch(samples, number)
        value = penalised(net(x), target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    for found, state in pool(2).run(_penalised, file):
        assert found == pytest.approx(losses, rel=1e-9)
        assert_close(net.state_dict(), state)


def _predicted(file: str, traced: Imported) -> tuple[list[Any], tuple[int, int], dict[str, Tensor]]:
    """In training, in evaluation, of a smaller batch; and of this rank's samples."""
    step = stepped(file, traced)
    x, _ = batch()
    answers = [step(batch(), outputs=True).outputs, step.forward(x, everything=True)]
    with step.evaluating():
        answers += [step.forward(batch(), everything=True), step.forward(x[:4], samples=4, everything=True)]
        own = step.forward(x)
        with torch.inference_mode():  # as loops evaluate, with batches that are made there
            answers.append(step.forward(batch(), everything=True))
            made = batch()
        with pytest.raises(RuntimeFailure, match=r"evaluating\(\)"):
            step(batch())
    before = step.state_dict()
    step(made)
    return [*answers, own], step.sample_range, before


@pytest.mark.parametrize("name", ["data-parallel", "megatron", "fsdp"])
def test_predictions_are_those_of_the_model_in_the_same_mode(name: str) -> None:
    x, _ = batch()
    before = Net()
    for answers, (low, high), state in pool(2).run(_predicted, plan(name, 2), imported()):
        model = Net()
        model.load_state_dict(state)
        first, training, evaluated, smaller, inferred, own = answers
        expected = before(x)
        torch.testing.assert_close(first["logits"], expected["logits"][low:high])
        torch.testing.assert_close(training, model(x))
        model.load_state_dict(state)  # running statistics
        model.eval()
        torch.testing.assert_close(evaluated, model(x))
        torch.testing.assert_close(inferred, evaluated, rtol=0.0, atol=0.0)
        torch.testing.assert_close(smaller, model(x[:4]))
        torch.testing.assert_close(own["logits"], model(x)["logits"][low:high])
        torch.testing.assert_close(own["mean"], model(x)["mean"])


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """16 samples: two whole batches and one of four."""

    def __init__(self) -> None:
        self.x, self.target = batch(16)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.target[index]


def _looped(file: str) -> tuple[list[float], list[int | None], dict[str, Tensor]]:
    step = parallelize(Net(0.3), read(file), loss=loss)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    losses, sizes = [], []
    for part in step.loader(Samples(), seed=3):
        sizes.append(None if part is None else len(part[0]))
        losses.append(step(part).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, sizes, step.state_dict()


def test_a_loader_feeds_each_rank_its_samples_and_the_smaller_last_batch() -> None:
    """Dropout draws the same whatever the plan, so that one rank is the yardstick."""
    [(losses, sizes, state)] = pool(1).run(_looped, plan("single", 1, Net(0.3)))
    assert sizes == [6, 6, 4]
    answers = pool(2).run(_looped, plan("data-parallel", 2, Net(0.3)))
    assert [own for _, own, _ in answers] == [[3, 3, 2]] * 2
    for found, _, weights in answers:
        assert found == pytest.approx(losses, rel=1e-9)
        assert_close(state, weights)
    only_one = pool(2).run(_looped, plan("single", 2, Net(0.3)))
    assert [own for _, own, _ in only_one] == [[6, 6, 4], [None] * 3]
    assert only_one[1][0] == pytest.approx(losses, rel=1e-9)


def _fetched_first(file: str) -> list[float]:
    step = parallelize(Net(), read(file), loss=loss)
    loader = step.loader(Samples(), seed=3)
    first, second, last = loader
    assert len(loader) == len(list(loader)) == 3 and len(step.loader(Samples(), drop_last=True)) == 2
    return [step(first).loss.item(), step(second).loss.item(), step(last, samples=4).loss.item()]


def _epochs(file: str) -> list[list[Tensor]]:
    step = parallelize(Net(), read(file), loss=loss)
    loader = step.loader(Samples(), seed=3, epoch=1)
    return [[x for x, _ in epoch] for epoch in (loader, loader, step.loader(Samples(), seed=3, epoch=2))]


def test_a_loader_that_is_iterated_over_again_draws_the_next_epochs_order() -> None:
    [(first, second, expected)] = pool(1).run(_epochs, plan("single", 1))
    assert all(map(torch.equal, second, expected)) and not all(map(torch.equal, first, second))


def test_batches_may_all_be_fetched_before_the_first_step() -> None:
    [losses] = pool(1).run(_fetched_first, plan("single", 1))
    for found in pool(2).run(_fetched_first, plan("data-parallel", 2)):
        assert found == pytest.approx(losses, rel=1e-9)


def _refused(file: str) -> list[str]:
    step = parallelize(Net(), read(file), loss=loss)
    errors = []
    for region in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with region, pytest.raises(RuntimeFailure) as error:
            step(batch())
        errors.append(str(error.value))
    with pytest.raises(RuntimeFailure) as error:
        step.step(*batch())
    errors.append(str(error.value))
    for sharded in (_sharded(), FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))):
        with pytest.raises(ImportModelError, match="has been sharded already"):
            flexsearch.optimize(sharded, batch(), ONE_RANK, loss=loss)
    with pytest.raises(ImportModelError, match="DTensor"):
        parallelize(_sharded(), read(file), loss=loss)
    value = parallelize(Net(), read(file), loss=loss)(batch()).loss
    for of_a_step in (value, value / 3, torch.amp.GradScaler("cpu").scale(value)):
        with pytest.raises(RuntimeFailure, match="has run the backward pass already"):
            of_a_step.backward()
    weight = torch.ones((), requires_grad=True)
    (value + 2 * weight).backward()  # a penalty has a gradient of its own
    assert weight.grad == 2 and f"{value:.2f}" == f"{value.item():.2f}" and repr(value).startswith("tensor(")
    assert all(type(x) is Tensor for x in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))))
    return errors


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(Net(), init_device_mesh("cpu", (1,)))


def test_regions_that_a_plan_cannot_honour_are_refused_with_the_remedy() -> None:
    [(grad, inference, autocast, no_optimizer)] = pool(1).run(_refused, plan("single", 1))
    assert "step.evaluating()" in grad and "step.evaluating()" in inference
    assert "precision='bf16'" in autocast and "parallelize(optimizer=...)" in no_optimizer


class Switched(nn.Module):
    """Takes nested tensors, a number and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: dict[str, Tensor], scale: float, doubled: bool = False) -> Tensor:
        y = self.linear(x["a"] - 2 * x["b"]) * scale
        return 2 * y if doubled else y


def _passed() -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model, (a, _), (b, _) = Switched(), batch(), batch(seed=1)
    inputs = {"a": a, "b": b}, 2.0, True
    file = baseline("single", import_model(model, inputs, torch.mean), ONE_RANK)
    losses, errors = [model(*inputs).mean().item()], []
    other_order = {"b": b, "a": a}, 2.0, True
    losses += [parallelize(model, file, loss=torch.mean, inputs=inputs)(x).loss.item() for x in (inputs, other_order)]
    for other in (({"a": a, "b": b}, 3.0, True), ({"a": a, "b": b}, 2.0, False)):
        with pytest.raises(RuntimeFailure) as error:
            parallelize(model, file, loss=torch.mean, inputs=inputs)(other)
        errors.append(str(error.value))
    for samples in (0, 2.5):
        with pytest.raises(RuntimeFailure) as error:
            parallelize(model, file, loss=torch.mean, inputs=inputs)(inputs, samples=samples)  # type: ignore[arg-type]
        errors.append(str(error.value))
    for make in (torch.optim.SGD(model.parameters()), lambda weights: None):
        with pytest.raises(RuntimeFailure) as error:
            parallelize(model, file, loss=torch.mean, inputs=inputs, optimizer=make)  # type: ignore[arg-type]
        errors.append(str(error.value))
    with pytest.raises(RuntimeFailure) as error:
        parallelize(model, file, loss=torch.mean, inputs=inputs).trace(inputs, steps=0)
    errors.append(str(error.value))
    with pytest.raises(StrategyError, match=r"Strategy\.load"):
        parallelize(model, "plan.json", loss=torch.mean)  # type: ignore[arg-type]
    return losses, errors


def test_what_a_plan_would_not_heed_is_refused() -> None:
    """Values in a batch that are no tensors, an empty batch, an optimizer that is none. Dictionaries have no order."""
    [(losses, errors)] = pool(1).run(_passed)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    words = ("got 3.0", "got False", "batch of 0", "samples=2.5", "not a SGD", "returned None", "trace of 0")
    for error, word in zip(errors, words, strict=True):
        assert word in error


class Named(Net):
    """Takes its input by name only."""

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x)


def _by_name(file: str) -> float:
    with pytest.raises(ImportModelError, match=r"by name, or nested, pass an example batch: .*inputs=batch"):
        parallelize(Named(), read(file), loss=loss)
    x, target = batch()
    return parallelize(Named(), read(file), loss=loss, inputs={"x": x}, targets=target)(({"x": x}, target)).loss.item()


def test_a_plan_from_a_file_says_when_it_needs_an_example() -> None:
    x, target = batch()
    graph = import_model(Named(), {"x": x}, loss, targets=target)
    file = baseline("single", graph, ONE_RANK).to_file().model_dump_json()
    assert pool(1).run(_by_name, file) == pytest.approx([loss(Net()(x), target)["loss"].item()], rel=1e-9)


def _wrapped(file: str) -> float:
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True))
    return parallelize(wrapped, read(file), loss=loss)(batch()).loss.item()


def test_what_wraps_a_model_is_taken_off() -> None:
    x, target = batch()
    expected = loss(Net()(x), target)["loss"].item()
    assert pool(2).run(_wrapped, plan("data-parallel", 2)) == pytest.approx([expected] * 2, rel=1e-9)


def test_a_strategy_remembers_the_example_that_it_was_optimized_for() -> None:
    strategy = flexsearch.optimize(Net(), batch(), ONE_RANK, loss=loss, budget=5, options=Options(optimizer="adam"))
    assert strategy.example is not None
    inputs, targets, own = strategy.example
    assert inputs.is_meta and inputs.shape == (BATCH, 4) and targets.shape == (BATCH,) and own is loss
    assert "example" not in strategy.to_file().model_dump()


def _planned() -> tuple[list[str], list[float], int]:
    """What two searches find on this rank, and how many it makes itself."""
    searched: list[Any] = []
    own = Setting.search
    Setting.search = lambda *given, **more: searched.append(own(*given, **more)) or searched[-1]  # type: ignore
    try:
        plans = [flexsearch.optimize(Net(), batch(), "ethernet-1g:2", loss=loss, budget=5, processes=1) for _ in "ab"]
    finally:
        Setting.search = own  # type: ignore[method-assign]
    assert all(p.example is not None and p.example[2] is loss for p in plans)
    return [p.content_hash() for p in plans], [p.prediction.iteration_s for p in plans if p.prediction], len(searched)


def test_the_first_rank_searches_for_all() -> None:
    """Times as budget may give each rank another plan, and all would search on the same cores."""
    first, second = pool(2).run(_planned)
    assert first[:2] == second[:2] and (first[2], second[2]) == (2, 0)


def _on_its_own() -> list[str]:
    """Answers to two questions: at the first the first rank fails, and the second one it is not asked."""
    rank = torch.distributed.get_rank()

    def answer() -> str:
        if rank == 0:
            raise ValueError
        return "own"

    if rank == 0:
        with pytest.raises(ValueError):
            of_first_rank(answer, "failing", 60.0)
        return []
    return [of_first_rank(answer, "failing", 60.0), of_first_rank(answer, "unasked", 60.0, 0.1)]


def test_ranks_answer_for_themselves_where_the_first_one_does_not() -> None:
    assert pool(2).run(_on_its_own) == [[], ["own", "own"]]


def _digests(files: list[str], graph: Imported) -> tuple[list[str], str]:
    """Digests of plans as this rank lowers them, and the error if rank 1 had lowered another order."""
    digests = [lower(graph.graph, s, s.cluster, Costs(graph.graph, s.cluster)).digest for s in map(read, files)]
    own = vars(Lowered)["digest"]
    try:
        if torch.distributed.get_rank() == 1:
            Lowered.digest = property(lambda _: "another")  # type: ignore[assignment]
        with pytest.raises(RuntimeFailure) as error:
            distribute(Net(), graph, read(files[0]))
    finally:
        Lowered.digest = own
    return digests, str(error.value)


def test_ranks_that_would_run_other_tasks_stop_before_the_first_step() -> None:
    files = [plan(name, 2) for name in ("data-parallel", "megatron", "fsdp")]
    (first, error), (second, _) = pool(2).run(_digests, files, imported())
    assert first == second and len(set(first)) == 3
    assert "the ranks do not have the same order of tasks" in error
