"""The memory layout of the values of a group: planes with zero borders, in one arena that values share over time.

Borders are as wide as the widest window that reads them. Rows of a plane share borders: the right border of a row is
the left border of the next, so a plane of width 32 with a border of 1 has rows 33 pixels apart. Values that are added,
concatenated or normalised into each other share one layout (a *class*). A slot of the arena is reused only by values
whose zeros are at the same positions, so borders are never overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gossamer.deployment.runtime.network import (
    Affine,
    Concat,
    Network,
    Normalise,
    Operation,
    Pair,
    Pointwise,
    Product,
    Recurrent,
    Softmax,
    Value,
    reads,
    writes,
)

CHUNK = 16
ARENA_HEAD = 64  # floats at the start of the arena that are always zero
ARENA_TAIL = 256  # floats a last chunk may read past the end of a value
WORTH_COPYING = 24  # minimum number of weights per plane for which copies of it can save time
Places = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Layout:
    """Sizes in floats, except for ``pitch`` in pixels; ``base`` is the first pixel of a plane."""

    top: int
    left: int
    bottom: int
    right: int
    pitch: int
    plane: int
    base: int


@dataclass(frozen=True)
class Phases:
    """The planes of x split by the phase of a stride, for strided convolutions of one sample."""

    x: int
    y: int
    stride: Pair
    name: str = "phases"


Step = Operation | Phases


@dataclass(frozen=True, eq=False)
class Placed:
    """A graph with a layout and an arena offset for every value."""

    graph: Network
    steps: list[Step]
    values: list[Value]
    layouts: list[Layout]
    offsets: list[int]
    spare: list[int]  # the offset from a value to floats after it that stay zero
    copies: dict[int, list[tuple[int, int]]]
    arena: int
    lanes: int
    shifted: frozenset[Product]  # products that read copies of x, one for each shift of their window


class _Classes:
    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        self._parent[self.find(a)] = self.find(b)

    def add(self) -> None:
        self._parent.append(len(self._parent))


def is_single(product: Product, values: list[Value], lanes: int) -> bool:
    """Whether the product has one sample and one output pixel: a matrix times a vector."""
    return lanes == 1 and values[product.y].pixels == 1


def borders(product: Product, x: Value, y: Value) -> tuple[int, int, int, int]:
    """The border of x that the product reads: top, left, bottom, right."""
    if product.taps.count == 0:
        return 0, 0, 0, 0
    (sy, sx), (py, px) = product.stride, product.padding
    dy, dx = product.taps.dy, product.taps.dx
    bottom = (y.height - 1) * sy + int(dy.max()) - py - (x.height - 1)
    right = (y.width - 1) * sx + int(dx.max()) - px - (x.width - 1)
    return max(0, py - int(dy.min())), max(0, px - int(dx.min())), max(0, bottom), max(0, right)


def shifts(product: Product, values: list[Value], lanes: int) -> bool:
    """Whether a product may be faster with shifted copies of x: one sample, a window of several positions, chunks of
    whole rows, and enough weights to pay for the copies."""
    x, y, taps = values[product.x], values[product.y], product.taps
    if lanes > 1 or y.pixels == 1 or product.stride != (1, 1) or taps.count == 0:
        return False
    several = bool(taps.dy.min() < taps.dy.max() or taps.dx.min() < taps.dx.max())
    unbroken = y.width % CHUNK == 0 or y.width == x.width
    return several and unbroken and taps.count >= WORTH_COPYING * np.unique(taps.channel).size


def place(graph: Network, lanes: int, shifted: frozenset[Product] = frozenset()) -> Placed:
    """Assign a layout and an offset to every value. The products in ``shifted`` read copies of x, except for those
    whose chunks would overlap borders that another product needs."""
    values, classes = list(graph.values), _Classes(len(graph.values))
    narrow = lanes < CHUNK
    steps = _insert_phases(graph, values, classes, lanes) if narrow else list[Step](graph.operations)
    for step in steps:
        if isinstance(step, Affine | Normalise | Product) and step.add is not None:
            classes.join(step.add, step.y)
        if isinstance(step, Affine | Normalise | Pointwise | Softmax):
            classes.join(step.x, step.y)
        if isinstance(step, Pointwise) and step.by is not None and values[step.by].same_pixels(values[step.y]):
            classes.join(step.by, step.y)
        if isinstance(step, Concat):
            for x in step.xs:
                classes.join(x, step.y)
        if isinstance(step, Recurrent):
            states = (*step.state.before, *step.state.after)
            for one, other in pairwise(states):
                classes.join(one, other)
    while True:
        layouts = _layouts(steps, values, classes, lanes, shifted)
        fitting = frozenset(p for p in shifted if _unbroken(p, values, layouts))
        if fitting == shifted:
            break
        shifted = fitting
    offsets, spare, copies, arena = _allocate(graph, steps, values, layouts)
    return Placed(graph, steps, values, layouts, offsets, spare, copies, arena, lanes, shifted)


def _unbroken(product: Product, values: list[Value], layouts: list[Layout]) -> bool:
    """Whether chunks of x and y lie within rows, or in rows without a border between them."""
    compact = all(layouts[item].pitch == values[item].width for item in (product.x, product.y))
    return compact or values[product.y].width % CHUNK == 0


def _insert_phases(graph: Network, values: list[Value], classes: _Classes, lanes: int) -> list[Step]:
    steps: list[Step] = []
    made: dict[tuple[int, Pair], int] = {}
    for operation in graph.operations:
        if isinstance(operation, Product) and operation.stride != (1, 1) and not is_single(operation, values, lanes):
            key = operation.x, operation.stride
            if key not in made:
                x, (sy, sx) = values[operation.x], operation.stride
                made[key] = len(values)
                values.append(Value(x.channels * sy * sx, x.height, x.width))
                classes.add()
                steps.append(Phases(operation.x, made[key], operation.stride))
        steps.append(operation)
    return steps


def _layouts(
    steps: list[Step], values: list[Value], classes: _Classes, lanes: int, shifted: frozenset[Product]
) -> list[Layout]:
    count = len(values)
    border = np.zeros((count, 4), np.int64)
    windows = [s for s in steps if isinstance(s, Product) and s not in shifted and not is_single(s, values, lanes)]
    for product in windows:
        root = classes.find(product.x)
        border[root] = np.maximum(border[root], borders(product, values[product.x], values[product.y]))
    # A chunk of several pixels may cross the end of a row: input and output of a window then need rows of the same
    # pitch, and strided windows read phases instead.
    pitches = _Classes(count)
    least = np.ones(count, np.int64)
    for item in range(count):
        pitches.join(item, classes.find(item))
    phases = {(s.x, s.stride): s.y for s in steps if isinstance(s, Phases)}
    if lanes < CHUNK:
        for product in windows:
            pitches.join(phases.get((product.x, product.stride), product.x), product.y)
    for item in range(count):
        root, group = classes.find(item), pitches.find(item)
        if item not in phases.values():
            least[group] = max(least[group], values[item].width + int(border[root, [1, 3]].max()))
    for product in windows:
        if (product.x, product.stride) in phases and product.taps.count:
            left, group = int(border[classes.find(product.x), 1]), pitches.find(product.y)
            reach = (int(product.taps.dx.max()) - product.padding[1] + left) // product.stride[1]
            least[group] = max(least[group], values[product.y].width + reach)
    made = []
    origins = {s.y: s for s in steps if isinstance(s, Phases)}
    for item in range(count):
        pitch = int(least[pitches.find(item)])
        if item in origins:
            step = origins[item]
            top, left, bottom, right = (int(b) for b in border[classes.find(step.x)])
            rows = -(-(values[step.x].height + top + bottom) // step.stride[0])
            made.append(Layout(0, 0, 0, 0, pitch, _round(rows * pitch * lanes), 0))
        elif lanes == 1 and values[item].pixels == 1 and not border[classes.find(item)].any():
            made.append(Layout(0, 0, 0, 0, 1, 1, 0))
        else:
            top, left, bottom, right = (int(b) for b in border[classes.find(item)])
            base = top * pitch + left
            inside = (values[item].height - 1) * pitch + values[item].width
            size = base + inside + bottom * pitch + right
            plane = _round(max(size * lanes, base * lanes + _round(inside * lanes)))
            made.append(Layout(top, left, bottom, right, pitch, plane, base * lanes))
    return made


def _round(size: int) -> int:
    return -(-size // CHUNK) * CHUNK


def _allocate(
    graph: Network, steps: list[Step], values: list[Value], layouts: list[Layout]
) -> tuple[list[int], list[int], dict[int, list[tuple[int, int]]], int]:
    """The offsets of values in the arena. Parts of a concatenation are computed in place, or copied if the place is
    occupied."""
    count = len(values)
    first, last = [len(steps)] * count, [-1] * count
    for time, step in enumerate(steps):
        for y in (step.y,) if isinstance(step, Phases) else writes(step):
            first[y] = min(first[y], time)
        for x in (step.x,) if isinstance(step, Phases) else reads(step):
            last[x] = time
        if isinstance(step, Product):
            phases = [s.y for s in steps if isinstance(s, Phases) and (s.x, s.stride) == (step.x, step.stride)]
            for x in phases:
                last[x] = time
    for y in graph.outputs:
        last[y] = len(steps)
    owner, shift = list(range(count)), [0] * count
    copies: dict[int, list[tuple[int, int]]] = {}
    for step in reversed(steps):  # the last concatenation owns the buffer, earlier ones are parts of it
        if not isinstance(step, Concat):
            continue
        channel, taken = 0, set[int]()
        for x in step.xs:
            if owner[x] == x and x not in taken and x not in graph.outputs:
                owner[x], shift[x] = step.y, channel
                taken.add(x)
            else:
                copies.setdefault(step.y, []).append((x, channel))
            channel += values[x].channels
    places, begin, end = [(0, 0)] * count, list(first), list(last)
    for item in range(count):
        root, channel = item, 0
        while owner[root] != root:
            channel += shift[root]
            root = owner[root]
        places[item] = root, channel
        if first[item] == len(steps):
            continue  # fused away
        begin[root], end[root] = min(begin[root], first[item]), max(end[root], last[item], first[item])
    return _pack(places, begin, end, values, layouts, copies)


def _pack(
    places: list[tuple[int, int]],
    begin: list[int],
    end: list[int],
    values: list[Value],
    layouts: list[Layout],
    copies: dict[int, list[tuple[int, int]]],
) -> tuple[list[int], list[int], dict[int, list[tuple[int, int]]], int]:
    made = {root for root, _ in places if begin[root] <= end[root]}
    roots = sorted(made, key=lambda item: begin[item])
    # (slot, busy until), by the zero positions of a plane: values with the same zero positions share slots
    slots: dict[tuple[Layout, int, int], list[tuple[int, int]]] = {}
    sizes: list[int] = []
    slot_of: dict[int, int] = {}
    for item in roots:
        value, layout = values[item], layouts[item]
        size, free = value.channels * layout.plane, slots.setdefault((layout, value.height, value.width), [])
        for index, (slot, busy) in enumerate(free):
            if busy < begin[item]:
                free[index] = (slot, end[item])
                sizes[slot] = max(sizes[slot], size)
                slot_of[item] = slot
                break
        else:
            free.append((len(sizes), end[item]))
            slot_of[item] = len(sizes)
            sizes.append(size)
    starts = ARENA_HEAD + np.concatenate([[0], np.cumsum([_round(size) + CHUNK for size in sizes], dtype=np.int64)])
    offsets, spare = [], []
    for item, (root, channel) in enumerate(places):
        if root not in slot_of:
            offsets.append(0)
            spare.append(0)
            continue
        slot = slot_of[root]
        offsets.append(int(starts[slot]) + channel * layouts[item].plane)
        spare.append(int(starts[slot + 1]) - CHUNK - offsets[-1])
    return offsets, spare, copies, int(starts[-1]) + ARENA_TAIL


def chunk_places(value: Value, layout: Layout, lanes: int) -> tuple[npt.NDArray[np.int64], Places | None]:
    """The first (row, column, lane) of each output chunk, neighbours together, and a mask if chunks cross borders."""
    if lanes >= CHUNK:
        tall = 2 if lanes == CHUNK and value.height % 2 == 0 and value.width % 4 == 0 else 1
        wide = 4 if tall == 2 else value.width
        y, x = (grid.ravel() for grid in np.mgrid[0 : value.height, 0 : value.width])
        order = np.lexsort((x % wide, y % tall, x // wide, y // tall))
        pixels = np.stack([y[order], x[order]], 1).repeat(lanes // CHUNK, 0)
        lane = np.tile(np.arange(0, lanes, CHUNK), value.pixels)
        return np.column_stack([pixels, lane]), None
    if value.width * lanes % CHUNK == 0:
        y, x = (grid.ravel() for grid in np.mgrid[0 : value.height, 0 : value.width : CHUNK // lanes])
        return np.stack([y, x, np.zeros_like(y)], 1), None
    inside = (value.height - 1) * layout.pitch + value.width
    pixel = np.arange(_round(inside * lanes)) // lanes
    row, column = pixel // layout.pitch, pixel % layout.pitch
    mask = np.where((row < value.height) & (column < value.width), -1, 0).astype(np.int32)
    starts = np.stack([row[::CHUNK], column[::CHUNK], np.zeros(len(pixel) // CHUNK, np.int64)], 1)
    return starts, mask
