"""State: what the loss does not use, models without values, and what each rank is fed of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import import_model, import_with_constants
from flexsearch.runtime.parallel import Parallel, distribute, parallelize
from flexsearch.strategy import Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Tables(nn.Module):
    """A layer, a part that the loss does not use, and constants computed from a buffer and from a transient one. States
    of its first version are refused."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layer, self.pooler = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)
        self.register_buffer("places", torch.randn(6, generator=generator, dtype=torch.float64))
        self.register_buffer("rates", torch.arange(6, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.cat((self.places.sin(), self.places.cos())).view(2, 6).sum(0)
        return (torch.tanh(self.layer(x)) * table * (self.rates + 1).rsqrt()).square().mean()

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *more: Any) -> None:
        assert versions.get("version") == 2
        super()._load_from_state_dict(state, prefix, versions, *more)


class Tokens(nn.Module):
    """Logits for each token, with a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(torch.einsum("bsf,ts->btf", x, mask)).flatten(0, 1)


def _parallel(model: nn.Module, file: str, *, inputs: tuple[Tensor, ...] = (X,), **more: object) -> Parallel:
    imported = import_with_constants(model, inputs, **more)  # type: ignore[arg-type]
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    return distribute(model, imported, strategy, lambda parameters: torch.optim.SGD(parameters, lr=0.5))


def _file(model: nn.Module, name: str, **more: object) -> str:
    graph = import_model(model, **({"example_inputs": (X,)} | more))  # type: ignore[arg-type]
    return baseline(name, graph, Topology.load("ethernet-1g:2")).to_file().model_dump_json()


def _step(model: nn.Module, *inputs: Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(*inputs)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _kept(file: str) -> tuple[list[str], dict[str, Tensor], str]:
    """Names of the state before any step, the state after loading one, and the error of a state without a name."""
    parallel = _parallel(Tables(), file)
    names = list(parallel.state_dict())
    torch.manual_seed(5)
    state = {name: torch.randn_like(tensor) for name, tensor in Tables().state_dict().items()}
    parallel.load_state_dict(state)
    parallel.step(X)
    found = parallel.state_dict()
    parallel.load_state_dict(found)
    with pytest.raises(RuntimeFailure) as error:
        parallel.load_state_dict({n: t for n, t in found.items() if n != "pooler.weight"})
    return names, found, str(error.value)


@pytest.mark.parametrize("plan", ["data-parallel", "megatron", "fsdp"])
def test_parameters_that_the_loss_does_not_use_are_part_of_the_state(plan: str) -> None:
    torch.manual_seed(5)
    model = Tables()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn_like(tensor))
    _step(model, X)
    expected = model.state_dict()
    for names, found, error in pool(2).run(_kept, _file(Tables(), plan)):
        assert names == list(expected) == list(found)
        Tables().load_state_dict(found)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)
        assert "pooler.weight" in error


def _on_meta(transient: bool) -> nn.Module:
    with torch.device("meta"):
        model = Tables()
    if not transient:
        model.register_buffer("rates", Tables().rates, persistent=False)
    return model


def _from_meta(file: str) -> tuple[float, dict[str, Tensor]]:
    parallel = _parallel(_on_meta(transient=False), file)
    with pytest.raises(RuntimeFailure, match="call load_state_dict or load"):
        parallel.step(X)
    torch.manual_seed(3)
    parallel.load_state_dict(Tables().state_dict())
    return float(parallel.step(X)), parallel.state_dict()


@pytest.mark.parametrize("plan", ["data-parallel", "megatron"])
def test_a_model_on_the_meta_device_is_complete_once_a_state_is_loaded(plan: str) -> None:
    """The constants that follow from buffers, too: their values come with the state."""
    torch.manual_seed(3)
    model = Tables()
    loss = _step(model, X)
    file = _file(_on_meta(transient=False), plan)
    assert file == _file(Tables(), plan)
    for found, state in pool(2).run(_from_meta, file):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


class Built(nn.Module):
    """Layers that draw their weights when they are made, one of them tied, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64)
        self.same = nn.Linear(6, 6, bias=False, dtype=torch.float64)
        self.same.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.norm(self.layer(x))).square().mean()


class Bare(Built):
    """A weight of its own that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


def _drawn(file: str, bare: str) -> tuple[dict[str, Tensor], str, bool]:
    """The state of a model that was made on the meta device, and the error of one that cannot fill itself."""
    before = torch.get_rng_state()
    with torch.device("meta"):
        model, other = Built(), Bare()
    state = parallelize(model, _read(file), seed=5, initialise=True).state_dict()
    with pytest.raises(RuntimeFailure) as error:
        parallelize(other, _read(bare), initialise=True)
    kept = torch.equal(before, torch.get_rng_state()) and all(p.is_meta for p in model.parameters())
    return state, str(error.value), kept


def _read(file: str) -> Strategy:
    return Strategy.from_file(StrategyFile.model_validate_json(file))


def test_a_model_on_the_meta_device_draws_the_weights_that_it_has_when_it_is_built() -> None:
    torch.manual_seed(5)
    expected = Built().state_dict()
    for state, error, kept in pool(2).run(_drawn, _file(Built(), "megatron"), _file(Bare(), "megatron")):
        assert kept and list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert "'the model' (Bare) has weights but no reset_parameters" in error


def _lost(file: str, make: Callable[[], nn.Module]) -> str:
    with pytest.raises(RuntimeFailure) as error:
        _parallel(make(), file)
    return str(error.value)


class Masked(nn.Module):
    """A mask that no state has, which its module's function may forget."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.where(self.mask, self.weight, 0.0)).square().mean()


