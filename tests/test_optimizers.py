"""Optimizers of the loop: those that look at whole tensors run where the plan keeps these whole, and are else refused
on all ranks; so is one of the model's own parameters, which nothing trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.runtime import optimizers
from flexsearch.runtime.parallel import distribute
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests import test_loop, test_recipe_steps
from tests.ranks import pool
from tests.test_loop import assert_close, read
from tests.test_recipe_steps import Net

STEPS = 2


class Memory(nn.Module):
    """The gates of its weights are a dimension of their own in a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory = nn.LSTMCell(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.memory(x)[0]
        return hidden


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))


@cache
def imported(make: Callable[[], nn.Module] = Net) -> Imported:
    return import_with_constants(make(), batch(), F.cross_entropy)


def plan(name: str, make: Callable[[], nn.Module] = Net) -> str:
    return baseline(name, imported(make).graph, Topology.load("ethernet-1g:2")).to_file().model_dump_json()


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
    "Muon": lambda weights: torch.optim.Muon([w for w in weights if w.dim() == 2], lr=0.1),
    "LBFGS": lambda weights: torch.optim.LBFGS(weights, lr=0.5, max_iter=3),
}


def stepped(call: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Steps of an optimizer; ``call`` returns a loss and leaves gradients."""

    def closure() -> float:
        optimizer.zero_grad()
        return call().item()

    for _ in range(STEPS):
        optimizer.step(closure)


@cache
def alone(name: str) -> dict[str, Tensor]:
    model = Net()
    x, targets = batch()

    def call() -> Tensor:
        value = F.cross_entropy(model(x), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    stepped(call, MAKE[name](model.parameters()))
    return model.state_dict()


def told(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeFailure) as error:
        call()
    return str(error.value)


def _with_each(file: str, traced: Imported, has_matrices: bool) -> dict[str, dict[str, Tensor] | str]:
    """By optimizer, the weights after its steps, or what it is told."""
    answers: dict[str, dict[str, Tensor] | str] = {}
    for name, make in MAKE.items():
        step = distribute(Net(), traced, read(file))
        if name == "Muon" and not (has_matrices or step.sample_range[1]):
            make = MAKE["Adafactor"]  # Muon takes no list without matrices; this rank only feeds the other
        optimizer = make(step.parameters())
        try:
            stepped(lambda step=step: step(*batch()).loss, optimizer)  # type: ignore[misc]
            answers[name] = step.state_dict()
        except RuntimeFailure as error:
            answers[name] = str(error)
    return answers


@pytest.mark.parametrize(
    ("plan_of", "refused"),
    [("data-parallel", {}),
     ("placement", {"LBFGS": "LBFGS looks at all weights together, and rank 1 does not hold 'first.weight'"}),
     ("single", {"LBFGS": "LBFGS looks at all weights together, and rank 1 does not hold 'first.weight'"}),
     ("megatron", dict.fromkeys(MAKE, "rank 0 holds (4, 6) of 'first.weight', which is (8, 6)")),
     ("fsdp", dict.fromkeys(MAKE, "of 'first.weight', which is (8, 6)"))],
)  # fmt: skip
def test_optimizers_of_whole_tensors_run_as_alone_or_are_refused_on_all_ranks(
    plan_of: str, refused: dict[str, str]
) -> None:
    first, second = pool(2).run(_with_each, plan(plan_of), imported(), plan_of != "single")
    for name in MAKE:
        if name not in refused:
            assert_close(alone(name), first[name])
            assert_close(alone(name), second[name])
            continue
        for answer in (first[name], second[name]):
            assert all(words in answer for words in (refused[name], "--save data-parallel", "AdamW"))


@pytest.mark.parametrize(
    ("kind", "what"),
    [("SGD", ""), ("AdamW", ""), ("Lambda", ""), ("LarsonAdam", ""), ("Adafactor", "whole weights"),
     ("FusedLAMB", "whole weights"), ("LARS", "whole weights"), ("MuonWithAuxAdam", "whole weights"),
     ("DistributedShampoo", "whole weights"), ("FullBatchLBFGS", "all weights together")],
)  # fmt: skip
def test_optimizers_of_others_are_known_by_the_words_of_their_names(kind: str, what: str) -> None:
    own: type[torch.optim.Optimizer] = type(kind, (torch.optim.SGD,), {})
    assert optimizers.looks_at(own) == optimizers.looks_at(type("Own", (own,), {})) == what


def _of_a_group(file: str, traced: Imported) -> tuple[str, dict[str, Tensor]]:
    """Adafactor over what is whole, on the rank that has it; a group of others is added later."""
    step = distribute(Net(), traced, read(file))
    named = dict(step.named_parameters())
    factors = torch.optim.Adafactor([named.get("last.bias", nn.Parameter(torch.zeros(1)))], lr=0.1)
    other = nn.Linear(2, 2).double()  # a step of this process is none of its business
    other(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
    torch.optim.LBFGS(other.parameters()).step(lambda: 0.0)
    step(*batch())
    factors.step()
    state = step.state_dict()
    factors.add_param_group({"params": [named["first.weight"]]})
    step(*batch())
    torch.distributed.barrier()
    return told(factors.step), state


def test_what_an_optimizer_holds_decides() -> None:
    model = Net()
    x, targets = batch()
    F.cross_entropy(model(x), targets).backward()  # type: ignore[no-untyped-call]
    torch.optim.Adafactor([model.last.bias], lr=0.1).step()
    for error, state in pool(2).run(_of_a_group, plan("megatron"), imported()):
        assert "(4, 6) of 'first.weight'" in error
        assert_close(model.state_dict(), state)


def _in_the_short_cut(files: dict[str, str], traced: Imported) -> dict[str, str]:
    return {
        name: told(lambda file=file: distribute(Net(), traced, read(file), MAKE["LBFGS"]))  # type: ignore[misc]
        for name, file in files.items()
    }


def test_the_short_cut_refuses_them_as_the_step_is_made() -> None:
    """On a rank without weights, too, which makes no optimizer."""
    files = {name: plan(name) for name in ("single", "megatron")}
    first, second = pool(2).run(_in_the_short_cut, files, imported())
    assert all("LBFGS looks at all weights together" in e for e in (*first.values(), *second.values()))


def _otherwise_kept(files: list[str], net: Imported, memory: Imported, replicas: Imported) -> list[str]:
    steps = [
        distribute(make(), traced, read(file))
        for make, traced, file in zip(
            (test_loop.Net, Memory, test_recipe_steps.Net), (net, memory, replicas), files, strict=True
        )
    ]
    return [
        told(lambda step=step, kind=kind: MAKE[kind](step.parameters()).step(lambda: 0.0))  # type: ignore[misc]
        for step, kind in zip(steps, ("Adafactor", "Adafactor", "LBFGS"), strict=True)
    ]


def test_weights_that_no_plan_keeps_as_the_model_does_and_replicas_with_gradients_of_their_own() -> None:
    files = [test_loop.plan("data-parallel", 2), plan("data-parallel", Memory), test_recipe_steps.plan("gossip")]
    answers = pool(2).run(_otherwise_kept, files, test_loop.imported(), imported(Memory), test_recipe_steps.imported())
    for unread, gates, replicas in answers:
        assert "steps read a part of 'places.weight' alone" in unread and "at least for this weight" in unread
        assert "'memory.weight_ih' is kept as (4, 4, 6), where the model has (16, 6)" in gates
        assert "by a recipe have gradients of their own" in replicas


def _dropped(file: str, traced: Imported) -> tuple[int, int, int, bool]:
    """After steps were made and dropped: what is left of them."""
    gc.collect()
    before, hooks = len(optimizers._ALL), len(_global_optimizer_pre_hooks)
    models = []
    for _ in range(5):
        model = Net()
        step = distribute(model, traced, read(file))
        optimizer = torch.optim.AdamW(step.parameters())
        step(*batch())
        optimizer.step()
        models += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(step)]
    del model, step, optimizer
    gc.collect()
    alive = sum(reference() is not None for reference in models)
    return len(optimizers._ALL) - before, len(_global_optimizer_pre_hooks) - hooks, alive, hooks > 0


def test_nothing_is_left_of_steps_that_were_dropped() -> None:
    for steps, hooks, alive, watched in pool(2).run(_dropped, plan("megatron"), imported()):
        assert (steps, hooks if watched else hooks - 1, alive) == (0, 0, 0)


def _of_the_model(file: str, traced: Imported) -> list[str]:
    """What loops are told that give the model's parameters away, not the step's."""
    errors = []
    for use in (
        lambda weights: torch.optim.AdamW(weights).step(),
        lambda weights: nn.utils.clip_grad_norm_(weights, 1.0),
    ):
        model = Net()
        step = distribute(model, traced, read(file))
        step(*batch())
        errors.append(told(lambda: use(model.parameters())))  # noqa: B023
    model = Net()
    distribute(model, traced, read(file))
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # who trains the model itself may
    torch.optim.AdamW(model.parameters()).step()
    return errors


@pytest.mark.parametrize("name", ["data-parallel", "megatron"])
def test_the_models_own_parameters_are_refused_where_nothing_gives_them_gradients(name: str) -> None:
    for errors in pool(2).run(_of_the_model, plan(name), imported()):
        for error, what in zip(errors, ("AdamW", "clip_grad_norm_"), strict=True):
            assert f"{what} got parameters of the model" in error and "step.parameters()" in error
