"""LSTM, GRU and plain recurrent layers with zero initial states.

A hidden unit can be removed if no needed unit reads it, in its own layer, in the next one or after the module; reading
itself does not count. It can also be removed if it is always zero: its candidate gate has no inputs, and its state
starts at zero. All layers and directions of a module have the same number of units, so the one with the most needed
units decides. The last state of a module with one layer and one direction has the units of its outputs. If the last
state of another module is used, all units are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.heads import SPLITS, places_of_parts
from gossamer.deployment.compaction.layers import parameter_like
from gossamer.deployment.compaction.shapes import WITH_PLACES

_CANDIDATE = {"LSTM": 2, "GRU": 2, "RNN_TANH": 0, "RNN_RELU": 0}
"""The block of rows of the weights that computes the candidate value of a unit."""


@dataclass(frozen=True)
class _Direction:
    """The tensor names of one direction of one layer."""

    module: nn.RNNBase
    suffix: str

    def tensor(self, name: str) -> Tensor:
        return cast(Tensor, getattr(self.module, name + self.suffix))

    def by_unit(self, name: str) -> Tensor:
        """A tensor as (gates, units, …)."""
        values = self.tensor(name).detach().double().cpu()
        return values.reshape(-1, self.module.hidden_size, *values.shape[1:])

    def zero_units(self, zero_inputs: Tensor) -> Tensor:
        """Units that are always zero."""
        gate = _CANDIDATE[self.module.mode]
        still = ~(self.by_unit("weight_ih")[gate][:, ~zero_inputs] != 0).any(1)
        if self.module.bias:
            biases = self.by_unit("bias_ih")[gate], self.by_unit("bias_hh")[gate]
            still &= (biases[0] == 0) & (biases[1] == 0)
        links = self.by_unit("weight_hh")[gate] != 0
        while (fewer := still & ~(links & ~still).any(1)).sum() < still.sum():
            still = fewer
        return still

    def needed_units(self, needed: Tensor, zero: Tensor) -> Tensor:
        matter = needed & ~zero
        links = (self.by_unit("weight_hh") != 0).any(0)
        while (more := matter | (links[matter].any(0) & ~zero)).sum() > matter.sum():
            matter = more
        return matter

    def inputs_read(self, matter: Tensor) -> Tensor:
        return (self.by_unit("weight_ih") != 0).any(0)[matter].any(0)


class Recurrent:
    def __init__(self) -> None:
        self._units: list[list[Tensor]] = []
        self._zero: list[list[Tensor]] = []

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        module = cast(nn.RNNBase, analysis.module(node))
        source = analysis.of(node.args[0])
        if len(node.all_input_nodes) != 1 or module.proj_size or (source is not None and source.dim != -1):
            return None
        zero = torch.zeros(module.input_size, dtype=torch.bool) if source is None else source.constant == 0
        for directions in _layers(module):
            self._zero.append([each.zero_units(zero) for each in directions])
            self._units.append([analysis.groups.fresh(module.hidden_size) for _ in directions])
            zero = torch.cat(self._zero[-1])
        analysis.equal_numbers.append([ids for layer in self._units for ids in layer])
        constant = torch.zeros(zero.numel(), dtype=torch.float64).where(zero, torch.nan)
        return Features(-1, torch.cat(self._units[-1]), constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        module = cast(nn.RNNBase, analysis.module(node))
        live = Reason(Hold.LIVE, analysis.name(node))
        for directions, units, zeros in reversed(list(zip(_layers(module), self._units, self._zero, strict=True))):
            parts, reads = needed.chunk(len(directions)), torch.zeros(0, dtype=torch.bool)
            for direction, ids, zero, part in zip(directions, units, zeros, parts, strict=True):
                matter = direction.needed_units(part, zero)
                analysis.groups.hold(ids[matter], live)
                read = direction.inputs_read(matter)
                reads = reads | read if reads.numel() else read
            needed = reads
        source = analysis.of(node.args[0])
        if source is not None:
            analysis.read(node.args[0], needed)
            analysis.groups.hold(source.ids[needed & ~_foldable(module, source)], live)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        module = cast(nn.RNNBase, analysis.module(node))
        source, columns = analysis.of(node.args[0]), analysis.kept(node.args[0])
        if source is not None and columns is not None:
            removed = ~columns & _foldable(module, source) & (source.constant != 0)
            for direction in _layers(module)[0] if removed.any() else []:
                shift = direction.tensor("weight_ih").detach().double().cpu()[:, removed] @ source.constant[removed]
                old = direction.tensor("bias_ih")
                setattr(module, f"bias_ih{direction.suffix}", parameter_like(old, old.double() + shift.to(old.device)))
                analysis.folded[analysis.name(node)] = int(removed.sum())
        kept_inputs = torch.ones(module.input_size, dtype=torch.bool) if columns is None else columns
        inputs, hidden = int(kept_inputs.sum()), 0
        for directions, units in zip(_layers(module), self._units, strict=True):
            kept = [analysis.groups.kept(ids) for ids in units]
            for direction, stay in zip(directions, kept, strict=True):
                _shrink(direction, stay, kept_inputs)
                hidden = int(stay.sum())
            kept_inputs = torch.cat(kept)
        module.input_size, module.hidden_size = inputs, hidden


class Item:
    """The outputs or last state of a recurrent layer, a part of a split, or the first of two results."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        first, index = node.args
        source = analysis.of(first)
        if source is None or not isinstance(first, fx.Node):
            return None
        places = places_of_parts(analysis, first) if first.target in SPLITS else None
        if places is not None and isinstance(index, int):
            return Features(source.dim, source.ids[places[index]], source.constant[places[index]])
        return source if _has_the_same_features(analysis, first, index) else None

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        analysis.pass_on(node, needed)

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Nothing: it has no parameters per feature."""


def _has_the_same_features(analysis: Analysis, node: fx.Node, index: object) -> bool:
    """Whether this part of a result has the features of the call; for a recurrent layer, the units of its outputs, in
    their order."""
    if node.op != "call_module":
        return index == 0 or node.target not in WITH_PLACES  # otherwise the two states of an LSTM layer, or a part
    module = cast(nn.RNNBase, analysis.module(node))
    return index == 0 or (index == 1 and module.num_layers == 1 and not module.bidirectional)


def _layers(module: nn.RNNBase) -> list[list[_Direction]]:
    ends = ("", "_reverse") if module.bidirectional else ("",)
    return [[_Direction(module, f"_l{layer}{end}") for end in ends] for layer in range(module.num_layers)]


def _foldable(module: nn.RNNBase, source: Features) -> Tensor:
    return source.is_constant if module.bias else source.constant == 0


def _shrink(direction: _Direction, units: Tensor, inputs: Tensor) -> None:
    device = direction.tensor("weight_ih").device
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if direction.module.bias else 2]:
        old = direction.tensor(name).detach()
        rows = units.repeat(old.shape[0] // units.numel()).to(device)
        chosen = old[rows]
        if old.ndim == 2:
            chosen = chosen[:, (inputs if name == "weight_ih" else units).to(device)]
        setattr(direction.module, name + direction.suffix, parameter_like(direction.tensor(name), chosen))
