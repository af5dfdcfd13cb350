"""Records of attention (``attention_op`` in attention.h) and of the operations between the layers of transformers
(``constant_op`` and ``move_op`` in kernels.c)."""

from __future__ import annotations

import numpy as np

from gossamer.deployment.runtime.layout import CHUNK, Placed
from gossamer.deployment.runtime.network import Attention, Constant, Heads, Recall
from gossamer.deployment.runtime.weights import Kept

BLOCK = 64  # floats of a row of scores, at most
APART = 4  # samples taken apart at a time, as in attention.h


def attention_fields(kept: Kept, placed: Placed, step: Attention) -> list[int]:
    """The record, but for the places of values and scratch memory, which come last."""
    queries, keys = step.lengths
    q, k, v = step.heads
    places = [
        _places(kept, placed, item, heads)
        for item, heads in zip((step.x, step.keys, step.source), step.heads, strict=True)
    ]
    y = placed.layouts[step.y]
    mask, mask_head, mask_row = 0, 0, _rounded(queries)
    if step.mask is not None:
        padded = np.zeros((*step.mask.shape[:2], mask_row), np.float32)
        padded[:, :, :queries] = step.mask
        mask, mask_head = kept.keep(padded), padded[0].size if len(padded) > 1 else 0
    hidden = -1 if step.hidden is None else placed.offsets[step.hidden] + placed.layouts[step.hidden].base
    scale = kept.keep(np.array([step.scale], np.float32))
    sizes = [len(q.first), queries, keys, k.size, v.size]
    rows = [*(row for _, row in places), y.plane]
    return [*sizes, *(at for at, _ in places), *rows, scale, mask, mask_head, mask_row, hidden, int(step.causal)]


def attention_scratch(step: Attention, lanes: int) -> int:
    """Floats of scores, and of samples that are taken apart."""
    queries, keys = map(_rounded, step.lengths)
    _, k, v = step.heads
    apart = (queries + keys) * (k.size + v.size) + keys
    return keys * BLOCK + (APART * apart if lanes > 1 else 0)


def recall_fields(kept: Kept, step: Recall, sample: int, values: int) -> list[int]:
    """The record of attention with a memory of ``sample`` floats, without the place of scratch memory, which is last.
    All values have one pixel and one lane, so that channels are contiguous."""
    q, k, v = step.heads
    shared = sorted(set(zip(k.first, v.first, strict=True)))
    which = [shared.index(pair) for pair in zip(k.first, v.first, strict=True)]
    tables = (q.first, tuple(key for key, _ in shared), tuple(value for _, value in shared))
    at = [kept.keep(np.array(table, np.int64)) for table in tables]
    scale, cache = kept.keep(np.array([step.scale], np.float32)), step.cache
    sizes = [len(q.first), len(shared), k.size, v.size, cache.length]
    places = [cache.positions, cache.memory, sample, cache.first]
    return [*sizes, *at, q.stride, k.stride, v.stride, scale, kept.keep(np.array(which, np.int64)), *places, values]


def memory_size(heads: tuple[Heads, Heads, Heads], length: int) -> int:
    """Floats of the keys and values of a sample, as in attention.h."""
    _, k, v = heads
    shared = len(set(zip(k.first, v.first, strict=True)))
    return shared * (k.size * _rounded(length) + length * _rounded(v.size))


def constant_fields(kept: Kept, placed: Placed, step: Constant) -> list[int]:
    value, layout = placed.values[step.y], placed.layouts[step.y]
    return [value.channels, value.height, value.width, layout.plane, layout.pitch, kept.keep(step.planes)]


def move_fields(placed: Placed, x: int, y: int) -> list[int]:
    value, layout = placed.values[x], placed.layouts[x]
    return [value.channels, value.height, value.width, layout.plane, layout.pitch, placed.layouts[y].plane]


def _places(kept: Kept, placed: Placed, item: int, heads: Heads) -> tuple[int, int]:
    """The address of the offsets of heads, and floats between the channels of a head."""
    layout = placed.layouts[item]
    first = layout.base + heads.pixel * placed.lanes + np.array(heads.first, np.int64) * layout.plane
    return kept.keep(first), heads.stride * layout.plane


def _rounded(size: int) -> int:
    return -(-size // CHUNK) * CHUNK
