"""VGG-16 and VGG-19 with batch normalisation for 32 × 32 images.

Convolutions of 3 × 3 without bias, each followed by batch normalisation and ReLU; four maximum pools and a
last average pool bring 32 × 32 down to one pixel of 512 channels. VGG-16 has a classifier of two layers (512
hidden units, 14,977,728 prunable weights), VGG-19 a single one (20,024,000). The paper does not print the sizes
of its VGGs.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["VGG", "vgg16_cifar", "vgg19_cifar"]

_CHANNELS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five stages, the i-th of `convolutions[i]` convolutions; `hidden` are the classifier's inner widths."""

    def __init__(self, convolutions: tuple[int, ...], hidden: tuple[int, ...] = (), num_classes: int = 10) -> None:
        super().__init__()
        if len(convolutions) != len(_CHANNELS):
            raise ValueError(f"expected {len(_CHANNELS)} stages of convolutions, got {len(convolutions)}")
        layers: list[nn.Module] = []
        channels = 3
        for stage, (count, width) in enumerate(zip(convolutions, _CHANNELS, strict=True)):
            if stage > 0:
                layers.append(nn.MaxPool2d(2))
            for _ in range(count):
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ]
                channels = width
        self.features = nn.Sequential(*layers)
        head: list[nn.Module] = []
        for width in hidden:
            head += [nn.Linear(channels, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
            channels = width
        self.classifier = nn.Sequential(*head, nn.Linear(channels, num_classes))
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(self.features(x), 2)
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def vgg16_cifar(num_classes: int = 10) -> VGG:
    return VGG((2, 2, 3, 3, 3), (512,), num_classes)


def vgg19_cifar(num_classes: int = 10) -> VGG:
    return VGG((2, 2, 4, 4, 4), (), num_classes)
