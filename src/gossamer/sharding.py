"""Tensors that may be sharded over processes (the DTensors of FSDP2) and tensors that are not, alike."""

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
    """The part of ``tensor`` that lies in this process's memory, outside autograd."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``; of a DTensor gathered (or summed) over its mesh, which all processes have to do."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor``, the part in this process's memory, as a whole that is sharded like ``parameter``."""
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


def shard_group(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The processes over which the tensors are sharded, or None where each process has them whole."""
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
