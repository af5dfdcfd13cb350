"""A convolution of one sample with copies of its planes, one per shift of the window.

A tap reads a plane a few floats before or after its pixel, so most vectors that it loads straddle two cache lines.
Planes also need a border, so rows shorter than a vector leave part of it empty. Here the planes are copied first
(``shifts_op`` in kernels.c): once per column of the window and, if the row length is not a multiple of a vector, once
per row of the window, too. A copy contains its zeros, so it needs no border, and every tap loads whole vectors that
never straddle two lines. This is faster if many taps read a plane; timing decides.

A plane of 2 x 2 has vectors of four (``rows_of_four`` in products.h), which may begin at each row of its copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from gossamer.deployment.runtime.layout import CHUNK, Layout, Placed
from gossamer.deployment.runtime.network import Integers, Product, Value
from gossamer.deployment.runtime.plan_windows import PASS
from gossamer.deployment.runtime.weights import Kept, panels

FOUR = 4  # row lengths with a specialised kernel
COPIES_IN_CACHE = 32 << 10  # bytes of copies that stay in the first-level cache while all rows read them
COPIES_OF_FOUR = 16 << 10  # less: with this few values per weight, weights stream through the cache faster
ENOUGH = 1024  # minimum number of products per row in a block of channels; starting a row costs as much as some


@dataclass(frozen=True)
class Block:
    """Some input channels: the record fields for copying their planes, and the data for the product."""

    copies: list[int]
    weight: int
    places: int  # address of the chunk offsets in a copy
    size: int  # floats of scratch
    four: bool


@dataclass(frozen=True)
class _Copy:
    """One copy of a plane: the shift of its first pixel, rows, and its offset among the copies of its channel."""

    top: int
    left: int
    rows: int
    begin: int


def shifted_blocks(kept: Kept, placed: Placed, step: Product) -> list[Block]:
    """The product by blocks of input channels; each block adds to the output of the previous one."""
    x, y, taps, layout = placed.values[step.x], placed.values[step.y], step.taps, placed.layouts[step.x]
    four = y.pixels == FOUR
    copies, size, inside = _copies(step, y, FOUR if four else CHUNK)
    chunks = _chunks(layout, x, y.width, copies)
    tables = [len(chunks[0]), *(kept.keep(array) for array in chunks)]
    places = kept.keep(np.arange(0, y.pixels, CHUNK, dtype=np.int32))
    used = np.unique(taps.channel)
    window = sum(min(copy.rows * y.width, PASS + (copy.rows - y.height) * y.width) for copy in copies)
    fitting = -(-len(used) * window * 4 // (COPIES_OF_FOUR if four else COPIES_IN_CACHE))
    worth_it = taps.count * min(PASS, y.pixels) // (ENOUGH * taps.rows)
    blocks: list[Block] = []
    for channels in np.array_split(used, max(1, min(fitting, worth_it, len(used)))):
        here = (taps.channel >= channels[0]) & (taps.channel <= channels[-1])
        part = taps.chosen(here)
        offsets = np.searchsorted(channels, part.channel) * size + inside[here]
        weight = panels(kept, part, offsets, 0 * step.bias if blocks else step.bias, 1 if four else CHUNK)
        planes = kept.keep((channels * layout.plane).astype(np.int32))
        scratch = -(-len(channels) * size // CHUNK) * CHUNK + CHUNK  # the last chunk may extend beyond a copy
        blocks.append(Block([len(channels), planes, size, *tables], weight, places, scratch, four))
    return blocks


def _copies(step: Product, y: Value, unit: int) -> tuple[list[_Copy], int, Integers]:
    """The copies of a plane, their total floats, and the offset that each tap reads."""
    taps, (py, px) = step.taps, step.padding
    period = (
        CHUNK // gcd(y.width, CHUNK) if unit == CHUNK else 1
    )  # number of rows after which a row starts at a vector again
    kinds, kind = np.unique(taps.dx * period + taps.dy % period, return_inverse=True)
    copies, begin, inside = list[_Copy](), 0, np.zeros_like(taps.dy)
    for number, dx in enumerate((kinds // period).tolist()):
        mine = kind == number
        first, last = int(taps.dy[mine].min()), int(taps.dy[mine].max())
        copies.append(_Copy(first - py, dx - px, last - first + y.height, begin))
        inside[mine] = begin + (taps.dy[mine] - first) * y.width
        begin += -(-copies[-1].rows * y.width // unit) * unit
    return copies, begin, inside


def _chunks(layout: Layout, x: Value, pitch: int, copies: list[_Copy]) -> tuple[npt.NDArray[np.int32], ...]:
    """For the chunks of the copies of one plane: sources, destinations, offsets in the table of masks, and that table.
    Values of other rows or planes in a chunk are masked."""
    sources, targets, masks = [], [], []
    for copy in copies:
        place = np.arange(-(-copy.rows * pitch // CHUNK) * CHUNK)
        row, column = place // pitch + copy.top, place % pitch + copy.left
        valid = (row >= 0) & (row < x.height) & (column >= 0) & (column < x.width) & (place < copy.rows * pitch)
        start = (layout.base + row * layout.pitch + column - place % CHUNK).reshape(-1, CHUNK)
        valid = valid.reshape(-1, CHUNK)
        any_valid = valid.argmax(1)  # all have the same start
        sources.append(np.where(valid.any(1), start[np.arange(len(start)), any_valid], 0))
        targets.append(copy.begin + place[::CHUNK])
        masks.append(valid)
    table, which = np.unique(np.concatenate(masks), axis=0, return_inverse=True)
    arrays = np.concatenate(sources), np.concatenate(targets), which.ravel() * CHUNK, np.where(table, -1, 0)
    return tuple(array.astype(np.int32) for array in arrays)
