"""What loops do besides stepping: evaluate between steps, clip as PyTorch does, average weights, add penalties; and
what the short cut cannot do, or a plan would not heed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import import_model
from flexsearch.runtime.parallel import Parallel, parallelize
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool
from tests.test_loop import Net, Samples, assert_close, batch, imported, loss, plan, read, stepped


def _evaluated(file: str, told: bool) -> list[Tensor]:
    """Predictions behind steps on the same batches, and on batches of the user's own. ``told``: every call is told the
    size."""
    step = parallelize(Net(), read(file), loss=loss)
    own = batch(seed=9) if step.sample_range[1] else None
    answers: list[Tensor] = []

    def predict(part: tuple[Tensor, Tensor] | None, samples: int) -> None:
        with step.evaluating():
            outputs = step.forward(part, samples=samples if told else None, everything=True)
        answers.append(outputs["logits"])

    sizes = iter((6, 6, 4))
    for part in step.loader(Samples(), seed=3):
        samples = next(sizes)
        predict(own, 6)
        answers.append(step(part, samples=samples if told else None).loss.detach())
        predict(part, samples)
        predict(own, 6)
        predict(part, samples)
    predict(part, samples)
    answers.append(step(own, samples=6 if told else None).loss.detach())
    predict(own, 6)
    return answers


@pytest.mark.parametrize("name", ["data-parallel", "single"])
def test_a_loop_may_evaluate_the_batch_that_it_has_stepped_on(name: str) -> None:
    """The last one, which is smaller, too; and other batches between. With ``single`` the second rank gets None."""
    [expected] = pool(1).run(_evaluated, plan("single", 1), True)
    for answers in pool(2).run(_evaluated, plan(name, 2), False):
        torch.testing.assert_close(answers, expected, rtol=1e-9, atol=1e-11)


def _clipped(file: str) -> tuple[list[float], dict[str, Tensor], str]:
    step = parallelize(Net(), read(file), loss=loss)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
    norms = []
    for number in range(2):
        step(batch(seed=number))
        rows = step.parameters() if number else [p for p in step.parameters() if p.grad is not None]
        norms.append(nn.utils.clip_grad_norm_(rows, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    state = step.state_dict()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    norms.append(nn.utils.clip_grad_norm_(other.parameters(), 9.0).item())
    step(batch())
    torch.distributed.barrier()
    with pytest.raises(RuntimeFailure) as error:
        nn.utils.clip_grad_norm_([*step.parameters(), *other.parameters()], 1.0)
    return norms, state, str(error.value)


@pytest.mark.parametrize("name", ["megatron", "fsdp", "single"])
def test_clipping_as_pytorch_does_is_by_the_norm_of_the_whole_model(name: str) -> None:
    """With ``single``, a rank that has no gradients at all gives none."""
    model, norms = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(2):
        optimizer.zero_grad()
        x, target = batch(seed=number)
        loss(model(x), target)["loss"].backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05).item())
        optimizer.step()
    for found, state, error in pool(2).run(_clipped, plan(name, 2)):
        assert found == pytest.approx([*norms, 3**0.5], rel=1e-6)
        assert_close(model.state_dict(), state)
        assert "step.clip_grad_norm_(max_norm)" in error


def _short_cut(file: str) -> list[str]:
    step = parallelize(Net(), read(file), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    before, errors = step.state_dict(), []
    for call in (lambda: step(batch()), lambda: step.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeFailure) as error:
            call()
        errors.append(str(error.value))
    assert_close(before, step.state_dict(), 0.0)
    step.step(*batch())
    return errors


def test_the_short_cut_refuses_what_needs_gradients() -> None:
    [errors] = pool(1).run(_short_cut, plan("single", 1))
    assert all("parallelize(optimizer=...) has every step update" in error for error in errors)
    assert all("make the optimizer from step.parameters()" in error for error in errors)


def _traced(file: str, short_cut: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """The state and the number of the step's random draws, before and after a trace."""
    make = partial(torch.optim.SGD, lr=0.1) if short_cut else None
    step = parallelize(Net(0.3), read(file), loss=loss, optimizer=make)
    if short_cut:
        step.step(*batch())
    before, draws = step.state_dict(), [step.context.step]
    assert step.trace(batch(), steps=1).spans
    return before, step.state_dict(), [*draws, step.context.step]


