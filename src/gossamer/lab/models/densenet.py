"""DenseNet-40 and DenseNet-BC-100 for 32 × 32 images (Huang et al. 2017), growth 12.

Three dense blocks in which every layer gets the concatenation of all previous outputs. DenseNet-40: layers
of one 3 × 3 convolution, transitions that keep the channels, 24 initial channels and 456 at the end
(1,040,568 weights; 16 initial channels, as the DenseNet article has them, would end at 448).
DenseNet-BC-100: a 1 × 1 bottleneck of 48 channels before each 3 × 3 convolution and transitions that halve
the channels (745,164).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["DenseNet", "densenet40", "densenet_bc100"]


class DenseLayer(nn.Module):
    """Append `growth` new channels: cat(x, conv3×3(relu(bn(x))))."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(functional.relu(self.bn(x)))), 1)


class BottleneckLayer(nn.Module):
    """Append `growth` new channels, computed from 4 · growth channels that a 1 × 1 convolution mixes."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.bn1(x)))
        return torch.cat((x, self.conv2(functional.relu(self.bn2(y)))), 1)


class Transition(nn.Module):
    """Between blocks: a 1 × 1 convolution, then half the resolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(self.conv(functional.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """Three blocks of `layers_per_block` layers; a transition keeps the fraction `compression` of channels."""

    def __init__(
        self,
        layers_per_block: int,
        *,
        growth: int = 12,
        bottleneck: bool = False,
        compression: float = 1.0,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        if not 0 < compression <= 1:
            raise ValueError(f"expected a compression above 0 and at most 1, got {compression}")
        channels = 2 * growth
        layer = BottleneckLayer if bottleneck else DenseLayer
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            if block > 0:
                kept = int(channels * compression)
                layers.append(Transition(channels, kept))
                channels = kept
            for _ in range(layers_per_block):
                layers.append(layer(channels, growth))
                channels += growth
        self.features = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn(self.features(x)))
        logits: Tensor = self.classifier(torch.mean(x, dim=(2, 3)))
        return logits


def densenet40(num_classes: int = 10) -> DenseNet:
    return DenseNet(12, num_classes=num_classes)


def densenet_bc100(num_classes: int = 10) -> DenseNet:
    return DenseNet(16, bottleneck=True, compression=0.5, num_classes=num_classes)
