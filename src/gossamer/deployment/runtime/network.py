"""The network as a short list of operations, in terms of planes and non-zero weights.

``torch.export`` gives the network as ATen calls; ``capture`` turns them to the few operations the kernels
know. Each value is a number of channels times a plane of pixels: a picture has height and width, a vector is
one pixel, a sequence or a signal has one pixel for each time step. Linear layers, convolutions, shortcuts that
subsample or add channels all become one thing, a ``Product``: a list of taps (row, channel, dy, dx, weight) with
a stride and a padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Pair = tuple[int, int]


class UnsupportedError(ValueError):
    """The network has something the native runtime cannot express; the message names it."""


@dataclass(frozen=True)
class Value:
    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, eq=False)
class Taps:
    """Non-zero weights: output row, input channel, place in the window, weight; sorted by row."""

    rows: int
    row: Integers
    channel: Integers
    dy: Integers
    dx: Integers
    weight: Floats

    @property
    def count(self) -> int:
        return self.weight.size

    def chosen(self, where: npt.NDArray[np.bool_] | Integers) -> Taps:
        places = self.row[where], self.channel[where], self.dy[where], self.dx[where]
        return Taps(self.rows, *places, self.weight[where])

    def scaled(self, scale: Floats) -> Taps:
        return Taps(self.rows, self.row, self.channel, self.dy, self.dx, self.weight * scale[self.row])


@dataclass(frozen=True, eq=False)
class Input:
    """A picture, vector or sequence that the caller passes."""

    y: int
    slot: int
    name: str = "input"


@dataclass(frozen=True, eq=False)
class Embed:
    """Rows of a table chosen by the tokens that the caller passes."""

    y: int
    slot: int
    table: Floats
    name: str


@dataclass(frozen=True, eq=False)
class Product:
    x: int
    y: int
    taps: Taps
    bias: Floats
    stride: Pair
    padding: Pair
    dense_size: int
    name: str
    add: int | None = None
    relu: bool = False
    kind: Literal["linear", "convolution", "copy", "element-wise"] = "linear"

    @property
    def copies(self) -> bool:
        """Whether all it does is to pick channels and pixels."""
        single = self.taps.count <= self.taps.rows and np.unique(self.taps.row).size == self.taps.count
        plain = bool((self.taps.weight == 1).all() and (self.taps.dy == 0).all() and (self.taps.dx == 0).all())
        free = self.add is None and not self.relu and not self.bias.any()
        return single and plain and free and self.padding == (0, 0)


@dataclass(frozen=True, eq=False)
class Affine:
    """y = relu(scale * x + shift + add), each part optional."""

    x: int
    y: int
    name: str
    scale: Floats | None = None
    shift: Floats | None = None
    add: int | None = None
    relu: bool = False


#: Functions of single values, in the order of the enum in pointwise.h.
Function = Literal[
    "identity",
    "clamp",
    "leaky",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
    "gelu_tanh",
    "hard_sigmoid",
    "hard_swish",
    "elu",
    "softplus",
]
FUNCTIONS: tuple[Function, ...] = get_args(Function)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """y = function(x), times another value where one is given: of the same shape, or one pixel for all."""

    x: int
    y: int
    function: Function
    name: str
    parameters: tuple[float, float] = (0.0, 0.0)
    slopes: Floats | None = None  # one a channel, of a leaky ReLU
    by: int | None = None


@dataclass(frozen=True, eq=False)
class Softmax:
    """Over the channels of each pixel."""

    x: int
    y: int
    logarithm: bool
    name: str


@dataclass(frozen=True, eq=False)
class Normalise:
    """y = relu(scale * normalised x + shift + add), each part optional: mean 0 and variance 1 over each group of
    channels that follow each other, of all pixels together or of each by itself."""

    x: int
    y: int
    groups: int
    each_pixel: bool
    epsilon: float
    name: str
    scale: Floats | None = None
    shift: Floats | None = None
    add: int | None = None
    relu: bool = False


@dataclass(frozen=True, eq=False)
class Pool:
    x: int
    y: int
    kind: Literal["max", "average"]
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    count_padding: bool
    divisor: int
    name: str


@dataclass(frozen=True, eq=False)
class Spread:
    """Each pixel becomes ``factor`` pixels: copies of itself, or one from each of as many channels that follow each
    other (as the planes of a transposed convolution do). What is past the edge of y is left out."""

    x: int
    y: int
    factor: Pair
    copies: bool
    name: str


@dataclass(frozen=True, eq=False)
class Concat:
    xs: tuple[int, ...]
    y: int
    name: str


#: Cells of recurrent layers, with the number of their gates. The last two are those of ``nn.RNN``.
Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class Recurrence:
    """Where a recurrent layer's state comes from and goes to: values of which it has ``units`` channels from
    ``first``."""

    first: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Recurrent:
    """One direction of one layer of a recurrent module; its output goes to ``channel`` and following of y."""

    x: int
    y: int
    kind: Cell
    units: int
    input_taps: Taps
    input_bias: Floats
    hidden_taps: Taps
    hidden_bias: Floats
    reverse: bool
    channel: int
    dense_size: int
    name: str
    state: Recurrence


Operation = Input | Embed | Product | Affine | Normalise | Pointwise | Softmax | Pool | Spread | Concat | Recurrent


@dataclass(frozen=True)
class Source:
    """What the caller passes: "picture", "signal", "vector", "sequence", "state" or "tokens", shaped like this
    but for the batch."""

    form: str
    shape: tuple[int, ...]


def batch_axis(form: str, time_major: bool) -> int:
    """The axis along which samples lie."""
    return 1 if form == "state" or (time_major and form in ("sequence", "tokens")) else 0


@dataclass(frozen=True, eq=False)
class Network:
    values: list[Value]
    operations: list[Operation]
    outputs: tuple[int, ...]
    #: for each output how the network sees it (a form of translator.py), and its shape for the example
    forms: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Source, ...]
    time_major: bool
    #: how the outputs are nested (a structure of torch.utils._pytree), None for a tensor alone
    structure: Any = None


def reads(operation: Operation) -> tuple[int, ...]:
    """Values an operation needs."""
    match operation:
        case Input() | Embed():
            return ()
        case Concat():
            return operation.xs
        case Product() | Affine() | Normalise():
            return (operation.x,) if operation.add is None else (operation.x, operation.add)
        case Pointwise():
            return (operation.x,) if operation.by is None else (operation.x, operation.by)
        case Pool() | Softmax() | Spread():
            return (operation.x,)
        case Recurrent():
            return (operation.x, *operation.state.before)


def writes(operation: Operation) -> tuple[int, ...]:
    """Values an operation makes, or a part of them."""
    return (operation.y, *operation.state.after) if isinstance(operation, Recurrent) else (operation.y,)


def dense_taps(weight: Floats) -> Taps:
    """Taps of a weight of shape (rows, channels, height, width): its elements that are not zero."""
    row, channel, dy, dx = np.nonzero(weight)
    return Taps(weight.shape[0], row, channel, dy, dx, weight[row, channel, dy, dx])


def diagonal_taps(rows: int, pairs: Integers, weights: Floats) -> Taps:
    """One tap a row in ``pairs`` (row, channel): copies, shifts and scales channels."""
    zeros = np.zeros(len(pairs), np.int64)
    return Taps(rows, pairs[:, 0], pairs[:, 1], zeros, zeros, weights.astype(np.float32))
