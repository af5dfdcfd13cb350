# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""Common parts of GPU kernels over many tensors. A launch takes up to 32 tensors, and their addresses are arguments, so
that nothing is copied to the GPU in a step and the step can be captured."""

from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gossamer.methods.blocks import TOGETHER, Blocks

# Round after every operation, as torch does.
LAUNCH: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def pick(pointers, which):
    pointer = pointers[0]
    for number in tl.static_range(1, len(pointers)):
        pointer = tl.where(which == number, pointers[number], pointer)
    return pointer


@triton.jit
def locate(blocks, first, multiple: tl.constexpr, block: tl.constexpr):
    """The offsets of this program's weights in the state, in w̃ and in their tensor; a bounds mask; tensor and run."""
    row = blocks + (first + tl.program_id(0)).to(tl.int64) * 6
    lane = tl.arange(0, block)
    in_state = tl.multiple_of(tl.load(row), multiple) + lane
    in_dense = tl.multiple_of(tl.load(row + 1), multiple) + lane
    in_tensor = tl.multiple_of(tl.load(row + 2), multiple) + lane
    inside = lane < tl.multiple_of(tl.load(row + 3), multiple).to(tl.int32)
    return in_state, in_dense, in_tensor, inside, tl.load(row + 4).to(tl.int32), tl.load(row + 5)


def launches(blocks: Blocks) -> Iterator[tuple[tuple[int], int, range]]:
    """The grid, the first block and the tensors of each launch."""
    for start in range(0, len(blocks.sizes), TOGETHER):
        these = range(start, min(start + TOGETHER, len(blocks.sizes)))
        first, end = blocks.first[start], blocks.first[these.stop]
        if end > first:
            yield (end - first,), first, these


def filled(tensors: Sequence[Tensor], these: range) -> tuple[Tensor, ...]:
    """The tensors of a launch, padded to a power of two by repeating the first, so that few kernels are compiled."""
    some = [tensors[index] for index in these]
    length = 1 << (len(some) - 1).bit_length()
    return tuple(some + some[:1] * (length - len(some)))


def filled_gradients(gradients: Sequence[Tensor | None], these: range) -> tuple[tuple[Tensor, ...], int]:
    """The gradients, with placeholders for absent ones, and a bit mask of the present ones."""
    present = sum(1 << number for number, index in enumerate(these) if gradients[index] is not None)
    any_one = next(gradient for gradient in gradients if gradient is not None)
    return filled([any_one if gradient is None else gradient for gradient in gradients], these), present
