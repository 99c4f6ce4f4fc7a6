"""Models of images that people train: traced without opaque operators, and exact in random pieces."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

from flexsearch.graph import Operator
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.ops import forward_flops
from tests.interpret import Intervals, interpret


def block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.up, self.last = block(3, 8), block(8, 16), up, block(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        return self.last(torch.cat([wide, self.up(self.second(F.max_pool2d(wide, 2)))], 1))


class Pyramid(nn.Module):
    """Levels of a feature pyramid, of odd sizes, and a head that sees all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([block(3, 8), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.sides = nn.ModuleList(nn.Conv2d(8, 6, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for level in self.levels:
            x = level(x)
            levels.append(x)
        top = self.sides[2](levels[2])
        results = [top]
        for side, level in zip(self.sides[1::-1], levels[1::-1], strict=True):
            top = side(level) + F.interpolate(top, size=level.shape[-2:], mode="nearest")
            results.append(top)
        size = levels[0].shape[-2:]
        return torch.cat([F.interpolate(y, size=size, mode="bicubic", align_corners=False) for y in results], 1)


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 1), nn.PixelShuffle(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
            nn.ReflectionPad2d(1), nn.Conv2d(2, 8, 3), nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(8, 3, 3, padding=1, padding_mode="circular"),
        )  # fmt: skip

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (spread / 2).exp())


class Transformer(nn.Module):
    """A spatial transformer: an image seen through an affine map that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.what = nn.Linear(3 * 16 * 16, 6), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.what(F.grid_sample(x, grid, align_corners=False))


class Segmentation(nn.Module):
    """Unpools where it pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(self.down(x), 2, return_indices=True)
        return F.max_unpool2d(self.up(y), places, [2, 2])


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(10, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, groups=2), nn.BatchNorm2d(8, affine=False), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 3, 3, 1), nn.Tanh(),
    )  # fmt: skip


def _volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(4, 4, 3, 1, 1, groups=2), nn.AvgPool3d(3, 2, 1), nn.ConvTranspose3d(4, 2, 2, 2),
        nn.AdaptiveAvgPool3d((1, 2, 3)),
    )  # fmt: skip


def _shuffles() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ChannelShuffle(4), nn.Conv2d(8, 8, 3, groups=4), nn.PixelUnshuffle(2),
        nn.LocalResponseNorm(3), nn.LPPool2d(2, 2),
    )  # fmt: skip


def _columns() -> nn.Module:
    return nn.Sequential(
        nn.Unfold(3, padding=1, stride=2), nn.Conv1d(27, 27, 1), nn.Fold((16, 16), 3, padding=1, stride=2)
    )


def _sound() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Conv1d(3, 4, 3, padding=1)), nn.ReLU(), weight_norm(nn.ConvTranspose1d(4, 2, 4, 2, 1))
    )


IMAGE = (4, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "unet-transposed": (lambda: UNet(nn.ConvTranspose2d(16, 8, 2, 2)), [IMAGE]),
    "unet-bilinear": (
        lambda: UNet(nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 8, 1))), [IMAGE],
    ),
    "unet-nearest": (lambda: UNet(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 1))), [IMAGE]),
    "pyramid": (Pyramid, [(4, 3, 15, 17)]),
    "autoencoder": (AutoEncoder, [IMAGE, (4, 4, 4, 4)]),
    "transformer": (Transformer, [IMAGE]),
    "segmentation": (Segmentation, [IMAGE]),
    "generator": (_generator, [(4, 10, 1, 1)]),
    "volumes": (_volumes, [(2, 2, 6, 8, 8)]),
    "shuffles": (_shuffles, [IMAGE]),
    "columns": (_columns, [IMAGE]),
    "sound": (_sound, [(2, 3, 8)]),
}  # fmt: skip


def _cuts(op: Operator, draw: random.Random) -> Intervals:
    """Two parts of up to two axes."""
    chosen = draw.sample(list(op.splittable), min(len(op.splittable), draw.randint(0, 2)))
    points = {axis: [0, draw.randint(1, op.sizes[axis] - 1), op.sizes[axis]] for axis in chosen}
    return {axis: list(pairwise(points.get(axis, [0, size]))) for axis, size in op.sizes.items()}


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_images_is_split_exactly(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = MODELS[name]
    model, inputs = make().double(), [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    imported = import_with_constants(model, inputs, _loss)
    graph, draw = imported.graph, random.Random(name)
    assert all(op.kind != "opaque" for op in graph.operators)
    values = dict(imported.constants) | dict(zip(imported.input_names, inputs, strict=True))
    values |= {buffer: x.clone() for buffer, x in model.named_buffers()} | dict(model.named_parameters())
    result = interpret(graph, values, cuts=lambda op: _cuts(op, draw))
    loss = _loss(model(*inputs))
    torch.testing.assert_close(result[graph.loss], loss, rtol=1e-9, atol=0)
    weights = dict(model.named_parameters())
    for x, y in zip(
        torch.autograd.grad(result[graph.loss], list(weights.values())),
        torch.autograd.grad(loss, list(weights.values())),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
    for buffer, new in graph.buffer_updates.items():  # the model has made the step, too
        torch.testing.assert_close(result[new], model.get_buffer(buffer), rtol=1e-9, atol=0)
    tracked = any(getattr(m, "track_running_stats", False) for m in model.modules())
    assert bool(graph.buffer_updates) == tracked


@pytest.mark.parametrize("name", ["unet-transposed", "generator", "volumes"])
def test_convolutions_have_the_flops_that_torch_counts(name: str) -> None:
    make, shapes = MODELS[name]
    model, inputs = make(), [torch.randn(shape) for shape in shapes]
    graph = import_with_constants(model, inputs, _loss).graph
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    flops = sum(float(forward_flops(op, op.sizes)) for op in graph.operators if op.kind.startswith("conv"))
    assert flops == counter.get_total_flops()
