"""Masks that are done: what they have removed is zero and stays zero, whatever the optimizer does.

No method by itself, but what follows every one of them where many runs are trained side by side.
"""

from torch import Tensor

from gossamer.methods.rule import Options, Rule


class Frozen(Rule[Options]):
    name, title, options = "frozen", "frozen masks", Options
    reference = "–"

    def __init__(self, mask: Tensor) -> None:
        self._removed = ~mask

    @property
    def mask(self) -> Tensor:
        return ~self._removed

    def show_(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        return

    def settle_(self, weights: Tensor) -> None:
        weights.masked_fill_(self._removed, 0.0)

    def freeze_(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"removed": self._removed}
