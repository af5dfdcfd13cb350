"""Operation-aware soft channel pruning (SCP): channels that batch norm and ReLU rarely let pass.

Rule: the outputs of a batch norm with gain γ and bias β are about normal with mean β and standard deviation |γ|, so
ReLU lets a share Φ(β/|γ|) of them pass. A penalty on these shares moves channels to zero, and those with the smallest
are pruned.
Reference: Kang & Han 2020, Operation-Aware Soft Channel Pruning using Differentiable Masks.
Ours: a published soft mask multiplies the channel in training, and removes it by its own threshold. Here, the share
itself is penalized in the sparsify phase, after which the channels with the smallest shares of the network are pruned,
as the sparsity requires. The batch norm before an addition counts as if ReLU followed it. filters.py defines the
sparsity.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, expect, is_rate
from gossamer.methods.filters import PrunedByNorm

_SMALLEST = 1e-3  # |γ|, where the slope of Φ is limited


@dataclass(frozen=True)
class SCPOptions(Options):
    penalty: float = 1e-4  # on the sum of all shares

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


class SCP(PrunedByNorm[SCPOptions]):
    name, title, options = "scp", "channels by Gaussian CDF of batch norm (SCP)", SCPOptions
    reference = "Kang & Han 2020, Operation-Aware Soft Channel Pruning using Differentiable Masks"

    def __init__(self, context: Context[SCPOptions]) -> None:
        self._begin(context)
        self._penalty, self._biases = context.column("penalty"), torch.zeros_like(self._gains)

    def add_penalty(self, gradient: Tensor, others: Tensor) -> None:
        gains, biases = others.index_select(1, self._columns), others.index_select(1, self._bias_columns)
        self._gains.copy_(gains)
        self._biases.copy_(biases)
        spread = gains.abs().clamp_min(_SMALLEST)
        ratio = biases / spread
        slope = torch.exp(-0.5 * ratio.square()) / (math.sqrt(2.0 * math.pi) * spread)  # of Φ(β/|γ|), along β
        slope *= self._penalty * self._sparsifying(gains.dtype)
        gradient.index_add_(1, self._bias_columns, slope)
        gradient.index_add_(1, self._columns, -slope * ratio * gains.sign())

    def _scores(self, weights: Tensor) -> Tensor:
        shares: Tensor = torch.special.ndtr(self._biases / self._gains.abs().clamp_min(_SMALLEST))
        return shares

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "biases": self._biases}
