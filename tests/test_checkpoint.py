"""Checkpoints: saved under one plan, loaded under another, on other ranks, or into a plain model, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool
from tests.small_models import case
from tests.test_loop import read


class Mixed(nn.Module):
    """Tied weights, a recurrent layer whose gates are split, a table read in part, dropout, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.places, self.cell = nn.Embedding(7, 4), nn.LSTMCell(4, 6)
        self.up, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 6, bias=False)
        self.down.weight = self.up.weight
        self.drop, self.unused = nn.Dropout(0.4), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cell(x + self.places.weight[1:3].sum(0))
        return self.down(self.drop(self.norm(self.up(hidden)))).square().mean()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def traced() -> Imported:
    return import_with_constants(Mixed(), X)


def file(name: str, ranks: int) -> str:
    return baseline(name, traced().graph, Topology.load(f"ethernet-1g:{ranks}")).to_file().model_dump_json()


def started(plan: str, seed: int = 7) -> tuple[Parallel, torch.optim.Optimizer]:
    step = distribute(Mixed(), traced(), read(plan), seed=seed)
    return step, torch.optim.AdamW(step.parameter_groups(decay=0.1), lr=0.01)


def train(step: Parallel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(step(X).loss.item())
        step.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _saved(plan: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], int]:
    """The state that was saved, the moments of Adam, the losses afterwards, and the largest chunk that was written."""
    step, optimizer = started(plan)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(step, optimizer, 2)
    scheduler.step()
    step.save(folder, optimizer, scheduler=scheduler.state_dict(), epoch=3)
    state, moments = step.state_dict(), _moments(step, optimizer)
    return state, moments, train(step, optimizer, 2), max(p.numel() for p in step.parameters())


