"""Convolution and batch norm for stacked networks.

`vmap` can map both by itself, but splits batch norm into many passes over memory, in higher precision. Here one
operation does the work of all networks. On CUDA GPUs that is a kernel of ours, with the images of each network
contiguous (`conv_triton.py`, `norm_triton.py`), or a matrix product for a 1 × 1 convolution; wide convolutions that
fill a GPU by themselves are computed network by network. Elsewhere, and for other convolutions, the channels of all
networks are concatenated for one grouped convolution or one wide batch norm. The arithmetic is that of the ordinary
layers.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FEWEST_CHANNELS = 16  # of a group in a convolution; with fewer, GPU libraries take the groups one by one
_MANY_CHANNELS = 128  # in and out, from which on networks are convolved one by one where no kernel of ours is better
# Multiply-adds of one network, from which on none is. On an H200 WRN-28-10 (15e9 in most of its convolutions) is 13 %
# faster without, VGG-16 (2.4e9) 8 % slower (docs/lab-book.md, 39.).
_FILLS_A_GPU = 5e9


class StackableConv2d(nn.Conv2d):
    """As in a linear layer, the bias and the sum with it stay in full precision."""

    def forward(self, input: Tensor) -> Tensor:
        input = input.to(self.weight.dtype)
        if self.bias is not None and self.bias.dtype is not self.weight.dtype:
            return self._convolve(input) + self.bias[:, None, None]
        return self._convolve(input) if self.bias is None else super().forward(input)

    def _convolve(self, input: Tensor) -> Tensor:
        if not _has_usual_padding(self):
            return self._conv_forward(input, self.weight, None)  # type: ignore[no-any-return]
        options = (self.stride, self.padding, self.dilation, self.groups)
        return _Convolution.apply(input, self.weight, *options)  # type: ignore[no-any-return, no-untyped-call]


class StackableBatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return _norm(self, input) if _is_usual(self) else super().forward(input)


class StackableBatchNorm1d(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return _norm(self, input) if _is_usual(self) and input.dim() == 2 else super().forward(input)


class StackableLinear(nn.Linear):
    """The bias and the sum with it stay in full precision; the next product does not."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class StackableAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """The mean over all pixels as a mean: torch has no batching rule for the gradient of the pool of one network."""

    def forward(self, input: Tensor) -> Tensor:
        whole = self.output_size in (1, (1, 1))
        return torch.mean(input, dim=(-2, -1), keepdim=True) if whole else super().forward(input)


class StackableSequential(nn.Sequential):
    """Fuses consecutive convolution, batch norm and ReLU."""

    def forward(self, input: Tensor) -> Tensor:
        layers, position = list(self), 0
        while position < len(layers):
            match layers[position : position + 3]:
                case [StackableConv2d() as conv, StackableBatchNorm2d() as bn, nn.ReLU()] if _can_join(conv, bn):
                    input, position = convolution_and_norm(conv, bn, input, None), position + 3
                case [first, *_]:
                    input, position = first(input), position + 1
        return input


def _has_usual_padding(conv: nn.Conv2d) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _is_usual(bn: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    return bn.affine and bn.track_running_stats and bn.momentum is not None


def _can_join(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> bool:
    return conv.bias is None and _has_usual_padding(conv) and _is_usual(bn)


def _tensors(bn: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Tensor | None, ...]:
    return bn.weight, bn.bias, bn.running_mean, bn.running_var


def norm_and_relu(bn: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """relu(bn(x))"""
    return _norm(bn, x, rectify=True) if _is_usual(bn) else F.relu(bn(x))


def _norm(bn: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor, *, rectify: bool = False) -> Tensor:
    options = (bn.training, bn.momentum, bn.eps, rectify)
    return _BatchNorm.apply(x, None, *_tensors(bn), *options)  # type: ignore[no-any-return, no-untyped-call]


def pool_and_pad(x: Tensor, new_channels: int) -> Tensor:
    return _PoolAndPad.apply(x, new_channels)  # type: ignore[no-any-return, no-untyped-call]


def concatenate(x: Tensor, more: Tensor) -> Tensor:
    """The channels of both."""
    return _Concatenation.apply(x, more)  # type: ignore[no-any-return, no-untyped-call]


def convolution_and_norm(conv: nn.Conv2d, bn: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None) -> Tensor:
    """relu(bn(conv(x)) + shortcut)"""
    tensors = (x.to(conv.weight.dtype), conv.weight, shortcut, *_tensors(bn))
    options = (conv.stride, conv.padding, conv.dilation, conv.groups, bn.training, bn.momentum, bn.eps)
    return _ConvolutionAndNorm.apply(*tensors, *options)  # type: ignore[no-any-return, no-untyped-call]


def _by_network(images: Tensor, axis: int | None) -> Tensor:
    """The layout of the kernels: (networks, batch, height, width, channels); without networks if all share images."""
    if axis is None:
        return images.permute(0, 2, 3, 1).contiguous()
    return images.movedim(axis, 0).permute(0, 1, 3, 4, 2).contiguous()


def _beside(images: Tensor, axis: int | None, networks: int) -> Tensor:
    """(networks, batch, channels, …) → (batch, networks · channels, …); images that all share are repeated."""
    if axis is None:
        images = images.expand(networks, *images.shape)
        axis = 0
    return images.movedim(axis, 1).flatten(1, 2)


def _apart(images: Tensor, networks: int) -> Tensor:
    return images.view(images.shape[0], networks, -1, *images.shape[2:])


class _Stacked(torch.autograd.Function):
    """Only used under vmap, whose rule calls ordinary differentiable functions, so no backward is needed here."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        raise RuntimeError("a stacked layer was called outside a stack of networks: use plain() first")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


