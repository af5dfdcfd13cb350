"""No method: the dense network at the same epochs, which every sparse one is held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.methods.rule import Layout, Options, Request, Rule, Timeline


class Dense(Rule[Options]):
    name, title, options = "dense", "dense", Options
    reference = "–"

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._mask = torch.ones_like(weights, dtype=torch.bool)

    @property
    def mask(self) -> Tensor:
        return self._mask

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        return

    def freeze_(self, weights: Tensor) -> Tensor:
        return self._mask

    def state(self) -> dict[str, Tensor]:
        return {}
