"""SNIP: keeps the weights to which the loss is most sensitive, chosen once at the beginning.

Rule: the sensitivity is |∂L/∂w ⊙ w| of the initial network on the first batch; the largest of the network are kept.
Reference: Lee, Ajanthan & Torr 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity.
Ours: ∂L/∂w ⊙ w is summed over the first `batches` steps, while these steps already train the dense network; then
one step prunes. min_density protects a fraction of each tensor, as whole layers could be pruned otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, magnitude
from gossamer.methods.timing import PrunedOnce


@dataclass(frozen=True)
class SNIPOptions(Options):
    batches: int = 2  # published: one batch of about 128 images

    def __post_init__(self) -> None:
        expect(self, batches=(self.batches >= 1, "at least 1"))


class SNIP(BudgetedMethod[SNIPOptions], PrunedOnce[SNIPOptions]):
    name, title, options = "snip", "sensitivity at the start (SNIP)", SNIPOptions
    reference = "Lee et al. 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity"
    shared = ("batches",)
    from_start = True

    def __init__(self, context: Context[SNIPOptions]) -> None:
        self._prune_after = min(context.options[0].batches, context.timeline.length)
        self._begin(GlobalBudget(context, magnitude(context.weights), ramp="none"))
        self._sum = torch.zeros_like(context.weights)

    def update_masks(self, step: Step) -> None:
        self._sum.addcmul_(step.gradient, step.weights)
        self.weight_gradient(step.gradient, step.weights)

    def _prune(self, weights: Tensor) -> None:
        self._budget.score.copy_(self._sum.abs())
        self._budget.protect_()
        self._budget.cut_()

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"sum": self._sum}
