"""Calibration: the range of the inputs of each product, for its int8 kernel.

The network runs on the data of the caller in float32, sample by sample, and the largest absolute input of every linear
layer, convolution and recurrent layer is stored in the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from gossamer.deployment.runtime.layout import Placed, place
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import Floats, Network, Operation, Product, Recurrent


def calibrated(model: NativeModel, inputs: Sequence[Tensor]) -> Network:
    """The network with the range of every layer that can run in int8, for the inputs of one call."""
    alone, placed = NativeModel(model.graph, model.native, Setting(1)), place(model.graph, 1)
    layers = {
        number: operation
        for number, operation in enumerate(model.graph.operations)
        if (isinstance(operation, Product) and operation.kind in ("linear", "convolution"))
        or (isinstance(operation, Recurrent) and operation.kind != "rnn_relu")  # its state has no bound
    }
    largest = dict.fromkeys(layers, 0.0)
    for number, arena in alone.traced(*inputs):
        if number in layers:
            largest[number] = max(largest[number], _largest(arena, placed, layers[number].x))
    operations: list[Operation] = list(model.graph.operations)
    for number, layer in layers.items():
        operations[number] = replace(layer, largest=largest[number] if np.isfinite(largest[number]) else 0.0)
    return replace(model.graph, operations=operations)


def _largest(arena: Floats, placed: Placed, item: int) -> float:
    """The largest absolute number of a value, without its borders."""
    value, layout = placed.values[item], placed.layouts[item]
    start = placed.offsets[item] + layout.base
    planes = np.lib.stride_tricks.as_strided(
        arena[start:],
        (value.channels, value.height, value.width),
        (4 * layout.plane, 4 * layout.pitch, 4),
        writeable=False,
    )
    return float(np.abs(planes).max())
