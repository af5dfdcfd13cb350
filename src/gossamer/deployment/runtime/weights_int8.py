"""Weights in int8: a scale per output row, and four consecutive input channels in one word of 32 bits.

The structs are those of int8.h, and the order of the fields is the order there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gossamer.deployment.runtime.layout import CHUNK
from gossamer.deployment.runtime.network import Floats, Integers, Taps
from gossamer.deployment.runtime.weights import Kept, starts_of, window_steps

LARGEST = 127  # the codes are symmetric: -127 to 127


@dataclass(frozen=True, eq=False)
class Quantised:
    """Words of weights as taps (channels and bit patterns are those of words), and what turns sums into floats."""

    taps: Taps
    scales: Floats  # of the sums of each row
    totals: npt.NDArray[np.int32]  # of the codes of each row
    inverse: float  # codes of the values = values * inverse


def codes_of(taps: Taps) -> tuple[npt.NDArray[np.int8], Floats]:
    """Codes of the weights and the scale of each row: symmetric, from its largest weight."""
    largest = np.zeros(taps.rows, np.float32)
    np.maximum.at(largest, taps.row, np.abs(taps.weight))
    scales = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return np.rint(taps.weight / scales[taps.row]).astype(np.int8), scales


def quantised(taps: Taps, largest: float) -> Quantised:
    """The weights in words; ``largest`` is the largest absolute value that they are multiplied with."""
    codes, scales = codes_of(taps)
    height, width = int(taps.dy.max(initial=0)) + 1, int(taps.dx.max(initial=0)) + 1
    groups = int(taps.channel.max(initial=0)) // 4 + 1
    key = np.ravel_multi_index((taps.row, taps.channel // 4, taps.dy, taps.dx), (taps.rows, groups, height, width))
    found, place = np.unique(key, return_inverse=True)
    words = np.zeros((found.size, 4), np.int8)
    words[place, taps.channel % 4] = codes
    row, group, dy, dx = (each.astype(np.int64) for each in np.unravel_index(found, (taps.rows, groups, height, width)))
    totals = np.bincount(taps.row, codes, taps.rows).astype(np.int32)
    bits = words.view(np.float32).ravel()  # the field of the taps; no arithmetic touches them
    scale = np.float32(largest / LARGEST)
    return Quantised(Taps(taps.rows, row, group, dy, dx, bits), scales * scale, totals, 1 / float(scale))


def int8_panels(kept: Kept, weight: Quantised, offsets: Integers, bias: Floats) -> int:
    """``sparse8``: rows of words and offsets."""
    taps = weight.taps
    near = far = 0
    if not (offsets % CHUNK).any() and offsets.max(initial=0) // CHUNK < 1 << 16:
        near = kept.keep((offsets // CHUNK).astype(np.uint16))
    else:
        far = kept.keep(offsets.astype(np.int32))
    starts = starts_of(np.bincount(taps.row, minlength=taps.rows))
    arrays = starts, taps.weight, weight.totals, weight.scales, bias.astype(np.float32)
    pointers = [kept.keep(each) for each in arrays]
    return kept.struct(taps.rows, *pointers, near, far, kept.keep(np.array([weight.inverse], np.float32)))


def int8_vector(kept: Kept, weight: Quantised, bias: Floats) -> int:
    """``windowed8``: sixteen rows traverse the words of the vector together."""
    steps = window_steps(weight.taps, weight.taps.channel)
    rest = (weight.totals, weight.scales, bias.astype(np.float32), np.array([weight.inverse], np.float32))
    return kept.struct(steps[0].size - 1, *(kept.keep(array) for array in (*steps, *rest)))
