"""Final masks: pruned weights stay exactly zero, whatever the optimizer does.

Not a separate method: in batched training it follows every other method in the fine-tuning phase.
"""

from torch import Tensor

from gossamer.methods.base import Method, Options, Step


class Frozen(Method[Options]):
    name, title = "frozen", "frozen masks"

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def update_masks(self, step: Step) -> None:
        return

    def project(self, weights: Tensor) -> None:
        weights.masked_fill_(~self.mask, 0.0)

    def finalize(self, weights: Tensor) -> Tensor:
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}
