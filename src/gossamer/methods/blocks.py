"""Tensors divided into blocks, one per program of a GPU kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

BLOCK = 4096  # weights per program
TOGETHER = 32  # tensors per launch


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of all tensors. No block spans two tensors."""

    table: Tensor
    """One row per block: its offsets in the state of the method, in w̃ and in its tensor; its size; the index of its
    tensor in the launch; its run."""
    sizes: Sequence[int]
    first: Sequence[int]  # the first block of each tensor, and the total number
    firsts: Tensor  # the same, on the device
    multiple: int  # 16 if it divides all offsets and sizes, which is faster, otherwise 1

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        offsets: Sequence[int],
        device: torch.device,
        *,
        places: Sequence[int] | None = None,
        runs: Sequence[int] | None = None,
    ) -> "Blocks":
        """`offsets` are those in the state of the method, and `places` those in w̃, if different."""
        places = offsets if places is None else places
        runs = [0] * len(sizes) if runs is None else runs
        rows = [
            (offset + start, place + start, start, min(BLOCK, size - start), tensor % TOGETHER, run)
            for tensor, (size, offset, place, run) in enumerate(zip(sizes, offsets, places, runs, strict=True))
            for start in range(0, size, BLOCK)
        ]
        first = list(accumulate((-(-size // BLOCK) for size in sizes), initial=0))
        return cls(
            table=torch.tensor(rows, dtype=torch.int64).reshape(-1, 6).to(device),
            sizes=sizes,
            first=first,
            firsts=torch.tensor(first, device=device),
            multiple=1 if any(number % 16 for number in (*sizes, *offsets, *places)) else 16,
        )
