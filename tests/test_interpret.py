"""Imported models, computed operator by operator, give the loss and gradients of the plain PyTorch model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.graph.importer import import_with_constants
from tests import small_models
from tests.interpret import interpret


def check(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, loss: Callable[..., Tensor]) -> set[str]:
    """Compare in float64; returns the kinds of operators that took part."""
    model = model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    imported = import_with_constants(model, inputs, loss, targets=targets)
    graph, leaves = imported.graph, dict(model.named_parameters())
    values = {k: v.detach().clone() for k, v in model.named_buffers()} | dict(imported.constants) | leaves
    values |= dict(zip(imported.input_names, inputs, strict=True)) | dict(
        zip(imported.target_names, (targets,), strict=True)
    )
    plain = loss(model(*inputs), targets)
    expected = torch.autograd.grad(plain, list(leaves.values()), allow_unused=True)
    known = interpret(graph, values)
    torch.testing.assert_close(known[graph.loss], plain, rtol=1e-9, atol=0)
    found = torch.autograd.grad(known[graph.loss], list(leaves.values()), allow_unused=True)
    largest = max(float(y.abs().max()) for y in expected if y is not None)
    for name, x, y in zip(leaves, found, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None and y is not None:
            scale = float(y.abs().max()) + 1e-4 * largest  # a bias before batch norm has gradient 0, up to rounding
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}")
    for buffer, name in graph.buffer_updates.items():
        torch.testing.assert_close(known[name], dict(model.named_buffers())[buffer], rtol=1e-9, atol=1e-12)
    return {op.kind for op in graph.operators}


@pytest.mark.parametrize("name", small_models.NAMES)
def test_small_models(name: str) -> None:
    case = small_models.case(name)
    check(case.model, case.inputs, case.targets, case.loss)


_ZOO: dict[str, Callable[[], Any]] = {
    "lenet": lambda: zoo.lenet(batch=2),
    "alexnet": lambda: zoo.alexnet(batch=1, size=64, hidden=32),
    "resnet50": lambda: zoo.resnet50(batch=2, size=32, width=8, blocks=(1, 1, 1, 1)),
    "mlp": lambda: zoo.mlp(batch=3, features=8, width=9),
    "gpt2": lambda: zoo.gpt2(batch=2, seq=8, layers=2, hidden=16, heads=2, vocab=31),
    "bert": lambda: zoo.bert(batch=2, seq=8, layers=2, hidden=16, heads=2, vocab=31),
    "inception_v3": lambda: zoo.inception_v3(batch=2, size=75, width=1, classes=5),
    "rnntc": lambda: zoo.rnntc(batch=2, steps=3, hidden=6, vocab=11, layers=2),
    "rnnlm": lambda: zoo.rnnlm(batch=2, steps=3, hidden=6, vocab=11),
    "nmt": lambda: zoo.nmt(batch=2, steps=3, hidden=6, vocab=11),
    "llama": lambda: zoo.llama7b(2, 8, layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, device="cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_ZOO))
def test_the_zoo(name: str) -> None:
    made = _ZOO[name]()
    check(made.model, made.inputs, made.targets, made.loss)


class _Rest(nn.Module):
    """Operators that the other models do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 4, padding="same", dilation=3, groups=2)
        self.norm = nn.InstanceNorm1d(6, affine=True)
        self.frozen, self.prelu = nn.BatchNorm1d(6), nn.PReLU(6)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.prelu(self.norm(self.conv(x)))
        x = F.batch_norm(x, self.frozen.running_mean, self.frozen.running_var, self.frozen.weight, None, False)
        x = F.max_pool1d(x, 3, 2, 1, ceil_mode=True) + F.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        x = F.adaptive_max_pool1d(x, 5) * self.scale[1:].expand(5)
        q, k = x.unflatten(1, (2, 3)).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=0.3)
        y = y + F.scaled_dot_product_attention(q, k, q, attn_mask=mask.double() * 0.1)
        y = torch.where(mask.any(0)[..., :1], y, -y).masked_fill(y > 3, 0.25)
        y = y.pow(2).clamp(max=4.0).to(torch.float64) + torch.logsumexp(y, -1, keepdim=True)
        top, _ = y.max(-1)
        return torch.cat((y.flatten(1), top.flatten(1), y.cumsum(-1).std(-1).flatten(1)), 1).log1p()


def test_operators_that_the_other_models_do_not_use() -> None:
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 3, 3) > 0.3
    mask[..., 0] = True
    inputs = (torch.randn(2, 4, 13), mask)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        parts = F.smooth_l1_loss(y, target) + F.huber_loss(y, target, delta=0.5) + F.l1_loss(y, target, reduction="sum")
        odds = F.binary_cross_entropy_with_logits(y, target, pos_weight=target[0] + 1)
        return parts + odds + F.kl_div(y.log_softmax(1), target, reduction="sum") + F.cross_entropy(y, target)

    model = _Rest().double()
    width = model(inputs[0].double(), mask).shape[1]
    check(model, inputs, torch.rand(2, width).double(), loss)
