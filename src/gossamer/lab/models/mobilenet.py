"""A network of depth-wise separable convolutions for 32 × 32 images, after MobileNet (Howard et al. 2017).

A block is a 3 × 3 convolution of each channel by itself and a 1 × 1 convolution that mixes channels, each with batch
normalisation and ReLU. The first layer keeps the resolution, as usual on CIFAR; three blocks halve it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["MobileNet", "mobilenet_cifar"]

_STAGES = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1))  # channels and stride


class MobileNet(nn.Module):
    def __init__(self, num_classes: int = 100, stages: tuple[tuple[int, int], ...] = _STAGES) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        for width, stride in stages:
            layers += [
                nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        he_initialise_(self)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # a filter has 9 inputs and 9 outputs

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.mean(self.features(x), dim=(2, 3)))
        return logits


def mobilenet_cifar(num_classes: int = 100) -> MobileNet:
    return MobileNet(num_classes)
