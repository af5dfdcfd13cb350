"""The two LeNets of the usual compression benchmarks, for 28 × 28 grey images.

LeNet-300-100 is fully connected (266,200 weights). LeNet-5 is the "Caffe" variant of these benchmarks,
with 20 and 50 filters of 5 × 5 and 500 hidden units (430,500 weights), not the smaller network of 1998.
"""

from __future__ import annotations

from torch import Tensor, nn

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["LeNet5", "LeNet300", "lenet5", "lenet300"]


class LeNet300(nn.Module):
    """784 → 300 → 100 → classes, with ReLU."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, num_classes),
        )
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class LeNet5(nn.Module):
    """Two convolutions with maximum pools, then 800 → 500 → classes, with ReLU."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, num_classes),
        )
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def lenet300(num_classes: int = 10) -> LeNet300:
    return LeNet300(num_classes)


def lenet5(num_classes: int = 10) -> LeNet5:
    return LeNet5(num_classes)
