"""A common interface to tensors that are sharded over processes (the DTensors of FSDP2) and to plain tensors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether ``tensor`` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and rarely needed

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of ``tensor``, detached from autograd."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``. A DTensor is gathered (or summed) over its mesh, so all processes have to call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor sharded like ``parameter``, of which ``tensor`` is the local shard."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gathered(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor of which ``tensor`` is the local shard, sharded like ``parameter``."""
    return whole(sharded_like(tensor, parameter))


def shard_axis(parameter: Tensor) -> int | None:
    """The axis along which ``parameter`` is sharded, or None."""
    if not is_sharded(parameter):
        return None
    from torch.distributed.tensor import Shard

    return next((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), None)


def shard_group(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The process group over which the tensors are sharded, or None."""
    groups: set[dist.ProcessGroup | None] = set()
    for parameter in parameters:
        if not is_sharded(parameter):
            groups.add(None)
            continue
        sharded = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard()]
        if len(sharded) > 1:
            raise ValueError(
                f"expected parameters sharded along one dimension of the device mesh, got {parameter.placements}: "
                "use fully_shard over a one-dimensional mesh (or a hybrid mesh of replicas)"
            )
        groups.add(parameter.device_mesh.get_group(sharded[0]) if sharded else None)
    if len(groups) > 1:
        raise ValueError(
            "expected all the weights to be sharded over the same processes or none, got a mixture: "
            "apply fully_shard to the whole model, or exclude the others"
        )
    return groups.pop()


def of_all_processes(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ``tensor`` of every process of the group, one row per process.

    Computed as a sum of rows that are zero elsewhere, because the name of the gathering collective differs between
    versions of torch.
    """
    rows = tensor.new_zeros(dist.get_world_size(group), tensor.numel())
    rows[dist.get_rank(group)] = tensor.flatten()
    dist.all_reduce(rows, group=group)
    return rows
