"""Regions that run in a mode of their own: what a plan computes is what eager PyTorch computes, in the same dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from flexsearch.errors import ImportModelError
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.regions import CHECKPOINTS
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool
from tests.training import Training, assert_same, imported, plain, planned

_autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Layers(nn.Module):
    """Two linear layers and a norm, called by a function that opens regions around them."""

    def __init__(self, call: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 5), nn.Linear(5, 4), nn.LayerNorm(4)
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.call = call

    def mlp(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x).float().square().mean()


def _no_grad(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.mlp(x).abs().amax(dim=-1, keepdim=True)
    return m.mlp(x) / (1 + scale)


def _enabled_inside(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.norm(x)
        with torch.enable_grad():
            z = m.mlp(x) * y
        y = m.norm(z) * y
    return y * z


def _no_grad_in_autocast(m: Layers, x: Tensor) -> Tensor:
    with _autocast():
        with torch.no_grad():
            y = m.mlp(x)
        return m.mlp(x) * y


def _autocast_off_inside(m: Layers, x: Tensor) -> Tensor:
    with _autocast():
        y = m.mlp(x)
        with torch.autocast("cpu", enabled=False):
            y = m.mlp(y.float())
        return m.norm(y) + torch.softmax(m.mlp(x), dim=-1)


def _under_autocast(m: Layers, x: Tensor) -> Tensor:
    with _autocast():
        return m.mlp(x)


def _checkpoint_in_autocast(m: Layers, x: Tensor) -> Tensor:
    with _autocast():
        return checkpoint(m.mlp, x, use_reentrant=False)


def _selective(m: Layers, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(m.mlp, x, use_reentrant=False, context_fn=contexts)


class Swish(torch.autograd.Function):
    """x sigmoid(x), which saves its input alone: the backward is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * torch.sigmoid(scale * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.scale * x)
        return gradient * gate * (1 + ctx.scale * x * (1 - gate)), None


REGIONS: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "no_grad": _no_grad,
    "enable_grad in no_grad": _enabled_inside,
    "no_grad in autocast": _no_grad_in_autocast,
    "autocast": _under_autocast,
    "autocast off in autocast": _autocast_off_inside,
    "checkpoint": lambda m, x: checkpoint(m.mlp, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m.mlp, m.chain(x), use_reentrant=True),
    "selective checkpoint": _selective,
    "sequential checkpoint": lambda m, x: checkpoint_sequential(m.chain, 2, m.mlp(x), use_reentrant=True),
    "checkpoint in autocast": _checkpoint_in_autocast,
    "backward that is the derivative": lambda m, x: Swish.apply(m.mlp(x), 1.5),
}


def build(name: str, draws: bool) -> Training:
    torch.manual_seed(0)
    return Training(Layers(REGIONS[name]), {"x": torch.randn(6, 4)})


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_computes_what_eager_pytorch_computes(name: str, ranks: int) -> None:
    traced = imported(build, name, False)
    plan = "data-parallel" if ranks > 1 else "single"
    file = baseline(plan, traced.graph, Topology.load(f"ethernet-1g:{ranks}")).to_file().model_dump_json()
    before, expected = plain(build, name)
    digits = 2e-2 if "autocast" in name else 1e-5  # bfloat16 has 8 bits: gradients of two halves are rounded apart
    for history in pool(ranks).run(planned, build, name, False, traced, file):
        assert_same(expected, history, before, digits, name)


@pytest.mark.parametrize("name", [name for name in REGIONS if "autocast" in name])
def test_layers_in_autocast_regions_keep_their_names_and_dtypes(name: str) -> None:
    model, batch, *_ = build(name, False)
    eager: list[tuple[str, torch.dtype]] = []

    def watch(path: str) -> Any:
        return lambda _module, _inputs, output: eager.append((path, output.dtype))

    for path in ("first", "second", "norm"):
        model.get_submodule(path).register_forward_hook(watch(path))
    model(**batch)
    graph = imported(build, name, False).graph
    layers = [
        (op.module, getattr(torch, graph.tensor[op.outputs[0]].dtype))
        for op in graph.operators
        if op.kind in ("linear", "layer_norm")
    ]
    assert layers == eager


@pytest.mark.parametrize("name", [name for name in REGIONS if "checkpoint" in name])
def test_a_checkpoint_is_called_as_a_function_with_a_note(name: str) -> None:
    traced = imported(build, name, False)
    assert traced.notes == (CHECKPOINTS,)
    assert all(op.module for op in traced.graph.operators if op.kind == "linear")


def test_results_of_a_no_grad_region_are_detached_once_where_they_leave_it() -> None:
    kinds = [op.kind for op in imported(build, "no_grad", False).graph.operators]
    assert kinds.count("detach") == 1


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def test_a_function_with_a_backward_of_its_own_is_refused_and_runs_again_after_that() -> None:
    model = Layers(lambda m, x: Reversed.apply(m.mlp(x)))
    with pytest.raises(ImportModelError, match=r"Reversed, called at tests/test_regions\.py:\d+, has a"):
        import_with_constants(model, (torch.randn(6, 4),))
    loss = model(torch.randn(6, 4))
    loss.backward()
    assert model.first.weight.grad is not None
