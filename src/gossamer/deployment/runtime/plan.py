"""From a placed graph to the records of a native call: codes, offsets, pointers, sizes.

A plan is for one number of lanes (samples per group). Its arrays are laid out as the structs of
kernels.c expect them; the order of the fields here is the order there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.deployment.runtime.layout import (
    ARENA_TAIL,
    CHUNK,
    Phases,
    Placed,
    chunk_places,
    is_single,
    place,
    shifts,
)
from gossamer.deployment.runtime.network import (
    GATES,
    Affine,
    Attention,
    Cell,
    Column,
    Concat,
    Constant,
    Embed,
    Input,
    Join,
    Network,
    Normalise,
    Pointwise,
    Pool,
    Product,
    Recall,
    Recurrent,
    Softmax,
    Spread,
    TokenValues,
    UnsupportedError,
    Value,
    diagonal_taps,
)
from gossamer.deployment.runtime.plan_attention import (
    attention_fields,
    attention_scratch,
    constant_fields,
    move_fields,
    recall_fields,
)
from gossamer.deployment.runtime.plan_pointwise import normalise_fields, pointwise_fields, softmax_fields
from gossamer.deployment.runtime.plan_shifted import shifted_blocks
from gossamer.deployment.runtime.plan_windows import channel_blocks, phases_fields, pool_fields, spread_fields
from gossamer.deployment.runtime.records import (
    AFFINE,
    ATTENTION,
    COLUMN,
    CONSTANT,
    COPY,
    EMBED,
    GRU,
    LOAD,
    LSTM,
    MOVE,
    NORMALISE,
    PHASES,
    POINTWISE,
    POOL,
    PRODUCT,
    PRODUCT_DENSE,
    PRODUCT_FOUR,
    PRODUCT_INT8,
    PRODUCT_INT8_ONE,
    PRODUCT_ONE,
    RECALL,
    RECORD,
    RNN_RELU,
    RNN_TANH,
    SHIFTS,
    SOFTMAX,
    SPREAD,
    STORE,
    TOKENS,
    Line,
    Plan,
)
from gossamer.deployment.runtime.weights import (
    WAYS,
    WINDOW,
    Kept,
    Kernel,
    dense_panels,
    one_vector,
    panels,
    possible_kernels,
)
from gossamer.deployment.runtime.weights_int8 import int8_panels, int8_vector, quantised

_CODES: dict[Cell, int] = {"lstm": LSTM, "gru": GRU, "rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU}
RECURRENT_COLUMNS = 128  # steps times lanes for which the input product is computed ahead of the recurrence


def make_plan(graph: Network, lanes: int, kernels: Mapping[int, Kernel] | None = None) -> Plan:
    """The plan for a number of lanes. ``kernels`` has the kernel of each operation that does not use the first possible
    one."""
    kernels = kernels or {}
    chosen = [op for number, op in enumerate(graph.operations) if kernels.get(number) == "shifted"]
    shifted = frozenset(op for op in chosen if isinstance(op, Product) and shifts(op, graph.values, lanes))
    return _Planner(place(graph, lanes, shifted), kernels).plan()


def choices(graph: Network, lanes: int) -> dict[int, tuple[Kernel, ...]]:
    """The possible kernels of each operation."""
    found: dict[int, tuple[Kernel, ...]] = {}
    for number, operation in enumerate(graph.operations):
        if isinstance(operation, Product):
            one = is_single(operation, graph.values, lanes)
            shifted = shifts(operation, graph.values, lanes)
            found[number] = possible_kernels(operation.taps, one_vector=one, shifts=shifted)
            if operation.largest > 0 and (not one or _reads_channels(operation, graph.values[operation.x])):
                found[number] += ("int8",)
        elif isinstance(operation, Recurrent):
            int8: tuple[Kernel, ...] = ("int8",) if operation.largest > 0 else ()
            if lanes == 1:
                found[number] = (*possible_kernels(operation.hidden_taps, one_vector=True), *int8)
            elif int8:
                found[number] = ("panels", *int8)
    return found


def _reads_channels(product: Product, x: Value) -> bool:
    """Whether the product reads one pixel, without a window."""
    return x.pixels == 1 and product.padding == (0, 0) and not (product.taps.dy.any() or product.taps.dx.any())


def _rounded(size: int) -> int:
    return -(-size // CHUNK) * CHUNK


class _Planner:
    def __init__(self, placed: Placed, kernels: Mapping[int, Kernel]) -> None:
        self.placed = placed
        self.kernels = kernels
        self.numbers = {operation: number for number, operation in enumerate(placed.graph.operations)}
        self.lanes = placed.lanes
        self.records: list[list[int]] = []
        self.batch_fields: list[tuple[int, int, int]] = []
        self.lines: list[Line] = []
        self.kept = Kept()
        self.owners: list[int] = []  # operation behind each record
        self.owner = -1
        self.states = 0  # floats for the states of recurrent layers, after the values
        self.shared = 0  # floats of scratch memory after those, for one operation at a time
        self.shared_fields: list[tuple[int, int, int]] = []

    def plan(self) -> Plan:
        phases = {(s.x, s.stride): s.y for s in self.placed.steps if isinstance(s, Phases)}
        for step in self.placed.steps:
            self.owner = -1 if isinstance(step, Phases) else self.numbers[step]
            match step:
                case Input():
                    self._load(step)
                case Embed():
                    self._embed(step)
                case TokenValues():
                    self._tokens(step)
                case Constant():
                    self._planes(CONSTANT, step, constant_fields(self.kept, self.placed, step))
                case Product():
                    self._product(step, phases.get((step.x, step.stride)))
                case Affine():
                    self._affine(step)
                case Normalise():
                    self._emit(NORMALISE, step.x, step.y, step.add, normalise_fields(self.kept, self.placed, step))
                    self._line(step, "normalisation", "vectors")
                case Pointwise():
                    self._emit(POINTWISE, step.x, step.y, None, pointwise_fields(self.kept, self.placed, step))
                    self._line(step, "element-wise", step.function.replace("_", " "))
                case Softmax():
                    self._emit(SOFTMAX, step.x, step.y, None, softmax_fields(self.kept, self.placed, step))
                    self._line(step, "softmax", "vectors")
                case Pool():
                    self._planes(POOL, step, pool_fields(self.placed, step))
                    self._line(step, f"{step.kind} pooling", "vectors" if self.lanes > 1 else "plain")
                case Spread():
                    self._planes(SPREAD, step, spread_fields(self.placed, step))
                    self._line(step, "upsampling" if step.copies else "interleaving", "plain")
                case Phases():
                    self._emit(PHASES, step.x, step.y, None, phases_fields(self.placed, step))
                case Concat():
                    self._concat(step)
                case Join():
                    self._join(step)
                case Attention():
                    self._attention(step)
                case Column():
                    channels, pixels = step.planes.shape
                    planes = self.kept.keep(np.ascontiguousarray(step.planes.T))
                    self._emit(COLUMN, -1, step.y, None, [step.slot, pixels, channels, planes])
                case Recall():
                    self._recall(step)
                case Recurrent():
                    self._recurrent(step)
        self.owner = -1
        for slot, output in enumerate(self.placed.graph.outputs):
            self._store(slot, output)
        scratch = self.placed.arena + self.states
        for record, field, offset in self.shared_fields:
            self.records[record][field] = scratch + offset
        arena = scratch + self.shared + ARENA_TAIL
        if arena >= 1 << 31:
            raise UnsupportedError(f"an arena of {arena} floats; offsets have 31 bits: use a smaller input")
        records = np.array(self.records, np.int64).reshape(-1, RECORD)
        fields, lines, kept = tuple(self.batch_fields), tuple(self.lines), tuple(self.kept.arrays)
        return Plan(self.lanes, records, fields, arena, lines, kept, tuple(self.owners))

    # ------------------------------------------------------------------------------------------ small helpers

    def _emit(self, code: int, x: int, y: int, add: int | None, fields: Sequence[int]) -> None:
        offsets = self.placed.offsets
        place = [
            code,
            offsets[x] if x >= 0 else 0,
            offsets[y] if y >= 0 else 0,
            -1 if add is None else offsets[add],
        ]
        self.records.append([*place, *fields, *[0] * (RECORD - 4 - len(fields))])
        self.owners.append(self.owner)

    def _chosen(self, default: Kernel) -> Kernel:
        return self.kernels.get(self.owner, default)

    def _line(
        self, step: Any, kind: str, kernel: str, weights: int = 0, nonzeros: int = 0, multiplies: bool = True
    ) -> None:
        value = self.placed.values[step.y]
        shape = f"{value.channels}x{value.height}x{value.width}" if value.pixels > 1 else str(value.channels)
        work = nonzeros * value.pixels if multiplies else 0
        self.lines.append(Line(step.name, kind, shape, kernel, weights, nonzeros, work, self.owner))

    def _chunks(self, y: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:
        """Pixels of the output chunks, their offsets, and the addresses of offsets and mask."""
        layout = self.placed.layouts[y]
        pixels, mask = chunk_places(self.placed.values[y], layout, self.lanes)
        at = layout.base + (pixels[:, 0] * layout.pitch + pixels[:, 1]) * self.lanes + pixels[:, 2]
        return pixels, at, self.kept.keep(at.astype(np.int32)), 0 if mask is None else self.kept.keep(mask)

    # --------------------------------------------------------------------------------------- input and output

    def _runs(self, slot: int, item: int, form: str, shape: tuple[int, ...]) -> list[int]:
        """The mapping from the contiguous floats of a sample to the planes."""
        value, layout, lanes = self.placed.values[item], self.placed.layouts[item], self.lanes
        plane, row = layout.plane, layout.pitch * lanes
        if form == "state":  # (layers, batch, units)
            layers, units = shape[0], shape[2]
            self.batch_fields.append((len(self.records), 4 + 5, units))
            return [slot, units, units, plane, layers, units, units * plane, 1, 0, 0]
        features, sample = value.channels, value.channels * value.pixels
        if form == "sequence" and self.placed.graph.time_major:
            self.batch_fields.append((len(self.records), 4 + 5, features))
            return [slot, features, features, plane, value.width, features, lanes, 1, 0, 0]
        if form in ("sequence", "turned"):  # channels come last
            outer = [value.height, value.width * features, row, value.width, features, lanes]
            return [slot, sample, features, plane, *outer]
        if value.pixels == 1:
            return [slot, sample, sample, plane, 1, 0, 0, 1, 0, 0]
        outer = [value.channels, value.pixels, plane, value.height, value.width, row]
        return [slot, sample, value.width, lanes, *outer]

    def _load(self, step: Input) -> None:
        source = self.placed.graph.inputs[step.slot]
        runs = self._runs(step.slot, step.y, source.form, source.shape)
        self._emit(LOAD, -1, step.y, None, runs)
        self.records[-1][2] += self.placed.layouts[step.y].base

    def _store(self, slot: int, item: int) -> None:
        graph = self.placed.graph
        runs = self._runs(slot, item, graph.forms[slot], graph.shapes[slot])
        self._emit(STORE, item, -1, None, runs)
        self.records[-1][1] += self.placed.layouts[item].base

    def _token_fields(self, step: Embed | TokenValues) -> list[int]:
        """The input, its steps, and the strides of samples and steps."""
        width = self.placed.values[step.y].width
        if self.placed.graph.time_major:
            self.batch_fields.append((len(self.records), 4 + 3, 1))
            return [step.slot, width, 1, 0]
        return [step.slot, width, width, 1]

    def _tokens(self, step: TokenValues) -> None:
        self._emit(TOKENS, -1, step.y, None, self._token_fields(step))
        self.records[-1][2] += self.placed.layouts[step.y].base

    def _embed(self, step: Embed) -> None:
        plane = self.placed.layouts[step.y].plane
        tokens, features = step.table.shape
        fields = [*self._token_fields(step), tokens, features, self.kept.keep(step.table), plane]
        self._emit(EMBED, -1, step.y, None, fields)
        self.records[-1][2] += self.placed.layouts[step.y].base
        self._line(step, "embedding", "look-up", step.table.size, int(np.count_nonzero(step.table)), multiplies=False)

    # ----------------------------------------------------------------------------------------------- products

    def _product(self, step: Product, phases: int | None) -> None:
        if is_single(step, self.placed.values, self.lanes):
            self._product_one(step)
            return
        if step in self.placed.shifted:
            self._product_shifted(step)
            return
        x, y = self.placed.layouts[step.x], self.placed.layouts[step.y]
        int8 = quantised(step.taps, step.largest) if self._chosen("panels") == "int8" else None
        taps = step.taps if int8 is None else int8.taps
        lanes, (sy, sx), (py, px) = self.lanes, step.stride, step.padding
        pixels, at, y_at, mask = self._chunks(step.y)
        if phases is not None:
            source = self.placed.layouts[phases]
            dy, dx = taps.dy - py + x.top, taps.dx - px + x.left
            plane = taps.channel * sy * sx + (dy % sy) * sx + dx % sx
            offsets = plane * source.plane + ((dy // sy) * source.pitch + dx // sx) * lanes
            x_at = at - y.base
        else:
            offsets = taps.channel * x.plane + (taps.dy * x.pitch + taps.dx) * lanes
            first = (pixels[:, 0] * sy - py) * x.pitch + pixels[:, 1] * sx - px
            x_at = x.base + first * lanes + pixels[:, 2]
        places = self.kept.keep(x_at.astype(np.int32))
        if int8 is not None:
            weight = int8_panels(self.kept, int8, offsets, step.bias)
            fields = [weight, len(at), places, y_at, mask, y.plane, int(step.relu)]
            self._emit_int8(step, fields, step.x if phases is None else phases)
            words = 4 * int8.taps.count / max(1, step.dense_size)
            self._product_line(step, f"int8, {words:.0%} of blocks", step.taps.count)
            return
        dense = self._chosen("panels") == "dense"
        blocks = channel_blocks(self.placed, step)
        for number, (begin, end) in enumerate(pairwise(blocks)):
            inside = (taps.channel >= begin) & (taps.channel < end)
            bias = step.bias if number == 0 else np.zeros_like(step.bias)
            part, at_part = taps.chosen(inside), offsets[inside]
            if dense:
                weight = dense_panels(self.kept, part, at_part, bias)
            else:
                weight = panels(self.kept, part, at_part, bias, lanes)
            last = end == blocks[-1]
            fields = [weight, len(at), places, y_at, mask, y.plane, int(step.relu and last)]
            add = step.add if number == 0 else step.y
            self._emit(PRODUCT_DENSE if dense else PRODUCT, step.x if phases is None else phases, step.y, add, fields)
        kernel = "dense" if dense else f"panels of {lanes}" if lanes >= CHUNK else f"planes of {lanes}"
        self._product_line(step, kernel, taps.count)

    def _product_shifted(self, step: Product) -> None:
        _, at, y_at, mask = self._chunks(step.y)
        blocks = shifted_blocks(self.kept, self.placed, step)
        for number, block in enumerate(blocks):
            self.shared_fields += [(len(self.records), 2, 0), (len(self.records) + 1, 1, 0)]
            self._emit(SHIFTS, step.x, -1, None, block.copies)
            relu = int(step.relu and number == len(blocks) - 1)
            fields = [block.weight, len(at), block.places, y_at, mask, self.placed.layouts[step.y].plane, relu]
            add = step.add if number == 0 else step.y
            self._emit(PRODUCT_FOUR if block.four else PRODUCT, -1, step.y, add, fields)
            self.shared = max(self.shared, block.size)
        self._product_line(step, "shifted planes", step.taps.count)

    def _product_one(self, step: Product) -> None:
        x, y, value = self.placed.layouts[step.x], self.placed.layouts[step.y], self.placed.values[step.x]
        taps = step.taps
        row, column = taps.dy - step.padding[0], taps.dx - step.padding[1]
        inside = (row >= 0) & (row < value.height) & (column >= 0) & (column < value.width)
        taps, row, column = taps.chosen(inside), row[inside], column[inside]
        offsets = x.base + taps.channel * x.plane + row * x.pitch + column
        kernel = self._chosen("gather")
        if kernel == "int8":
            fields = [int8_vector(self.kept, quantised(step.taps, step.largest), step.bias)]
            self._emit_int8_one(step, [*fields, 0, 0, 0, 0, y.plane, int(step.relu)])
            self._product_line(step, "one vector, int8", taps.count)
            return
        weight, begin = one_vector(self.kept, kernel, taps, offsets, step.bias, self.placed.spare[step.x])
        fields = [weight, 0, 0, 0, 0, y.plane, int(step.relu), WAYS[kernel], begin]
        self._emit(PRODUCT_ONE, step.x, step.y, step.add, fields)
        self.records[-1][2] += y.base
        self.records[-1][3] += 0 if step.add is None else y.base
        self._product_line(step, f"one vector, {kernel}", taps.count)

    def _emit_int8(self, step: Product, fields: list[int], source: int) -> None:
        """A product of the planes of ``source``: the value x, or its phases."""
        channels, planes = (self.placed.values[each].channels for each in (step.x, source))
        plane = self.placed.layouts[source].plane
        phases = planes // channels
        self._in_scratch(-(-channels // 4) * phases * plane, field=len(fields) + 3)
        self._emit(PRODUCT_INT8, source, step.y, step.add, [*fields, channels, phases, plane])

    def _emit_int8_one(self, step: Product, fields: list[int]) -> None:
        """A product of one vector: windows of its words may reach one window further than the words."""
        x, y = self.placed.layouts[step.x], self.placed.layouts[step.y]
        channels = self.placed.values[step.x].channels
        self._in_scratch(-(-channels // 4) + 2 * WINDOW, field=len(fields) + 3)
        self._emit(PRODUCT_INT8_ONE, step.x, step.y, step.add, [*fields, channels, 1, x.plane])
        self.records[-1][1] += x.base
        self.records[-1][2] += y.base
        self.records[-1][3] += 0 if step.add is None else y.base

    def _in_scratch(self, size: int, field: int) -> None:
        """Give the next record this many words of scratch memory; the address goes to a field of its own."""
        self.shared_fields.append((len(self.records), 4 + field, 0))
        self.shared = max(self.shared, _rounded(size))

    def _product_line(self, step: Product, kernel: str, nonzeros: int) -> None:
        layer = step.kind in ("linear", "convolution")
        self._line(step, step.kind, kernel, step.dense_size if layer else 0, nonzeros if layer else 0)

    def _affine(self, step: Affine) -> None:
        value, layout = self.placed.values[step.y], self.placed.layouts[step.y]
        if self.lanes == 1 and value.pixels == 1:
            pairs = np.arange(value.channels)[:, None].repeat(2, 1)
            scale = np.ones(value.channels, np.float32) if step.scale is None else step.scale
            shift = np.zeros(value.channels, np.float32) if step.shift is None else step.shift
            taps = diagonal_taps(value.channels, pairs, scale)
            one = Product(
                *(step.x, step.y, taps, shift, (1, 1), (0, 0), value.channels, step.name),
                add=step.add,
                relu=step.relu,
                kind="element-wise",
            )
            self._product_one(one)
            return
        _, at, y_at, mask = self._chunks(step.y)
        scale_at = 0 if step.scale is None else self.kept.keep(step.scale)
        shift_at = 0 if step.shift is None else self.kept.keep(step.shift)
        fields = [value.channels, len(at), y_at, mask, layout.plane, int(step.relu), scale_at, shift_at]
        self._emit(AFFINE, step.x, step.y, step.add, fields)
        self._line(step, "element-wise", "vectors")

    # ----------------------------------------------------------------------------------------------- the rest

    def _planes(self, code: int, step: Pool | Spread | Constant, fields: Sequence[int]) -> None:
        """A record with the offsets of the first pixels."""
        x = -1 if isinstance(step, Constant) else step.x
        self._emit(code, x, step.y, None, fields)
        self.records[-1][1] += 0 if x < 0 else self.placed.layouts[x].base
        self.records[-1][2] += self.placed.layouts[step.y].base

    def _concat(self, step: Concat) -> None:
        plane = self.placed.layouts[step.y].plane
        for x, channel in self.placed.copies.get(step.y, []):
            self._emit(COPY, x, step.y, None, [self.placed.values[x].channels * plane])
            self.records[-1][2] += channel * plane
        self._line(step, "concatenation", "copied" if step.y in self.placed.copies else "in place")

    def _join(self, step: Join) -> None:
        done = 0
        for x in step.xs:
            self._emit(MOVE, x, step.y, None, move_fields(self.placed, x, step.y))
            self.records[-1][1] += self.placed.layouts[x].base
            self.records[-1][2] += self.placed.layouts[step.y].base + done * self.lanes
            done += self.placed.values[x].pixels
        self._line(step, "joined pixels", "copied")

    def _attention(self, step: Attention) -> None:
        self.shared = max(self.shared, _rounded(attention_scratch(step, self.lanes)))
        fields = attention_fields(self.kept, self.placed, step)
        self.shared_fields.append((len(self.records), 4 + len(fields) + 1, 0))
        y_head = step.heads[2].size * self.placed.layouts[step.y].plane
        self._emit(ATTENTION, step.x, step.y, step.keys, [*fields, self.placed.offsets[step.source], 0, y_head])
        self.records[-1][2] += self.placed.layouts[step.y].base
        heads = len(step.heads[0].first)
        self._line(step, "attention", f"{heads} heads, {'causal' if step.causal else 'all keys'}")

    def _recall(self, step: Recall) -> None:
        self.shared = max(self.shared, _rounded(step.cache.length))
        sample = self.placed.graph.inputs[step.cache.memory].shape[1]
        fields = recall_fields(self.kept, step, sample, self.placed.offsets[step.source])
        self.shared_fields.append((len(self.records), 4 + len(fields), 0))
        self._emit(RECALL, step.x, step.y, step.keys, fields)
        self._line(step, "attention", f"{len(step.heads[0].first)} heads, cached keys and values")

    def _state(self, step: Recurrent) -> list[int]:
        """Offsets of h and c before and after (-1 if there is none), and floats between units."""
        found, row = [], self.lanes
        for items in (step.state.before, step.state.after):
            layouts = [self.placed.layouts[item] for item in items]
            row = next((layout.plane for layout in layouts), row)  # the same for all
            starts = [self.placed.offsets[item] + layout.base for item, layout in zip(items, layouts, strict=True)]
            found += [*(start + step.state.first * row for start in starts), -1, -1][:2]
        return [*found, row]

    def _recurrent(self, step: Recurrent) -> None:
        x, y, value = self.placed.layouts[step.x], self.placed.layouts[step.y], self.placed.values[step.x]
        lanes, units, gates = self.lanes, step.units, GATES[step.kind]
        steps = min(value.width, max(1, RECURRENT_COLUMNS // lanes))
        columns = -(-steps * lanes // CHUNK) * CHUNK
        # The gates of one sample are needed step by step, those of several samples packed per step.
        input_gates = gates * units * columns * (2 if lanes == 1 else 1)
        shared = [input_gates, gates * units * lanes * (2 if step.kind == "gru" and lanes > 1 else 1)]
        self.shared = max(self.shared, _rounded(shared[0]) + _rounded(shared[1]))
        # The state has its own memory, followed by a chunk of zeros that padded rows read.
        state = _rounded(units * lanes) + CHUNK
        state_places = [self.placed.arena + self.states, self.placed.arena + self.states + state]
        self.states += 2 * state
        kernel = self._chosen("gather")
        into, across, alone, begin = self._recurrent_weights(step, kernel, x.plane, columns)
        places = self.kept.keep(np.arange(0, columns, CHUNK, dtype=np.int32))
        fields = [value.width, units, gates, into, across, alone, x.plane, y.plane, steps, int(step.reverse)]
        fields += [0, 0, *state_places, places, *self._state(step), WAYS.get(kernel, 0), begin]
        if kernel == "int8":
            self.shared_fields.append((len(self.records), 4 + len(fields), sum(map(_rounded, shared))))
            words = -(-value.channels // 4) * columns, -(-units // 4) * lanes + 2 * WINDOW
            self.shared = max(self.shared, sum(map(_rounded, shared)) + _rounded(max(words)))
            fields += [0, value.channels]
        self._emit(_CODES[step.kind], step.x, step.y, None, fields)
        self.shared_fields += [
            (len(self.records) - 1, 14, 0),
            (len(self.records) - 1, 15, _rounded(shared[0])),
        ]
        self.records[-1][1] += x.base
        self.records[-1][2] += y.base + step.channel * y.plane
        nonzeros = step.input_taps.count + step.hidden_taps.count
        how = f"panels of {lanes}" if lanes > 1 else f"steps together, then one vector per step, {kernel}"
        how = f"{how}, int8" if lanes > 1 and kernel == "int8" else how
        self._line(step, step.kind.replace("_", " "), how, step.dense_size, nonzeros)

    def _recurrent_weights(
        self, step: Recurrent, kernel: Kernel, plane: int, columns: int
    ) -> tuple[int, int, int, int]:
        """The weights for the inputs, for several samples, and for one, with where its vector begins."""
        lanes, taps, bias = self.lanes, step.hidden_taps, step.hidden_bias
        if kernel == "int8":
            x, h = quantised(step.input_taps, step.largest), quantised(taps, 1.0)
            into = int8_panels(self.kept, x, x.taps.channel * columns, step.input_bias)
            if lanes == 1:
                return into, 0, int8_vector(self.kept, h, bias), 0
            return into, int8_panels(self.kept, h, h.taps.channel * lanes, bias), 0, 0
        into = panels(self.kept, step.input_taps, step.input_taps.channel * plane, step.input_bias, lanes)
        if lanes == 1:
            alone, begin = one_vector(self.kept, kernel, taps, taps.channel, bias, _rounded(step.units))
            return into, 0, alone, begin
        return into, panels(self.kept, taps, taps.channel * lanes, bias, lanes), 0, 0
