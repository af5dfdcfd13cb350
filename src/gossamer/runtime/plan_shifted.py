"""A convolution of one sample by copies of its planes, one for each shift of the window.

A tap reads a plane a few floats before or behind the pixel it is for, so most vectors that it loads straddle two cache
lines, and planes need a border, so rows shorter than a vector leave part of it empty. Here the planes are copied first
(``shifts_op`` in kernels.c): once for each column of the window and, where a row is no multiple of a vector, for each
row of it, too. A copy has its zeros inside, so it needs no border, and every tap loads whole cache lines. This pays
where a plane is read by many taps; timing tells.

A plane of 2 x 2 has vectors of four (``rows_of_four`` in products.h), with nine copies of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np

from gossamer.runtime.graph import Integers, Product
from gossamer.runtime.layout import CHUNK, Layout, Placed
from gossamer.runtime.plan_windows import PASS
from gossamer.runtime.weights import Kept, panels

FOUR = 4  # values of a row that has a kernel of its own
FIRST_CACHE = 32 << 10  # bytes of copies that stay in the first-level cache


@dataclass(frozen=True)
class Block:
    """Some input channels: fields of the record that copies their planes, and what the product needs."""

    copies: list[int]
    weight: int
    places: int  # address of the chunks' places in a copy
    size: int  # floats of scratch
    four: bool


@dataclass(frozen=True)
class _Copy:
    """One copy of a plane: shift of its first row and column, rows, and where it begins among the copies."""

    top: int
    left: int
    rows: int
    begin: int


def shifted_blocks(kept: Kept, placed: Placed, step: Product) -> list[Block]:
    x, y, taps = placed.values[step.x], placed.values[step.y], step.taps
    four = y.pixels == FOUR
    unit = FOUR if four else CHUNK
    period = CHUNK // gcd(y.width, CHUNK)  # rows after which a row begins with a vector again
    key = taps.dx * period + taps.dy % period
    kinds, kind = np.unique(key, return_inverse=True)
    copies: list[_Copy] = []
    total = 0
    for number in range(len(kinds)):
        dy = taps.dy[kind == number]
        rows = int(dy.max() - dy.min()) + y.height
        left = int(kinds[number]) // period - step.padding[1]
        copies.append(_Copy(int(dy.min()) - step.padding[0], left, rows, total))
        total += -(-rows * y.width // unit) * unit
    begin, top = (np.array([getattr(copy, name) for copy in copies]) for name in ("begin", "top"))
    inside = begin[kind] + (taps.dy - step.padding[0] - top[kind]) * y.width
    places = kept.keep(np.arange(0, -(-y.pixels // CHUNK) * CHUNK, CHUNK, dtype=np.int32))
    chunks = [kept.keep(array) for array in _chunks(placed.layouts[step.x], x.height, x.width, y.width, copies)]
    count = sum(-(-copy.rows * y.width // CHUNK) for copy in copies)
    used = np.unique(taps.channel)
    window = sum(min(copy.rows * y.width, PASS + (copy.rows - y.height) * y.width) for copy in copies)
    blocks = []
    borders = _borders(len(used), window, taps.count // (12 * taps.rows))
    for number, (first, last) in enumerate(pairwise(borders)):
        channels = used[first:last]
        here = (taps.channel >= channels[0]) & (taps.channel <= channels[-1])
        part = taps.chosen(here)
        offsets = np.searchsorted(channels, part.channel) * total + inside[here]
        bias = step.bias if number == 0 else np.zeros_like(step.bias)
        planes = kept.keep((channels * placed.layouts[step.x].plane).astype(np.int32))
        fields = [len(channels), planes, total, count, *chunks]
        size = -(-len(channels) * total // CHUNK) * CHUNK + CHUNK
        blocks.append(Block(fields, panels(kept, part, offsets, bias, unit), places, size, four))
    return blocks


def _borders(channels: int, window: int, enough: int) -> list[int]:
    """Blocks of channels whose copies stay in the first-level cache while all rows read them, if rows have enough
    weights in each."""
    count = max(1, min(enough, -(-channels * window * 4 // FIRST_CACHE), channels))
    return [channels * i // count for i in range(count + 1)]


def _chunks(x: Layout, height: int, width: int, pitch: int, copies: list[_Copy]) -> tuple[Integers, ...]:
    """Of the chunks that make the copies of one plane: where they come from, where they go, where in the table of
    masks theirs begins; and that table. What a chunk has of other rows or planes is masked."""
    sources, targets, masks = [], [], []
    for copy in copies:
        place = np.arange(-(-copy.rows * pitch // CHUNK) * CHUNK)
        row, column = place // pitch + copy.top, place % pitch + copy.left
        valid = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (place < copy.rows * pitch)
        source = x.base + row * x.pitch + column - place % CHUNK  # of the chunk, were it unbroken up to here
        valid, source = valid.reshape(-1, CHUNK), source.reshape(-1, CHUNK)
        some = valid.argmax(1)
        sources.append(np.where(valid.any(1), source[np.arange(len(source)), some], 0))
        targets.append(copy.begin + place[::CHUNK])
        masks.append(valid)
    different, which = np.unique(np.concatenate(masks), axis=0, return_inverse=True)
    arrays = np.concatenate(sources), np.concatenate(targets), which.ravel() * CHUNK, np.where(different, -1, 0)
    return tuple(array.astype(np.int32) for array in arrays)
