"""Records of element-wise operations: ``pointwise_op`` and ``softmax_op`` in pointwise.h, ``normalise_op`` in
normalising.h."""

from __future__ import annotations

import numpy as np

from gossamer.deployment.runtime.layout import CHUNK, Placed, chunk_places
from gossamer.deployment.runtime.network import FUNCTIONS, Normalise, Pointwise, Softmax
from gossamer.deployment.runtime.weights import Kept


def _places(kept: Kept, placed: Placed, y: int) -> list[int]:
    """Rows, chunks with their offsets and mask, and floats between rows; or one contiguous range."""
    value, layout, lanes = placed.values[y], placed.layouts[y], placed.lanes
    if lanes == 1 and layout.plane == 1:  # channels are contiguous
        return [value.channels, 0, 0, 0, layout.plane, value.channels]
    pixels, mask = chunk_places(value, layout, lanes)
    at = layout.base + (pixels[:, 0] * layout.pitch + pixels[:, 1]) * lanes + pixels[:, 2]
    mask_at = 0 if mask is None else kept.keep(mask)
    return [value.channels, len(at), kept.keep(at.astype(np.int32)), mask_at, layout.plane, 0]


def softmax_fields(kept: Kept, placed: Placed, step: Softmax) -> list[int]:
    return [*_places(kept, placed, step.y), int(step.logarithm)]


def normalise_fields(kept: Kept, placed: Placed, step: Normalise) -> list[int]:
    places, value = _places(kept, placed, step.y), placed.values[step.y]
    together = not step.each_pixel
    # With 16 lanes or more, chunks of the same samples are one pixel apart.
    sets = max(1, placed.lanes // CHUNK) if together else places[1]
    count = value.channels // step.groups * (value.pixels if together else 1)
    epsilon = kept.keep(np.array([step.epsilon], np.float32))
    factors = [0 if each is None else kept.keep(each) for each in (step.scale, step.shift)]
    return [*places, step.groups, sets, int(together), count, epsilon, *factors, int(step.relu), int(step.centred)]


def pointwise_fields(kept: Kept, placed: Placed, step: Pointwise) -> list[int]:
    places = _places(kept, placed, step.y)
    slopes = 0 if step.slopes is None else kept.keep(step.slopes)
    factor = [-1, 0, 0, 0]
    if step.by is not None:
        layout, lanes, by, y = placed.layouts[step.by], placed.lanes, placed.values[step.by], placed.values[step.y]
        repeats = not by.same_pixels(y)
        at, start = places[2], placed.offsets[step.by]
        if repeats:
            pixels, _ = chunk_places(placed.values[step.y], placed.layouts[step.y], lanes)
            at, start = kept.keep(pixels[:, 2].astype(np.int32)) if lanes >= CHUNK else 0, start + layout.base
        factor = [start, layout.plane if by.channels == y.channels else 0, at, int(repeats)]
    parameters = kept.keep(np.array(step.parameters, np.float32))
    return [FUNCTIONS.index(step.function), *places, slopes, *factor, parameters]
