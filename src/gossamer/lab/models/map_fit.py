"""The small network of the paper's map-fitting experiment.

Three fully connected layers of 64 neurons, each followed by batch normalisation and ReLU (12,288
prunable weights). With random weights and random masks it is the target map; with the same weights and other
masks it is fitted to it.
"""

from __future__ import annotations

from torch import Tensor, nn

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["MapFit", "map_fit"]


class MapFit(nn.Module):
    """`depth` times linear → batch normalisation → ReLU, `width` wide, with `num_classes` outputs."""

    def __init__(self, num_classes: int = 64, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for outputs in (*[width] * (depth - 1), num_classes):
            layers += [nn.Linear(width, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


def map_fit(num_classes: int = 64, width: int = 64, depth: int = 3) -> MapFit:
    return MapFit(num_classes, width, depth)
