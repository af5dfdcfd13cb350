"""The hidden state of a language model between two windows of text.

It has a fixed address on the device, as a captured step requires.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class RNNState:
    """The hidden state; None before the first window, so that the network starts from zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.value: tuple[Tensor, ...] | None = None
        self._next: tuple[Tensor, ...] = ()

    def note(self, hidden: Iterable[Tensor]) -> None:
        """Record the final state of a window; `value` is unchanged, as the backward pass may still need it."""
        self._next = tuple(part.detach() for part in hidden)

    def carry(self) -> None:
        """Make the recorded state the initial state of the next window."""
        if self.value is None:
            self.value = tuple(part.clone() for part in self._next)
        else:
            for kept, new in zip(self.value, self._next, strict=True):
                kept.copy_(new)
        self._next = ()

    def clear(self) -> None:
        for part in self.value or ():
            part.zero_()

    def state(self) -> list[Tensor] | None:
        return None if self.value is None else list(self.value)

    def load(self, state: Iterable[Tensor] | None) -> None:
        self.value = None if state is None else tuple(part.to(self._device) for part in state)
