# mypy: disable-error-code="no-untyped-def, untyped-decorator, override"
"""Batch norm, the addition of a shortcut and ReLU in one go, for channels-last images on CUDA GPUs.

relu(batch_norm(x) + shortcut) passes over memory once to sum and once to write, and its backward the same; taken one by
one the operations need more than twice as many passes. Statistics are summed in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 64  # rows of a block
_CHANNELS = 64  # columns of a block
_ROUNDS = 8  # blocks that one program sums before it adds to the total


@triton.jit
def _sum(x, sums, pixels, channels, rounds: tl.constexpr, p: tl.constexpr, c: tl.constexpr):
    column = tl.program_id(1) * c + tl.arange(0, c)
    total = tl.zeros((c,), dtype=tl.float32)
    squares = tl.zeros((c,), dtype=tl.float32)
    for number in range(rounds):
        row = (tl.program_id(0) * rounds + number) * p + tl.arange(0, p)
        inside = (row < pixels)[:, None] & (column < channels)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * channels + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        total += tl.sum(values, 0)
        squares += tl.sum(values * values, 0)
    tl.atomic_add(sums + column, total, mask=column < channels)
    tl.atomic_add(sums + channels + column, squares, mask=column < channels)


@triton.jit
def _write(x, shortcut, y, sums, gamma, beta, stats, running_mean, running_var, pixels, channels, momentum, eps,
           has_shortcut: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    column = tl.program_id(1) * c + tl.arange(0, c)
    there = column < channels
    mean = tl.load(sums + column, mask=there, other=0.0) / pixels
    variance = tl.maximum(tl.load(sums + channels + column, mask=there, other=1.0) / pixels - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(gamma + column, mask=there, other=0.0) * rstd
    shift = tl.load(beta + column, mask=there, other=0.0) - mean * scale
    row = tl.program_id(0) * p + tl.arange(0, p)
    inside = (row < pixels)[:, None] & there[None, :]
    place = row.to(tl.int64)[:, None] * channels + column[None, :]
    result = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if has_shortcut:
        result += tl.load(shortcut + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, tl.maximum(result, 0.0).to(y.dtype.element_ty), mask=inside)
    first = there & (tl.program_id(0) == 0)
    tl.store(stats + column, mean, mask=first)
    tl.store(stats + channels + column, rstd, mask=first)
    old_mean = tl.load(running_mean + column, mask=first, other=0.0)
    old_var = tl.load(running_var + column, mask=first, other=0.0)
    unbiased = variance * (pixels / (pixels - 1.0))
    tl.store(running_mean + column, old_mean + momentum * (mean - old_mean), mask=first)
    tl.store(running_var + column, old_var + momentum * (unbiased - old_var), mask=first)


@triton.jit
def _sum_backward(x, y, dy, gamma, beta, stats, sums, pixels, channels, has_shortcut: tl.constexpr,
                  rounds: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    column = tl.program_id(1) * c + tl.arange(0, c)
    there = column < channels
    mean = tl.load(stats + column, mask=there, other=0.0)
    rstd = tl.load(stats + channels + column, mask=there, other=0.0)
    scale = tl.load(gamma + column, mask=there, other=0.0)
    shift = tl.load(beta + column, mask=there, other=0.0)
    total = tl.zeros((c,), dtype=tl.float32)
    product = tl.zeros((c,), dtype=tl.float32)
    for number in range(rounds):
        row = (tl.program_id(0) * rounds + number) * p + tl.arange(0, p)
        inside = (row < pixels)[:, None] & there[None, :]
        place = row.to(tl.int64)[:, None] * channels + column[None, :]
        normal = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        if has_shortcut:
            alive = tl.load(y + place, mask=inside, other=0.0) > 0
        else:
            alive = normal * scale[None, :] + shift[None, :] > 0
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(alive & inside, gradient, 0.0)
        total += tl.sum(gradient, 0)
        product += tl.sum(gradient * normal, 0)
    tl.atomic_add(sums + column, total, mask=there)
    tl.atomic_add(sums + channels + column, product, mask=there)


@triton.jit
def _write_backward(x, y, dy, gamma, beta, stats, sums, dx, dshortcut, pixels, channels,
                    has_shortcut: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    column = tl.program_id(1) * c + tl.arange(0, c)
    there = column < channels
    mean = tl.load(stats + column, mask=there, other=0.0)
    rstd = tl.load(stats + channels + column, mask=there, other=0.0)
    scale = tl.load(gamma + column, mask=there, other=0.0)
    shift = tl.load(beta + column, mask=there, other=0.0)
    total = tl.load(sums + column, mask=there, other=0.0) / pixels
    product = tl.load(sums + channels + column, mask=there, other=0.0) / pixels
    row = tl.program_id(0) * p + tl.arange(0, p)
    inside = (row < pixels)[:, None] & there[None, :]
    place = row.to(tl.int64)[:, None] * channels + column[None, :]
    normal = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    if has_shortcut:
        alive = tl.load(y + place, mask=inside, other=0.0) > 0
    else:
        alive = normal * scale[None, :] + shift[None, :] > 0
    gradient = tl.where(alive, tl.load(dy + place, mask=inside, other=0.0).to(tl.float32), 0.0)
    if has_shortcut:
        tl.store(dshortcut + place, gradient.to(dshortcut.dtype.element_ty), mask=inside)
    result = (scale * rstd)[None, :] * (gradient - total[None, :] - normal * product[None, :])
    tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)


class NormAddReLU(torch.autograd.Function):
    """relu(batch_norm(x) + shortcut) in training mode; x and shortcut (batch, channels, …) in channels-last memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        channels = x.shape[1]
        pixels = x.numel() // channels
        sums = torch.zeros(2, channels, device=x.device)
        stats = torch.empty(2, channels, device=x.device)
        y = torch.empty_like(x)
        columns = triton.cdiv(channels, _CHANNELS)
        _sum[(triton.cdiv(pixels, _PIXELS * _ROUNDS), columns)](
            x, sums, pixels, channels, _ROUNDS, _PIXELS, _CHANNELS, num_warps=4
        )
        _write[(triton.cdiv(pixels, _PIXELS), columns)](
            x, x if shortcut is None else shortcut, y, sums, gamma, beta, stats, running_mean, running_var,
            pixels, channels, momentum, eps, shortcut is not None, _PIXELS, _CHANNELS, num_warps=4,
        )  # fmt: skip
        ctx.has_shortcut = shortcut is not None
        ctx.save_for_backward(x, y if ctx.has_shortcut else x, gamma, beta, stats)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y, gamma, beta, stats = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        pixels = x.numel() // channels
        sums = torch.zeros(2, channels, device=x.device)
        dx = torch.empty_like(x)
        dshortcut = torch.empty_like(x) if ctx.has_shortcut else None
        columns = triton.cdiv(channels, _CHANNELS)
        _sum_backward[(triton.cdiv(pixels, _PIXELS * _ROUNDS), columns)](
            x, y, dy, gamma, beta, stats, sums, pixels, channels, ctx.has_shortcut,
            _ROUNDS, _PIXELS, _CHANNELS, num_warps=4,
        )  # fmt: skip
        _write_backward[(triton.cdiv(pixels, _PIXELS), columns)](
            x, y, dy, gamma, beta, stats, sums, dx, dx if dshortcut is None else dshortcut, pixels, channels,
            ctx.has_shortcut, _PIXELS, _CHANNELS, num_warps=4,
        )  # fmt: skip
        return dx, dshortcut, sums[1], sums[0], None, None, None, None
