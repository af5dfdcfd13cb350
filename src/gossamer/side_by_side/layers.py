"""Convolution and batch norm that know how to be stacked.

`vmap` can map both by itself, but takes batch norm apart into many passes over memory, in higher precision. Here the
stacked networks' channels are laid side by side instead, and one grouped convolution or one wide batch norm does the
work of all: the arithmetic is that of the ordinary layers.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.models.resnet import BasicBlock, ZeroPadShortcut


def stackable(module: nn.Module) -> nn.Module:
    """Let the layers of `module` be stacked efficiently, in place. Names and parameters stay."""
    return _change_classes(module, _STACKABLE)


def plain(module: nn.Module) -> nn.Module:
    """Undo `stackable`."""
    return _change_classes(module, {new: old for old, new in _STACKABLE.items()})


def _change_classes(module: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    for part in module.modules():
        part.__class__ = classes.get(type(part), type(part))
    return module


class _StackableConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(input)
        options = (self.stride, self.padding, self.dilation, self.groups)
        return _Convolution.apply(input, self.weight, *options)  # type: ignore[no-any-return, no-untyped-call]


class _StackableBatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        if not self.affine or not self.track_running_stats or self.momentum is None:
            return super().forward(input)
        return _norm(self, input, None, rectify=False)


class _StackableBasicBlock(BasicBlock):
    """The block of a residual network, with its normalisation, addition and rectification done together."""

    def forward(self, x: Tensor) -> Tensor:
        y = _norm(self.bn1, self.conv1(x), None, rectify=True)
        return _norm(self.bn2, self.conv2(y), self.shortcut(x), rectify=True)


class _StackableShortcut(ZeroPadShortcut):
    def forward(self, x: Tensor) -> Tensor:
        return _PoolAndPad.apply(x, self.new_channels)  # type: ignore[no-any-return, no-untyped-call]


_STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: _StackableConv2d,
    nn.BatchNorm2d: _StackableBatchNorm2d,
    BasicBlock: _StackableBasicBlock,
    ZeroPadShortcut: _StackableShortcut,
}


def _norm(bn: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None, *, rectify: bool) -> Tensor:
    options = (bn.training, bn.momentum, bn.eps, rectify)
    tensors = (x, shortcut, bn.weight, bn.bias, bn.running_mean, bn.running_var)
    return _BatchNorm.apply(*tensors, *options)  # type: ignore[no-any-return, no-untyped-call]


def _beside(images: Tensor, axis: int | None, networks: int) -> Tensor:
    """(networks, batch, channels, …) → (batch, networks · channels, …); images that all share are repeated."""
    if axis is None:
        images = images.expand(networks, *images.shape)
        axis = 0
    return images.movedim(axis, 1).flatten(1, 2)


def _apart(images: Tensor, networks: int) -> Tensor:
    return images.view(images.shape[0], networks, -1, *images.shape[2:])


class _Stacked(torch.autograd.Function):
    """Only ever mapped: the rule below calls ordinary differentiable functions, so no backward is needed here."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        raise RuntimeError("a stacked layer was called outside a stack of networks: use plain() first")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


class _Convolution(_Stacked):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, weight, stride, padding, dilation, groups = args
        networks = info.batch_size
        shared = in_dims[0] is None and groups == 1
        weight = weight.movedim(in_dims[1], 0).flatten(0, 1)
        if not shared:
            images, groups = _beside(images, in_dims[0], networks), groups * networks
        result = F.conv2d(images, weight, None, stride, padding, dilation, groups)
        return _apart(result, networks), 1


class _BatchNorm(_Stacked):
    """Batch norm, then the addition of a shortcut if there is one, then ReLU if asked for."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, shortcut, weight, bias, mean, variance, training, momentum, eps, rectify = args
        networks = info.batch_size
        weight, bias, mean, variance = (vector.view(-1) for vector in (weight, bias, mean, variance))
        images = _beside(images, in_dims[0], networks)
        if shortcut is not None:
            shortcut = _beside(shortcut, in_dims[1], networks)
        if training and rectify and _has_kernels(images):
            from gossamer.side_by_side.norm_kernels import NormAddReLU  # needs Triton

            tensors = (_channels_last(images), None if shortcut is None else _channels_last(shortcut), weight, bias)
            result = NormAddReLU.apply(*tensors, mean, variance, momentum, eps)  # type: ignore[no-untyped-call]
            return _apart(result, networks), 1
        result = F.batch_norm(images, mean, variance, weight, bias, training, momentum, eps)
        if shortcut is not None:
            result = result + shortcut
        return _apart(F.relu(result) if rectify else result, networks), 1


class _PoolAndPad(_Stacked):
    """Average 2 × 2 pixels and append channels of zeros, network by network."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, new_channels = args
        pooled = F.avg_pool2d(_channels_last(_beside(images, in_dims[0], info.batch_size)), 2)
        batch, _, height, width = pooled.shape
        rows = pooled.permute(0, 2, 3, 1).reshape(batch, height, width, info.batch_size, -1)
        return F.pad(rows, (0, new_channels)).permute(0, 3, 4, 1, 2), 1


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _has_kernels(images: Tensor) -> bool:
    return images.is_cuda and images.dim() == 4 and importlib.util.find_spec("triton") is not None
