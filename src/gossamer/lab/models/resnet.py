"""The residual networks for 32 × 32 images (He et al. 2016): ResNet-20, 56 and 110.

Post-activation blocks of two 3 × 3 convolutions, three stages of 16, 32 and 64 channels, depth 6n + 2. A
shortcut that changes the resolution has no parameters: it averages 2 × 2 pixels and fills the new channels
with zeros. ResNet-20 has 268,336 prunable weights that way, which agrees with the 0.268M that the paper
prints; convolutional shortcuts would give 270,896. The code the paper adapted builds that shortcut from detached
values, so no gradient passes its two stage transitions; here the gradient flows, as in the original
architecture.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["ResNet", "resnet20", "resnet56", "resnet110"]


class ZeroPadShortcut(nn.Module):
    """Halve the resolution by averaging and append channels of zeros."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(functional.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))"""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity() if stride == 1 else ZeroPadShortcut(channels - in_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of depth 6n + 2 for RGB images of 32 × 32 pixels."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of the form 6n + 2 (8, 14, 20, …), got {depth}; choose one of those")
        blocks_per_stage = (depth - 2) // 6
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stage1 = _stage(16, 16, blocks_per_stage, stride=1)
        self.stage2 = _stage(16, 32, blocks_per_stage, stride=2)
        self.stage3 = _stage(32, 64, blocks_per_stage, stride=2)
        self.classifier = nn.Linear(64, num_classes)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.classifier(torch.mean(x, dim=(2, 3)))
        return logits


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))


def resnet20(num_classes: int = 10) -> ResNet:
    return ResNet(20, num_classes)


def resnet56(num_classes: int = 10) -> ResNet:
    return ResNet(56, num_classes)


def resnet110(num_classes: int = 10) -> ResNet:
    return ResNet(110, num_classes)
