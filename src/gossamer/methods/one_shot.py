"""Magnitude pruning in one step.

Rule: weights below a multiple of the standard deviation of their layer are pruned, all in one step, and never return;
the rest is fine-tuned.
Reference: Han et al. 2015, Learning both Weights and Connections for Efficient Neural Networks.
Ours: one threshold for the whole network, and min_density protects a fraction of each tensor. The first step of the
mask phases prunes; the rest of the run is fine-tuning.
"""

from gossamer.methods.gradual import SmallestPruned


class OneShot(SmallestPruned):
    name, title, ramp = "one_shot", "one-shot magnitude + fine-tuning (Han)", "at_once"
    reference = "Han et al. 2015, Learning both Weights and Connections for Efficient Neural Networks"
