"""The variables of all connections of a network, each kind laid out as one long vector.

    dense            w̃, the weight variables
    mask_variable    m̃
    mask             m

One vector a kind, so that the budget sees all the connections at once and a step is a handful of kernels however many
layers there are. For each tensor there is a view into every vector with the tensor's own shape and memory layout.
Extra memory: two weight-sized vectors and a byte a connection (a third vector where masks have momentum).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.sharding import local, of_all_processes

BLOCK = 4096  # connections that one program of a GPU kernel treats
TOGETHER = 32  # tensors that one launch of it treats
_LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


@dataclass(frozen=True, eq=False)
class Blocks:
    """The tensors cut into blocks, none of which lies in two tensors: what the kernels of learning_kernels.py go by."""

    table: (
        Tensor  # one row a block: its place in the vectors, its place in its tensor, its size, its tensor in its launch
    )
    first: Sequence[int]  # the first block of each tensor, and the number of all
    firsts: Tensor  # the same, on the device
    multiple: int  # 16 where all places and sizes are multiples of it, which is faster, else 1

    @classmethod
    def of(cls, sizes: Sequence[int], offsets: Sequence[int], device: torch.device) -> "Blocks":
        rows = [
            (offset + start, start, min(BLOCK, size - start), tensor % TOGETHER)
            for tensor, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
            for start in range(0, size, BLOCK)
        ]
        first = list(accumulate((-(-size // BLOCK) for size in sizes), initial=0))
        return cls(
            table=torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(device),
            first=first,
            firsts=torch.tensor(first, device=device),
            multiple=1 if any(size % 16 for size in sizes) else 16,
        )


class Store:
    """Vectors over all connections, and their views by tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, momentum: bool) -> None:
        tensors = [local(parameter) for parameter in parameters]
        self.device = common_device(tensors)
        self.sizes = [tensor.numel() for tensor in tensors]
        self.offsets = list(accumulate(self.sizes, initial=0))[:-1]
        self.count = sum(self.sizes)
        self._shapes = [(tensor.shape, _dense_strides(tensor)) for tensor in tensors]
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if double else torch.float32
        self.dense = self.vector()
        self.mask_variable = self.vector()
        self.velocity = self.vector() if momentum else None
        self.mask = torch.ones(self.count, dtype=torch.bool, device=self.device)
        self.dense_views = self.views(self.dense)
        self.mask_variable_views = self.views(self.mask_variable)
        self.mask_views = self.views(self.mask)
        self.blocks = Blocks.of(self.sizes, self.offsets, self.device)

    def vector(self) -> Tensor:
        return torch.zeros(self.count, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The part of each tensor, with the strides of the tensor (channels-last stays channels-last)."""
        return [
            vector.as_strided(shape, strides, offset)
            for (shape, strides), offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def is_laid_out_like(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors, one a weight or None, lie in memory as the views do. There has to be one at least."""
        there = [(tensor, shape) for tensor, shape in zip(tensors, self._shapes, strict=True) if tensor is not None]
        return len(there) > 0 and all(
            tensor.layout == torch.strided
            and all(
                stride == ours or length == 1
                for stride, ours, length in zip(tensor.stride(), strides, shape, strict=True)
            )
            for tensor, (shape, strides) in there
        )

    def freeze(self) -> None:
        """Let go of all but the masks: they do not change any more."""
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.dense = self.mask_variable = nothing
        self.velocity = None
        self.dense_views = self.mask_variable_views = []

    @property
    def frozen(self) -> bool:
        return not self.mask_variable_views

    def strongest(self, shares: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
        """Positions, in this process, of the so many largest mask variables of each tensor."""
        best = [
            self.mask_variable[offset : offset + size].topk(min(share, size))
            for offset, size, share in zip(self.offsets, self.sizes, shares, strict=True)
        ]
        if group is None:
            chosen = [each.indices for each in best]
        else:
            # Each process offers its best ones, and the best of all offers are taken.
            offers = [
                nn.functional.pad(b.values, (0, n - len(b.values)), value=-torch.inf)
                for b, n in zip(best, shares, strict=True)
            ]
            chosen = [
                each.indices[_own_among_best(offered, share, dist.get_rank(group))[: len(each.indices)]]
                for each, offered, share in zip(best, _offers_of_all(offers, group), shares, strict=True)
            ]
        return torch.cat([indices + offset for indices, offset in zip(chosen, self.offsets, strict=True)])


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device of all the tensors."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"expected all the weights on one device, got {', '.join(sorted(map(str, devices)))}: "
            "spread the model with fully_shard instead, or exclude what lies elsewhere"
        )
    return devices.pop()


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the tensor where they are those of a usual memory format, else row-major ones."""
    if any(tensor.is_contiguous(memory_format=layout) for layout in _LAYOUTS.get(tensor.dim(), ())):
        return tensor.stride()
    return tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))


def _offers_of_all(offers: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """What every process offers, one row a process, for each tensor."""
    sizes = [len(offer) for offer in offers]
    return torch.split_with_sizes(of_all_processes(torch.cat(list(offers)), group), sizes, dim=1)


def _own_among_best(offered: Tensor, share: int, rank: int) -> Tensor:
    """Which offers of this process are among the so many best of all."""
    taken = torch.zeros(offered.numel(), dtype=torch.bool, device=offered.device)
    taken[offered.flatten().topk(share).indices] = True
    return taken.view_as(offered)[rank]
