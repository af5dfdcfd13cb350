"""The walk over an exported program: inputs and outputs, the values made so far, arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.runtime.graph import (
    Affine,
    Floats,
    Graph,
    Input,
    Operation,
    Source,
    UnsupportedError,
    Value,
)

Form = Literal["picture", "vector", "flat", "sequence", "state"]
aten = torch.ops.aten


@dataclass(frozen=True)
class Handle:
    """A value of the graph, and how the network sees it; ``flat`` is a picture spread out to a vector."""

    value: int
    form: Form


@dataclass(frozen=True)
class Tokens:
    slot: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Zeros:
    """An initial state of zeros, the only one a recurrent layer may have here."""


class Translator:
    """Walks an exported program; what each call means is looked up in ``translations``."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        translations: Mapping[Any, Callable[[Translator, fx.Node], Any]],
    ) -> None:
        self.program = program
        self.translations = translations
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[Source] = []
        recurrent = [n for n in program.graph.nodes if n.target in (aten.lstm.input, aten.gru.input)]
        majors = {not n.args[8] for n in recurrent}
        if len(majors) > 1:
            raise UnsupportedError("recurrent layers with and without batch_first in one network")
        self.time_major = majors == {True}

    def translate(self) -> Graph:
        signature = self.program.graph_signature
        state = {**self.program.state_dict, **self.program.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= dict(signature.inputs_to_lifted_tensor_constants)
        self.names = names
        outputs: tuple[Any, ...] = ()
        shapes: tuple[tuple[int, ...], ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = state[names[node.name]] if node.name in names else self._input(node)
            elif node.op == "output":
                outputs = tuple(self._get(n) for n in node.args[0])
                shapes = tuple(tuple(n.meta["val"].shape) for n in node.args[0] if isinstance(n, fx.Node))
            elif node.target not in self.translations:
                raise UnsupportedError(f"no native kernel for {node.target} (node {node.name})")
            else:
                self.env[node] = self.translations[node.target](self, node)
                if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                    self.env[node.args[0]] = self.env[node]  # in place: who reads the old name sees the new
        if not outputs or not all(isinstance(out, Handle) for out in outputs):
            raise UnsupportedError("outputs that are not activations of the network")
        places, forms = tuple(o.value for o in outputs), tuple(o.form for o in outputs)
        structure = self.program.call_spec.out_spec if len(places) > 1 else None
        inputs = tuple(self.inputs)
        return Graph(self.values, self.operations, places, forms, shapes, inputs, self.time_major, structure)

    def _input(self, node: fx.Node) -> Handle | Tokens:
        slot = len(self.inputs)
        example = cast(Tensor, node.meta["val"])
        shape = tuple(example.shape)
        if example.dtype == torch.int64:
            self.inputs.append(Source("tokens", shape))
            return Tokens(slot, shape)
        form: Form
        if any(user.target in (aten.lstm.input, aten.gru.input) and node in _states(user) for user in node.users):
            self.inputs.append(Source("state", shape))
            handle = self.new(Value(shape[0] * shape[2], 1, 1), "state")
            self.operations.append(Input(handle.value, slot, node.name))
            return handle
        if example.dtype != torch.float32 or len(shape) not in (2, 3, 4):
            raise UnsupportedError(f"input {node.name} of shape {shape} and dtype {example.dtype}")
        if len(shape) == 4:
            form, value = "picture", Value(shape[1], shape[2], shape[3])
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

    def _get(self, node: Any) -> Any:
        return self.env[node] if isinstance(node, fx.Node) else node

    def arguments(self, node: fx.Node, *defaults: Any) -> list[Any]:
        """Arguments of a call with their values; ``defaults`` stand for those left out at the end."""
        given = list(node.args)
        if node.kwargs:
            schema = cast(Any, node.target)._schema
            names = [argument.name for argument in schema.arguments]
            for name in names[len(given) :]:
                if name in node.kwargs:
                    given.append(node.kwargs[name])
                elif len(given) < len(defaults):
                    given.append(defaults[len(given)])
        given += list(defaults[len(given) :])
        return [self._resolve(argument) for argument in given]

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [self._resolve(a) for a in argument]
        return self._get(argument)

    def parameter_name(self, node: Any) -> str:
        name = self.names.get(node.name, node.name) if isinstance(node, fx.Node) else str(node)
        return name.removesuffix(".weight")


Translation = Callable[[Translator, fx.Node], Any]


def _states(node: fx.Node) -> list[Any]:
    """The initial states that a recurrent call is given."""
    state = node.args[1]
    return list(state) if isinstance(state, list | tuple) else [state]


def to_floats(tensor: Tensor) -> Floats:
    if tensor.dtype != torch.float32:
        raise UnsupportedError(f"parameters of dtype {tensor.dtype}; the kernels work in float32")
    return tensor.detach().cpu().contiguous().numpy()


def activation(handle: Any, node: fx.Node, *forms: str) -> Handle:
    if not isinstance(handle, Handle) or (forms and handle.form not in forms):
        raise UnsupportedError(f"{node.target} on {getattr(handle, 'form', type(handle).__name__)} (node {node.name})")
    return handle


def bias_or_zeros(tensor: Tensor | None, rows: int) -> Floats:
    return np.zeros(rows, np.float32) if tensor is None else to_floats(tensor)


def append_affine(t: Translator, x: Handle, **parts: Any) -> Handle:
    y = t.new(t.values[x.value], x.form)
    t.operations.append(Affine(x.value, y.value, **parts))
    return y
