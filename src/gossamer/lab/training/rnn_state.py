"""The hidden state of a language model between two windows of its text.

It has its own place on the device, in which a captured step finds it again.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class RNNState:
    """None until the first window is done: a network then begins from zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.value: tuple[Tensor, ...] | None = None
        self._next: tuple[Tensor, ...] = ()

    def note(self, hidden: Iterable[Tensor]) -> None:
        """How a window has ended; `value` stays what the backward pass of this window may still need."""
        self._next = tuple(part.detach() for part in hidden)

    def carry(self) -> None:
        """Let the next window go on from there."""
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
