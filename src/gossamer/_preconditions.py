"""What would else come to light only when masks begin to learn, long into the run."""

from collections.abc import Sequence

import torch.distributed as dist

from gossamer.per_sample.scales import check_layers
from gossamer.prunable import Weight
from gossamer.settings import Settings
from gossamer.sharding import shard_axis
from gossamer.state import common_device


def check_weights(weights: Sequence[Weight], settings: Settings, *, sharded: bool, replicated: bool) -> None:
    """Raise where masks of these weights cannot learn with these settings.

    `sharded`: each process has a part of every weight; `replicated`: the model is wrapped in DistributedDataParallel.
    """
    common_device([weight.parameter for weight in weights])
    if sharded and settings.scale == "per_sample":
        raise ValueError('scale="per_sample" needs whole weights in every process: use DDP, or scale="global"')
    if settings.scale == "per_sample":
        check_layers(weights)
        if not replicated and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                'scale="per_sample" sums over the samples of all processes: give the Sparsifier the model that is '
                'wrapped in DistributedDataParallel, or use scale="batch"'
            )
    pieces = [w.name for w in weights if w.groups > 1 and shard_axis(w.parameter) != w.feature_axis]
    if sharded and settings.scale == "batch" and pieces:
        raise ValueError(f'scale="batch" cannot see the features of {pieces[0]} in shards: use scale="global"')
