"""Networks of the zoo with faster blocks for a stack: consecutive operations are fused."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.lab.batched.layers import (
    StackableAdaptiveAvgPool2d,
    StackableBatchNorm1d,
    StackableBatchNorm2d,
    StackableConv2d,
    StackableLinear,
    StackableSequential,
    concatenate,
    convolution_and_norm,
    norm_and_relu,
    pool_and_pad,
)
from gossamer.lab.models.densenet import BottleneckLayer, DenseLayer, DenseNet, Transition
from gossamer.lab.models.fc_densenet import FullyConnectedDenseNet, FullyConnectedLayer
from gossamer.lab.models.resnet import BasicBlock, ResNet, ZeroPadShortcut
from gossamer.lab.models.transformer import Attention
from gossamer.lab.models.wide_resnet import WideBlock, WideResNet, WideTransition


def stackable(module: nn.Module) -> nn.Module:
    """Replace the layers of `module` by ones that stack efficiently, in place. Names and parameters stay."""
    return _change_classes(module, _STACKABLE)


def plain(module: nn.Module) -> nn.Module:
    """Undo `stackable`."""
    return _change_classes(module, {new: old for old, new in _STACKABLE.items()})


def _change_classes(module: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    for part in module.modules():
        part.__class__ = classes.get(type(part), type(part))
    return module


class _StackableResNet(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        x = convolution_and_norm(self.conv, self.bn, x, None)
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.classifier(torch.mean(x, dim=(2, 3)))
        return logits


class _StackableBasicBlock(BasicBlock):
    """The block of a residual network, with convolution, normalisation, addition and ReLU fused."""

    def forward(self, x: Tensor) -> Tensor:
        y = convolution_and_norm(self.conv1, self.bn1, x, None)
        return convolution_and_norm(self.conv2, self.bn2, y, self.shortcut(x))


class _StackableFullyConnectedDenseNet(FullyConnectedDenseNet):
    """Every layer reads the pixels, so their contribution to all layers is one product, and they are never concatenated
    with hidden features."""

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        layers = [layer for layer in self.features if isinstance(layer, FullyConnectedLayer)]
        weights = [*(layer.linear.weight for layer in layers), self.classifier.weight]
        known, rest = zip(*(_columns(weight, pixels.shape[1]) for weight in weights), strict=True)
        *inputs, logits = torch.split(F.linear(pixels, torch.cat(known)), [len(weight) for weight in weights], dim=1)
        hidden = pixels[:, :0]
        for layer, value, weight in zip(layers, inputs, rest[:-1], strict=True):
            value = value + F.linear(hidden, weight) if hidden.shape[1] else value
            hidden = torch.cat((hidden, F.relu(layer.bn(value))), 1)
        return logits + F.linear(hidden, rest[-1], self.classifier.bias)


def _columns(weight: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first columns, and the others."""
    one, other = torch.split(weight, [first, weight.shape[1] - first], dim=1)
    return one, other


class _StackableShortcut(ZeroPadShortcut):
    def forward(self, x: Tensor) -> Tensor:
        return pool_and_pad(x, self.new_channels)


class _StackableDenseLayer(DenseLayer):
    def forward(self, x: Tensor) -> Tensor:
        return concatenate(x, self.conv(norm_and_relu(self.bn, x)))


class _StackableBottleneckLayer(BottleneckLayer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(norm_and_relu(self.bn1, x))
        return concatenate(x, self.conv2(norm_and_relu(self.bn2, y)))


class _StackableTransition(Transition):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(norm_and_relu(self.bn, x))
        return F.avg_pool2d(x, 2) if x.shape[-2] % 2 or x.shape[-1] % 2 else pool_and_pad(x, 0)


class _StackableDenseNet(DenseNet):
    def forward(self, x: Tensor) -> Tensor:
        return _classified(self, x)


def _classified(network: DenseNet | WideResNet, x: Tensor) -> Tensor:
    x = norm_and_relu(network.bn, network.features(x))
    logits: Tensor = network.classifier(torch.mean(x, dim=(2, 3)))
    return logits


class _StackableWideBlock(WideBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(norm_and_relu(self.bn1, x))
        return torch.add(x, self.conv2(self.dropout(norm_and_relu(self.bn2, y))))


class _StackableWideTransition(WideTransition):
    def forward(self, x: Tensor) -> Tensor:
        x = norm_and_relu(self.bn1, x)
        y = self.conv2(self.dropout(norm_and_relu(self.bn2, self.conv1(x))))
        return torch.add(self.shortcut(x), y)


class _StackableWideResNet(WideResNet):
    def forward(self, x: Tensor) -> Tensor:
        return _classified(self, x)


class _StackableAttention(Attention):
    """Attention as two products and a softmax: torch has no batching rule for its fused attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        dtype = self.inputs.weight.dtype
        inputs = self.inputs(x).to(dtype).view(batch, tokens, 3, self.heads, -1)
        query, key, value = inputs.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-2, -1)) * query.shape[-1] ** -0.5
        if self.causal:
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        shares = F.softmax(scores, dim=-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        mixed = F.dropout(shares, self.dropout, self.training) @ value
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return result


_STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool2d: StackableAdaptiveAvgPool2d,
    nn.Conv2d: StackableConv2d,
    nn.BatchNorm1d: StackableBatchNorm1d,
    nn.BatchNorm2d: StackableBatchNorm2d,
    nn.Linear: StackableLinear,
    nn.Sequential: StackableSequential,
    FullyConnectedDenseNet: _StackableFullyConnectedDenseNet,
    Attention: _StackableAttention,
    ResNet: _StackableResNet,
    BasicBlock: _StackableBasicBlock,
    ZeroPadShortcut: _StackableShortcut,
    DenseNet: _StackableDenseNet,
    DenseLayer: _StackableDenseLayer,
    BottleneckLayer: _StackableBottleneckLayer,
    Transition: _StackableTransition,
    WideResNet: _StackableWideResNet,
    WideBlock: _StackableWideBlock,
    WideTransition: _StackableWideTransition,
}
