"""The network as a short list of operations on planes with nonzero weights.

``torch.export`` gives the network as ATen calls, and ``capture`` translates them to the few operations of the kernels.
Each value has channels, each a plane of pixels: an image has height and width, a vector is one pixel, and a sequence or
signal has one pixel per time step. Linear layers, convolutions, and shortcuts that subsample or add channels all become
a ``Product``: a list of taps (row, channel, dy, dx, weight) with a stride and a padding.
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
    """The network uses something that the native runtime does not support; the message names it."""


@dataclass(frozen=True)
class Value:
    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width

    def same_pixels(self, other: Value) -> bool:
        return (self.height, self.width) == (other.height, other.width)


@dataclass(frozen=True, eq=False)
class Taps:
    """The nonzero weights: output row, input channel, window position, weight; sorted by row."""

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
    """An image, vector or sequence passed by the caller."""

    y: int
    slot: int
    name: str = "input"


@dataclass(frozen=True, eq=False)
class Embed:
    """Rows of a table selected by tokens passed by the caller."""

    y: int
    slot: int
    table: Floats
    name: str


@dataclass(frozen=True, eq=False)
class TokenValues:
    """The tokens passed by the caller as numbers, one channel: for masks."""

    y: int
    slot: int
    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """Planes of the model, the same for every sample: positions, a class token, rotations."""

    y: int
    planes: Floats  # (channels, pixels)
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
    largest: float = 0.0
    """The largest absolute input in the calibration data; without calibration 0, and no int8 kernel."""

    @property
    def copies(self) -> bool:
        """Whether it only copies channels and pixels."""
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
    "reciprocal",
    "differs",
    "hides",
]
FUNCTIONS: tuple[Function, ...] = get_args(Function)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """y = function(x), optionally times another value of the same shape, or of one pixel or one channel for all."""

    x: int
    y: int
    function: Function
    name: str
    parameters: tuple[float, float] = (0.0, 0.0)
    slopes: Floats | None = None  # one per channel, for a leaky ReLU
    by: int | None = None


@dataclass(frozen=True, eq=False)
class Softmax:
    """Softmax over the channels of each pixel."""

    x: int
    y: int
    logarithm: bool
    name: str


@dataclass(frozen=True, eq=False)
class Normalise:
    """y = relu(scale * normalised x + shift + add), each part optional: mean 0 and variance 1 over each group of
    consecutive channels, over all pixels or for each pixel. Unless ``centred``, no mean is subtracted, and the mean
    square becomes 1; this is possible for all channels of each pixel together."""

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
    centred: bool = True


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
    """Each pixel becomes ``factor`` pixels: copies of itself, or one from each of that many consecutive channels (for
    the planes of a transposed convolution). Pixels beyond the edge of y are dropped."""

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


@dataclass(frozen=True, eq=False)
class Join:
    """The pixels of several values, one value after the other, in one row."""

    xs: tuple[int, ...]
    y: int
    name: str


@dataclass(frozen=True)
class Heads:
    """The channels of queries, keys, values or results: the first channel of each head, the distance between the
    channels of a head, and their number; and the first pixel."""

    first: tuple[int, ...]
    stride: int
    size: int
    pixel: int = 0


@dataclass(frozen=True, eq=False)
class Attention:
    """For each head: the mean of the values, weighted by the softmax of scale * query . key + masks."""

    x: int  # queries
    keys: int
    source: int  # values
    y: int
    heads: tuple[Heads, Heads, Heads]  # of queries, keys and values
    lengths: Pair  # queries, keys
    scale: float
    causal: bool
    name: str
    mask: Floats | None = None  # to add: (heads or 1, keys, queries)
    hidden: int | None = None  # to add: one channel, one pixel per key


@dataclass(frozen=True, eq=False)
class Column:
    """One pixel of planes of the model, at the position of each sample."""

    y: int
    planes: Floats  # (channels, pixels)
    slot: int  # of the positions
    name: str


@dataclass(frozen=True)
class Cache:
    """The memory of keys and values of a decoder: the inputs with positions and with the memory, the first float of an
    attention in the memory of a sample, and the maximum number of tokens."""

    positions: int
    memory: int
    first: int
    length: int


@dataclass(frozen=True, eq=False)
class Recall:
    """Attention of one token: its key and value are added to those of the tokens before it, then it sees them all."""

    x: int  # query
    keys: int
    source: int  # values
    y: int
    heads: tuple[Heads, Heads, Heads]
    scale: float
    cache: Cache
    name: str


#: Cells of recurrent layers, with the number of their gates. The last two are those of ``nn.RNN``.
Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class Recurrence:
    """The source and destination of the state of a recurrent layer: ``units`` channels of values, starting at
    ``first``."""

    first: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Recurrent:
    """One direction of one layer of a recurrent module; its output goes to the channels of y from ``channel`` on."""

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
    largest: float = 0.0  # as in Product; the state is at most 1


Operation = (
    Input | Embed | TokenValues | Constant | Product | Affine | Normalise | Pointwise | Softmax | Pool | Spread
    | Concat | Join | Attention | Column | Recall | Recurrent
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """An input from the caller: "picture", "signal", "vector", "sequence", "state" or "tokens", with this shape except
    for the batch."""

    form: str
    shape: tuple[int, ...]


def batch_axis(form: str, time_major: bool) -> int:
    """The batch axis."""
    return 1 if form == "state" or (time_major and form in ("sequence", "tokens")) else 0


@dataclass(frozen=True, eq=False)
class Network:
    values: list[Value]
    operations: list[Operation]
    outputs: tuple[int, ...]
    #: for each output its form (see translator.py) and its shape for the example
    forms: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Source, ...]
    time_major: bool
    #: the nesting of the outputs (a structure of torch.utils._pytree); None for a single tensor
    structure: Any = None


def reads(operation: Operation) -> tuple[int, ...]:
    """The values that an operation reads."""
    match operation:
        case Input() | Embed() | TokenValues() | Constant() | Column():
            return ()
        case Attention():
            hidden = () if operation.hidden is None else (operation.hidden,)
            return (operation.x, operation.keys, operation.source, *hidden)
        case Recall():
            return (operation.x, operation.keys, operation.source)
        case Concat() | Join():
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
    """The values that an operation writes, entirely or in part."""
    return (operation.y, *operation.state.after) if isinstance(operation, Recurrent) else (operation.y,)


def dense_taps(weight: Floats) -> Taps:
    """Taps of a weight of shape (rows, channels, height, width): its nonzero elements."""
    row, channel, dy, dx = np.nonzero(weight)
    return Taps(weight.shape[0], row, channel, dy, dx, weight[row, channel, dy, dx])


def diagonal_taps(rows: int, pairs: Integers, weights: Floats) -> Taps:
    """One tap per (row, channel) in ``pairs``: copies, shifts and scales channels."""
    zeros = np.zeros(len(pairs), np.int64)
    return Taps(rows, pairs[:, 0], pairs[:, 1], zeros, zeros, weights.astype(np.float32))
