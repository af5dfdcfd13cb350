"""Dynamic pruning with feedback: keep the largest weights of the network, chosen again in every step.

Rule: the mask keeps the κ(t) largest |w̃| of the whole network. w̃ follows the gradient of the masked weights, also if
it is pruned, so pruned weights can grow and return. Reference: Lin et al. 2020, Dynamic Model Pruning with Feedback.
Ours: the mask is chosen in every step instead of every 16th, along our cubic budget, and min_density protects a
fraction of each tensor.
"""

from gossamer.methods.base import Context, Options, Step
from gossamer.methods.budgets import GlobalThreshold, magnitude
from gossamer.methods.patterned import make_budget


class DPF(GlobalThreshold[Options]):
    name, title = "dpf", "magnitude, re-chosen every step (DPF)"
    reference = "Lin et al. 2020, Dynamic Model Pruning with Feedback"
    patterned = True

    def __init__(self, context: Context[Options]) -> None:
        self._begin(make_budget(context, magnitude(context.weights)))

    def update_masks(self, step: Step) -> None:
        self._budget.score.copy_(step.weights.abs())
        self._budget.meet_()
