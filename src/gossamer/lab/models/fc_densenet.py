"""The fully connected DenseNet that the paper trains on MNIST.

Sixteen linear layers of eight units, each fed with the pixels and the outputs of all previous layers, and a
classifier on all 784 + 16 · 8 = 912 features: 117,152 prunable weights. A layer is linear → batch normalisation →
ReLU. Normalising in front of the linear layer, as convolutional DenseNets do, would rescale raw pixels that
are almost always black, and trains worse.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["FullyConnectedDenseNet", "fc_densenet_mnist"]


class FullyConnectedLayer(nn.Module):
    """Append `growth` new features: cat(x, relu(bn(linear(x))))."""

    def __init__(self, in_features: int, growth: int) -> None:
        super().__init__()
        # No bias: the shift of the following batch normalisation has the same effect.
        self.linear = nn.Linear(in_features, growth, bias=False)
        self.bn = nn.BatchNorm1d(growth)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, functional.relu(self.bn(self.linear(x)))), 1)


class FullyConnectedDenseNet(nn.Module):
    """`layers` densely connected linear layers of `growth` units; images are flattened."""

    def __init__(self, in_features: int = 784, layers: int = 16, growth: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        widths = [in_features + growth * i for i in range(layers + 1)]
        self.features = nn.Sequential(*(FullyConnectedLayer(width, growth) for width in widths[:-1]))
        self.classifier = nn.Linear(widths[-1], num_classes)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x.flatten(1)))
        return logits


def fc_densenet_mnist(num_classes: int = 10) -> FullyConnectedDenseNet:
    return FullyConnectedDenseNet(num_classes=num_classes)
