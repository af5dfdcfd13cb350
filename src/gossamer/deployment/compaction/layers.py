"""Layers with weights, which create and consume features.

An output feature is constant if its incoming weights are zero or read only constants. An input feature is unused if its
outgoing weights are zero. A constant input is folded into the bias. This is exact only without zero padding: at the
border a padded convolution reads zeros instead of the constant. With padding, one constant is kept, and its weights
represent those of all others, because it is missing at the border, too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.groups import Features, Hold, Reason
from gossamer.deployment.compaction.nodes import constants_like, shape

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def parameter_like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().to(old.dtype).contiguous(), requires_grad=old.requires_grad)


def by_output(module: nn.Linear | _ConvNd) -> Tensor:
    """The weights as (outputs, inputs per group, window positions)."""
    weight = module.weight.detach().flatten(2) if module.weight.ndim > 2 else module.weight.detach().unsqueeze(2)
    return weight.transpose(0, 1) if isinstance(module, _ConvTransposeNd) else weight


def keeps_constants(module: nn.Linear | _ConvNd) -> bool:
    """Whether a constant input has the same effect at every position: no zero padding."""
    if isinstance(module, nn.Linear):
        return True
    if isinstance(module, _ConvTransposeNd):
        return False
    if module.padding_mode != "zeros" or module.padding == "valid":
        return True
    if module.padding == "same":
        return all(size == 1 for size in module.kernel_size)
    return not any(cast(tuple[int, ...], module.padding))


def feature_axis(module: nn.Linear | _ConvNd) -> int:
    return -1 if isinstance(module, nn.Linear) else 1 - module.weight.ndim


class Weighted:
    """Linear layers and convolutions with one group."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        module = cast(nn.Linear | _ConvNd, analysis.module(node))
        axis = feature_axis(module)
        source = analysis.of(node.args[0])
        if source is not None and source.dim != axis:
            return None
        weight = by_output(module).double().cpu()
        constant = torch.zeros(weight.shape[1], dtype=torch.float64) if source is None else source.constant
        known = torch.zeros_like(constant, dtype=torch.bool) if source is None else usable(source, module)
        bias = 0 if module.bias is None else module.bias.detach().double().cpu()
        values = weight.sum(2) @ constant.where(known, 0) + bias
        varies = (weight != 0).any(2)[:, ~known].any(1)
        return Features(axis, analysis.groups.fresh(weight.shape[0]), values.where(~varies, torch.nan))

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        source = analysis.of(node.args[0])
        if source is None:
            return
        module = cast(nn.Linear | _ConvNd, analysis.module(node))
        reads = (by_output(module).cpu()[needed] != 0).any(2).any(0)
        analysis.read(node.args[0], reads)
        analysis.groups.hold(source.ids[reads & ~source.is_constant], Reason(Hold.LIVE, analysis.name(node)))
        blocked = reads & source.is_constant & ~usable(source, module)
        if blocked.any():
            candidates = blocked & analysis.groups.kept(source.ids)
            size = source.constant.abs().where(candidates if candidates.any() else blocked, 0)
            chosen = int(size.argmax())
            analysis.representatives[node] = [chosen]
            analysis.groups.hold(source.ids[chosen : chosen + 1], Reason(Hold.PADDING, analysis.name(node)))

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        module = cast(nn.Linear | _ConvNd, analysis.module(node))
        source, columns, rows = analysis.of(node.args[0]), analysis.kept(node.args[0]), analysis.kept(node)
        assert rows is not None
        if source is not None and columns is not None and not columns.all():
            removed = ~columns & source.is_constant & (source.constant != 0)
            removed &= (by_output(module).cpu()[analysis.needed[node]] != 0).any(2).any(0)
            if removed.any():
                _fold(module, source.constant, removed, *analysis.representatives.get(node, []))
                analysis.folded[analysis.name(node)] = int(removed.sum())
            _take_inputs(module, columns)
        if not rows.all():
            _take_outputs(module, rows)


def _fold(module: nn.Linear | _ConvNd, constant: Tensor, removed: Tensor, representative: int | None = None) -> None:
    """Fold constants into the bias, or into the weights of a constant that is kept."""
    weight = by_output(module).double().cpu()
    if keeps_constants(module):
        shift = weight.sum(2)[:, removed] @ constant[removed]
        old = module.bias.detach().double().cpu() if module.bias is not None else torch.zeros_like(shift)
        module.bias = parameter_like(module.weight, (old + shift).to(module.weight.device))
    elif representative is not None:
        share = constant[removed] / constant[representative]
        column = weight[:, representative] + torch.einsum("oit,i->ot", weight[:, removed], share)
        with torch.no_grad():
            by_output(module)[:, representative] = column.to(module.weight.device, module.weight.dtype)


