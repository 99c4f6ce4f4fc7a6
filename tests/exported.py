"""Training with exported files, on a rank and on one device."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.baselines import inside_group
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.schedule import placement
from flexsearch.strategy.tensor_parallel import flow
from flexsearch.strategy.weights import has_weights
from flexsearch.topology import Topology
from flexsearch.zoo.base import ZooModel
from flexsearch.zoo.cnn import lenet
from flexsearch.zoo.large import llama7b
from flexsearch.zoo.mlp import mlp
from flexsearch.zoo.transformer import gpt2
from tests import families

STEPS = 2
MOST = 0.5
"""Gradients of Hugging Face models are clipped to this norm."""
DOUBLE = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
"""Transformers' losses cast logits with ``float()``; in float32 sums in another order differ."""
Trained = tuple[list[float], dict[str, float]]
"""The losses on this rank, and the largest error of each weight that it has."""


def build(name: str) -> ZooModel:
    """A small model in float64."""
    made = {
        "mlp": lambda: mlp(16, features=12, width=12, layers=2, classes=4),
        "lenet": lambda: lenet(16),
        "llama": lambda: llama7b(8, 6, 4, hidden=32, heads=4, kv_heads=2, ffn=24, vocab=20, device="cpu"),
        "gpt2": lambda: gpt2(8, 6, 2, hidden=32, heads=4, vocab=21),
        "pooled": pooled,
        "overwriting": overwriting,
        "scaled": scaled,
        "by name": called,
        "tuples": lambda: called(returns="tuple"),
        "alike": lambda: called(returns="alike"),
        "written between": lambda: called(returns="written"),
        "uncalled": uncalled,
        "one activation": one_activation,
        "table": table,
    }[name]()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in made.inputs)
    return ZooModel(made.model.double(), inputs, made.targets, made.loss)


def pooled() -> ZooModel:
    """Convolutions, with a pooling between them and the linear layer that changes nothing at these sizes, as in
    AlexNet on images of 224 x 224: the plan has no operator of it."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 2, stride=2), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    return ZooModel(model, (torch.randn(8, 1, 8, 8),), torch.randint(5, (8,)), nn.functional.cross_entropy)


def overwriting() -> ZooModel:
    """An MLP as torchvision writes the classifiers of its networks."""
    torch.manual_seed(0)
    hidden = (nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.Linear(12, 12), nn.ReLU(True))
    model = nn.Sequential(*hidden, nn.Linear(12, 4))
    return ZooModel(model, (torch.randn(8, 6),), torch.randint(4, (8,)), nn.functional.cross_entropy)


class Scaled(nn.Module):
    """A linear layer, and one number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * self.scale


def scaled() -> ZooModel:
    """As the temperature of contrastive training is trained."""
    torch.manual_seed(0)
    return ZooModel(Scaled(), (torch.randn(8, 6),), torch.randint(4, (8,)), nn.functional.cross_entropy)


class Block(nn.Module):
    """A layer that returns its output; or that, a tensor that no other reads, a constant, what it got and no cache; or
    its output and another tensor of that shape."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns, self.layer = returns, nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor, scale: Any = None) -> Any:
        inner = self.layer(hidden).relu()
        output = hidden + inner * (1.0 if scale is None else scale)
        if self.returns == "tuple":
            return inner @ inner.T, output, torch.full((6,), 0.5, dtype=hidden.dtype) if scale is None else scale, None
        return (inner, output) if self.returns == "alike" else output


class Calling(nn.Module):
    """Blocks that are called with a keyword, by what they are."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(returns) for _ in range(4)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        scale = None
        for block in self.blocks:
            if block.returns == "written":
                x = block(hidden=x)
                x += 1.0
            elif block.returns == "tuple":
                _, x, scale, _ = block(hidden=x, scale=scale)
            else:
                x = block(hidden=x)[1] if block.returns == "alike" else block(hidden=x)
        return self.head(x)


