"""He initialisation for the registered networks.

He et al. (2015) derive two equally good scales for layers followed by ReLU: one keeps the variance of the
activations (2 / fan-in), one that of the gradients (2 / fan-out). Convolutions take fan-out, because the
original ResNet, VGG and DenseNet code for CIFAR does and published accuracies rest on it; linear layers take
fan-in, because fan-out would blow up a classifier that has ten outputs.
"""

from __future__ import annotations

from torch import nn

__all__ = ["he_initialise_"]


def he_initialise_(module: nn.Module) -> None:
    """Draw every convolution and linear weight of `module` from He's normal distribution; zero the biases.

    Batch normalisation starts as the identity (scale one, shift zero). Other layers do not change.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.ones_(layer.weight)
        else:
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
