"""Gradual magnitude pruning with the same sparsity in every tensor.

Rule: every n-th step the smallest |w| of each tensor are pruned, s(t) = s_f · (1 - (1 - t/T)³) of them. Pruned
weights are zero and never return.
Reference: Zhu & Gupta 2017, To Prune, or Not to Prune.
Ours: the counts of the tensors are rounded such that their sum is exactly the budget. The published schedules exempt
some layers by hand (the first, the last); here all are treated alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, expect
from gossamer.methods.budgets import keep_largest_, shares
from gossamer.methods.timing import PrunedInStages
from gossamer.schedule import cubic_budget


@dataclass(frozen=True)
class PerLayerOptions(Options):
    every: int = 100  # steps between two prunings

    def __post_init__(self) -> None:
        expect(self, every=(self.every >= 1, "at least 1 step"))


class GradualPerLayer(PrunedInStages[PerLayerOptions]):
    name, title, options = "gradual_per_layer", "gradual magnitude, per layer (Zhu & Gupta)", PerLayerOptions
    reference = "Zhu & Gupta 2017, To Prune, or Not to Prune"
    shared = ("every",)

    def __init__(self, context: Context[PerLayerOptions]) -> None:
        self._layout, self._keep = context.layout, context.keep
        self._schedule(context.timeline, context.options[0].every)
        self.mask = torch.ones_like(context.weights, dtype=torch.bool)

    def _prune(self, weights: Tensor, step: int) -> None:
        """Prune each tensor to its part of the budget."""
        total, sizes = self._layout.count, self._layout.sizes
        left = [cubic_budget(step / self._last, total, keep) for keep in self._keep]
        counts = [shares(sizes, each, [each / total] * len(sizes)) for each in left]
        keep_largest_(self.mask, self._layout, weights.abs().masked_fill_(~self.mask, -torch.inf), counts)

    def state(self) -> dict[str, Tensor]:
        return {"mask": self.mask}
