"""Translation of the shared graph: inputs and outputs, computed values, arguments of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.deployment.graph import RECURRENT_CALLS, shape_of
from gossamer.deployment.runtime.network import (
    Affine,
    Floats,
    Function,
    Input,
    Join,
    Network,
    Operation,
    Pointwise,
    Product,
    Source,
    Taps,
    TokenValues,
    UnsupportedError,
    Value,
    batch_axis,
    diagonal_taps,
)
from gossamer.deployment.runtime.views import Axis, Of, View, axis

Form = Literal["picture", "turned", "grouped", "signal", "vector", "flat", "sequence", "state", "bare", "view"]
aten = torch.ops.aten
#: Calls that treat an input of three dimensions as (batch, channels, steps), and as (batch, steps, channels).
_OF_SIGNALS = (
    *(aten.conv1d.default, aten.conv1d.padding, aten.conv_transpose1d.default, aten.batch_norm.default),
    *(aten.group_norm.default, aten.instance_norm.default, aten.channel_shuffle.default),
    *(aten.max_pool1d.default, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default),
    *(aten.adaptive_max_pool1d.default, aten.upsample_nearest1d.vec),
)
_OF_SEQUENCES = (*RECURRENT_CALLS, aten.linear.default, aten.layer_norm.default)


@dataclass(frozen=True)
class Handle:
    """A value of the graph and its form in the network: a sequence is (batch, steps, channels), or its steps come
    first, a signal is (batch, channels, steps), and ``flat`` is a picture or signal spread out to a vector. A picture
    is ``turned`` when its channels come last, and ``grouped`` when they have two axes. ``bare`` is a picture or vector
    of one channel without the axis of channels: (batch, height, width) or (batch,). A ``view`` is anything else, and
    lists its axes."""

    value: int
    form: Form
    view: View | None = None


@dataclass(frozen=True)
class Tokens:
    """Token sequences, of which the ``shape`` begins with the batch unless time comes first; ``turned`` after a
    transposition."""

    slot: int
    shape: tuple[int, ...]
    turned: bool = False


class Lazy:
    """The result of a call for which there is no operation before a later call is known, such as the scores of
    attention. Only calls that know it may receive it."""

    about: ClassVar[str]


@dataclass(frozen=True)
class Zeros:
    """An initial state of zeros, the only one a recurrent layer may have here."""


class Translator:
    """Translates the calls of a module with ``translations``."""

    def __init__(
        self,
        module: fx.GraphModule,
        translations: Mapping[Any, Callable[[Translator, fx.Node], Any]],
        of_views: frozenset[Any] = frozenset(),
        of_lazy: Mapping[tuple[Any, type[Lazy]], Callable[[Translator, fx.Node], Any]] | None = None,
    ) -> None:
        self.module = module
        self.translations = translations
        self.of_views = of_views  # calls that take views of parts of a value; for others, the parts are copied
        self.of_lazy = of_lazy or {}
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[Source] = []
        recurrent = [n for n in module.graph.nodes if n.target in RECURRENT_CALLS]
        majors = {not n.args[8] for n in recurrent}
        if len(majors) > 1:
            raise UnsupportedError("recurrent layers with and without batch_first in one network")
        self.time_major = majors == {True} if recurrent else _are_tokens_turned(module.graph)
        self._numbers: dict[int, Handle] = {}  # tokens as numbers, by slot

    def translate(self, structure: Any) -> Network:
        """The network, with outputs nested like ``structure`` (None for a single tensor)."""
        outputs: tuple[Any, ...] = ()
        shapes: tuple[tuple[int, ...], ...] = ()
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._input(node)
            elif node.op == "get_attr":
                self.env[node] = attrgetter(str(node.target))(self.module)
            elif node.op == "output":
                outputs = tuple(self.settled(self._get(n)) for n in node.args[0])
                shapes = tuple(shape_of(n) for n in node.args[0] if isinstance(n, fx.Node))
            elif self._is_constant(node):
                self.env[node] = self._computed(node)
            elif any(isinstance(self._get(each), Lazy) for each in node.all_input_nodes):
                self.env[node] = self._lazily(node)
            elif node.target not in self.translations:
                raise UnsupportedError(f"no native kernel for {node.target} (node {node.name})")
            else:
                self._call(node)
        if not outputs or not all(isinstance(out, Handle) for out in outputs):
            raise UnsupportedError("outputs that are not activations of the network")
        if any(out.form == "view" for out in outputs):
            raise UnsupportedError("an output whose axes are in another order than a layer makes them")
        places, forms = tuple(o.value for o in outputs), tuple(o.form for o in outputs)
        nested = None if structure is None or structure.is_leaf() else structure
        return Network(self.values, self.operations, places, forms, shapes, tuple(self.inputs), self.time_major, nested)

    def _lazily(self, node: fx.Node) -> Any:
        """The translation of a call of something lazy, by the kind of the first such input."""
        kind = next(type(each) for each in map(self._get, node.all_input_nodes) if isinstance(each, Lazy))
        if (node.target, kind) not in self.of_lazy:
            raise UnsupportedError(f"{node.target} of {kind.about} (node {node.name})")
        return self.of_lazy[node.target, kind](self, node)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a call depends only on tensors of the model, so that its result is constant."""
        known = [self._get(each) for each in node.all_input_nodes]
        return all(isinstance(each, Tensor) for each in known) and (bool(known) or _is_made(node))

    def _computed(self, node: fx.Node) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise UnsupportedError(f"random numbers (node {node.name})")
        with torch.no_grad():
            return cast(Any, node.target)(*fx.map_arg(node.args, self._get), **fx.map_arg(node.kwargs, self._get))

    def _call(self, node: fx.Node) -> None:
        if node.target not in self.of_views:
            for each in node.all_input_nodes:
                self.env[each] = self.settled(self._get(each))
        made = self.env[node] = self.translations[node.target](self, node)
        if isinstance(made, Handle) and node.meta["val"].dtype not in (torch.float32, torch.bool):
            raise UnsupportedError(f"{node.target} that makes {node.meta['val'].dtype} (node {node.name})")
        for handle, shape in _with_shapes(made, node):
            if handle is not None and shape not in self._shapes(handle):
                raise UnsupportedError(f"{node.target} that makes {shape} of a {handle.form} (node {node.name})")

    def _shapes(self, handle: Handle) -> list[tuple[int, ...]]:
        """The valid shapes of a value; any other would mix samples, pixels or steps."""
        value, batch = self.values[handle.value], self._batch()
        match handle.form:
            case "picture":
                return [(batch, value.channels, value.height, value.width)]
            case "turned":
                return [(batch, value.height, value.width, value.channels)]
            case "grouped":
                groups = [n for n in range(1, value.channels + 1) if value.channels % n == 0]
                return [(batch, n, value.channels // n, value.height, value.width) for n in groups]
            case "signal":
                return [(batch, value.channels, value.width)]
            case "sequence":
                steps = (value.width, batch) if self.time_major else (batch, value.width)
                return [(*steps, value.channels), (batch * value.width, value.channels)]
            case "state":
                layers = [n for n in range(1, value.channels + 1) if value.channels % n == 0]
                return [(n, batch, value.channels // n) for n in layers]
            case "bare":
                return [(batch, value.height, value.width), *([(batch,)] if value.pixels == 1 else [])]
            case "view":
                return [] if handle.view is None else [handle.view.shape]
        return [(batch, value.channels * value.pixels)]

    def _batch(self) -> int:
        sizes = {each.shape[batch_axis(each.form, self.time_major)] for each in self.inputs}
        if len(sizes) != 1:
            raise UnsupportedError(f"inputs of batches of {sorted(sizes)}; the kernels support one batch size per call")
        return sizes.pop()

    def _input(self, node: fx.Node) -> Handle | Tokens:
        slot = len(self.inputs)
        example = cast(Tensor, node.meta["val"])
        shape = tuple(example.shape)
        if example.dtype == torch.int64:
            self.inputs.append(Source("tokens", shape))
            return Tokens(slot, shape)
        form: Form
        if any(user.target in RECURRENT_CALLS and node in _states(user) for user in node.users):
            self.inputs.append(Source("state", shape))
            handle = self.new(Value(shape[0] * shape[2], 1, 1), "state")
            self.operations.append(Input(handle.value, slot, node.name))
            return handle
        if example.dtype != torch.float32 or len(shape) not in (2, 3, 4):
            raise UnsupportedError(f"input {node.name} of shape {shape} and dtype {example.dtype}")
        if len(shape) == 4:
            form, value = "picture", Value(shape[1], shape[2], shape[3])
        elif len(shape) == 3 and _is_signal(node):
            form, value = "signal", Value(shape[1], 1, shape[2])
        elif len(shape) == 3:
            form, value = "sequence", Value(shape[2], 1, shape[0] if self.time_major else shape[1])
        else:
            form, value = "vector", Value(shape[1], 1, 1)
        handle = self.new(value, form)
        self.inputs.append(Source(form, shape))
        self.operations.append(Input(handle.value, slot, node.name))
        return handle

    def new(self, value: Value, form: Form) -> Handle:
        self.values.append(value)
        return Handle(len(self.values) - 1, form)

    def like(self, x: Handle) -> Handle:
        """A new value of the same size and form."""
        return replace(x, value=self.new(self.values[x.value], x.form).value)

    def pointwise(self, x: Handle, name: str, function: Function, **parts: Any) -> Handle:
        y = self.like(x)
        self.operations.append(Pointwise(x.value, y.value, function, name, **parts))
        return y

    def fits(self, handle: Handle, node: fx.Node) -> bool:
        return shape_of(node) in self._shapes(handle)

    def numbers(self, tokens: Tokens) -> Handle:
        """Tokens as the numbers of one channel."""
        if len(tokens.shape) != 2:
            raise UnsupportedError(f"numbers of tokens of shape {tokens.shape}")
        if tokens.slot not in self._numbers:
            steps = tokens.shape[0 if self.time_major else 1]
            y = self.new(Value(1, 1, steps), "view")
            self.operations.append(TokenValues(y.value, tokens.slot, f"tokens {tokens.slot}"))
            self._numbers[tokens.slot] = y
        y = self._numbers[tokens.slot]
        axes = axis("sample", self._batch()), axis("pixel", self.values[y.value].pixels)
        return replace(y, view=View(axes if not self.time_major or tokens.turned else axes[::-1]))

    def view_of(self, x: Handle, shape: tuple[int, ...]) -> View:
        """The axes of a value, which has this shape."""
        if x.view is not None:
            return x.view
        view = View(self._axes(x))
        return view if view.shape == shape else view.reshaped(shape)

    def viewed(self, value: int, view: View) -> Handle:
        """A value with other axes, in another form than a view if there is one."""
        size = self.values[value]
        forms: tuple[Form, ...] = ("sequence", "signal", "vector", "picture", "turned")
        for handle in (Handle(value, form) for form in forms):
            axes = self._axes(handle)
            if handle.form == "sequence" and len(view.axes) == 2:
                axes = ((*axes[0], *axes[1]), axes[2])
            if view == View(axes) and (handle.form != "vector" or size.pixels == 1):
                in_rows = handle.form in ("sequence", "signal") and size.height > 1
                if not in_rows:
                    return handle
                if handle.form == "sequence":
                    return self.in_a_row(handle)
        return Handle(value, "view", view)

    def _axes(self, x: Handle) -> tuple[Axis, ...]:
        value = self.values[x.value]
        samples, channels = axis("sample", self._batch()), axis("channel", value.channels)
        pixels, rows = axis("pixel", value.pixels), axis("pixel", value.height, value.width)
        columns = axis("pixel", value.width)
        match x.form:
            case "picture":
                return samples, channels, rows, columns
            case "turned":
                return samples, rows, columns, channels
            case "signal":
                return samples, channels, pixels
            case "sequence":
                return (pixels, samples, channels) if self.time_major else (samples, pixels, channels)
            case "vector":
                return samples, channels
            case "flat":
                return samples, (*channels, *pixels)
        raise UnsupportedError(f"a view of a {x.form}")

    def in_a_row(self, x: Handle) -> Handle:
        """The pixels of an image as those of a sequence."""
        value = self.values[x.value]
        y = self.new(Value(value.channels, 1, value.pixels), "sequence")
        self.operations.append(Join((x.value,), y.value, "pixels in a row"))
        return y

    def settled(self, x: Any) -> Any:
        """A view of some channels or pixels as a value of its own; anything else as it is."""
        if not isinstance(x, Handle) or x.view is None or self._is_whole(x):
            return x
        value, view = self.values[x.value], x.view
        parts = [part for each in view.axes for part in each]
        kinds: tuple[Of, Of] = ("channel", "pixel")
        channels, pixels = ([p for p in parts if p.of == of and p.stride] for of in kinds)
        if value.height > 1 or len(pixels) > 1:
            raise UnsupportedError("a view of some rows and columns")
        strides = dict.fromkeys(pixels, 1)
        count = 1
        for part in sorted(channels, key=lambda part: part.stride):
            strides[part], count = count, count * part.size
        if len(strides) != len(channels) + len(pixels):
            raise UnsupportedError("a view with an axis twice")
        whole = View(tuple(tuple(replace(p, stride=strides.get(p, p.stride)) for p in each) for each in view.axes))
        step, steps = (pixels[0].stride, pixels[0].size) if pixels else (1, 1)
        chosen = View((tuple(sorted(channels, key=lambda part: -part.stride)),), view.channel)
        source = chosen.places("channel")
        y = self.new(Value(count, 1, steps), "view")
        taps = diagonal_taps(count, np.stack([np.arange(count), source], 1), np.ones(count, np.float32))
        taps = replace(taps, dx=taps.dx + view.pixel)
        bias = np.zeros(count, np.float32)
        copy = Product(x.value, y.value, taps, bias, (1, step), (0, 0), count, "a part", kind="copy")
        self.operations.append(copy)
        return self.viewed(y.value, whole)

    def _is_whole(self, x: Handle) -> bool:
        """Whether a view has every channel and pixel once."""
        assert x.view is not None
        value, parts = self.values[x.value], [part for each in x.view.axes for part in each]
        sizes = {of: int(np.prod([part.size for part in parts if part.of == of])) for of in ("channel", "pixel")}
        repeats = any(part.stride == 0 for part in parts)
        return not repeats and sizes == {"channel": value.channels, "pixel": value.pixels}

    def _get(self, node: Any) -> Any:
        return self.env[node] if isinstance(node, fx.Node) else node

    def arguments(self, node: fx.Node, *defaults: Any) -> list[Any]:
        """The arguments of a call with their values; ``defaults`` replace omitted ones at the end."""
        given = list(node.args)
        if node.kwargs:
            schema = cast(Any, node.target)._schema
            names = [argument.name for argument in schema.arguments]
            for name in names[len(given) :]:
                if name in node.kwargs:
                    given.append(node.kwargs[name])
                elif len(given) < len(defaults):
                    given.append(defaults[len(given)])
        if defaults and any(extra is not None for extra in given[len(defaults) :]):
            raise UnsupportedError(f"{node.target} with {given[len(defaults) :]} (node {node.name})")
        given = [*given, *defaults[len(given) :]][: len(defaults) or None]
        return [self._resolve(argument) for argument in given]

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [self._resolve(a) for a in argument]
        return self._get(argument)

    def parameter_name(self, node: Any) -> str:
        """The name of a layer, from its weight, or from the first tensor that the weight is computed from."""
        first = node
        while isinstance(first, fx.Node) and first.op != "get_attr" and first.all_input_nodes:
            first = first.all_input_nodes[0]
        name = str(first.target if isinstance(first, fx.Node) and first.op == "get_attr" else node)
        return name.partition(".parametrizations.")[0].removesuffix(".weight")


Translation = Callable[[Translator, fx.Node], Any]
#: Calls without activations that make constants.
_MADE = (
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.ones.default),
    aten.scalar_tensor.default,
)


def _is_made(node: fx.Node) -> bool:
    return node.target in _MADE or (node.target is aten.zeros.default and not shape_of(node))


def _are_tokens_turned(graph: fx.Graph) -> bool:
    """Whether a network without recurrent layers takes tokens with the time first, and transposes them."""
    tokens = [n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].dtype == torch.int64]
    users = [user for node in tokens for user in node.users]
    return bool(users) and all(user.target in (aten.t.default, aten.transpose.int) for user in users)


def _with_shapes(made: Any, node: fx.Node) -> list[tuple[Handle | None, tuple[int, ...]]]:
    """The activations among the results of a call, each with its shape."""
    if isinstance(made, Handle):
        return [(made, shape_of(node))]
    if isinstance(made, tuple) and all(isinstance(each, Handle | None) for each in made):
        return [(each, tuple(val.shape)) for each, val in zip(made, node.meta["val"], strict=False)]
    return []


def _is_signal(node: fx.Node) -> bool:
    """Whether an input of three dimensions has its channels before its steps, decided by the first call that allows
    only one of the two."""
    paths, seen = [(node, False)], {node}
    for current, turned in paths:
        for user in current.users:
            if user.target in _OF_SIGNALS:
                return not turned
            if user.target in _OF_SEQUENCES:
                return turned
            if user not in seen:
                seen.add(user)
                paths.append((user, turned != _moves_the_last_axis(user)))
    return False


def _moves_the_last_axis(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return cast(list[int], node.args[1])[-1] not in (-1, 2)
    return node.target is aten.transpose.int and not {-1, 2}.isdisjoint(cast(tuple[int, ...], node.args[1:]))


def _states(node: fx.Node) -> list[Any]:
    """The initial states of a recurrent call."""
    state = node.args[1]
    return list(state) if isinstance(state, list | tuple) else [state]


def to_floats(tensor: Tensor) -> Floats:
    if tensor.dtype != torch.float32:
        raise UnsupportedError(f"parameters of dtype {tensor.dtype}; the kernels work in float32")
    own = tensor.detach().to("cpu", copy=True)  # the model may change its parameters later, or free them
    return own.contiguous().numpy()


def activation(handle: Any, node: fx.Node, *forms: str) -> Handle:
    if not isinstance(handle, Handle) or (forms and handle.form not in forms):
        raise UnsupportedError(f"{node.target} on {getattr(handle, 'form', type(handle).__name__)} (node {node.name})")
    return handle


def has_features(t: Translator, x: Handle) -> bool:
    """Whether the last axis of a view is that of all channels."""
    return x.view is not None and x.view.axes[-1] == axis("channel", t.values[x.value].channels)


def bias_or_zeros(tensor: Tensor | None, rows: int) -> Floats:
    return np.zeros(rows, np.float32) if tensor is None else to_floats(tensor)


def append_affine(t: Translator, x: Handle, **parts: Any) -> Handle:
    y = t.like(x)
    t.operations.append(Affine(x.value, y.value, **parts))
    return y


def as_vector(t: Translator, handle: Any) -> Any:
    """A flattened image, with its pixels as channels of one pixel."""
    if not isinstance(handle, Handle) or handle.form != "flat":
        return handle
    value = t.values[handle.value]
    size = value.channels * value.pixels
    y = t.new(Value(size, 1, 1), "vector")
    if not loaded_as(t, handle, y):
        channel, dy, dx = np.indices((value.channels, value.height, value.width)).reshape(3, -1)
        taps = Taps(size, np.arange(size), channel, dy, dx, np.ones(size, np.float32))
        bias = np.zeros(size, np.float32)
        flat = Product(handle.value, y.value, taps, bias, (1, 1), (0, 0), size, "flatten", kind="copy")
        t.operations.append(flat)
    return y


def loaded_as(t: Translator, handle: Handle, y: Handle) -> bool:
    """If a value is an input, load it in another form instead of moving it."""
    source = next((op for op in t.operations if isinstance(op, Input) and op.y == handle.value), None)
    if source is not None:
        t.operations.append(Input(y.value, source.slot, source.name))
    return source is not None
