"""Data-driven sparse structure selection (DSS): scaling factors of channels by an accelerated proximal gradient.

Rule: the output of each structure is multiplied by a factor λ with an L1 penalty p, which follows its own optimizer

    z = λ - η·∂L/∂λ,   z' = sign(z)·max(0, |z| - η·p),   v = z' - λ + μ·v,   λ = z' + μ·v

so that factors become exactly zero. Structures whose factor is zero are removed.
Reference: Huang & Wang 2018, Data-Driven Sparse Structure Selection for Deep Neural Networks.
Ours: structures are channels, and the factor is the gain of the batch norm after the convolution, since a second factor
beside it is redundant. η is the learning rate of the weights; gains have no weight decay. After the sparsify phase,
the penalty ends, the channels with the smallest |λ| of the network are pruned, as the sparsity requires, and their
factors are zero. filters.py defines the sparsity.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.methods.base import Context, Options, expect, is_rate
from gossamer.methods.filters import PrunedByNorm
from gossamer.methods.soft_threshold import soft_threshold


@dataclass(frozen=True)
class DSSOptions(Options):
    penalty: float = 1e-3  # p
    momentum: float = 0.9  # μ

    def __post_init__(self) -> None:
        expect(
            self,
            penalty=(is_rate(self.penalty), "a number of at least 0"),
            momentum=(0 <= self.momentum < 1, "a number of at least 0 and below 1"),
        )


class DSS(PrunedByNorm[DSSOptions]):
    name, title, options = "dss", "channels by scaling factors, proximal (DSS)", DSSOptions
    reference = "Huang & Wang 2018, Data-Driven Sparse Structure Selection for Deep Neural Networks"
    needs_rate = True

    def __init__(self, context: Context[DSSOptions]) -> None:
        self._begin(context)
        self._penalty, self._momentum = context.column("penalty"), context.column("momentum")
        self._velocity = torch.zeros_like(self._gains)
        self._alive = torch.ones_like(self._gains)

    def add_penalty(self, gradient: Tensor, others: Tensor) -> None:
        """Take the step of the factors, which `project_others` writes after that of the optimizer."""
        before, slope = others.index_select(1, self._columns), gradient.index_select(1, self._columns)
        rate = self._timeline.rate.to(before.dtype)
        near = soft_threshold(before - rate * slope, rate * self._penalty * self._sparsifying(before.dtype))
        velocity = near - before + self._momentum * self._velocity
        finite = torch.isfinite(slope).all(1, keepdim=True)
        self._gains.copy_(torch.where(finite, (near + self._momentum * velocity) * self._alive, before))
        self._velocity.copy_(torch.where(finite, velocity * self._alive, self._velocity))

    def project_others(self, others: Tensor) -> None:
        others.index_copy_(1, self._columns, self._gains)

    def _scores(self, weights: Tensor) -> Tensor:
        return self._gains.abs()

    def _prune(self, weights: Tensor) -> None:
        super()._prune(weights)
        parts = zip(self._layout.split(self.mask), self._layout.shapes, strict=True)
        filters = [part.view(len(part), shape[0], -1)[:, :, 0] for part, shape in parts if len(shape) > 2]
        self._alive.copy_(torch.cat(filters, dim=1))

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "velocity": self._velocity, "alive": self._alive}