def usable(source: Features, module: nn.Linear | _ConvNd) -> Tensor:
    """The constant input features that can be folded into the bias."""
    return source.is_constant if keeps_constants(module) else source.constant == 0


def _take_inputs(module: nn.Linear | _ConvNd, columns: Tensor) -> None:
    columns = columns.to(module.weight.device)
    chosen = module.weight[columns] if isinstance(module, _ConvTransposeNd) else module.weight[:, columns]
    module.weight = parameter_like(module.weight, chosen)
    if isinstance(module, nn.Linear):
        module.in_features = int(columns.sum())
    else:
        module.in_channels = int(columns.sum())


def _take_outputs(module: nn.Linear | _ConvNd, rows: Tensor) -> None:
    rows = rows.to(module.weight.device)
    chosen = module.weight[:, rows] if isinstance(module, _ConvTransposeNd) else module.weight[rows]
    module.weight = parameter_like(module.weight, chosen)
    if module.bias is not None:
        module.bias = parameter_like(module.bias, module.bias[rows])
    if isinstance(module, nn.Linear):
        module.out_features = int(rows.sum())
    else:
        module.out_channels = int(rows.sum())


class Normalised:
    """Batch normalisation with running statistics: a scale and a shift per feature."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        module = cast(Norm, analysis.module(node))
        source, size = analysis.of(node.args[0]), shape(node)
        if source is None or size is None or len(size) + source.dim != 1 or module.running_var is None:
            return None
        with torch.no_grad():
            given = constants_like(node, len(size), source.dim, source.constant)
            values = module(given.to(module.running_var.device))
        values = values.flatten().double().cpu()
        if module.weight is not None:
            shift = torch.zeros_like(values) if module.bias is None else module.bias.detach().double().cpu()
            values = torch.where(module.weight.detach().cpu() == 0, shift, values)
        return Features(source.dim, source.ids, values)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        weight = cast(Norm, analysis.module(node)).weight
        analysis.read(node.args[0], needed if weight is None else needed & (weight.detach().cpu() != 0))

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        module = cast(Norm, analysis.module(node))
        kept = analysis.kept(node)
        assert kept is not None
        if kept.all():
            return
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, parameter_like(parameter, parameter[kept.to(parameter.device)]))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.ndim == 1:
                setattr(module, name, buffer[kept.to(buffer.device)].clone())
        module.num_features = int(kept.sum())


class Embedded:
    """Embeddings: the columns of the table are features. Rows are kept, as any token may occur."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        module = cast(nn.Embedding, analysis.module(node))
        if module.max_norm is not None:
            return None
        table = module.weight.detach().double().cpu()
        constant = table[0].where((table == table[0]).all(0), torch.nan)
        return Features(-1, analysis.groups.fresh(table.shape[1]), constant)

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        """Nothing: tokens have no features."""

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        module = cast(nn.Embedding, analysis.module(node))
        kept = analysis.kept(node)
        assert kept is not None
        if not kept.all():
            module.weight = parameter_like(module.weight, module.weight[:, kept.to(module.weight.device)])
            module.embedding_dim = int(kept.sum())


class Attribute:
    """A tensor of the model with one value per feature, such as the scale of a layer."""

    def forward(self, analysis: Analysis, node: fx.Node) -> Features | None:
        values = _attribute(analysis.graph_module, str(node.target))
        wide = [axis for axis, size in enumerate(values.shape) if size > 1]
        if len(wide) != 1 or not values.is_floating_point():
            return None
        ids = analysis.groups.fresh(values.numel())
        return Features(wide[0] - values.ndim, ids, values.detach().double().cpu().flatten())

    def backward(self, analysis: Analysis, node: fx.Node, needed: Tensor) -> None:
        """Nothing: it has no inputs."""

    def rewrite(self, analysis: Analysis, node: fx.Node) -> None:
        kept, features = analysis.kept(node), analysis.features[node]
        assert kept is not None
        if kept.all():
            return
        values = _attribute(analysis.graph_module, str(node.target))
        chosen = values.detach().index_select(features.dim, kept.nonzero().flatten().to(values.device))
        owner, _, name = str(node.target).rpartition(".")
        new = parameter_like(values, chosen) if isinstance(values, nn.Parameter) else chosen
        setattr(analysis.graph_module.get_submodule(owner), name, new)


def _attribute(module: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    return cast(Tensor, getattr(module.get_submodule(owner), last))
