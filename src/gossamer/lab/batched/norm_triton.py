# mypy: disable-error-code="no-untyped-def, untyped-decorator, override"
"""Batch norm, the addition of a shortcut and ReLU in one go, for the images of many networks on CUDA GPUs.

Images lie as (runs, batch, height, width, channels): all that belongs to one run lies together.

relu(batch_norm(x) + shortcut) passes over memory once to sum and once to write, and its backward the same; taken one by
one the operations need more than twice as many passes. Statistics are summed in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # numbers in a block
_PROGRAMS = 1024  # about what keeps a large GPU busy


@triton.jit
def _sum(x, sums, pixels, channels: tl.constexpr, rounds: tl.constexpr, p: tl.constexpr, c: tl.constexpr):
    run = tl.program_id(2).to(tl.int64)
    x += run * pixels * channels
    sums += run * 2 * channels
    column = tl.program_id(1) * c + tl.arange(0, c)
    total = tl.zeros((p, c), dtype=tl.float32)
    squares = tl.zeros((p, c), dtype=tl.float32)
    for number in range(rounds):
        row = (tl.program_id(0) * rounds + number) * p + tl.arange(0, p)
        inside = (row < pixels)[:, None] & (column < channels)[None, :]
        values = tl.load(x + row[:, None] * channels + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += values
        squares += values * values
    tl.atomic_add(sums + column, tl.sum(total, 0), mask=column < channels)
    tl.atomic_add(sums + channels + column, tl.sum(squares, 0), mask=column < channels)


@triton.jit
def _write(x, shortcut, y, sums, gamma, beta, stats, running_mean, running_var, pixels, vector_stride, momentum, eps,
           channels: tl.constexpr, has_shortcut: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    run = tl.program_id(2).to(tl.int64)
    x, y, shortcut = x + run * pixels * channels, y + run * pixels * channels, shortcut + run * pixels * channels
    sums, stats = sums + run * 2 * channels, stats + run * 2 * channels
    gamma, beta = gamma + run * vector_stride, beta + run * vector_stride
    running_mean, running_var = running_mean + run * channels, running_var + run * channels
    column = tl.program_id(1) * c + tl.arange(0, c)
    there = column < channels
    mean = tl.load(sums + column, mask=there, other=0.0) / pixels
    variance = tl.maximum(tl.load(sums + channels + column, mask=there, other=1.0) / pixels - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(gamma + column, mask=there, other=0.0) * rstd
    shift = tl.load(beta + column, mask=there, other=0.0) - mean * scale
    row = tl.program_id(0) * p + tl.arange(0, p)
    inside = (row < pixels)[:, None] & there[None, :]
    place = row[:, None] * channels + column[None, :]
    result = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if has_shortcut:
        result += tl.load(shortcut + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, tl.maximum(result, 0.0).to(y.dtype.element_ty), mask=inside)
    first = there & (tl.program_id(0) + tl.zeros_like(column) == 0)
    tl.store(stats + column, mean, mask=first)
    tl.store(stats + channels + column, rstd, mask=first)
    old_mean = tl.load(running_mean + column, mask=first, other=0.0)
    old_var = tl.load(running_var + column, mask=first, other=0.0)
    unbiased = variance * (pixels / (pixels - 1.0))
    tl.store(running_mean + column, old_mean + momentum * (mean - old_mean), mask=first)
    tl.store(running_var + column, old_var + momentum * (unbiased - old_var), mask=first)


@triton.jit
def _sum_backward(x, y, dy, gamma, beta, stats, sums, pixels, vector_stride, channels: tl.constexpr,
                  has_shortcut: tl.constexpr, rounds: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    run = tl.program_id(2).to(tl.int64)
    x, y, dy = x + run * pixels * channels, y + run * pixels * channels, dy + run * pixels * channels
    sums, stats = sums + run * 2 * channels, stats + run * 2 * channels
    gamma, beta = gamma + run * vector_stride, beta + run * vector_stride
    column = tl.program_id(1) * c + tl.arange(0, c)
    there = column < channels
    mean = tl.load(stats + column, mask=there, other=0.0)
    rstd = tl.load(stats + channels + column, mask=there, other=0.0)
    scale = tl.load(gamma + column, mask=there, other=0.0)
    shift = tl.load(beta + column, mask=there, other=0.0)
    total = tl.zeros((p, c), dtype=tl.float32)
    product = tl.zeros((p, c), dtype=tl.float32)
    for number in range(rounds):
        row = (tl.program_id(0) * rounds + number) * p + tl.arange(0, p)
        inside = (row < pixels)[:, None] & there[None, :]
        place = row[:, None] * channels + column[None, :]
        normal = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        if has_shortcut:
            alive = tl.load(y + place, mask=inside, other=0.0) > 0
        else:
            alive = normal * scale[None, :] + shift[None, :] > 0
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(alive & inside, gradient, 0.0)
        total += gradient
        product += gradient * normal
    tl.atomic_add(sums + column, tl.sum(total, 0), mask=there)
    tl.atomic_add(sums + channels + column, tl.sum(product, 0), mask=there)


@triton.jit
def _write_backward(x, y, dy, gamma, beta, stats, sums, dx, dshortcut, pixels, vector_stride, channels: tl.constexpr,
                    has_shortcut: tl.constexpr, p: tl.constexpr, c: tl.constexpr):  # fmt: skip
    run = tl.program_id(2).to(tl.int64)
    x, y, dy = x + run * pixels * channels, y + run * pixels * channels, dy + run * pixels * channels
    dx, dshortcut = dx + run * pixels * channels, dshortcut + run * pixels * channels
    sums, stats = sums + run * 2 * channels, stats + run * 2 * channels
    gamma, beta = gamma + run * vector_stride, beta + run * vector_stride
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
    place = row[:, None] * channels + column[None, :]
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
    """relu(batch_norm(x) + shortcut) in training mode; x and shortcut (runs, batch, height, width, channels)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sums: Tensor | None,
        shortcut: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """`sums` of x and of its squares (runs, 2, channels), if they are known. `gamma` and `beta` (runs, channels)
        may be columns of one matrix; the running statistics are contiguous."""
        runs, channels, pixels, p, c = sizes(x)
        columns = triton.cdiv(channels, c)
        if sums is None:
            sums = torch.zeros(runs, 2, channels, device=x.device)
            rounds = _rounds(runs, pixels, p)
            _sum[triton.cdiv(pixels, p * rounds), columns, runs](x, sums, pixels, channels, rounds, p, c, num_warps=4)
        stats = torch.empty_like(sums)
        y = torch.empty_like(x)
        _write[triton.cdiv(pixels, p), columns, runs](
            x, x if shortcut is None else shortcut, y, sums, gamma, beta, stats, running_mean, running_var,
            pixels, gamma.stride(0), momentum, eps, channels, shortcut is not None, p, c, num_warps=4,
        )  # fmt: skip
        ctx.has_shortcut = shortcut is not None
        ctx.save_for_backward(x, y if ctx.has_shortcut else x, gamma, beta, stats)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y, gamma, beta, stats = ctx.saved_tensors
        dy = gradients[0].contiguous()
        runs, channels, pixels, p, c = sizes(x)
        columns = triton.cdiv(channels, c)
        sums = torch.zeros_like(stats)
        dx = torch.empty_like(x)
        dshortcut = torch.empty_like(x) if ctx.has_shortcut else None
        rounds = _rounds(runs, pixels, p)
        _sum_backward[triton.cdiv(pixels, p * rounds), columns, runs](
            x, y, dy, gamma, beta, stats, sums, pixels, gamma.stride(0), channels, ctx.has_shortcut, rounds, p, c,
            num_warps=4,
        )  # fmt: skip
        _write_backward[triton.cdiv(pixels, p), columns, runs](
            x, y, dy, gamma, beta, stats, sums, dx, dx if dshortcut is None else dshortcut, pixels, gamma.stride(0),
            channels, ctx.has_shortcut, p, c, num_warps=4,
        )  # fmt: skip
        return dx, None, dshortcut, sums[:, 1], sums[:, 0], None, None, None, None


def sizes(x: Tensor) -> tuple[int, int, int, int, int]:
    """Runs, channels, pixels of a run, and the pixels and channels of a block."""
    runs, channels = x.shape[0], x.shape[-1]
    c = min(64, triton.next_power_of_2(channels))
    return runs, channels, x[0].numel() // channels, _BLOCK // c, c


def _rounds(runs: int, pixels: int, p: int) -> int:
    """Blocks that one program sums before it adds to the total: a power of two, as each number is compiled for."""
    return max(1, min(16, int(triton.next_power_of_2(runs * pixels // (p * _PROGRAMS) + 1)) // 2))
