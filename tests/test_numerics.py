"""Promise 1: every strategy computes what one device does: loss, gradients, and weights after three steps."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flexsearch import directions
from flexsearch.cost import Costs
from flexsearch.directions import Directions
from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower.lowering import lower
from flexsearch.runtime import casts, wire
from flexsearch.runtime import parts as runtime_parts
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.runtime.parts import Part, Plan
from flexsearch.search.hybrid import LayoutSearch
from flexsearch.strategy import Options, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.random_strategies import strategies
from tests.ranks import ON_GPUS, cluster, on_gpus, pool
from tests.small_models import NAMES, Case, Dropped, case
from tests.staged_plans import deep, staged_plan, tokens_loss
from tests.test_states import slow_between_hosts

SEED = os.environ.get("FLEXSEARCH_NUMERICS_SEED")
"""Other cases than CI's fixed ones."""

CASES = int(os.environ.get("FLEXSEARCH_NUMERICS_CASES", "4"))
"""Random strategies for each model; thousands offline, about a hundred in all in CI, with those of other files."""

COSTLY = {
    "recurrent": 2, "towers": 2, "lookups": 2, "rotary": 2,
    "translation": 3, "statistics": 3, "images": 3, "experts": 3,
}  # fmt: skip
"""Models of many small operators: so many times fewer cases, which take as long as those of the others."""

STEPS, RATE = 3, 0.5


History = list[tuple[float, dict[str, Tensor]]]
"""Loss and state before the first step (loss 0) and after each one."""

NORM, EPSILON, NOISE = 0.1, 1e-5, 1e-11
"""AdamW's steps: the gradient is clipped to ``NORM``. AdamW divides a gradient by its own size plus ``EPSILON``: one
that cancels to rounding noise of 1e-15 moves its weight by noise, too."""


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.05, eps=EPSILON)


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, as ``Parallel.parameter_groups`` makes them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip


def _history(parallel: Parallel, inputs: Any, targets: Any, adamw: bool, steps: int = STEPS) -> History:
    """Of training on this rank: by SGD within the step, or by AdamW and clipping in a loop around it."""
    history = [(0.0, parallel.state_dict())]
    if not adamw:
        for _ in range(steps):
            history.append((parallel.step(inputs, targets).item(), parallel.state_dict()))
        return history
    optimizer = _adamw(parallel.parameter_groups(decay=0.1))
    history[0][1]["norm"] = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        loss = parallel((inputs, targets)).loss
        norm = parallel.clip_grad_norm_(NORM)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), parallel.state_dict() | {"norm": norm}))
    return history


@cache
def _imported(name: str, dtype: str = "float64") -> Imported:
    """Traced once, for all ranks: tracing takes longer than everything else together."""
    made = case(name, dtype)
    tracing = Tracing(batch_norm_groups=made.groups)
    return import_with_constants(made.model, made.inputs, made.loss, targets=made.targets, tracing=tracing)


def _single(name: str, dtype: str = "float64", steps: int = STEPS, adamw: bool = False) -> History:
    """On one device, in plain PyTorch."""
    made = case(name, dtype)
    optimizer = _adamw(_groups(made.model)) if adamw else _sgd(list(made.model.parameters()))
    norm, history = {"norm": torch.zeros((), dtype=torch.float64)} if adamw else {}, []
    history.append((0.0, {k: v.clone() for k, v in made.model.state_dict().items()} | norm))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss_and_gradients(made)
        if adamw:
            trained = [p for p in made.model.parameters() if p.grad is not None]
            norm = {"norm": torch.nn.utils.clip_grad_norm_(trained, NORM).double()}
        optimizer.step()
        history.append((loss.item(), {k: v.clone() for k, v in made.model.state_dict().items()} | norm))
    return history


def _loss_and_gradients(made: Case) -> Tensor:
    """Of the whole batch; of its groups one by one, the first of which alone counts for the running statistics."""
    losses: list[Tensor] = []
    for *inputs, targets in zip(*(x.chunk(made.groups) for x in (*made.inputs, made.targets)), strict=True):
        buffers = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
        losses.append(made.loss(made.model(*inputs), targets) / made.groups)
        losses[-1].backward()
        if len(losses) > 1:
            made.model.load_state_dict(buffers, strict=False)
    return torch.stack(losses).sum()


