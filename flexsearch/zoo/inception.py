"""Inception-v3 (Szegedy et al., 2016, "Rethinking the Inception architecture"), with the layers of torchvision."""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.zoo.base import ZooModel, build
from flexsearch.zoo.cnn import images, init_conv

Size = int | tuple[int, int]


class ConvNorm(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(self, channels: int, width: int, kernel: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=0.001)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


def _chain(channels: int, *parts: tuple[int, Size] | tuple[int, Size, int]) -> nn.Sequential:
    """ConvNorms one after the other: (width, kernel), padded to keep the size, or (width, kernel, stride), not padded
    where the stride is not 1."""
    layers = []
    for width, kernel, *strides in parts:
        stride = strides[0] if strides else 1
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        layers.append(ConvNorm(channels, width, kernel, stride, (sides[0] // 2, sides[1] // 2) if stride == 1 else 0))
        channels = width
    return nn.Sequential(*layers)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


class BlockA(nn.Module):
    """1x1, 5x5, double 3x3 and pooled branches."""

    def __init__(self, channels: int, pooled: int, width: int) -> None:
        super().__init__()
        w = width
        self.branch1 = _chain(channels, (4 * w, 1))
        self.branch5 = _chain(channels, (3 * w, 1), (4 * w, 5))
        self.branch3 = _chain(channels, (4 * w, 1), (6 * w, 3), (6 * w, 3))
        self.pooled = _chain(channels, (pooled, 1))
        self.channels = 14 * w + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch1(x), self.branch5(x), self.branch3(x), self.pooled(_average(x))), dim=1)


class BlockB(nn.Module):
    """Halves the size after the A blocks."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        w = width
        self.branch3 = _chain(channels, (24 * w, 3, 2))
        self.deep = _chain(channels, (4 * w, 1), (6 * w, 3), (6 * w, 3, 2))
        self.channels = 30 * w + channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch3(x), self.deep(x), F.max_pool2d(x, 3, stride=2)), dim=1)


class BlockC(nn.Module):
    """7x7 convolutions as 1x7 and 7x1."""

    def __init__(self, channels: int, inner: int, width: int) -> None:
        super().__init__()
        c, w = inner, 12 * width
        self.branch1 = _chain(channels, (w, 1))
        self.branch7 = _chain(channels, (c, 1), (c, (1, 7)), (w, (7, 1)))
        self.deep = _chain(channels, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (w, (1, 7)))
        self.pooled = _chain(channels, (w, 1))
        self.channels = 4 * w

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch1(x), self.branch7(x), self.deep(x), self.pooled(_average(x))), dim=1)


class BlockD(nn.Module):
    """Halves the size after the C blocks."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        w = 12 * width
        self.branch3 = _chain(channels, (w, 1), (20 * width, 3, 2))
        self.branch7 = _chain(channels, (w, 1), (w, (1, 7)), (w, (7, 1)), (w, 3, 2))
        self.channels = 32 * width + channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch3(x), self.branch7(x), F.max_pool2d(x, 3, stride=2)), dim=1)


class BlockE(nn.Module):
    """Branches that fork again into 1x3 and 3x1."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        w = 24 * width
        self.branch1 = _chain(channels, (20 * width, 1))
        self.branch3 = _chain(channels, (w, 1))
        self.branch3_wide, self.branch3_high = _chain(w, (w, (1, 3))), _chain(w, (w, (3, 1)))
        self.deep = _chain(channels, (28 * width, 1), (w, 3))
        self.deep_wide, self.deep_high = _chain(w, (w, (1, 3))), _chain(w, (w, (3, 1)))
        self.pooled = _chain(channels, (12 * width, 1))
        self.channels = 128 * width

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.branch3(x), self.deep(x)
        forks = (self.branch3_wide(one), self.branch3_high(one), self.deep_wide(two), self.deep_high(two))
        return torch.cat((self.branch1(x), *forks, self.pooled(_average(x))), dim=1)


class InceptionV3(nn.Module):
    """Inception-v3 without the auxiliary classifier: (batch, 3, size, size) -> (batch, classes), size >= 75.

    23.8 M parameters with ``width`` 16, the unit of all numbers of channels.
    """

    def __init__(self, classes: int = 1000, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvNorm(3, 2 * w, 3, stride=2),
            ConvNorm(2 * w, 2 * w, 3),
            ConvNorm(2 * w, 4 * w, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            ConvNorm(4 * w, 5 * w, 1),
            ConvNorm(5 * w, 12 * w, 3),
            nn.MaxPool2d(3, stride=2),
        )
        blocks: list[BlockA | BlockB | BlockC | BlockD | BlockE] = [BlockA(12 * w, 2 * w, w)]
        blocks += [BlockA(16 * w, 4 * w, w), BlockA(18 * w, 4 * w, w), BlockB(18 * w, w)]
        blocks += [BlockC(48 * w, inner * w, w) for inner in (8, 10, 10, 12)]
        blocks += [BlockD(48 * w, w), BlockE(80 * w, w), BlockE(128 * w, w)]
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(128 * w, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                init_conv(module)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.blocks(self.stem(x))), 1)
        return self.fc(self.dropout(x))


def inception_v3(
    batch: int = 64,
    device: str | torch.device = "cpu",
    *,
    size: int = 299,
    classes: int = 1000,
    width: int = 16,
    dropout: float = 0.0,
) -> ZooModel:
    """Inception-v3 on (batch, 3, size, size) images."""
    return build(
        lambda: InceptionV3(classes, width, dropout), lambda: images(batch, 3, size, classes), F.cross_entropy, device
    )
