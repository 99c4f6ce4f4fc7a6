"""What loops do besides stepping: evaluate between steps, clip as PyTorch does; and what the short cut cannot do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.parallel import parallelize
from tests.ranks import pool
from tests.test_loop import Net, Samples, assert_close, batch, loss, plan, read


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