def called(returns: str = "tensor") -> ZooModel:
    torch.manual_seed(0)
    return ZooModel(Calling(returns), (torch.randn(8, 6),), torch.randint(4, (8,)), nn.functional.cross_entropy)


class Table(nn.Module):
    """Has an embedding that it does not call: it hands the weight to a norm, and what that returns to all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm = nn.Embedding(8, 6), nn.LayerNorm(6)
        self.blocks = nn.ModuleList(Block("tensor") for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.norm(self.positions.weight)
        for block in self.blocks:
            x = block(hidden=x, scale=scale)
        return x


def table() -> ZooModel:
    """As DeBERTa's table of relative positions."""
    torch.manual_seed(0)
    return ZooModel(Table(), (torch.randn(8, 8, 6),), torch.randint(6, (8, 6)), nn.functional.cross_entropy)


class Uncalled(nn.Module):
    """Has a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def uncalled() -> ZooModel:
    """As the rows of Wav2Vec2 that take the place of masked time steps."""
    torch.manual_seed(0)
    return ZooModel(Uncalled(), (torch.randn(8, 6),), torch.randint(4, (8,)), nn.functional.cross_entropy)


class OneActivation(nn.Module):
    """Layers of one width with the same activation behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.activation = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def one_activation() -> ZooModel:
    torch.manual_seed(0)
    return ZooModel(OneActivation(), (torch.randn(8, 6),), torch.randint(6, (8,)), nn.functional.cross_entropy)


