"""The per-sample sums of a step as the literal Eq. (grad_norm) needs them: over all processes, without loss scale."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.methods.base import SampleSums
from gossamer.per_sample import SampleMoments, refuse_unknown
from gossamer.prunable import Weight


class SampleScales:
    """Watches the layers of the weights and hands out what a step has seen."""

    def __init__(
        self, weights: Sequence[Weight], dense: Mapping[str, Tensor], replicas: dist.ProcessGroup | None
    ) -> None:
        self._watcher = SampleMoments(_uses(weights), dense.__getitem__)
        self._names = [weight.name for weight in weights]
        self._replicas = replicas

    def take(self, loss_scale: float | None) -> SampleSums:
        """The sums since the last call. Where the loss was scaled, so were they, by the square."""
        totals, samples = self._watcher.totals(), self._watcher.samples
        self._watcher.reset()
        if samples == 0:
            raise RuntimeError(
                'scale="per_sample" saw no backward pass of the model before this step: train the model that was given '
                'to the Sparsifier, not a copy or a compiled one, or use scale="batch"'
            )
        factor = 1.0 if loss_scale is None else loss_scale**-2
        if self._replicas is not None:
            # Each process takes the mean over its own samples; the joint mean divides by the number of processes again.
            processes = dist.get_world_size(self._replicas)
            joint = torch.cat(list(totals.values()))
            dist.all_reduce(joint, group=self._replicas)
            parts = torch.split(joint, [total.numel() for total in totals.values()])
            totals = dict(zip(totals, parts, strict=True))
            samples, factor = samples * processes, factor / processes**2
        return SampleSums([totals[name] * factor for name in self._names], samples)

    def close(self) -> None:
        self._watcher.close()


def check_layers(weights: Sequence[Weight]) -> None:
    """Raise a ValueError that names the weights of layers whose per-sample gradients are not known."""
    refuse_unknown(_uses(weights), {})


def _uses(weights: Sequence[Weight]) -> dict[str, list[tuple[nn.Module, str]]]:
    return {weight.name: [(use.module, use.attribute) for use in weight.uses] for weight in weights}