@pytest.mark.parametrize("short_cut", [False, True])
def test_a_trace_leaves_running_statistics_and_dropout_as_they_were(short_cut: bool) -> None:
    for before, after, (first, last) in pool(2).run(_traced, plan("megatron", 2, Net(0.3)), short_cut):
        assert_close(before, after, 0.0)
        assert first == last


def _told(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeFailure) as error:
        call()
    return str(error.value)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.linear(x * mask)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _passed() -> tuple[list[float], list[bool], list[str]]:
    """Losses and outputs of batches that are passed as several arguments; what others are told."""
    step = stepped(plan("single", 1), imported())
    x, target = batch()
    losses = [step((x, target)).loss.item(), step(x, target).loss.item()]
    with step.evaluating():
        first, second = step.forward(x), step.forward(x, target)
    errors = [_told(lambda: step(x, x, target)), _told(lambda: parallelize(Net(), step.strategy, loss=loss)(x=x))]
    named: dict[str, Any] = {"mask": x.abs(), "x": x, "labels": target}
    file = baseline("single", import_model(Named(), named), Topology.load("ethernet-1g:1"))
    of_names = parallelize(Named(), file, inputs=named)
    losses += [of_names(named).loss.item(), of_names({"x": x, "mask": x.abs(), "labels": target}).loss.item()]
    errors += [_told(lambda: of_names(**named)), _told(lambda: of_names.forward(**named))]
    errors.append(_told(lambda: of_names(x, x.abs(), target)))  # in another order than they were imported in
    return losses, [torch.equal(first["logits"], second["logits"])], errors


def test_a_batch_may_be_passed_as_arguments_where_that_is_unambiguous() -> None:
    [(losses, outputs, errors)] = pool(1).run(_passed)
    x, target = batch()
    alone = loss(Net()(x), target)["loss"].item(), Named()(x, x.abs(), target)["loss"].item()
    assert losses == pytest.approx([alone[0]] * 2 + [alone[1]] * 2, rel=1e-12) and all(outputs)
    words = [
        "step((inputs, targets))",
        "no argument x. Pass a batch",
        "as one dict",
        "as one dict",
        "Pass a dict of these",
    ]
    for error, word in zip(errors, words, strict=True):
        assert word in error


HOOKS: dict[str, Callable[[Net, Parallel], object]] = {
    "layer 'first' has a forward hook": lambda net, step: net.first.register_forward_hook(lambda *_: None),
    "layer 'norm' has a forward pre-hook": lambda net, step: net.norm.register_forward_pre_hook(lambda *_: None),
    "the model has a backward hook": lambda net, step: net.register_full_backward_hook(lambda *_: None),
    "layer 'head' has a backward pre-hook": lambda net, step: net.head.register_full_backward_pre_hook(lambda *_: None),
    "parameter 'head.weight' of the model": lambda net, step: net.head.weight.register_hook(lambda g: 2 * g),
    " of the step has a hook": lambda net, step: next(step.parameters()).register_hook(lambda g: 2 * g),
    "of the step has a hook on": lambda net, step: next(step.parameters()).register_post_accumulate_grad_hook(
        lambda p: None
    ),
}  # fmt: skip


def _hooked(file: str) -> list[str]:
    errors = []
    for put in HOOKS.values():
        net = Net()
        step = stepped(file, imported(), net)
        step(batch())
        put(net, step)
        torch.distributed.barrier()
        errors.append(_told(lambda step=step: step(batch())))  # type: ignore[misc]
    return errors


def test_hooks_that_a_plan_would_not_call_are_refused() -> None:
    for errors in pool(2).run(_hooked, plan("megatron", 2)):
        for error, words in zip(errors, HOOKS, strict=True):
            assert words in error and "Remove it" in error


def _doubled(net: Net) -> Net:
    net.first.register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


