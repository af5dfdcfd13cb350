# mypy: disable-error-code="no-untyped-def, untyped-decorator, override"
"""3 × 3 convolutions of many small networks at once, for CUDA GPUs.

Images lie as (runs, batch, height, width, channels), filters as (runs, outputs, 3, 3, channels): all that belongs to
one run lies together. A program takes some pixels of one run and multiplies: pixels × (3 · channels), a row of the
window, by (3 · channels) × outputs, for each of the three rows. The libraries' grouped convolutions take the groups of
the weight gradient one by one; this does all runs at once, and sums what batch norm needs on the way.

Sums are in float32, whatever the images are.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # about what keeps a large GPU busy


@triton.jit
def _convolve(x, w, y, sums, batch, run_stride, filter_stride,
              height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr,
              stride: tl.constexpr, has_sums: tl.constexpr, precision: tl.constexpr,
              p: tl.constexpr, k: tl.constexpr, o: tl.constexpr):  # fmt: skip
    out_height: tl.constexpr = (height + stride - 1) // stride
    out_width: tl.constexpr = (width + stride - 1) // stride
    row_length: tl.constexpr = 3 * channels
    chunks: tl.constexpr = (row_length + k - 1) // k
    run = tl.program_id(2).to(tl.int64)
    pixels = batch * out_height * out_width
    pixel = tl.program_id(0) * p + tl.arange(0, p)
    image = pixel // (out_height * out_width)
    down = (pixel // out_width) % out_height * stride - 1
    right = pixel % out_width * stride - 1
    output = tl.program_id(1) * o + tl.arange(0, o)
    images, filters = x + run * run_stride, w + run * filter_stride
    total = tl.zeros((p, o), dtype=tl.float32)
    for step in tl.range(0, 3 * chunks):
        row, first = step // chunks, step % chunks * k
        place = first + tl.arange(0, k)
        there = (pixel < pixels) & (down + row >= 0) & (down + row < height)
        start = ((image * height + down + row) * width + right) * channels
        if channels % k == 0:  # all places are of one pixel
            column = right + first // channels
            inside = (there & (column >= 0) & (column < width))[:, None]
        else:
            column = right[:, None] + (place // channels)[None, :]
            inside = there[:, None] & (column >= 0) & (column < width) & (place < row_length)[None, :]
        window = tl.load(images + start[:, None] + place[None, :], mask=inside, other=0.0)
        taps = tl.load(filters + output[None, :] * (3 * row_length) + row * row_length + place[:, None],
                       mask=(place < row_length)[:, None] & (output < outputs)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(window, taps, total, input_precision=precision)
    written = (pixel < pixels)[:, None] & (output < outputs)[None, :]
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + run * pixels * outputs + pixel[:, None] * outputs + output[None, :], rounded, mask=written)
    if has_sums:
        seen = rounded.to(tl.float32)  # as the result is read
        place = sums + run * 2 * outputs + output
        tl.atomic_add(place, tl.sum(seen, 0), mask=output < outputs)
        tl.atomic_add(place + outputs, tl.sum(seen * seen, 0), mask=output < outputs)


@triton.jit
def _gradient_of_images(dy, w, dx, batch, filter_stride,
                        height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
                        outputs: tl.constexpr, stride: tl.constexpr, precision: tl.constexpr,
                        p: tl.constexpr, k: tl.constexpr, o: tl.constexpr):  # fmt: skip
    out_height: tl.constexpr = (height + stride - 1) // stride
    out_width: tl.constexpr = (width + stride - 1) // stride
    row_length: tl.constexpr = 3 * outputs
    chunks: tl.constexpr = (row_length + k - 1) // k
    run = tl.program_id(2).to(tl.int64)
    pixels = batch * height * width
    pixel = tl.program_id(0) * p + tl.arange(0, p)
    image = pixel // (height * width)
    down = (pixel // width) % height + 1
    right = pixel % width + 1
    channel = tl.program_id(1) * o + tl.arange(0, o)
    gradients = dy + run * batch * (out_height * out_width * outputs)
    filters = w + run * filter_stride
    total = tl.zeros((p, o), dtype=tl.float32)
    for step in tl.range(0, 3 * chunks):
        row, first = step // chunks, step % chunks * k
        place = first + tl.arange(0, k)
        tap, output = place // outputs, place % outputs
        y = (down - row) // stride
        there = (pixel < pixels) & (down >= row) & (y < out_height) & ((down - row) % stride == 0)
        start = (image * out_height + y) * out_width
        if outputs % k == 0:  # all places are of one pixel
            distance = (right - first // outputs)[:, None]
            inside = there[:, None]
        else:
            distance = right[:, None] - tap[None, :]
            inside = there[:, None] & (place < row_length)[None, :]
        column = distance // stride
        inside = inside & (distance >= 0) & (column < out_width) & (distance % stride == 0)
        gradient = tl.load(gradients + (start[:, None] + column) * outputs + output[None, :], mask=inside, other=0.0)
        taps = tl.load(filters + output[:, None] * (9 * channels) + (tap + row * 3)[:, None] * channels
                       + channel[None, :],
                       mask=(place < row_length)[:, None] & (channel < channels)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(gradient, taps, total, input_precision=precision)
    written = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    where = dx + run * pixels * channels + pixel[:, None] * channels + channel[None, :]
    tl.store(where, total.to(dx.dtype.element_ty), mask=written)


@triton.jit
def _row_of_window(images, image, down, right, there, place, row: tl.constexpr, height: tl.constexpr,
                   width: tl.constexpr, channels: tl.constexpr):  # fmt: skip
    """What the pixels see in one row of their windows: (pixels, places)."""
    start = ((image * height + down + row) * width + right) * channels
    column = right[:, None] + (place // channels)[None, :]
    inside = (there & (down + row >= 0) & (down + row < height))[:, None] & (column >= 0) & (column < width)
    return tl.load(images + start[:, None] + place[None, :], mask=inside & (place < 3 * channels)[None, :], other=0.0)


@triton.jit
def _gradient_of_filters(x, dy, parts, batch, run_stride, rounds: tl.constexpr,
                         height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr,
                         stride: tl.constexpr, precision: tl.constexpr,
                         p: tl.constexpr, k: tl.constexpr, o: tl.constexpr):  # fmt: skip
    out_height: tl.constexpr = (height + stride - 1) // stride
    out_width: tl.constexpr = (width + stride - 1) // stride
    row_length: tl.constexpr = 3 * channels
    chunks: tl.constexpr = (row_length + k - 1) // k
    run = tl.program_id(2).to(tl.int64)
    pixels = batch * out_height * out_width
    place = tl.program_id(1) % chunks * k + tl.arange(0, k)
    output = tl.program_id(1) // chunks * o + tl.arange(0, o)
    images, gradients = x + run * run_stride, dy + run * pixels * outputs
    top = tl.zeros((k, o), dtype=tl.float32)
    middle = tl.zeros((k, o), dtype=tl.float32)
    bottom = tl.zeros((k, o), dtype=tl.float32)
    for number in range(rounds):
        pixel = (tl.program_id(0) * rounds + number) * p + tl.arange(0, p)
        there = pixel < pixels
        image = pixel // (out_height * out_width)
        down = (pixel // out_width) % out_height * stride - 1
        right = pixel % out_width * stride - 1
        gradient = tl.load(gradients + pixel[:, None] * outputs + output[None, :],
                           mask=there[:, None] & (output < outputs)[None, :], other=0.0)  # fmt: skip
        window = _row_of_window(images, image, down, right, there, place, 0, height, width, channels)
        top = tl.dot(tl.trans(window), gradient, top, input_precision=precision)
        window = _row_of_window(images, image, down, right, there, place, 1, height, width, channels)
        middle = tl.dot(tl.trans(window), gradient, middle, input_precision=precision)
        window = _row_of_window(images, image, down, right, there, place, 2, height, width, channels)
        bottom = tl.dot(tl.trans(window), gradient, bottom, input_precision=precision)
    part = parts + (run * tl.num_programs(0) + tl.program_id(0)) * (outputs * 3 * row_length)
    where = part + output[None, :] * (3 * row_length) + place[:, None]
    written = (place < row_length)[:, None] & (output < outputs)[None, :]
    tl.store(where, top, mask=written)
    tl.store(where + row_length, middle, mask=written)
    tl.store(where + 2 * row_length, bottom, mask=written)


class Tile(NamedTuple):
    """What a program takes at a time."""

    pixels: int
    places: int  # of a row of the window: three times the channels
    outputs: int
    warps: int
    stages: int


def image_tile(pixels: int, channels: int, outputs: int) -> Tile:
    """The best of those tried on an H200, for `pixels` of all runs together."""
    places = _block(channels)
    many = pixels >= 256 * 512
    return Tile(
        256 if many else 128, places, _block(outputs), 4 if many else 8, stages=3 if places < 64 or not many else 2
    )


def filter_tile(channels: int, outputs: int) -> Tile:
    if channels < 16:
        return Tile(64, _block(3 * channels), _block(outputs), warps=2, stages=3)
    return Tile(32 if channels >= 64 else 64, _block(3 * channels), _block(outputs), warps=4, stages=3)


def _block(size: int) -> int:
    return max(16, min(64, int(triton.next_power_of_2(size))))


class Convolution(torch.autograd.Function):
    """Images (runs, batch, height, width, channels), or without the first axis if all runs share them, and filters
    (runs, outputs, 3, 3, channels) → images of the outputs and, for batch norm, their sums and sums of squares
    (runs, 2, outputs). Padding 1, stride 1 or 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.stride = stride
        y, sums = convolve(x, w, stride)
        ctx.mark_non_differentiable(sums)
        return y, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = gradient_of_images(dy, x, w, ctx.stride) if ctx.needs_input_grad[0] else None
        return dx, gradient_of_filters(dy, x, w, ctx.stride), None