class _Convolution(_Stacked):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, weight, *options = args
        if _has_kernel(images, weight, in_dims[0], *options):
            result, _ = _convolve(images, in_dims[0], weight, in_dims[1], options[0])
            return result.permute(0, 1, 4, 2, 3), 0
        if _is_product(images, weight, in_dims[0], *options):
            return _product(images, in_dims[0], weight, in_dims[1], options[0]).permute(0, 1, 4, 2, 3), 0
        if _is_wide(images, weight, in_dims[0], options[-1]):
            return _one_by_one(images, in_dims[0], weight, in_dims[1], *options), 0
        return _grouped_convolution(info.batch_size, images, in_dims[0], weight, in_dims[1], *options), 1


def _convolve(images: Tensor, axis: int | None, weight: Tensor, weight_axis: int | None, stride: Any) -> Any:
    from gossamer.lab.batched.conv_triton import Convolution  # needs Triton

    assert weight_axis is not None
    filters = weight.movedim(weight_axis, 0).permute(0, 1, 3, 4, 2)
    if not filters[0].is_contiguous():
        filters = filters.contiguous()
    return Convolution.apply(_by_network(images, axis), filters, stride[0])  # type: ignore[no-untyped-call]


def _product(images: Tensor, axis: int | None, weight: Tensor, weight_axis: int | None, stride: Any) -> Tensor:
    """A 1 × 1 convolution is one matrix product per network: pixels × channels by channels × outputs."""
    assert axis is not None
    assert weight_axis is not None
    pixels = _by_network(images, axis)[:, :, :: stride[0], :: stride[1]]
    filters = weight.movedim(weight_axis, 0)[..., 0, 0].transpose(1, 2)
    return torch.bmm(pixels.flatten(1, 3), filters).view(*pixels.shape[:4], -1)


def _one_by_one(
    images: Tensor, axis: int | None, weight: Tensor, weight_axis: int | None, stride: Any, padding: Any, dilation: Any,
    groups: int,
) -> Tensor:  # fmt: skip
    """Network by network: libraries are fastest for large convolutions of one group."""
    assert axis is not None
    assert weight_axis is not None
    rows = zip(_by_network(images, axis).unbind(), weight.movedim(weight_axis, 0).unbind(), strict=True)
    results = [F.conv2d(x.permute(0, 3, 1, 2), w, None, stride, padding, dilation, groups) for x, w in rows]
    return torch.stack([each.permute(0, 2, 3, 1) for each in results]).permute(0, 1, 4, 2, 3)


