"""Magnitude pruning at once.

Rule: what is below a multiple of the standard deviation of its layer goes, all in one step, and never returns; the rest
is fine-tuned.
Reference: Han et al. 2015, Learning both Weights and Connections for Efficient Neural Networks.
Ours: one threshold for the whole network, with the floor a tensor. The cut is made in the first step of the mask phases
and the rest of the run is fine-tuning.
"""

from gossamer.methods.gradual import SmallestGo


class OneShot(SmallestGo):
    name, title, ramp = "one_shot", "one-shot magnitude + fine-tuning (Han)", "at_once"
    reference = "Han et al. 2015, Learning both Weights and Connections for Efficient Neural Networks"
