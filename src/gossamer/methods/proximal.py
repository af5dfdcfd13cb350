"""A proximal rule with an exact budget: soft thresholding of latent weights.

Rule: the optimizer updates latent weights w̃ with the gradient at the weights that the layer uses, which are the
proximal map of the L1 norm, sign(w̃)·max(|w̃| - T, 0). T grows until masks are frozen; then the kept weights heal.
Reference: torchao 2025, PAT: pruning-aware training.
Ours: T follows from the budget of the step, one for the whole network, instead of growing with the learning rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from gossamer.methods.feather import Feather, FeatherOptions


@dataclass(frozen=True)
class ProximalOptions(FeatherOptions):
    power: float = 1.0
    pruned_grad_scale: float | None = 1.0


class Proximal(Feather):
    name, title, options = "proximal", "soft threshold of latent weights (PAT)", ProximalOptions
    reference = "torchao 2025, PAT: pruning-aware training"
    usual_phases: ClassVar[Mapping[str, str]] = MappingProxyType({})