def convolve(x: Tensor, w: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    runs, outputs, channels = w.shape[0], w.shape[1], w.shape[4]
    batch, height, width = x.shape[-4:-1]
    out_height, out_width = -(-height // stride), -(-width // stride)
    y = torch.empty(runs, batch, out_height, out_width, outputs, dtype=x.dtype, device=x.device)
    sums = torch.zeros(runs, 2, outputs, device=x.device)
    tile = image_tile(runs * batch * out_height * out_width, channels, outputs)
    grid = (triton.cdiv(batch * out_height * out_width, tile.pixels), triton.cdiv(outputs, tile.outputs), runs)
    _convolve[grid](
        x, w, y, sums, batch, _run_stride(x), w.stride(0), height, width, channels, outputs, stride, True,
        _precision(x), *tile[:3], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, sums


def gradient_of_images(dy: Tensor, x: Tensor, w: Tensor, stride: int) -> Tensor:
    if x.dim() != 5:
        raise RuntimeError("no gradient is given of images that all runs share")
    runs, batch, height, width, channels = x.shape
    outputs = w.shape[1]
    dx = torch.empty_like(x)
    tile = image_tile(runs * batch * height * width, outputs, channels)
    grid = (triton.cdiv(batch * height * width, tile.pixels), triton.cdiv(channels, tile.outputs), runs)
    _gradient_of_images[grid](
        dy, w, dx, batch, w.stride(0), height, width, channels, outputs, stride, _precision(x),
        *tile[:3], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx


def gradient_of_filters(dy: Tensor, x: Tensor, w: Tensor, stride: int) -> Tensor:
    runs, outputs, channels = w.shape[0], w.shape[1], w.shape[4]
    batch, height, width = x.shape[-4:-1]
    tile = filter_tile(channels, outputs)
    chunks = triton.cdiv(3 * channels, tile.places) * triton.cdiv(outputs, tile.outputs)
    blocks = triton.cdiv(dy.numel() // (runs * outputs), tile.pixels)
    # Sums over some blocks first, in as many programs as keep the GPU busy, then over those: always in the same order.
    rounds = triton.cdiv(blocks, max(1, min(blocks, _PROGRAMS // (runs * chunks))))
    parts = torch.empty(runs, triton.cdiv(blocks, rounds), outputs, 3, 3, channels, device=x.device)
    _gradient_of_filters[parts.shape[1], chunks, runs](
        x, dy, parts, batch, _run_stride(x), rounds, height, width, channels, outputs, stride, _precision(x),
        *tile[:3], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return parts.sum(1).to(w.dtype)


def _run_stride(x: Tensor) -> int:
    return x[0].numel() if x.dim() == 5 else 0


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
