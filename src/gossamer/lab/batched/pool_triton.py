# mypy: disable-error-code="no-untyped-def, untyped-decorator, override"
"""The shortcut of a residual network that halves the images, for many networks on CUDA GPUs.

Images lie as (runs, batch, height, width, channels), as in conv_kernels.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.lab.batched.norm_triton import sizes


@triton.jit
def _pool(x, y, batch, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr,
          p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    run = tl.program_id(2).to(tl.int64)
    pixels = batch * (height // 2) * (width // 2)
    pixel = tl.program_id(0) * p + tl.arange(0, p)
    channel = tl.program_id(1) * c + tl.arange(0, c)
    line, column = pixel // (width // 2) * 2, pixel % (width // 2) * 2
    start = x + run * pixels * 4 * channels + ((line * width + column) * channels)[:, None] + channel[None, :]
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    total = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(start + channels, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(start + width * channels, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(start + width * channels + channels, mask=inside, other=0.0).to(tl.float32)
    where = y + run * pixels * outputs + pixel[:, None] * outputs + channel[None, :]
    written = (pixel < pixels)[:, None] & (channel < outputs)[None, :]
    tl.store(where, (0.25 * total).to(y.dtype.element_ty), mask=written)


@triton.jit
def _pool_backward(dy, dx, batch, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
                   outputs: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    run = tl.program_id(2).to(tl.int64)
    pixels = batch * height * width
    pixel = tl.program_id(0) * p + tl.arange(0, p)
    channel = tl.program_id(1) * c + tl.arange(0, c)
    source = pixel // width // 2 * (width // 2) + pixel % width // 2
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    gradients = dy + run * (pixels // 4) * outputs + source[:, None] * outputs + channel[None, :]
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    where = dx + run * pixels * channels + pixel[:, None] * channels + channel[None, :]
    tl.store(where, (0.25 * gradient).to(dx.dtype.element_ty), mask=inside)


class PoolAndPad(torch.autograd.Function):
    """The mean of each 2 × 2 pixels, and channels of zeros appended; the height and width of the images are even."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, new_channels: int) -> Tensor:
        runs, batch, height, width, channels = x.shape
        ctx.shape = x.shape
        y = x.new_empty(runs, batch, height // 2, width // 2, channels + new_channels)
        _, outputs, pixels, p, c = sizes(y)
        grid = (triton.cdiv(pixels, p), triton.cdiv(outputs, c), runs)
        _pool[grid](x, y, batch, height, width, channels, outputs, p, c, num_warps=4)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy = gradients[0].contiguous()
        dx = dy.new_empty(ctx.shape)
        runs, batch, height, width, channels = dx.shape
        _, _, pixels, p, c = sizes(dx)
        grid = (triton.cdiv(pixels, p), triton.cdiv(channels, c), runs)
        _pool_backward[grid](dy, dx, batch, height, width, channels, dy.shape[-1], p, c, num_warps=4)
        return dx, None
