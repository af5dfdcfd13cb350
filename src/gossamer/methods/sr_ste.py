"""SR-STE: magnitude masks, chosen again in every step, with a decay of the pruned weights.

Rule: the N largest |w̃| of every M are used, from the start. w̃ follows the gradient of the masked weights
straight through, plus λ·(1 - m) ⊙ w̃, which keeps pruned weights small, so that masks settle.
Reference: Zhou et al. 2021, Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch.
Ours: the first step is dense. It also serves other patterns and single weights, where the largest of the network are
used. Masks change until the end, as published, unless phases are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect, is_rate
from gossamer.methods.budgets import GlobalThreshold, magnitude
from gossamer.methods.patterned import make_budget


@dataclass(frozen=True)
class SRSTEOptions(Options):
    decay: float = 2e-4  # λ, of pruned weights

    def __post_init__(self) -> None:
        expect(self, decay=(is_rate(self.decay), "a number of at least 0"))


class SRSTE(GlobalThreshold[SRSTEOptions]):
    name, title, options = "sr_ste", "magnitude, pruned weights decay (SR-STE)", SRSTEOptions
    reference = "Zhou et al. 2021, Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch"
    patterned = True
    from_start = True
    usual_phases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"warmup": "0it", "sparsify": "0.5run", "stabilise": "0.5run"}
    )

    def __init__(self, context: Context[SRSTEOptions]) -> None:
        self._decay = context.column("decay")
        self._begin(make_budget(context, magnitude(context.weights), ramp="at_once"))

    def update_masks(self, step: Step) -> None:
        self.weight_gradient(step.gradient, step.weights)
        self._budget.score.copy_(step.weights.abs())
        self._budget.meet_()

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.add_(weights.masked_fill(self.mask, 0.0) * self._decay)