def _hooked_before(file: str) -> list[float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = parallelize(_doubled(Net()), read(file), loss=loss)
    told = [str(w.message) for w in caught if "forward hook: what it computes is in the plan" in str(w.message)]
    assert len(told) == (step.rank == 0)
    return [step(batch()).loss.item() for _ in range(2)]


def test_a_hook_from_before_the_plan_is_a_part_of_it() -> None:
    x, target = batch()
    alone = loss(_doubled(Net())(x), target)["loss"].item()
    for losses in pool(2).run(_hooked_before, plan("megatron", 2, _doubled(Net()))):
        assert losses == pytest.approx([alone] * 2, rel=1e-9)


AVERAGED = 4
"""Steps; weights are averaged after each from the second on."""


def _loop(
    run: Callable[[int], object], weights: nn.Module, mean: AveragedModel, optimizer: torch.optim.Optimizer
) -> None:  # fmt: skip
    """Stochastic weight averaging as PyTorch's documentation has it, with a penalty that is added by hand."""
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for number in range(AVERAGED):
        run(number)
        nothing = torch.zeros((), requires_grad=True)  # on a rank without weights
        penalty = sum((p.square().sum() for p in weights.parameters() if p.grad is not None), nothing)
        (0.01 * penalty).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if number:
            mean.update_parameters(weights)
            scheduler.step()


def _averaged(file: str) -> tuple[dict[str, Tensor], list[str]]:
    step = stepped(file, imported())
    weights = nn.ParameterList(step.parameters())
    mean = AveragedModel(weights)
    _loop(lambda number: step(batch(seed=number)), weights, mean, torch.optim.SGD(step.parameters(), lr=0.3))
    with torch.no_grad():
        for parameter, value in zip(step.parameters(), mean.module.parameters(), strict=True):
            parameter.copy_(value)
    model = Net()
    model.load_state_dict(step.state_dict())
    update_bn([batch(seed=9)], model)
    errors = [_told(lambda: AveragedModel(step)), _told(lambda: copy.copy(step))]  # type: ignore[arg-type]
    return model.state_dict(), errors


@pytest.mark.parametrize("name", ["data-parallel", "megatron", "fsdp", "single"])
def test_averages_and_penalties_over_a_steps_parameters_are_those_of_the_model(name: str) -> None:
    model = Net()
    mean = AveragedModel(model)

    def run(number: int) -> None:
        x, target = batch(seed=number)
        loss(model(x), target)["loss"].backward()  # type: ignore[no-untyped-call]

    _loop(run, model, mean, torch.optim.SGD(model.parameters(), lr=0.3))
    model.load_state_dict({name: mean.module.state_dict()[name] if name in dict(model.named_parameters()) else value
                           for name, value in model.state_dict().items()})  # fmt: skip
    update_bn([batch(seed=9)], model)
    for state, errors in pool(2).run(_averaged, plan(name, 2)):
        assert_close(model.state_dict(), state)
        assert all("cannot be copied" in error and "ParameterList" in error for error in errors)


class _Told(nn.Module):
    """Returns a prediction and what it is not computed from: a weight that the loss reads, a buffer, a constant, an
    input, and nothing."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("places", torch.arange(3))
        self.ones = torch.ones(2, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        others = {"scale": self.scale, "places": self.places, "ones": self.ones, "none": None}
        return {"logits": self.layer(x), **others, "x": x}


def _scaled(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"] * output["scale"], targets)


def _told_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 1])


def _everything_told(file: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Predictions before and after a step."""
    torch.manual_seed(0)
    step = parallelize(_Told(), read(file), loss=_scaled)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    answers = []
    for _ in range(2):
        with step.evaluating():
            answers.append(copy.deepcopy(step.forward(_told_batch(), everything=True)))  # weights are those of the step
        step(_told_batch())
        optimizer.step()
    return answers[0], answers[1]


@pytest.mark.parametrize("name", ["data-parallel", "fsdp"])
def test_a_model_may_return_what_it_computes_nothing_from(name: str) -> None:
    torch.manual_seed(0)
    model, (x, targets) = _Told(), _told_batch()
    graph = import_model(model, x, _scaled, targets=targets)
    file = baseline(name, graph, Topology.load("ethernet-1g:2")).to_file().model_dump_json()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = copy.deepcopy({key: None if y is None else y.detach() for key, y in model(x).items()})
    _scaled(model(x), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for answers in pool(2).run(_everything_told, file):
        for answer, whole in zip(answers, (expected, model(x)), strict=True):
            assert list(answer) == list(whole)
            for key, value in whole.items():
                assert (answer[key] is None) == (value is None)
                if value is not None:
                    torch.testing.assert_close(answer[key], value.detach(), rtol=1e-9, atol=1e-12)
