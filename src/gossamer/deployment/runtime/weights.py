"""The memory layout of the weights of a layer for each kernel.

Every function returns the address of a struct of products.h or one_vector.h, whose arrays ``Kept`` keeps alive as long
as the plan. The order of the fields is the order there.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gossamer.deployment.runtime.layout import CHUNK
from gossamer.deployment.runtime.network import Floats, Integers, Taps

#: Sparse products for many values at once (panels, shifted), or for one vector (the next three); dense ones for both.
#: "int8" is for both, and only after calibration.
Kernel = Literal["panels", "shifted", "gather", "loads", "windows", "dense", "int8"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
#: Codes of the kernels for one vector, as in one_vector.h.
WAYS: dict[Kernel, int] = {"gather": 0, "loads": 1, "windows": 2, "dense": 3, "int8": 4}
LINE = 64  # bytes of a cache line
ROWS = 4  # rows per block of a dense product, as in vectors.h
WINDOW = 32  # values available to the windows kernel in a step
DENSE_ABOVE = 0.1  # below this density, dense kernels are always slower


def cache_lines(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes aligned to a cache line: vectors that straddle two lines take twice as long to load."""
    room = np.zeros(nbytes + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return room[begin : begin + nbytes]


def aligned_zeros(count: int) -> Floats:
    return cache_lines(4 * count).view(np.float32)


class Kept:
    """Arrays that native code points to."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []

    def keep(self, array: npt.NDArray[Any]) -> int:
        """The address of a copy that lives as long as this object."""
        aligned = cache_lines(array.nbytes).view(array.dtype)
        aligned[:] = array.ravel()
        self.arrays.append(aligned)
        return int(aligned.ctypes.data)

    def struct(self, *fields: int) -> int:
        return self.keep(np.array(fields, np.int64))

    def offsets(self, offsets: Integers, shift: int = 0) -> tuple[int, int]:
        """Addresses of the offsets in 16 bits if they fit, otherwise in 32."""
        if offsets.max(initial=0) >> shift < 1 << 16:
            return self.keep((offsets >> shift).astype(np.uint16)), 0
        return 0, self.keep(offsets.astype(np.int32))


def possible_kernels(taps: Taps, *, one_vector: bool, shifts: bool = False) -> tuple[Kernel, ...]:
    """The kernels to time for a layer; the first is the default."""
    many: tuple[Kernel, ...] = ("panels", "shifted") if shifts else ("panels",)
    sparse: tuple[Kernel, ...] = ("gather", "loads", "windows") if one_vector else many
    if taps.count == 0:
        return sparse[:1]
    used = np.zeros((int(taps.channel.max()) + 1, int(taps.dy.max()) + 1, int(taps.dx.max()) + 1), np.bool_)
    used[taps.channel, taps.dy, taps.dx] = True
    places = int(np.count_nonzero(used))
    return (*sparse, "dense") if taps.count >= DENSE_ABOVE * taps.rows * places else sparse


def starts_of(counts: Integers) -> Integers:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def panels(kept: Kept, taps: Taps, offsets: Integers, bias: Floats, step: int) -> int:
    """Rows of weights and offsets; all offsets are multiples of ``step``, a power of two or a multiple of 16."""
    lengths = np.bincount(taps.row, minlength=taps.rows)
    order = np.argsort(-lengths, kind="stable")
    place = np.empty(taps.rows, np.int64)
    place[order] = np.arange(taps.rows)
    inside = np.argsort(place[taps.row], kind="stable")
    starts = starts_of(lengths[order])
    shift = 4 if step >= CHUNK else step.bit_length() - 1
    near, far = kept.offsets(offsets[inside], shift)
    pointers = [kept.keep(starts), kept.keep(taps.weight[inside]), kept.keep(bias[order].astype(np.float32))]
    return kept.struct(taps.rows, *pointers, near, far, shift, kept.keep(order.astype(np.int32)))


def dense_panels(kept: Kept, taps: Taps, offsets: Integers, bias: Floats) -> int:
    """All rows with all columns in which any row has a weight; rows in blocks, the last one padded."""
    used = np.zeros(int(offsets.max(initial=-1)) + 1, np.bool_)
    used[offsets] = True
    places = np.flatnonzero(used)
    column = (np.cumsum(used) - 1)[offsets]
    blocks = -(-taps.rows // ROWS)
    weight = np.zeros((blocks * ROWS, places.size), np.float32)
    weight[taps.row, column] = taps.weight
    filled = np.zeros(blocks * ROWS, np.float32)
    filled[: taps.rows] = bias
    packed = weight.reshape(blocks, ROWS, places.size).transpose(0, 2, 1)
    pointers = [kept.keep(places.astype(np.int32)), kept.keep(packed), kept.keep(filled)]
    return kept.struct(taps.rows, places.size, *pointers)


def one_vector(kept: Kept, kernel: Kernel, taps: Taps, offsets: Integers, bias: Floats, zero: int) -> tuple[int, int]:
    """The struct of a weight for one vector, and the start of the vector; ``zero`` is the offset of a 0."""
    bias = bias.astype(np.float32)
    match kernel:
        case "windows":
            return _windows(kept, taps, offsets, bias), 0
        case "dense":
            first = int(offsets.min(initial=0))
            weight = np.zeros((taps.rows, int(offsets.max(initial=0)) - first + 1), np.float32)
            weight[taps.row, offsets - first] = taps.weight
            return kept.struct(taps.rows, weight.shape[1], kept.keep(weight), kept.keep(bias)), first
        case _:
            return _gather(kept, taps, offsets, bias, zero), 0


def _slices(rows: int, lengths: Integers) -> tuple[Integers, Integers]:
    """Rows by decreasing length, and the row of each lane (-1: none), sixteen per slice."""
    order = np.argsort(-lengths, kind="stable")
    lanes = np.full(-(-rows // CHUNK) * CHUNK, -1, np.int64)
    lanes[:rows] = order
    return order, lanes


def _gather(kept: Kept, taps: Taps, offsets: Integers, bias: Floats, zero: int) -> int:
    """Rows sorted by length, in slices of sixteen; padding reads the 0 at ``zero``."""
    lengths = np.bincount(taps.row, minlength=taps.rows)
    order, lanes = _slices(taps.rows, lengths)
    starts = starts_of(lengths[order[::CHUNK]])
    lane_of = np.empty(taps.rows, np.int64)
    lane_of[order] = np.arange(taps.rows)
    first = starts_of(lengths)[:-1]
    step = starts[lane_of[taps.row] // CHUNK] + np.arange(taps.count) - first[taps.row]
    cell = step * CHUNK + lane_of[taps.row] % CHUNK
    columns = np.full(int(starts[-1]) * CHUNK, zero, np.int64)
    weights = np.zeros(columns.size, np.float32)
    columns[cell], weights[cell] = offsets, taps.weight
    near, far = kept.offsets(columns)
    rest = [kept.keep(a) for a in (weights, lanes.astype(np.int32), bias)]
    return kept.struct(len(lanes) // CHUNK, kept.keep(starts), near, far, *rest)


def _windows(kept: Kept, taps: Taps, offsets: Integers, bias: Floats) -> int:
    steps = window_steps(taps, offsets)
    return kept.struct(steps[0].size - 1, *(kept.keep(array) for array in steps), kept.keep(bias))


def window_steps(taps: Taps, offsets: Integers) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of ``windowed``, from the starts of its slices to the order of its rows.

    Sixteen rows traverse the vector together: the window begins at the next weight of the row that is furthest
    behind, and every row with a weight inside the window uses it. All slices are computed at the same time here."""
    inside = np.lexsort((offsets, taps.row))
    places, weights = np.append(offsets[inside], 0), np.append(taps.weight[inside], np.float32(0))
    lengths = np.bincount(taps.row, minlength=taps.rows)
    _, lanes = _slices(taps.rows, lengths)
    begin = np.append(starts_of(lengths)[:-1], 0)[lanes].reshape(-1, CHUNK)  # lane -1 reads the 0 appended
    end = begin + np.append(lengths, 0)[lanes].reshape(-1, CHUNK)
    nowhere = np.iinfo(np.int64).max // 2
    steps: list[tuple[Integers, Integers, npt.NDArray[np.uint8], Floats]] = []
    while (begin < end).any():
        following = np.where(begin < end, places[np.minimum(begin, len(places) - 1)], nowhere)
        at = following.min(1) // CHUNK * CHUNK
        active = np.flatnonzero((begin < end).any(1))
        taken = (following < at[:, None] + WINDOW) & (begin < end)
        picks = np.where(taken, following - at[:, None], 0).astype(np.uint8)
        values = np.where(taken, weights[np.minimum(begin, len(weights) - 1)], 0).astype(np.float32)
        steps.append((active, at[active], picks[active], values[active]))
        begin = begin + taken
    count = len(lanes) // CHUNK
    owner = np.concatenate([np.zeros(0, np.int64), *(step[0] for step in steps)])
    order = np.argsort(owner, kind="stable")  # slice after slice, each in the order of its steps
    at = np.concatenate([np.zeros(0, np.int64), *(step[1] for step in steps)])[order]
    picks = np.concatenate([np.zeros((0, CHUNK), np.uint8), *(step[2] for step in steps)])[order]
    values = np.concatenate([np.zeros((0, CHUNK), np.float32), *(step[3] for step in steps)])[order]
    starts = starts_of(np.bincount(owner, minlength=count))
    return starts, at.astype(np.int32), picks, values, lanes.astype(np.int32)
