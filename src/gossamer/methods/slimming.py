"""Network slimming: channels are ranked by the gain of the batch norm that follows them.

Rule: an L1 penalty on the gains γ of the batch norm after each convolution during the sparsify phase; then the
channels with the smallest |γ| of the whole network are pruned, and the rest is fine-tuned.
Reference: Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming.
Ours: gain and bias of a pruned channel do not change, as they are not prunable. filters.py defines the sparsity.
"""

from dataclasses import dataclass

from torch import Tensor

from gossamer.methods.base import Context, Options, expect, is_rate
from gossamer.methods.filters import PrunedByNorm


@dataclass(frozen=True)
class SlimmingOptions(Options):
    penalty: float = 1e-4  # on the gains

    def __post_init__(self) -> None:
        expect(self, penalty=(is_rate(self.penalty), "a number of at least 0"))


class Slimming(PrunedByNorm[SlimmingOptions]):
    name, title, options = "slimming", "channels by batch-norm gain (network slimming)", SlimmingOptions
    reference = "Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming"

    def __init__(self, context: Context[SlimmingOptions]) -> None:
        self._begin(context)
        self._penalty = context.column("penalty")

    def add_penalty(self, gradient: Tensor, others: Tensor) -> None:
        gains = others.index_select(1, self._columns)
        self._gains.copy_(gains)
        gradient.index_add_(1, self._columns, gains.sign() * self._penalty * self._sparsifying(gains.dtype))

    def _scores(self, weights: Tensor) -> Tensor:
        return self._gains.abs()
