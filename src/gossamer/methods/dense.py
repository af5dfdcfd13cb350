"""No pruning: the dense network with the same number of epochs, as the baseline."""

import torch
from torch import Tensor

from gossamer.methods.base import Context, Method, Options, Step


class Dense(Method[Options]):
    name, title = "dense", "dense"
    exact = False

    def __init__(self, context: Context[Options]) -> None:
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    def update_masks(self, step: Step) -> None:
        return

    def finalize(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {}
