"""Checks that run up front instead of mid-training."""

from collections.abc import Sequence

import torch.distributed as dist

from gossamer.per_sample.capture import check_layers
from gossamer.prunable import Weight
from gossamer.state import common_device


def check_weights(weights: Sequence[Weight], *, needs_samples: bool, sharded: bool, replicated: bool) -> None:
    """Raise where masks of these weights cannot train.

    `needs_samples`: the method looks at single samples; `sharded`: each process has a part of every weight;
    `replicated`: the model is wrapped in DistributedDataParallel.
    """
    common_device([weight.parameter for weight in weights])
    if not needs_samples:
        return
    if sharded:
        raise ValueError('scale="per_sample" needs whole weights in every process: use DDP, or scale="global"')
    check_layers(weights)
    if not replicated and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            'scale="per_sample" sums over the samples of all processes: give the Sparsifier the model that is '
            'wrapped in DistributedDataParallel, or use scale="batch"'
        )
