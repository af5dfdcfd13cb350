"""LSTM, GRU and plain recurrent layers, over a sequence and as single cells."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.deployment.runtime.network import Cell, Recurrence, Recurrent, UnsupportedError, Value, dense_taps
from gossamer.deployment.runtime.translator import (
    Handle,
    Translation,
    Translator,
    Zeros,
    activation,
    bias_or_zeros,
    to_floats,
)

aten = torch.ops.aten
_CELLS: dict[Any, Cell] = {
    **{aten.lstm.input: "lstm", aten.gru.input: "gru", aten.lstm_cell.default: "lstm", aten.gru_cell.default: "gru"},
    **{aten.rnn_tanh.input: "rnn_tanh", aten.rnn_relu.input: "rnn_relu"},
    **{aten.rnn_tanh_cell.default: "rnn_tanh", aten.rnn_relu_cell.default: "rnn_relu"},
}


def _name(t: Translator, weight: Any, kind: Cell) -> str:
    return t.parameter_name(weight).replace("weight_ih", kind.partition("_")[0])


def _append(t: Translator, x: int, y: int, kind: Cell, weights: list[Tensor | None], name: str, **place: Any) -> None:
    """One layer in one direction; ``weights`` are those of input and state, then their biases or None."""
    w_in, w_hidden = (to_floats(cast(Tensor, w)) for w in weights[:2])
    b_in, b_hidden = (bias_or_zeros(b, w_in.shape[0]) for b in weights[2:])
    if kind != "gru":  # one sum; in a GRU the reset gate stands between the two
        b_in, b_hidden = b_in + b_hidden, np.zeros_like(b_hidden)
    taps = dense_taps(w_in[:, :, None, None]), dense_taps(w_hidden[:, :, None, None])
    parts = (x, y, kind, w_hidden.shape[1], taps[0], b_in, taps[1], b_hidden)
    t.operations.append(Recurrent(*parts, dense_size=w_in.size + w_hidden.size, name=name, **place))


def _layers(t: Translator, node: fx.Node) -> tuple[Any, ...]:
    x, state, weights, has_bias, layers, _, training, both, _ = t.arguments(node)
    kind = _CELLS[node.target]
    x = activation(x, node, "sequence")
    given = state if isinstance(state, list) else [state]
    if training or not _alike(given):
        raise UnsupportedError(f"a recurrent layer in training or with a mixed initial state (node {node.name})")
    each, directions = 4 if has_bias else 2, 2 if both else 1
    if len(weights) != each * layers * directions:
        raise UnsupportedError(f"a recurrent layer with projections (node {node.name})")
    nodes = cast(list[fx.Node], node.args[2])
    all_units = sum(weights[i * each + 1].shape[1] for i in range(layers * directions))
    before = tuple(s.value for s in given if isinstance(s, Handle))
    after: list[Handle] = []
    if any(user.args[1] != 0 and user.users for user in node.users):
        after = [t.new(Value(all_units, 1, 1), "state") for _ in given]
    for layer in range(layers):
        units = weights[layer * directions * each + 1].shape[1]
        y = t.new(Value(units * directions, 1, t.values[x.value].width), "sequence")
        for direction in range(directions):
            number = layer * directions + direction
            own = [*weights[number * each : (number + 1) * each], None, None][:4]
            _append(
                *(t, x.value, y.value, kind, own),
                name=_name(t, nodes[number * each], kind),
                reverse=direction == 1,
                channel=direction * units,
                state=Recurrence(number * units, before, tuple(h.value for h in after)),
            )
        x = y
    return (x, *after) if after else (x, *[None] * len(given))


def _alike(states: list[Any]) -> bool:
    return all(isinstance(s, Zeros) for s in states) or all(isinstance(s, Handle) for s in states)


def _cell(t: Translator, node: fx.Node) -> Any:
    """A cell, as a layer over a sequence of one step."""
    x, state, *weights = t.arguments(node, *[None] * 6)
    kind = _CELLS[node.target]
    x = activation(x, node, "vector")
    given = state if isinstance(state, list) else [state]
    if not _alike(given):
        raise UnsupportedError(f"a recurrent cell with a mixed state (node {node.name})")
    units = weights[1].shape[1]
    y, *after = (t.new(Value(units, 1, 1), "vector") for _ in range(3 if kind == "lstm" else 1))
    before = tuple(activation(s, node, "vector").value for s in given if isinstance(s, Handle))
    _append(
        *(t, x.value, y.value, kind, weights),
        name=_name(t, node.args[2], kind),
        reverse=False,
        channel=0,
        state=Recurrence(0, before, tuple(h.value for h in after)),
    )
    return (y, after[1]) if kind == "lstm" else y


RECURRENT: dict[Any, Translation] = {call: _cell if "cell" in str(call) else _layers for call in _CELLS}
