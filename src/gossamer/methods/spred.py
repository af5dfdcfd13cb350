"""spred: an L1 penalty as weight decay on two factors.

Rule: each weight is the product of two factors, w = m ⊙ v, both with weight decay; at the minimum over all
factorisations this is an L1 penalty on w. m starts at 1, so that signs can change through v. PILoT is this with a
decay that is raised while the network is too dense.
References: Ziyin & Wang 2023, spred: Solving L1 Penalty with SGD; Jacobs & Burkholz 2025, Mask in the Mirror (PILoT).
Ours: v is trained by the user's optimizer and m by Adam, whose learning rate goes to zero on a cosine, so that the rule
does not depend on the optimizer. The decay rises linearly in the sparsify phase and is zero after it. At the end the
largest |m ⊙ v| are kept, as the budget requires.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.adam import Adam
from gossamer.methods.base import Context, Options, Step, expect, is_rate
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, magnitude


@dataclass(frozen=True)
class SpredOptions(Options):
    mask_lr: float = 0.001  # learning rate of m
    decay: float = 1.0  # of both factors, at the end of the sparsify phase

    def __post_init__(self) -> None:
        expect(
            self,
            mask_lr=(is_rate(self.mask_lr), "a number of at least 0"),
            decay=(is_rate(self.decay), "a number of at least 0"),
        )


class Spred(BudgetedMethod[SpredOptions]):
    name, title, options = "spred", "two factors with weight decay (spred)", SpredOptions
    reference = "Ziyin & Wang 2023, spred: Solving L1 Penalty with SGD"
    masked_forward = False

    def __init__(self, context: Context[SpredOptions]) -> None:
        self._timeline, decays = context.timeline, context.values("decay")
        self._rate = context.timeline.annealed(context.values("mask_lr"))
        ramp = max(1, context.timeline.plan.sparsify)
        self._decay = context.timeline.series(
            lambda step: [decay * (step + 1) / ramp if step < ramp else 0.0 for decay in decays]
        )
        self._factor = torch.ones_like(context.weights)  # m; the parameters hold v
        self._adam = Adam(context.weights)
        self._begin(GlobalBudget(context, magnitude(context.weights), ramp="none"))

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        torch.mul(self._factor, weights, out=out)

    def update_masks(self, step: Step) -> None:
        rate, decay = self._timeline.now(self._rate), self._timeline.now(self._decay)
        direction = self._adam.direction(step.gradient * step.weights, self._timeline.clock)
        self.weight_gradient(step.gradient, step.weights)
        self._factor.sub_(rate * (direction + decay * self._factor))
        step.weights.sub_(rate * decay * step.weights)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.mul_(self._factor)

    def finalize(self, weights: Tensor) -> Tensor:
        weights.mul_(self._factor)
        self._budget.score.copy_(weights.abs())
        self._budget.protect_()
        self._budget.cut_()
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "factor": self._factor, **self._adam.state()}
