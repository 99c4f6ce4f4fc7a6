"""Convolutional networks: LeNet-5, AlexNet, VGG-16 and ResNets, all but the first with the layers of torchvision."""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.zoo.base import ZooModel, build


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling: (batch, 1, 28, 28) -> (batch, classes)."""

    def __init__(self, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc3 = nn.Linear(16 * 5 * 5, 120)
        self.fc4 = nn.Linear(120, 84)
        self.fc5 = nn.Linear(84, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = self.dropout(F.relu(self.fc3(x)))
        x = self.dropout(F.relu(self.fc4(x)))
        return self.fc5(x)


class AlexNet(nn.Module):
    """AlexNet (Krizhevsky, 2014, "One weird trick"): (batch, 3, size, size) -> (batch, classes), size >= 63.

    61.1 M parameters, 96 % of them in the fully connected layers of ``hidden`` features.
    """

    def __init__(self, classes: int = 1000, hidden: int = 4096, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, 64, 11, stride=4, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(3, stride=2),
                conv2=nn.Conv2d(64, 192, 5, padding=2),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(3, stride=2),
                conv3=nn.Conv2d(192, 384, 3, padding=1),
                relu3=nn.ReLU(),
                conv4=nn.Conv2d(384, 256, 3, padding=1),
                relu4=nn.ReLU(),
                conv5=nn.Conv2d(256, 256, 3, padding=1),
                relu5=nn.ReLU(),
                pool5=nn.MaxPool2d(3, stride=2),
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            OrderedDict(
                drop6=nn.Dropout(dropout),
                fc6=nn.Linear(256 * 6 * 6, hidden),
                relu6=nn.ReLU(),
                drop7=nn.Dropout(dropout),
                fc7=nn.Linear(hidden, hidden),
                relu7=nn.ReLU(),
                fc8=nn.Linear(hidden, classes),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class VGG16(nn.Module):
    """VGG-16, configuration D (Simonyan & Zisserman, 2014): (batch, 3, size, size) -> (batch, classes), size >= 32.

    138.4 M parameters; layers are called as in the paper, conv1_1 ... conv5_3 and fc6 ... fc8.
    """

    blocks = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

    def __init__(self, classes: int = 1000, hidden: int = 4096, dropout: float = 0.0) -> None:
        super().__init__()
        features: OrderedDict[str, nn.Module] = OrderedDict()
        channels = 3
        for block, (width, convs) in enumerate(self.blocks, 1):
            for i in range(1, convs + 1):
                features[f"conv{block}_{i}"] = nn.Conv2d(channels, width, 3, padding=1)
                features[f"relu{block}_{i}"] = nn.ReLU()
                channels = width
            features[f"pool{block}"] = nn.MaxPool2d(2, stride=2)
        self.features = nn.Sequential(features)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            OrderedDict(
                fc6=nn.Linear(512 * 7 * 7, hidden),
                relu6=nn.ReLU(),
                drop6=nn.Dropout(dropout),
                fc7=nn.Linear(hidden, hidden),
                relu7=nn.ReLU(),
                drop7=nn.Dropout(dropout),
                fc8=nn.Linear(hidden, classes),
            )
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                init_conv(module)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1 convolutions to 4 * ``width`` channels, plus the shortcut."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 (He et al., 2015) with batch normalisation: (batch, 3, size, size) -> (batch, classes).

    25.6 M parameters with ``width`` 64; ``blocks`` gives the bottlenecks of the four stages: (3, 4, 23, 3) makes it
    ResNet-101.
    """

    def __init__(
        self,
        classes: int = 1000,
        width: int = 64,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(width, width, blocks[0], stride=1)
        self.layer2 = self._stage(4 * width, 2 * width, blocks[1], stride=2)
        self.layer3 = self._stage(8 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = self._stage(16 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(32 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                init_conv(module)

    @staticmethod
    def _stage(channels: int, width: int, count: int, stride: int) -> nn.Sequential:
        rest = [Bottleneck(4 * width, width) for _ in range(count - 1)]
        return nn.Sequential(Bottleneck(channels, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(self.dropout(x))


def init_conv(conv: nn.Conv2d) -> None:
    """He initialisation, without which the signal of a network this deep fades away."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def images(batch: int, channels: int, size: int, classes: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Random images (batch, channels, size, size), as the tuple of inputs, and classes (batch)."""
    return (torch.randn(batch, channels, size, size),), torch.randint(classes, (batch,))


def lenet(batch: int = 64, device: str | torch.device = "cpu", *, classes: int = 10, dropout: float = 0.0) -> ZooModel:
    """LeNet-5 on (batch, 1, 28, 28) images."""
    return build(lambda: LeNet(classes, dropout), lambda: images(batch, 1, 28, classes), F.cross_entropy, device)


def alexnet(
    batch: int = 32,
    device: str | torch.device = "cpu",
    *,
    size: int = 224,
    classes: int = 1000,
    hidden: int = 4096,
    dropout: float = 0.0,
) -> ZooModel:
    """AlexNet on (batch, 3, size, size) images."""
    return build(
        lambda: AlexNet(classes, hidden, dropout), lambda: images(batch, 3, size, classes), F.cross_entropy, device
    )


def vgg16(
    batch: int = 32,
    device: str | torch.device = "cpu",
    *,
    size: int = 224,
    classes: int = 1000,
    hidden: int = 4096,
    dropout: float = 0.0,
) -> ZooModel:
    """VGG-16 on (batch, 3, size, size) images."""
    return build(
        lambda: VGG16(classes, hidden, dropout), lambda: images(batch, 3, size, classes), F.cross_entropy, device
    )


def resnet50(
    batch: int = 32,
    device: str | torch.device = "cpu",
    *,
    size: int = 224,
    classes: int = 1000,
    width: int = 64,
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
    dropout: float = 0.0,
) -> ZooModel:
    """ResNet-50 on (batch, 3, size, size) images."""
    return build(
        lambda: ResNet50(classes, width, blocks, dropout),
        lambda: images(batch, 3, size, classes),
        F.cross_entropy,
        device,
    )


def resnet101(
    batch: int = 64,
    device: str | torch.device = "cpu",
    *,
    size: int = 224,
    classes: int = 1000,
    width: int = 64,
    blocks: tuple[int, int, int, int] = (3, 4, 23, 3),
    dropout: float = 0.0,
) -> ZooModel:
    """ResNet-101 on (batch, 3, size, size) images: ResNet-50 with more blocks in its third stage."""
    return resnet50(batch, device, size=size, classes=classes, width=width, blocks=blocks, dropout=dropout)
