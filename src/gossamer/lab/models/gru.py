"""A gated recurrent unit that reads an image as a sequence, and classifies it by its last state.

With `input_size=4`, a digit of 28 × 28 pixels has 196 steps; with 1, a pixel per step, it has 784. The GRU is PyTorch's
own, at its default initialisation.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["GRUClassifier", "gru"]


class GRUClassifier(nn.Module):
    """Takes sequences (batch, steps, input_size), or images, which are cut into steps of `input_size` numbers."""

    def __init__(self, num_classes: int = 10, input_size: int = 4, hidden_size: int = 256, layers: int = 1) -> None:
        super().__init__()
        self.input_size = input_size
        self.gru = nn.GRU(input_size, hidden_size, layers)
        self.classifier = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x.reshape(x.shape[0], -1, self.input_size).transpose(0, 1))
        logits: Tensor = self.classifier(states[-1])
        return logits


def gru(num_classes: int = 10, input_size: int = 4, hidden_size: int = 256, layers: int = 1) -> GRUClassifier:
    return GRUClassifier(num_classes, input_size, hidden_size, layers)
