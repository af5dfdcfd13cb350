"""Grouped and depth-wise convolutions, also transposed: all groups have the same number of inputs, and of outputs.

A group is removed as a whole if neither its outputs nor its inputs are needed. The remaining groups can lose inputs
only if all lose the same number, and likewise outputs. The group that needs the most decides, and the dead features
that are kept for it are reported.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gossamer.deployment.compaction.analysis import Analysis, EqualGroups
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.layers import feature_axis, keeps_constants, parameter_like, usable


def _by_group(module: _ConvNd) -> Tensor:
    """The weights as (groups, outputs per group, inputs per group, window positions)."""
    weight = module.weight.detach().double().cpu()
    first = weight.reshape(module.groups, -1, weight.shape[1], weight[0, 0].numel())
    return first.transpose(1, 2) if isinstance(module, _ConvTransposeNd) else first


class Grouped:
    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        module = cast(_ConvNd, analysis.module(node))
        source, axis, weight = analysis.of(node.args[0]), feature_axis(module), _by_group(module)
        if source is not None and source.dim != axis:
            return None
        groups, outputs, inputs, _ = weight.shape
        constant = torch.zeros(groups * inputs, dtype=torch.float64) if source is None else source.constant
        known = torch.zeros_like(constant, dtype=torch.bool) if source is None else usable(source, module)
        values = torch.einsum("goit,gi->go", weight, constant.where(known, 0).reshape(groups, inputs)).flatten()
        if module.bias is not None:
            values = values + module.bias.detach().double().cpu()
        varies = ((weight != 0).any(3) & ~known.reshape(groups, 1, inputs)).any(2).flatten()
        ids = analysis.groups.fresh(groups * outputs)
        before = None if source is None else source.ids.reshape(groups, inputs)
        analysis.equal_groups[node] = EqualGroups(before, ids.reshape(groups, outputs))
        return Features(axis, ids, values.where(~varies, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        source = analysis.of(node.args[0])
        if source is None:
            return
        module = cast(_ConvNd, analysis.module(node))
        reads = _reads(_by_group(module), needed)
        analysis.read(node.args[0], reads.flatten())
        analysis.groups.hold(source.ids[reads.flatten() & ~source.is_constant], Reason(Hold.LIVE, analysis.name(node)))
        blocked = reads & (source.is_constant & ~usable(source, module)).reshape(reads.shape)
        kept = analysis.groups.kept(source.ids).reshape(reads.shape)
        size = source.constant.abs().reshape(reads.shape)
        chosen = [-1] * len(blocked)
        for group, there in enumerate(blocked):
            if there.any():
                candidates = there & kept[group]
                chosen[group] = int(size[group].where(candidates if candidates.any() else there, 0).argmax())
                place = group * reads.shape[1] + chosen[group]
                analysis.groups.hold(source.ids[place : place + 1], Reason(Hold.PADDING, analysis.name(node)))
        analysis.representatives[node] = chosen

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        module = cast(_ConvNd, analysis.module(node))
        weight, source = _by_group(module), analysis.of(node.args[0])
        kept = analysis.kept(node)
        assert kept is not None
        rows = kept.reshape(weight.shape[:2])
        columns = torch.ones(weight.shape[0], weight.shape[2], dtype=torch.bool)
        if source is not None:
            columns = analysis.groups.kept(source.ids).reshape(columns.shape)
        if rows.all() and columns.all():
            return
        stay = rows.any(1)
        if source is not None:
            constant = source.constant.reshape(columns.shape)
            removed = ~columns & ~constant.isnan() & (constant != 0) & stay[:, None]
            removed &= _reads(weight, analysis.needed[node])
            if removed.any():
                weight = _fold(module, weight, constant, removed, analysis.representatives[node])
                analysis.folded[analysis.name(node)] = int(removed.sum())
        _shrink(module, weight, rows, columns)


def _reads(weight: Tensor, needed: Tensor) -> Tensor:
    """The inputs of each group that affect needed outputs."""
    return ((weight != 0).any(3) & needed.reshape(*weight.shape[:2], 1)).any(1)


def _fold(module: _ConvNd, weight: Tensor, constant: Tensor, removed: Tensor, representatives: list[int]) -> Tensor:
    """Fold constants into the bias, or into the weights of the representative constant of their group."""
    values = constant.where(removed, 0)
    if keeps_constants(module):
        shift = torch.einsum("goit,gi->go", weight, values).flatten()
        old = module.bias.detach().double().cpu() if module.bias is not None else torch.zeros_like(shift)
        module.bias = parameter_like(module.weight, (old + shift).to(module.weight.device))
        return weight
    weight = weight.clone()
    for group, place in enumerate(representatives):
        if place >= 0 and removed[group].any():
            share = values[group] / constant[group, place]
            weight[group, :, place] += torch.einsum("oit,i->ot", weight[group], share)
    return weight


def _shrink(module: _ConvNd, weight: Tensor, rows: Tensor, columns: Tensor) -> None:
    stay = rows.any(1).nonzero().flatten().tolist()
    parts = torch.stack([weight[group][rows[group]][:, columns[group]] for group in stay])
    parts = parts.transpose(1, 2) if isinstance(module, _ConvTransposeNd) else parts
    places = module.weight.shape[2:]
    new = parts.reshape(parts.shape[0] * parts.shape[1], parts.shape[2], *places)
    if module.bias is not None:
        module.bias = parameter_like(module.bias, module.bias[rows.flatten().to(module.bias.device)])
    module.weight = parameter_like(module.weight, new.to(module.weight.device))
    module.groups = len(stay)
    module.out_channels, module.in_channels = int(rows.sum()), int(columns.sum())
