# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""Saving w̃ and writing w = w̃ ⊙ m to the parameters in one pass over memory, for CUDA GPUs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.methods.blocks import BLOCK, Blocks
from gossamer.methods.launch_triton import LAUNCH, filled, launches, locate, pick


@triton.jit(do_not_specialize=["first"])
def _mask(parameters, dense, mask, blocks, first, multiple: tl.constexpr, block: tl.constexpr):
    in_state, _, in_tensor, inside, which, _ = locate(blocks, first, multiple, block)
    places = pick(parameters, which) + in_tensor
    pruned = tl.load(mask + in_state, mask=inside, other=1) == 0
    weight = tl.load(places, mask=inside, other=0.0)
    if dense is not None:
        tl.store(dense + in_state, weight.to(tl.float32), mask=inside)
    tl.store(places, tl.where(pruned, 0.0, weight), mask=inside)


def mask_on_gpu_(blocks: Blocks, parameters: Sequence[Tensor], mask: Tensor, dense: Tensor | None) -> None:
    """Copy the parameters to `dense`, if given, and zero their masked entries."""
    with torch.cuda.device_of(mask):
        for grid, first, these in launches(blocks):
            _mask[grid](
                filled(parameters, these), dense, mask.view(torch.uint8), blocks.table, first, blocks.multiple, BLOCK,
                **LAUNCH,
            )  # fmt: skip