def _moments(step: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The first moments of this rank's pieces, by name."""
    return {name: state["exp_avg"].clone() for name, p in step.named_parameters() if (state := optimizer.state.get(p))}


def _resumed(plan: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], dict[str, Any]]:
    step, optimizer = started(plan, seed=0)
    for parameter in step.parameters():
        parameter.data.zero_()
    extra = step.load(folder, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler.load_state_dict(extra["scheduler"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.009)
    return step.state_dict(), _moments(step, optimizer), train(step, optimizer, 2), extra


@pytest.mark.parametrize(("before", "after"), [(("fsdp", 4), ("megatron", 2)), (("megatron", 3), ("data-parallel", 1))])
def test_a_run_goes_on_under_another_plan_and_in_a_plain_model(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    """Weights, moments and buffers to the bit; losses as if nothing had happened, dropout's draws included."""
    saved = pool(before[1]).run(_saved, file(*before), str(tmp_path / "one"))
    state, losses = saved[0][0], saved[0][2]
    for loaded, _, continued, extra in pool(after[1]).run(_resumed, file(*after), str(tmp_path / "one")):
        assert list(loaded) == list(state) and all(torch.equal(loaded[name], state[name]) for name in state)
        assert continued == pytest.approx(losses, rel=1e-9)
        assert extra["epoch"] == 3
    model = Mixed()
    optimizer = torch.optim.AdamW(_two_groups(model), lr=1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    own = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    unused = [key for key in own["optimizer"] if ".unused." in key]
    for key in unused:  # the loss does not depend on it, so no step has made a state of it
        del own["optimizer"][key]
    checkpoint.load(own, checkpoint_id=str(tmp_path / "one"), no_dist=True)
    assert all(torch.equal(own["model"][name], state[name]) for name in state)
    moments = {key: value for key, value in own["optimizer"].items() if key.endswith("exp_avg")}
    for rank in saved:
        for name, piece in rank[1].items():
            if ".unread." not in name and piece.shape == moments[f"state.{name}.exp_avg"].shape:
                assert torch.equal(piece, moments[f"state.{name}.exp_avg"])
    assert own["optimizer"]["state.up.weight.step"] == 2.0 and moments["state.places.weight.exp_avg"].shape == (7, 4)
    assert not moments["state.places.weight.exp_avg"][3:].any() and moments["state.places.weight.exp_avg"][1].any()
    if before[0] == "fsdp":
        whole = max(value.numel() for value in state.values())
        assert all(rank[3] < whole for rank in saved), "a rank held a whole tensor"


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]}]  # fmt: skip


def _errors(plan: str, folder: str) -> list[str]:
    step, optimizer = started(plan)
    step.save(f"{folder}/weights")
    errors = []
    for name, more in ((f"{folder}/gone", ()), (f"{folder}/weights", (optimizer,))):
        step, optimizer = started(plan)
        with pytest.raises(RuntimeFailure) as error:
            step.load(name, *more)
        errors.append(str(error.value))
    made = case("mlp")
    other = import_with_constants(made.model, made.inputs, made.loss, targets=made.targets)
    strategy = baseline("data-parallel", other.graph, Topology.load("ethernet-1g:2"))
    with pytest.raises(RuntimeFailure) as error:
        distribute(made.model, other, strategy).load(f"{folder}/weights")
    return [*errors, str(error.value)]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for gone, optimizer, other in pool(2).run(_errors, file("fsdp", 2), str(tmp_path)):
        assert "no checkpoint in" in gone
        assert "has no optimizer's state" in optimizer
        assert "it is of another model" in other


def _as_safetensors(plan: str, folder: str) -> tuple[dict[str, Tensor], str]:
    """Saved and loaded again, after which the state is as before; and the error for a folder without files."""
    step, _ = started(plan)
    step.save_safetensors(folder)
    for parameter in step.parameters():
        parameter.data.zero_()
    step.load_safetensors(folder)
    state = step.state_dict()
    with pytest.raises(RuntimeFailure) as error:
        step.load_safetensors(f"{folder}/gone")
    return state, str(error.value)


@pytest.mark.parametrize("name", ["megatron", "fsdp"])
def test_weights_go_to_safetensors_and_back(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    expected = Mixed().state_dict()
    for state, error in pool(2).run(_as_safetensors, file(name, 2), str(tmp_path)):
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert "cannot read safetensors files" in error
    written = safetensors.load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys() - {"down.weight"}, "as Hugging Face writes tied weights"
    assert all(torch.equal(written[name], expected[name]) for name in written)


def _wide(plan: str | None = None) -> Any:
    """Four layers of 512 kB each; with a plan, split by it and with AdamW's states."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).double()
    x = torch.randn(8, 256, dtype=torch.float64)
    imported = import_with_constants(layers, (x,), nn.functional.mse_loss, targets=x)
    if plan is None:
        return imported
    step = distribute(layers, imported, read(plan))
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.01)
    step((x, x))
    optimizer.step()
    optimizer.zero_grad()
    return step, optimizer


def _bytes_beside(step: Parallel, optimizer: torch.optim.Optimizer, run: Callable[[], object]) -> tuple[int, int]:
    """What a rank holds at most while it writes or reads, beside what it holds anyway; and the latter."""
    there = [*step.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    with LiveBytes(there) as live:
        run()
    return live.peak, sum(tensor.nbytes for tensor in there)


def _bytes_of_saving(plan: str, folder: str) -> tuple[int, int]:
    step, optimizer = _wide(plan)
    return _bytes_beside(step, optimizer, lambda: step.save(folder, optimizer))


def _bytes_of_loading(plan: str, folder: str) -> tuple[int, int]:
    step, optimizer = _wide(plan)
    return _bytes_beside(step, optimizer, lambda: step.load(folder, optimizer))


def test_saving_and_loading_take_the_memory_of_few_pieces(tmp_path: Path) -> None:
    """Weights and moments are 6.3 MB, a piece 0.13 MB. One that loads makes new states for the optimizer, too."""
    graph = _wide().graph
    plans = [
        baseline(name, graph, Topology.load(f"ethernet-1g:{ranks}")).to_file().model_dump_json()
        for name, ranks in (("fsdp", 4), ("megatron", 2))
    ]
    whole = 3 * sum(tensor.nbytes for tensor in graph.of_kind("parameter"))
    piece = 256 * 256 * 8 // 4
    for beside, own in pool(4).run(_bytes_of_saving, plans[0], str(tmp_path / "one")):
        assert own < 1.01 * whole / 4
        assert beside <= 2 * piece
    for beside, own in pool(2).run(_bytes_of_loading, plans[1], str(tmp_path / "one")):
        assert own < 1.01 * whole / 2
        assert beside <= 2 / 3 * own + 3 * piece
