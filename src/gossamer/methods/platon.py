"""PLATON: keep weights that matter or might matter.

Rule: the importance of a weight is |w ⊙ ∂L/∂w|, smoothed over steps; its uncertainty is the smoothed distance between
the importance of a step and the smoothed one. The largest products of the two are kept, along a cubic. Pruned weights
are zero, and come back by the step that their gradient takes.
Reference: Zhang et al. 2022, PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance.
Ours: the masks are chosen in every step, so the average over the 10 steps between two choices is not needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect
from gossamer.methods.budgets import GlobalBudget, GlobalThreshold


@dataclass(frozen=True)
class PLATONOptions(Options):
    importance_memory: float = 0.85
    uncertainty_memory: float = 0.95

    def __post_init__(self) -> None:
        expect(
            self,
            importance_memory=(0 <= self.importance_memory < 1, "a number of at least 0 and below 1"),
            uncertainty_memory=(0 <= self.uncertainty_memory < 1, "a number of at least 0 and below 1"),
        )


class PLATON(GlobalThreshold[PLATONOptions]):
    name, title, options = "platon", "importance and its uncertainty (PLATON)", PLATONOptions
    reference = "Zhang et al. 2022, PLATON: Pruning Large Transformer Models with Upper Confidence Bound"
    shared = ("importance_memory", "uncertainty_memory")
    shardable = False  # many scores are equal (zero), and the first of these are kept: shards have another order

    def __init__(self, context: Context[PLATONOptions]) -> None:
        options = context.options[0]
        self._fresh = 1.0 - options.importance_memory, 1.0 - options.uncertainty_memory
        self._importance, self._uncertainty = torch.zeros_like(context.weights), torch.zeros_like(context.weights)
        self._begin(GlobalBudget(context, torch.zeros_like(context.weights)))

    def update_masks(self, step: Step) -> None:
        importance = (step.gradient * step.weights).abs_()
        self._importance.lerp_(importance, self._fresh[0])
        self._uncertainty.lerp_((importance - self._importance).abs_(), self._fresh[1])
        torch.mul(self._importance, self._uncertainty, out=self._budget.score)
        self._budget.meet_()

    def project(self, weights: Tensor) -> None:
        weights.masked_fill_(~self.mask, 0.0)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "importance": self._importance, "uncertainty": self._uncertainty}
