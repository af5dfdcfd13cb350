"""Records of the operations that walk over planes of pixels: ``pool_op`` and ``spread_op`` in pooling.h, ``phases_op``
in kernels.c."""

from __future__ import annotations

from gossamer.runtime.graph import Pool, Spread
from gossamer.runtime.layout import Phases, Placed


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
