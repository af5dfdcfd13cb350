"""Network trimming: channels by their average percentage of zeros (APoZ) after ReLU.

Rule: the APoZ of a channel is the share of its outputs that are zero after ReLU. Channels whose APoZ is more than c
standard deviations above the mean of their layer are pruned, and the rest is trained further.
Reference: Hu et al. 2016, Network Trimming: A Data-Driven Neuron Pruning Approach towards Efficient Deep Architectures.
Ours: c, published as one, is solved for, so that the sparsity is met by one cut at the end of the sparsify phase
instead of several rounds on chosen layers. Zeros are counted during training, in a running mean: outputs of the batch
norm after a convolution that are not positive, or of the convolution itself where none follows, as if ReLU came next.
filters.py defines the sparsity.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, Step, expect
from gossamer.methods.filters import PrunedChannels


@dataclass(frozen=True)
class APoZOptions(Options):
    memory: float = 0.99  # of the running mean

    def __post_init__(self) -> None:
        expect(self, memory=(0 <= self.memory < 1, "a number of at least 0 and below 1"))


class APoZ(PrunedChannels[APoZOptions]):
    name, title, options = "apoz", "channels by percentage of zeros (APoZ)", APoZOptions
    reference = "Hu et al. 2016, Network Trimming"
    observes = True

    def __init__(self, context: Context[APoZOptions]) -> None:
        self._begin(context)
        self._memory = context.column("memory")
        self._counts = [self._layout.shapes[index][0] for index in self._filters]
        self._active = context.weights.new_zeros(len(context.weights), sum(self._counts))  # 1 - APoZ

    def update_masks(self, step: Step) -> None:
        if step.active is None:
            raise ValueError("method='apoz' counts zeros in the forward pass, which batched training does not show")
        self._active.mul_(self._memory).add_(step.active * (1.0 - self._memory))
        self.weight_gradient(step.gradient, step.weights)

    def _scores(self, weights: Tensor) -> Tensor:
        layers = torch.split(self._active, self._counts, dim=1)
        tiny = torch.finfo(weights.dtype).tiny
        spreads = (each.std(1, correction=0, keepdim=True).clamp_min(tiny) for each in layers)
        return torch.cat(
            [(each - each.mean(1, keepdim=True)) / by for each, by in zip(layers, spreads, strict=True)], 1
        )

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "active": self._active}
