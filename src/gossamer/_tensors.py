"""Tensors that may be sharded over processes (the DTensors of FSDP2) and tensors that are not, alike."""

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether ``tensor`` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and rarely needed

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that lies in this process's memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``; of a DTensor gathered (or summed) over its mesh, which all processes have to do."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
