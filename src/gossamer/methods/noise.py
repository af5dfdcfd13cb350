"""Random numbers as a function of seed, step and position: the same in any batch of runs, on replay and on resume.

A counter is hashed by the finalizer of SplitMix64 (multiply and shift); there is no generator state.
"""

import torch
from torch import Tensor

_STEP, _SEED = -7046029254386353131, 0x1B873593CC9E2D51  # odd constants that spread steps and seeds over 64 bits
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def uniform(seeds: Tensor, clock: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers strictly between 0 and 1 for each seed, (rows, columns). `seeds` and `clock` are int64."""
    place = torch.arange(columns, device=seeds.device)
    bits = _scramble(seeds.view(-1, 1) * _SEED + clock * _STEP)
    bits = _scramble(bits + place * _STEP)
    return ((_shifted(bits, 41).to(dtype)) + 0.5) / (1 << 23)


def _scramble(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical right shift, as torch only has the arithmetic one."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
