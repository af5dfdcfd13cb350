"""Convolution and batch norm that know how to be stacked.

`vmap` can map both by itself, but takes batch norm apart into many passes over memory, in higher precision. Here the
stacked networks' channels are laid side by side instead, and one grouped convolution or one wide batch norm does the
work of all: the arithmetic is that of the ordinary layers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        return _BatchNorm.apply(  # type: ignore[no-any-return, no-untyped-call]
            input, self.weight, self.bias, self.running_mean, self.running_var, self.training, self.momentum, self.eps
        )


_STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: _StackableConv2d,
    nn.BatchNorm2d: _StackableBatchNorm2d,
}


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
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, weight, bias, mean, variance, training, momentum, eps = args
        networks = info.batch_size
        vectors = [vector.view(-1) for vector in (weight, bias, mean, variance)]
        result = F.batch_norm(
            _beside(images, in_dims[0], networks),
            vectors[2],
            vectors[3],
            vectors[0],
            vectors[1],
            training,
            momentum,
            eps,
        )
        return _apart(result, networks), 1