def layout(
    graph: OperatorGraph, data: int = 1, tensor: int = 1, borders: Sequence[str] = (), *, ranks: int = 1,
    topology: str = "ethernet-1g-4", states: States = States.WHOLE, schedule: Any = "1f1b", microbatches: int = 1,
    options: Options | None = None, over: int = 0, inside: bool = False,
) -> Strategy:  # fmt: skip
    """A data x pipeline x tensor layout of all devices, with Megatron's splits. ``borders``: first operators of the
    stages after the first, on so many ``ranks``. ``over``: as of ``Sharding``. ``inside``: replicas inside of ranks."""
    cluster = Topology.load(topology)
    first = (0, *(graph.index[name] for name in borders))
    rank_of = {s: r for r, held in enumerate(placement(schedule, ranks, len(first) // ranks)) for s in held}
    width, blocks = (data * tensor, 1) if inside else (tensor, data)
    groups = tuple(tuple(range(rank_of[s] * width, (rank_of[s] + 1) * width)) for s in range(len(first)))
    pipeline = Pipeline(blocks, first, groups, microbatches, schedule)
    stage_of = [max(s for s, begin in enumerate(first) if begin <= i) for i in range(len(graph.operators))]
    configs = {}
    for i, config in enumerate(inside_group(graph, cluster, tensor, data // blocks)):
        own = config.on(groups[stage_of[i]][d] for d in config.devices)
        kept, shards = (states, over) if has_weights(graph, i) else (States.WHOLE, 0)
        configs[graph.operators[i].name] = replace(own, states=kept, sharded_over=shards)
    return Strategy.make(
        graph, cluster, configs, options, stages=pipeline.stages(graph, len(cluster.devices) // blocks),
        microbatches=microbatches, schedule=schedule,
    )  # fmt: skip


def in_parts(graph: OperatorGraph, split: Mapping[str, str]) -> Strategy:
    """On two devices, the layers whose modules match a pattern split along its axis, and between them what PyTorch
    makes of that."""
    axes = {
        i: axis for pattern, axis in split.items() for i, op in enumerate(graph.operators)
        if re.fullmatch(pattern, op.module) and op.kind in ("linear", "embedding")
    }  # fmt: skip
    configs = dict(zip(graph.index, flow(graph, 2, axes).configs, strict=True))
    return Strategy.make(graph, Topology.load("ethernet-1g:2"), configs)


def family(name: str) -> tuple[nn.Module, families.Batch]:
    """A Hugging Face model of four layers in float64, and a batch of which every sample has equally many targets."""
    config = families.FAMILIES[name].options
    layers = {key: 4 for key in ("n_layer", "num_hidden_layers", "num_layers", "encoder_layers") if key in config}
    model, batch = families.build(name, draws=False, dtype=torch.float64, **layers)
    if batch["labels"].dim() > 1:
        batch["labels"][:, 4:] = -100
    return model, batch


def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the model on one device, weights by all of their names."""
    model, inputs, targets, loss = build(name)
    return _trained(model, lambda: loss(model(*inputs), targets))


def family_alone(name: str, norms: list[float]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of a Hugging Face model, with clipped gradients, whose ``norms`` are added."""
    model, batch = family(name)
    with DOUBLE:
        return _trained(model, lambda: model(**batch)["loss"], norms)


def _trained(
    model: nn.Module, loss: Callable[[], torch.Tensor], norms: list[float] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """``norms`` get those of the gradients, which are clipped then."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(STEPS):
        value = loss()
        torch.autograd.backward(value)
        if norms is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, dict(model.named_parameters(remove_duplicate=False))


def train_family(name: str, text: str) -> Trained:
    """As ``train``, of a Hugging Face model in a pipeline, with its collator's dict."""
    file: Any = types.ModuleType("apply_plan")
    exec(text, vars(file))
    model, batch = family(name)
    parts, schedule = file.apply_plan(model)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01, foreach=False)
    losses, norms, expected = list[float](), list[float](), list[float]()
    for _ in range(STEPS):
        with DOUBLE:
            value = file.forward_backward(parts, schedule, {key: file.share(x) for key, x in batch.items()})
        norms.append(file.clip_grad_norm_(parts, MOST).item())
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if value is None else [value.item()]
    errors = _errors(parts, family_alone(name, expected)[1])
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0.0)
    return losses, errors


def train(name: str, text: str, dtype: torch.dtype = torch.float64) -> Trained:
    """The same on this rank, with an exported file; the losses of its own samples, none where the last stage is not."""
    file: Any = types.ModuleType("apply_plan")
    exec(text, vars(file))
    model, inputs, targets, loss = build(name)
    model = model.to(dtype)
    inputs = tuple(file.share(x) if not x.is_floating_point() else file.share(x).to(dtype) for x in inputs)
    target, losses = file.share(targets), list[float]()
    schedule: Any = None
    if hasattr(file, "HELD"):
        model, schedule = file.apply_plan(model, loss)
    else:
        model = file.apply_plan(model)
    optimizer = getattr(file, "make_optimizer", _adamw)(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        if schedule is not None:
            value = file.forward_backward(model, schedule, inputs, target)
        elif hasattr(file, "forward_backward"):
            value = file.forward_backward(model, loss, inputs, target)
        else:
            value = loss(model(*inputs), target)
            torch.autograd.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if value is None else [value.item()]
    return losses, _errors(model, alone(name)[1])


def _adamw(model: nn.Module, kind: type[torch.optim.AdamW], lr: float) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=lr, foreach=False)


def _errors(model: nn.Module, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """By the name of each weight in the model as it was."""
    found = {}
    parts: list[Any] = [part.model for part in model] if isinstance(model, nn.ModuleList) else [model]
    for name, weight in (item for part in parts for item in part.named_parameters()):
        plain = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        found[plain] = (whole - expected[plain]).abs().max().item()
    return found


def family_gradients(name: str, text: str) -> dict[str, torch.Tensor]:
    """Gradients of all weights of a Hugging Face model that runs as an exported file says, of the whole batch; without
    a file, of the model alone."""
    model, batch = families.build(name, draws=False, dtype=torch.float64)
    file: Any = None
    if text:
        file = types.ModuleType("apply_plan")
        exec(text, vars(file))
        model = file.apply_plan(model)
        batch = {key: file.share(x) for key, x in batch.items()}
    if hasattr(file, "forward_backward"):
        file.forward_backward(model, batch)
    else:
        model(**batch)["loss"].backward()
    found = {key.removeprefix("module."): p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {key: grad.full_tensor() if isinstance(grad, DTensor) else grad for key, grad in found.items()}