def _parallel(
    name: str, imported: Imported, file: str, local: bool, dtype: str = "float64", steps: int = STEPS,
    compile: bool | str = False, adamw: bool = False,
) -> History:  # fmt: skip
    """The same on this rank under the strategy. ``local``: feed only the samples that the rank needs."""
    made = case(name, dtype)
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(made.model, imported, strategy, None if adamw else _sgd, compile=compile)
    inputs, targets = made.inputs, made.targets
    if local:
        low, high = parallel.sample_range
        inputs, targets = tuple(t[low:high] for t in inputs), targets[low:high]
    return _history(parallel, inputs, targets, adamw, steps)


def agree(expected: History, found: History, digits: float = 1e-9, noise: float = 1e-14) -> None:
    """Losses, gradients (differences of the weights over the first step) and weights agree to ``digits``. ``noise``:
    how far weights may differ in any case, such as a bias before batch norm, whose gradient cancels."""
    for step, ((loss, state), (other_loss, other)) in enumerate(zip(expected, found, strict=True)):
        assert other_loss == pytest.approx(loss, rel=digits), f"loss of step {step}"
        assert list(state) == list(other)
        for name in state:
            if state[name].is_floating_point():
                change = (state[name] - expected[0][1][name], other[name] - found[0][1][name])
                scale = max(change[0].abs().max().item(), 1e-6)
                slack = digits * scale + (noise if digits < 1e-6 else 1e-5)
                assert (change[0] - change[1]).abs().max().item() <= slack, f"{name} after step {step}"
            else:
                assert torch.equal(state[name], other[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_any_strategy_computes_what_one_device_does(name: str) -> None:
    imported = _imported(name)
    graph, expected = imported.graph, [_single(name, adamw=adamw) for adamw in (False, True)]

    @settings(
        max_examples=max(1, CASES // COSTLY.get(name, 1)), derandomize=SEED is None, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # shrinking would start ranks again and again
    )  # fmt: skip
    @given(data=st.data(), ranks=st.integers(1, 4), local=st.booleans(), adamw=st.booleans())
    def check(data: Any, ranks: int, local: bool, adamw: bool) -> None:
        topology = cluster(ranks)
        strategy = data.draw(strategies(graph, topology))
        file = strategy.to_file().model_dump_json()
        note(file)
        work = partial(_parallel, adamw=adamw)
        for found in pool(ranks).run(work, name, imported, file, local):
            agree(expected[adamw], found, noise=NOISE if adamw else 1e-14)

    (check if SEED is None else seed(int(SEED))(check))()


@pytest.mark.parametrize("name", ["convolutions", "ghosts", "decoder"])
def test_float32_too_in_the_layouts_that_are_fast_there(name: str) -> None:
    imported = _imported(name, "float32")
    graph, expected = imported.graph, _single(name, "float32", 1)

    @settings(
        max_examples=max(1, CASES // 3), derandomize=SEED is None, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(data=st.data(), ranks=st.integers(1, 4))
    def check(data: Any, ranks: int) -> None:
        strategy = data.draw(strategies(graph, cluster(ranks)))
        file = strategy.to_file().model_dump_json()
        note(file)
        for found in pool(ranks).run(_parallel, name, imported, file, False, "float32", 1):
            agree(expected, found, 2e-4)

    check()


def test_hosts_add_up_the_gradients_of_the_parts_that_each_of_them_has() -> None:
    imported, topology = _imported("mlp"), slow_between_hosts()
    topology = on_gpus(topology) if ON_GPUS else topology
    strategy = baseline("hsdp", imported.graph, topology)
    lowered = lower(imported.graph, strategy, topology, Costs(imported.graph, topology))
    forms = {w.plan.sync.form for w in lowered.weights if w.plan.sync is not None}
    assert forms & {"reduce_scatter + all_reduce", "exchange + all_reduce"}
    for found in pool(4).run(_parallel, "mlp", imported, strategy.to_file().model_dump_json(), False):
        agree(_single("mlp"), found)


STAGED = int(os.environ.get("FLEXSEARCH_STAGED_CASES", "4"))
"""Random plans with stages and microbatches."""


def _staged(imported: Imported, file: str, adamw: bool) -> History:
    """Of a plan, on this rank."""
    model, tokens, targets = deep()
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(model, imported, strategy, None if adamw else _sgd)
    return _history(parallel, (tokens,), targets, adamw)


def test_any_staged_plan_computes_what_one_device_does() -> None:
    """Dropout masks are those of the whole batch, so one device is a plan, too. Every third case trains by AdamW with
    clipping."""
    model, tokens, targets = deep()
    imported = import_with_constants(model, (tokens,), tokens_loss, targets=targets)
    graph = imported.graph
    alone = baseline("single", graph, cluster(1))
    single = alone.to_file().model_dump_json()
    expected = [pool(1).run(_staged, imported, single, adamw)[0] for adamw in (False, True)]
    for number in range(STAGED):
        plan, adamw = staged_plan(graph, random.Random(int(SEED or 0) + number), cluster=cluster), number % 3 == 2
        file, ranks = plan.to_file().model_dump_json(), pool(len(plan.cluster.devices))
        for rank, history in enumerate(ranks.run(_staged, imported, file, adamw)):
            try:
                agree(expected[adamw], history, noise=NOISE if adamw else 1e-14)
            except AssertionError as error:
                raise AssertionError(f"plan {number}, rank {rank}: {file}") from error


def test_replicas_inside_hosts_with_stages_across_them_compute_what_one_device_does() -> None:
    model, tokens, targets = deep()
    imported = import_with_constants(model, (tokens,), tokens_loss, targets=targets)
    topology = on_gpus(slow_between_hosts()) if ON_GPUS else slow_between_hosts()
    search = LayoutSearch(imported.graph, topology, Options(), None, 1e9)
    layout = next(f for key in search.numbers.layouts() if (f := key.layout).widths == (2, 2) and f.microbatches == 2)
    candidate = search.evaluate(layout, Options())
    assert candidate is not None
    plan = search._result(candidate, "").strategy
    assert [stage.mesh for stage in plan.stages] == [(0, 1), (2, 3)] and plan.microbatches == 2
    single = baseline("single", imported.graph, cluster(1)).to_file().model_dump_json()
    expected = pool(1).run(_staged, imported, single, False)[0]
    for history in pool(4).run(_staged, imported, plan.to_file().model_dump_json(), False):
        agree(expected, history)


def _apart(imported: Imported, file: str) -> tuple[History, int, int]:
    """Of a plan, on this rank, where parts of any size go in messages of their own, and messages of any size to lower
    ranks over connections of their own, as if all were on one host; how often the one makes several messages, and how
    many go the other way."""
    messages, group, more, lower = Plan.messages, Directions.group, [0], [0]

    def counted(plan: Plan, parts: Sequence[Part]) -> list[list[Part]]:
        made = messages(plan, parts)
        more[0] += len(made) > 1
        return made

    def counted_group(ways: Directions, source: int, destination: int, nbytes: int) -> dist.ProcessGroup | None:
        chosen = group(ways, source, destination, nbytes)
        lower[0] += chosen is not None
        return chosen

    def ways(topology: Topology, timeout_s: float) -> Directions:
        return Directions(["host"] * len(topology.devices), timedelta(seconds=timeout_s))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "directions", ways)
        patch.setattr(runtime_parts, "ALONE_BYTES", 1)
        patch.setattr(runtime_parts, "COPIED_BYTES", 1)
        patch.setattr(directions, "LARGE_BYTES", 1)
        patch.setattr(Plan, "messages", counted)
        patch.setattr(Directions, "group", counted_group)
        return _staged(imported, file, False), more[0], lower[0]


def test_parts_in_messages_and_messages_on_connections_of_their_own_arrive_where_they_belong() -> None:
    model, tokens, targets = deep()
    imported = import_with_constants(model, (tokens,), tokens_loss, targets=targets)
    alone = baseline("single", imported.graph, cluster(1)).to_file().model_dump_json()
    (expected,), several, downwards = pool(1).run(_staged, imported, alone, False), 0, 0
    for number in range(2000, 2006):
        plan = staged_plan(imported.graph, random.Random(number), cluster=cluster)
        file, ranks = plan.to_file().model_dump_json(), pool(len(plan.cluster.devices))
        for history, more, down in ranks.run(_apart, imported, file):
            agree(expected, history)
            several, downwards = several + more, downwards + down
    assert several > 0 and downwards > 0


def _own_connections(hosts: list[str]) -> list[tuple[int, int]]:
    """Between which ranks large messages have a connection of their own, from one to the other."""
    ways, size = Directions(hosts, timedelta(seconds=60)), range(len(hosts))
    return [(a, b) for a in size for b in size if a != b and ways.group(a, b, directions.LARGE_BYTES) is not None]


def test_only_messages_inside_a_host_go_over_connections_of_their_own() -> None:
    assert pool(3).run(_own_connections, ["a", "b", "a"]) == [[(2, 0)]] * 3
    assert pool(3).run(_own_connections, ["a", "b", "c"]) == [[]] * 3


def _precise(imported: Imported, file: str, together: bool = False) -> tuple[list[float], set[torch.dtype]]:
    """Losses, and the types of the weights that the optimizer sees. ``together``: casts are made as on a GPU."""
    model, tokens, targets = deep()
    plan = Strategy.from_file(StrategyFile.model_validate_json(file))
    before = casts.worthwhile
    casts.worthwhile = lambda device: together or before(device)
    try:
        parallel = distribute(model.float(), imported, plan, _sgd)
    finally:
        casts.worthwhile = before
    losses = [parallel.step((tokens,), targets).item() for _ in range(STEPS)]
    return losses, {weight.dtype for weight in parallel.stored.weights.values()}


def test_bf16_trains_float32_weights_to_about_the_same_losses() -> None:
    model, tokens, targets = deep()
    imported = import_with_constants(model.float(), (tokens,), tokens_loss, targets=targets)
    exact = baseline("fsdp", imported.graph, cluster(2))
    plans = [exact, *(staged_plan(imported.graph, random.Random(number), cluster=cluster) for number in range(6))]
    (expected, _), _ = pool(2).run(_precise, imported, exact.to_file().model_dump_json())
    assert sum(plan.microbatches > 1 for plan in plans) > 1
    for plan in plans:
        plan.options = plan.options.model_copy(update={"precision": "bf16"})
        file, ranks = plan.to_file().model_dump_json(), pool(len(plan.cluster.devices))
        answers = ranks.run(_precise, imported, file)
        assert ranks.run(_precise, imported, file, True) == answers
        for losses, types in answers:
            assert types <= {torch.float32}
            assert losses != expected and losses == pytest.approx(expected, rel=0.05), file


class _Masked(nn.Module):
    """Attention whose mask is filled with the least of float32, once as a number, once as a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        least, size = torch.finfo(x.dtype).min, tokens.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        x = x + (x @ x.mT).masked_fill(tokens[:, None] == 3, least).softmax(-1) @ x
        x = x + (x @ x.mT + torch.full((size, size), least, device=x.device) * later).softmax(-1) @ x
        made: Tensor = self.head(x)
        return made


def _masked_losses(imported: Imported, file: str, tokens: Tensor, targets: Tensor) -> list[float]:
    parallel = distribute(_Masked(), imported, Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    return [parallel.step((tokens,), targets).item() for _ in range(STEPS)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masks_of_float32_stay_finite_in_half_precision(precision: str) -> None:
    tokens, targets = (torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(k)) for k in range(2))
    tokens[1] = 3  # all of a sample is masked
    imported = import_with_constants(_Masked(), (tokens,), tokens_loss, targets=targets)
    plan = baseline("data-parallel", imported.graph, cluster(2))
    expected = pool(2).run(_masked_losses, imported, plan.to_file().model_dump_json(), tokens, targets)[0]
    plan.options = plan.options.model_copy(update={"precision": precision})
    for losses in pool(2).run(_masked_losses, imported, plan.to_file().model_dump_json(), tokens, targets):
        assert losses == pytest.approx(expected, rel=0.05)


def _drawn(file: str) -> list[float]:
    """Losses of two steps of a model that draws random numbers."""
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(5, 8, dtype=torch.float64)
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(model, import_with_constants(model, (x,), torch.sum), strategy, _sgd)
    return [parallel.step(x).item() for _ in range(2)]


def test_random_draws_do_not_depend_on_the_plan() -> None:
    graph = import_with_constants(Dropped(), (torch.zeros(5, 8, dtype=torch.float64),), torch.sum).graph
    expected: list[float] = []
    for plan, ranks in (("single", 1), ("data-parallel", 2), ("megatron", 2), ("data-parallel", 3)):
        strategy = baseline(plan, graph, cluster(ranks))
        for losses in pool(ranks).run(_drawn, strategy.to_file().model_dump_json()):
            expected = expected or losses
            assert losses == pytest.approx(expected, rel=1e-9), plan
    assert expected[0] != expected[1]


def _reloaded(name: str, imported: Imported, file: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """A state, the state after it was loaded on this rank, and the error for one of a wrong shape."""
    made = case(name)
    parallel = distribute(made.model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    given = {k: torch.randn_like(v) if v.is_floating_point() else v + 7 for k, v in made.model.state_dict().items()}
    parallel.load_state_dict(given)
    first = next(k for k, v in given.items() if v.dim() > 1)
    with pytest.raises(RuntimeFailure) as error:
        parallel.load_state_dict({**given, first: given[first][:-1]})
    return given, parallel.state_dict(), str(error.value)


@pytest.mark.parametrize("name", ["convolutions", "recurrent"])
def test_a_state_is_given_and_taken_in_the_models_own_names_and_shapes(name: str) -> None:
    imported, topology = _imported(name), cluster(2)
    file = baseline("megatron", imported.graph, topology).to_file().model_dump_json()
    for loaded, found, error in pool(2).run(_reloaded, name, imported, file):
        assert loaded.keys() == found.keys() and all(torch.equal(loaded[k], found[k]) for k in loaded)
        assert "has shape" in error


def test_the_check_can_fail() -> None:
    expected = _single("mlp")
    wrong = [(loss, {k: v.clone() for k, v in state.items()}) for loss, state in expected]
    wrong[-1][1]["a.weight"][0, 0] += 1e-7
    with pytest.raises(AssertionError, match=r"a\.weight after step 3"):
        agree(expected, wrong)


class _Added(nn.Module):
    """Autograd hands out one tensor as the gradient of both weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.a + self.b).square().mean()


def _added(imported: Imported, file: str, x: Tensor) -> dict[str, Tensor]:
    """The weights after a step of a plan."""
    parallel = distribute(_Added(), imported, Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    parallel.step((x,), None)
    return dict(parallel.state_dict())


def test_gradients_in_the_same_memory_add_up_apart_over_microbatches() -> None:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    imported, alone_on = import_with_constants(_Added(), (x,)), cluster(1)
    alone = baseline("single", imported.graph, alone_on)
    split = Strategy.make(imported.graph, alone_on, alone.configs, alone.options, microbatches=4)
    expected, actual = (
        pool(1).run(_added, imported, plan.to_file().model_dump_json(), x)[0] for plan in (alone, split)
    )
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=0)


def _writes_what_it_sends() -> str:
    """What rank 0 raises where it writes to a tensor that it is sending."""
    tensor = torch.zeros(4)
    if dist.get_rank():
        dist.recv(tensor, 0)
        return ""
    work = dist.isend(tensor, 1)
    tensor[:2].add_(1)
    try:
        work.wait()
    except AssertionError as error:
        return str(error)
    return ""


def test_every_case_on_ranks_would_notice_what_is_written_while_it_is_sent() -> None:
    assert pool(2).run(_writes_what_it_sends) == ["a tensor was written in place while it was being sent", ""]
