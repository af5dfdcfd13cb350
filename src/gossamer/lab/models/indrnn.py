"""Independently recurrent networks (Li et al. 2018), in which each neuron is connected only to itself over time.

    h_t = relu(W x_t + u ⊙ h_{t−1} + b)

W is an ordinary, prunable linear layer; u is a vector, one number per neuron, and is never pruned: a zero in it would
remove the memory of the neuron. The gradient over T steps contains the factor u to the power T, so training has to
bound |u|: `limit_recurrence_` after every step, as `gossamer.lab.training` does.

The paper defines the recurrence and no network; the one here follows the customary setting for digits read as
sequences: six layers of 128 neurons with batch normalisation, one row of the image per step by default, one
pixel per step with `input_size=1`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.lab.models.initialise import he_initialise_

__all__ = ["IndRNN", "IndRNNCell", "IndRNNLayer", "indrnn", "limit_recurrence_"]


class IndRNNCell(nn.Module):
    """One step: relu(W x + u ⊙ h + b)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Parameter(torch.empty(hidden_size))
        nn.init.uniform_(self.recurrent, 0.0, 1.0)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return functional.relu(self.input(x) + self.recurrent * h)


class IndRNNLayer(nn.Module):
    """A cell run over a sequence (steps, batch, features); gives all states and the last one."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = IndRNNCell(input_size, hidden_size)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # The input term does not depend on the state: one product for all steps, then a cheap loop.
        projected = self.cell.input(x)
        h = torch.zeros_like(projected[0]) if state is None else state
        states = []
        for step in projected.unbind(0):
            h = functional.relu(torch.addcmul(step, self.cell.recurrent, h))
            states.append(h)
        return torch.stack(states), h


class IndRNN(nn.Module):
    """Layers of IndRNN, each followed by batch normalisation; the last step's features are classified.

    Takes sequences (batch, steps, input_size), or images, which are cut into steps of `input_size` numbers.
    """

    def __init__(self, num_classes: int = 10, input_size: int = 28, hidden_size: int = 128, layers: int = 6) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"expected at least one layer, got {layers}")
        self.input_size = input_size
        widths = [input_size, *[hidden_size] * (layers - 1)]
        self.layers = nn.ModuleList(IndRNNLayer(width, hidden_size) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden_size) for _ in widths)
        self.classifier = nn.Linear(hidden_size, num_classes)
        he_initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], -1, self.input_size).transpose(0, 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            states, _ = layer(x)
            x = norm(states.flatten(0, 1)).view_as(states)
        logits: Tensor = self.classifier(x[-1])
        return logits


@torch.no_grad()
def limit_recurrence_(module: nn.Module, *, steps: int, growth: float = 2.0) -> None:
    """Clamp every u to |u| ≤ growth^(1 / steps): over `steps` steps a state grows at most `growth`-fold."""
    if steps < 1 or growth <= 0:
        raise ValueError(f"expected steps of at least 1 and growth above 0, got {steps} and {growth}")
    bound = growth ** (1 / steps)
    for part in module.modules():
        if isinstance(part, IndRNNCell):
            part.recurrent.clamp_(-bound, bound)


def indrnn(num_classes: int = 10, input_size: int = 28, hidden_size: int = 128, layers: int = 6) -> IndRNN:
    return IndRNN(num_classes, input_size, hidden_size, layers)
