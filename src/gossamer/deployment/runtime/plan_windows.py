"""Records of the operations on planes of pixels: ``pool_op`` and ``spread_op`` in pooling.h, ``phases_op`` in
kernels.c; and the blocks of channels of a product with windows."""

from __future__ import annotations

from gossamer.deployment.runtime.layout import CHUNK, Phases, Placed
from gossamer.deployment.runtime.network import Pool, Product, Spread

FIRST_CACHE = 48 << 10  # bytes of input that mostly fit the first-level cache
PASS = 128  # floats of output that fit the registers


def pool_fields(placed: Placed, step: Pool) -> list[int]:
    before, after = placed.values[step.x], placed.values[step.y]
    x, y = placed.layouts[step.x], placed.layouts[step.y]
    fields = [int(step.kind == "average"), before.channels, x.plane, y.plane, x.pitch, y.pitch]
    fields += [before.height, before.width, after.height, after.width]
    window = [*step.kernel, *step.stride, *step.padding, *step.dilation]
    return [*fields, *window, int(step.count_padding), step.divisor]


def spread_fields(placed: Placed, step: Spread) -> list[int]:
    after, x, y = placed.values[step.y], placed.layouts[step.x], placed.layouts[step.y]
    planes = [after.channels, x.plane, y.plane, x.pitch, y.pitch, after.height, after.width]
    return [*planes, *step.factor, int(step.copies)]


def phases_fields(placed: Placed, step: Phases) -> list[int]:
    x, y, value = placed.layouts[step.x], placed.layouts[step.y], placed.values[step.x]
    height, width = value.height + x.top + x.bottom, value.width + x.left + x.right
    after = [-(-height // step.stride[0]), min(y.pitch, -(-width // step.stride[1]))]
    return [value.channels, x.plane, x.pitch, height, width, y.plane, y.pitch, *step.stride, *after]


def channel_blocks(placed: Placed, step: Product) -> list[int]:
    """Borders between blocks of input channels.

    While chunks stay in registers, all rows read the same window of every channel. If these windows exceed
    the first-level cache, all rows are computed for one block of channels before the next, which adds to their output.
    This is faster if a row has enough weights in each block.
    """
    value, layout, lanes = placed.values[step.x], placed.layouts[step.x], placed.lanes
    if step.taps.count == 0 or value.pixels == 1 or (lanes < CHUNK and step.stride != (1, 1)):
        return [0, value.channels]
    reach = int(step.taps.dy.max()) + 1, int(step.taps.dx.max()) + 1
    if lanes < CHUNK:
        window = min(layout.plane, PASS + (reach[0] * layout.pitch + reach[1]) * lanes)
    else:
        tall, wide = (2, 4) if lanes == CHUNK else (1, max(1, PASS // lanes))
        window = (tall * step.stride[0] + reach[0]) * (wide * step.stride[1] + reach[1]) * lanes
    enough = step.taps.count // (12 * step.taps.rows)
    blocks = min(enough, -(-value.channels * window * 4 // FIRST_CACHE))
    return [value.channels * i // blocks for i in range(blocks + 1)] if blocks > 1 else [0, value.channels]
