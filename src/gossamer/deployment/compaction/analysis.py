"""Two passes over the graph: the forward pass finds constant features, the backward pass finds unused ones.

In the forward pass, every operation determines which of its output features are constant (the same number for every
input), and which features its output shares with its inputs. In the backward pass, it determines which of its input
features affect a needed output. A feature is kept if an operation that reads it needs it and cannot absorb its constant
into a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, fx, nn

from gossamer.deployment.compaction.groups import Features, Groups, Hold, Reason
from gossamer.deployment.compaction.nodes import shape
from gossamer.deployment.graph import aten


class Rule(Protocol):
    """The analysis of one kind of operation. If a rule does not apply to a call, `forward` returns None, and the call
    is treated as unknown."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        """The features of the result."""

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        """Mark the input features that are read, given the needed features of the result."""

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        """Remove features from the tensors and arguments of the operation."""


@dataclass(frozen=True, eq=False)
class EqualGroups:
    """The features of each group of a layer, as (groups, features per group). All kept groups must have the same number
    of inputs, and of outputs. If inputs is None, all inputs are kept."""

    inputs: Tensor | None
    outputs: Tensor


class Analysis:
    """The result of the analysis for every tensor of a graph. ``rules`` has the rule of each node."""

    def __init__(self, graph_module: fx.GraphModule, rules: Mapping[fx.Node, Rule]) -> None:
        self.graph_module = graph_module
        self.groups = Groups()
        self.features: dict[fx.Node, Features] = {}
        self.needed: dict[fx.Node, Tensor] = {}
        self.equal_numbers: list[list[Tensor]] = []
        """Sets of features that must keep the same number, as in the layers of one LSTM."""
        self.equal_groups: dict[fx.Node, EqualGroups] = {}
        self.representatives: dict[fx.Node, list[int]] = {}
        """The input features of a padded layer that represent all its constants, one per group (-1: none)."""
        self.folded: dict[str, int] = {}
        """The number of constants that a layer folded into its bias, or into the weights of its representative."""
        self._rules: dict[fx.Node, Rule] = {}
        nodes = list(graph_module.graph.nodes)
        for node in nodes:
            rule = rules.get(node)
            found = rule.forward(self, node) if rule is not None else None
            if rule is not None and found is not None:
                self._rules[node] = rule
                self.features[node] = found
                self.needed[node] = torch.zeros(found.count, dtype=torch.bool)
        for node in reversed(nodes):
            if node in self._rules:
                self._rules[node].backward(self, node, self.needed[node])
            else:
                self._read_by_unknown(node)
        self._leave_nothing_empty()

    def of(self, argument: object) -> Features | None:
        """The features of an argument of a call, if they are known."""
        return self.features.get(argument) if isinstance(argument, fx.Node) else None

    def module(self, node: fx.Node) -> nn.Module:
        return self.graph_module.get_submodule(str(node.target))

    def name(self, node: fx.Node) -> str:
        return str(node.target) if node.op in ("call_module", "get_attr") else node.name

    def kept(self, argument: object) -> Tensor | None:
        """The features of a tensor to keep; None if its features are unknown, so that all are kept."""
        features = self.of(argument)
        return None if features is None else self.groups.kept(features.ids)

    def read(self, argument: object, reads: Tensor) -> None:
        """Mark features that affect a needed output."""
        if isinstance(argument, fx.Node) and argument in self.features:
            self.needed[argument] |= reads

    def hold_all(self, argument: object, reason: Reason) -> None:
        """Keep all features of this tensor."""
        features = self.of(argument)
        if features is not None:
            self.read(argument, torch.ones(features.count, dtype=torch.bool))
            self.groups.hold(features.ids, reason)

    def pass_on(self, node: fx.Node, needed: Tensor) -> None:
        """For feature-wise operations: the needed features of the inputs are those of the result."""
        wanted = self.features[node].ids[needed]
        for each in node.all_input_nodes:
            features = self.of(each)
            if features is not None:
                self.read(each, torch.isin(features.ids, wanted))

    def rewrite(self) -> None:
        for node, rule in self._rules.items():
            rule.rewrite(self, node)

    def _read_by_unknown(self, node: fx.Node) -> None:
        reason = Reason(Hold.OUTPUT, "") if node.op == "output" else Reason(Hold.UNKNOWN, self.name(node))
        for each in node.all_input_nodes:
            features = self.of(each)
            if features is not None and not _asks_for_another_size(node, each, features.dim):
                self.hold_all(each, reason)

    def _leave_nothing_empty(self) -> None:
        changed = True
        while changed:
            before = self._held()
            for node, features in self.features.items():
                if not self.groups.kept(features.ids).any():
                    self.groups.hold(features.ids[:1], Reason(Hold.LAST, self.name(node)))
            for sets in self.equal_numbers:
                self._even_out(sets, Reason(Hold.LAYERS, ""))
            for node, groups in self.equal_groups.items():
                self._even_out_groups(groups, Reason(Hold.GROUPS, self.name(node)))
            changed = self._held() != before

    def _even_out_groups(self, groups: EqualGroups, reason: Reason) -> None:
        """Equalize the groups of a layer; groups without a held feature are removed."""
        sides = [groups.outputs] if groups.inputs is None else [groups.inputs, groups.outputs]
        kept = [self.groups.kept(ids.flatten()).reshape(ids.shape) for ids in sides]
        stay = torch.stack([each.any(1) for each in kept]).any(0) | (groups.inputs is None)
        for ids, held in zip(sides, kept, strict=True):
            missing = (held.sum(1)[stay].max().clamp_min(1) - held.sum(1)) * stay
            self.groups.hold(ids[~held & ((~held).cumsum(1) <= missing[:, None])], reason)

    def _even_out(self, sets: list[Tensor], reason: Reason) -> None:
        stay = max(int(self.groups.kept(ids).sum()) for ids in sets)
        for ids in sets:
            kept = self.groups.kept(ids)
            missing = max(stay, 1) - int(kept.sum())
            self.groups.hold(ids[~kept][:missing], reason)

    def _held(self) -> int:
        tensors = [features.ids for features in self.features.values()]
        tensors += [ids for sets in self.equal_numbers for ids in sets]
        return sum(int(self.groups.kept(ids).sum()) for ids in tensors)


def _asks_for_another_size(node: fx.Node, source: fx.Node, dim: int) -> bool:
    """Whether a call reads a size of a tensor other than its number of features."""
    size = shape(source)
    if size is None or node.target is not aten.sym_size.int:
        return False
    return cast(int, node.args[1]) % len(size) != len(size) + dim
