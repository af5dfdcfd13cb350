"""The wide residual networks WRN-28-10 and WRN-16-4 for 32 × 32 images (Zagoruyko & Komodakis 2016).

Pre-activation blocks of two 3 × 3 convolutions, three stages of 16, 32 and 64 times the width, depth 6n + 4.
If the number of channels changes, the shortcut is a 1 × 1 convolution of the activated input. WRN-28-10 has 36,461,232
prunable weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["WideResNet", "wrn16_4", "wrn28_10"]


class WideBlock(nn.Module):
    """x + conv(relu(bn(conv(relu(bn(x)))))) where the shapes agree."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.bn1(x)))
        return torch.add(x, self.conv2(self.dropout(functional.relu(self.bn2(y)))))


class WideTransition(nn.Module):
    """The first block of a stage: changes the channels, and the resolution where stride is 2."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(x))
        y = self.conv2(self.dropout(functional.relu(self.bn2(self.conv1(x)))))
        return torch.add(self.shortcut(x), y)


class WideResNet(nn.Module):
    """A wide ResNet of depth 6n + 4, `widen` times as wide as the thin one."""

    def __init__(self, depth: int, widen: int, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"expected a depth of the form 6n + 4 (10, 16, 22, 28, …), got {depth}; choose one")
        blocks = (depth - 4) // 6
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
        channels = 16
        for width, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            layers.append(WideTransition(channels, width, stride, dropout))
            layers += [WideBlock(width, dropout) for _ in range(blocks - 1)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn(self.features(x)))
        logits: Tensor = self.classifier(torch.mean(x, dim=(2, 3)))
        return logits


def wrn28_10(num_classes: int = 10, dropout: float = 0.0) -> WideResNet:
    return WideResNet(28, 10, num_classes, dropout)


def wrn16_4(num_classes: int = 100, dropout: float = 0.0) -> WideResNet:
    return WideResNet(16, 4, num_classes, dropout)
