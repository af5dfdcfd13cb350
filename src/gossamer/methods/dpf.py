"""Dynamic pruning with feedback: the largest weights of the network, chosen anew in every step.

Rule: mask = the κ(t) largest |w̃| of the whole network; w̃ follows the gradient of the masked weights, also behind the
mask, so that a removed connection can grow and return.
Reference: Lin et al. 2020, Dynamic Model Pruning with Feedback.
Ours: the mask is chosen in every step instead of every 16th, along our cubic budget, with the floor a tensor.
"""

from collections.abc import Sequence

from torch import Tensor

from gossamer.methods.budgets import GlobalBudget, MasksOfBudget, magnitude
from gossamer.methods.rule import DenseGradient, Layout, Options, Request, Timeline


class DPF(MasksOfBudget, DenseGradient[Options]):
    name, title, options = "dpf", "magnitude, re-chosen every step (DPF)", Options
    reference = "Lin et al. 2020, Dynamic Model Pruning with Feedback"

    def __init__(
        self, layout: Layout, requests: Sequence[Request[Options]], timeline: Timeline, weights: Tensor, *, floor: float
    ) -> None:
        self._budget = GlobalBudget(layout, requests, timeline, magnitude(weights), floor=floor)

    def learn_(self, gradient: Tensor, weights: Tensor) -> None:
        self._budget.score.copy_(weights.abs())
        self._budget.meet_()