def _grouped_convolution(
    networks: int, images: Tensor, axis: int | None, weight: Tensor, weight_axis: int | None, stride: Any, padding: Any,
    dilation: Any, groups: int,
) -> Tensor:  # fmt: skip
    assert weight_axis is not None
    shared, depthwise = axis is None and groups == 1, groups > 1 and weight.shape[-3] == 1
    weight = weight.movedim(weight_axis, 0).flatten(0, 1)
    if not shared:
        images, groups = _beside(images, axis, networks), groups * networks
    if depthwise:  # which GPU libraries have kernels for
        return _apart(F.conv2d(images, weight, None, stride, padding, dilation, groups), networks)
    plain_3x3 = weight.shape[2:] == (3, 3) and padding == (1, 1) and dilation == (1, 1)
    if stride == (2, 2) and plain_3x3 and images.shape[2] % 2 == 0 == images.shape[3] % 2:
        return _apart(_halving_convolution(images, weight, groups), networks)
    images, weight = _wide_enough(images, weight, groups)
    return _apart(F.conv2d(images, weight, None, stride, padding, dilation, groups), networks)


def _wide_enough(images: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Append channels of zeros if a group has too few for a fast grouped convolution (the colours of an image)."""
    channels = weight.shape[1]
    if groups == 1 or channels >= _FEWEST_CHANNELS:
        return images, weight
    missing = _FEWEST_CHANNELS - channels
    rows = images.view(images.shape[0], groups, channels, *images.shape[2:])
    padded = F.pad(rows, (0, 0, 0, 0, 0, missing)).flatten(1, 2)
    return padded, F.pad(weight, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last)


def _halving_convolution(images: Tensor, weight: Tensor, groups: int) -> Tensor:
    """A 3 × 3 convolution of stride 2 and padding 1 as a 2 × 2 convolution of stride 1.

    Each 2 × 2 pixels become one with four times the channels. Grouped convolutions with a stride are slow to
    differentiate on GPUs; this one is not. Output i needs the pixels 2i - 1, 2i and 2i + 1: the second of the pair
    before, and both of its own.
    """
    batch, all_channels, height, width = images.shape
    channels, outputs = all_channels // groups, weight.shape[0]
    pixels = images.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, groups, channels)
    pixels = pixels.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, height // 2, width // 2, -1)
    pixels = F.pad(pixels, (0, 0, 1, 0, 1, 0)).permute(0, 3, 1, 2)
    taps = F.pad(weight, (1, 0, 1, 0)).reshape(outputs, channels, 2, 2, 2, 2)
    taps = taps.permute(0, 2, 4, 3, 5, 1).reshape(outputs, 2, 2, 4 * channels).permute(0, 3, 1, 2)
    return F.conv2d(pixels, taps, groups=groups)


class _BatchNorm(_Stacked):
    """Batch norm, then the addition of a shortcut if there is one, then ReLU if asked for."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, shortcut, *vectors, training, momentum, eps, rectify = args
        if training and rectify and _on_gpu(images):
            result = _normalise(_by_network(images, in_dims[0]), None, shortcut, in_dims[1], vectors, momentum, eps)
            return result.permute(0, 1, 4, 2, 3), 0
        networks = info.batch_size
        weight, bias, mean, variance = (vector.reshape(-1) for vector in vectors)
        images = _beside(images, in_dims[0], networks)
        result = F.batch_norm(images, mean, variance, weight, bias, training, momentum, eps)
        if shortcut is not None:
            result = result + _beside(shortcut, in_dims[1], networks)
        return _apart(F.relu(result) if rectify else result, networks), 1


def _normalise(
    images: Tensor, sums: Tensor | None, shortcut: Tensor | None, axis: int | None, vectors: Any, momentum: float,
    eps: float,
) -> Tensor:  # fmt: skip
    from gossamer.lab.batched.norm_triton import NormAddReLU  # needs Triton

    short = None if shortcut is None else _by_network(shortcut, axis)
    return NormAddReLU.apply(images, sums, short, *vectors, momentum, eps)  # type: ignore[no-any-return, no-untyped-call]


class _ConvolutionAndNorm(_Stacked):
    """relu(batch_norm(convolution) + shortcut)"""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, weight, shortcut, *vectors, stride, padding, dilation, groups, training, momentum, eps = args
        options = (stride, padding, dilation, groups)
        if training and _has_kernel(images, weight, in_dims[0], *options):
            images, sums = _convolve(images, in_dims[0], weight, in_dims[1], stride)
            result = _normalise(images, sums, shortcut, in_dims[2], vectors, momentum, eps)
            return result.permute(0, 1, 4, 2, 3), 0
        images, axis = _Convolution.vmap(info, in_dims[:2], images, weight, *options)
        axes = (axis, *in_dims[2:7])
        return _BatchNorm.vmap(info, axes, images, shortcut, *vectors, training, momentum, eps, True)


class _Concatenation(_Stacked):
    """Of channels; torch.cat would make the pixels of each channel contiguous, which is slow for the next layer."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        if not _on_gpu(args[0]):
            parts = [part.movedim(axis, 0) for part, axis in zip(args, in_dims, strict=True)]
            return torch.cat(parts, dim=2), 0
        parts = [_by_network(part, axis) for part, axis in zip(args, in_dims, strict=True)]
        return torch.cat(parts, dim=-1).permute(0, 1, 4, 2, 3), 0


class _PoolAndPad(_Stacked):
    """Average 2 × 2 pixels and append channels of zeros, network by network."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        images, new_channels = args
        networks = info.batch_size
        if _on_gpu(images) and images.shape[-1] % 2 == 0 == images.shape[-2] % 2:
            from gossamer.lab.batched.pool_triton import PoolAndPad  # needs Triton

            rows = _by_network(images, in_dims[0])
            return PoolAndPad.apply(rows, new_channels).permute(0, 1, 4, 2, 3), 0  # type: ignore[no-untyped-call]
        rows = _beside(images, in_dims[0], networks).permute(0, 2, 3, 1)
        batch, height, width, channels = rows.shape
        squares = rows.reshape(batch, height // 2, 2, width // 2, 2, networks, channels // networks)
        return F.pad(squares.mean((2, 4)), (0, new_channels)).permute(0, 3, 4, 1, 2), 1


def _has_kernel(
    images: Tensor, weight: Tensor, axis: int | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    plain_3x3 = weight.shape[-2:] == (3, 3) and padding == (1, 1) and dilation == (1, 1) and groups == 1
    needs_gradient = axis is None and images.requires_grad
    large = _is_wide(images, weight, axis, groups) and _work(images, weight, axis, stride) >= _FILLS_A_GPU
    return _on_gpu(images) and plain_3x3 and not large and stride in ((1, 1), (2, 2)) and not needs_gradient


def _is_product(
    images: Tensor, weight: Tensor, axis: int | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    single = weight.shape[-2:] == (1, 1) and padding == (0, 0) and groups == 1
    return _on_gpu(images) and single and axis is not None


def _is_wide(images: Tensor, weight: Tensor, axis: int | None, groups: int) -> bool:
    wide = min(weight.shape[-4:-2]) >= _MANY_CHANNELS and groups == 1
    return _on_gpu(images) and wide and axis is not None


def _work(images: Tensor, weight: Tensor, axis: int | None, stride: Any) -> float:
    """Multiply-adds of one network."""
    networks = 1 if axis is None else images.shape[axis]
    outputs, height, width = weight.shape[-4], weight.shape[-2], weight.shape[-1]
    return images.numel() / networks * outputs * height * width / int(stride[0] * stride[1])


def _on_gpu(images: Tensor) -> bool:
    known = images.dtype in (torch.bfloat16, torch.float16)  # products of float32 would have no fast hardware
    return images.is_cuda and known and importlib.util.find_spec("triton") is not None