def _masked(file: str) -> tuple[float, str]:
    """The loss of a model on the meta device whose function fills the mask, and the error where it does not."""
    with torch.device("meta"):
        model, other = Masked(), Masked()

    def fill(module: Any) -> None:
        nn.init.ones_(module.weight)
        module.mask.fill_(True)

    value = float(parallelize(model, _read(file), initialise=fill)(X).loss)
    with pytest.raises(RuntimeFailure) as error:
        parallelize(other, _read(file), initialise=lambda module: nn.init.ones_(module.weight))  # type: ignore[arg-type]
    return value, str(error.value)


def test_what_no_state_has_comes_from_the_function_that_fills_modules() -> None:
    value = Masked()(X).item()
    for found, error in pool(2).run(_masked, _file(Masked(), "megatron")):
        assert found == pytest.approx(value, rel=1e-9) and "'the model' left 'mask' without values" in error


def _without_rates() -> nn.Module:
    return _on_meta(transient=True)


class Attribute(nn.Module):
    """A constant from a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.table = torch.ones(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.table.exp()).sum()


def _attribute() -> nn.Module:
    with torch.device("meta"):
        return Attribute()


@pytest.mark.parametrize(("make", "problem"), [(_without_rates, "buffer 'rates'"), (_attribute, "is no buffer")])
def test_values_that_no_state_can_bring_are_an_error(make: Callable[[], nn.Module], problem: str) -> None:
    for error in pool(2).run(_lost, _file(make(), "data-parallel"), make):
        assert problem in error and "on the CPU" in error


def _set_up(file: str) -> int:
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    step = parallelize(nn.Linear(6, 3), strategy, loss=torch.sum)
    return step.variants.traceable().training(VAST // 2).graph.batch


VAST = 2**40
"""Samples that fit no memory."""


def test_no_rank_builds_a_global_batch_to_set_a_step_up() -> None:
    """Nor to trace it again for another batch size, or where the model has weights and the example has none."""
    graph = import_model(nn.Linear(6, 3), torch.empty(VAST, 6, device="meta"), torch.sum)
    file = baseline("data-parallel", graph, Topology.load("ethernet-1g:2")).to_file().model_dump_json()
    assert pool(2).run(_set_up, file) == [VAST // 2] * 2


def _given() -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    return (x, mask), torch.randint(5, (12,), generator=generator)


def _fed(file: str) -> tuple[tuple[int, int], float, str]:
    (x, mask), targets = _given()
    parallel = _parallel(Tokens(), file, inputs=(x, mask), loss=F.cross_entropy, targets=targets)
    low, high = parallel.sample_range
    loss = parallel.step((x[low:high], mask), targets[3 * low : 3 * high])
    with pytest.raises(RuntimeFailure) as error:
        parallel.step((x[low:high], mask[:1]), targets)
    return (low, high), float(loss), str(error.value)


def _short(file: str) -> str:
    (x, mask), targets = _given()
    parallel = _parallel(Tokens(), file, inputs=(x, mask), loss=F.cross_entropy, targets=targets)
    with pytest.raises(RuntimeFailure) as error:
        parallel.step((x[:, :2], mask), targets)
    return str(error.value)


def test_sequences_of_another_length_are_refused_with_a_remedy() -> None:
    (x, mask), targets = _given()
    file = _file(Tokens(), "data-parallel", example_inputs=(x, mask), loss=F.cross_entropy, targets=targets)
    for error in pool(2).run(_short, file):
        assert "not float64 of shape (4, 2, 6). A plan is for one shape: pad or cut samples to it" in error


def test_a_ranks_samples_are_counted_in_samples_where_targets_are_flattened_and_a_mask_is_shared() -> None:
    torch.manual_seed(0)
    model = Tokens()
    (x, mask), targets = _given()
    loss = F.cross_entropy(model(x, mask), targets).item()
    file = _file(model, "data-parallel", example_inputs=(x, mask), loss=F.cross_entropy, targets=targets)
    torch.manual_seed(0)
    answers = pool(2).run(_seeded, file)
    assert [samples for samples, _, _ in answers] == [(0, 2), (2, 4)]
    for _, found, error in answers:
        assert found == pytest.approx(loss, rel=1e-9)
        assert "input_1 must be float64 of shape (3, 3) (the whole batch), not float64 of shape (1, 3)" in error


def _seeded(file: str) -> tuple[tuple[int, int], float, str]:
    torch.manual_seed(0)
    return _fed(file)
