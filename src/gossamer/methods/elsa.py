"""ELSA: the budget as a constraint, by the alternating direction method of multipliers (ADMM).

Rule: minimise the loss over w subject to w = z, where z has as many nonzeros as the budget allows. Every K steps
z = the largest entries of w + u, and u += w - z. In each step the gradient of λ/2·‖w - z + u‖² is added to that of the
loss. At the end the largest |w| are kept.
Reference: Lee et al. 2025, The Unseen Frontier: Pushing the Limits of LLM Sparsity with Surrogate-Free ADMM.
Ours: K shrinks with short mask phases, and min_density protects a fraction of each tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect, is_rate
from gossamer.methods.budgets import BudgetedMethod, GlobalBudget, magnitude


@dataclass(frozen=True)
class ELSAOptions(Options):
    penalty: float = 0.01  # λ
    every: int = 32  # K

    def __post_init__(self) -> None:
        expect(
            self,
            penalty=(is_rate(self.penalty), "a number of at least 0"),
            every=(self.every >= 1, "at least 1 step"),
        )


class ELSA(BudgetedMethod[ELSAOptions]):
    name, title, options = "elsa", "ADMM (ELSA)", ELSAOptions
    reference = "Lee et al. 2025, The Unseen Frontier: Pushing the Limits of LLM Sparsity with Surrogate-Free ADMM"
    shared = ("every",)
    masked_forward = False

    def __init__(self, context: Context[ELSAOptions]) -> None:
        self._every = context.timeline.often(context.options[0].every)
        self._penalty = context.column("penalty")
        self._begin(GlobalBudget(context, magnitude(context.weights), ramp="none"))
        self._budget.cut_()
        self._target = context.weights * self.mask  # z
        self._multiplier = torch.zeros_like(context.weights)  # u

    def apply_masks(self, weights: Tensor, out: Tensor) -> None:
        out.copy_(weights)  # dense to the end

    def update_masks(self, step: Step) -> None:
        self.weight_gradient(step.gradient, step.weights)

    def weight_gradient(self, gradient: Tensor, weights: Tensor) -> None:
        gradient.add_((weights - self._target + self._multiplier).mul_(self._penalty))

    def topology_due(self, step: int) -> bool:
        return step % self._every == 0

    def update_topology(self, weights: Tensor, step: int) -> None:
        shifted = weights + self._multiplier
        self._keep_largest(shifted)
        self._target.copy_(shifted * self.mask)
        self._multiplier.add_(weights - self._target)

    def finalize(self, weights: Tensor) -> Tensor:
        self._keep_largest(weights)
        return self.mask

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "sparse": self._target, "multiplier": self._multiplier}

    def _keep_largest(self, values: Tensor) -> None:
        self._budget.score.copy_(values.abs())
        self._budget.protect_()
        self._budget.cut_()
