# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""The usual step of learned masks on CUDA GPUs, for the rows of a race: what `SCL.learn_` does up to the budget.

For float32, the identity estimator, one scale a network and none of what is to be tried out. `_square` reads gradient
and w̃ and leaves sums of squares of the mask gradient, one a block; `_move` reads gradient, w̃, m̃ and mask, and writes m̃
and the damped gradient: 7 passes over memory of the size of the weights instead of some 29. Every operation rounds as
in torch; only the sums are added up in another order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _square(gradient, gradient_row, weights, weights_row, sums, size, block: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    slope = tl.load(gradient + row * gradient_row + place, mask=inside, other=0.0)
    weight = tl.load(weights + row * weights_row + place, mask=inside, other=0.0)
    work = slope * weight
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), tl.sum(work * work, 0))


@triton.jit
def _move(
    gradient,
    gradient_row,
    weights,
    weights_row,
    variable,
    mask,
    divisor,
    rate,
    anchor,
    cap,
    removed,
    size,
    block: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    slopes = gradient + row * gradient_row + place
    slope = tl.load(slopes, mask=inside, other=0.0)
    weight = tl.load(weights + row * weights_row + place, mask=inside, other=0.0)
    variables = variable + row * size + place
    new = tl.load(variables, mask=inside, other=0.0)
    new = new - tl.div_rn(slope * weight, tl.load(divisor + row)) * tl.load(rate + row)
    if anchor is not None:
        target = tl.minimum(tl.maximum(tl.abs(weight), _TINY), tl.load(cap + row))
        new = new + tl.load(anchor + row) * (target - new)
    tl.store(variables, new, mask=inside)
    if removed is not None:
        gone = tl.load(mask + row * size + place, mask=inside, other=1) == 0
        tl.store(slopes, slope * tl.load(removed + row), mask=gone)


def mean_squares_on_gpu(gradient: Tensor, weights: Tensor) -> Tensor:
    """The mean square of the mask gradient of each row, as a column."""
    rows, size = weights.shape
    blocks = triton.cdiv(size, _BLOCK)
    sums = weights.new_empty(rows, blocks)
    with torch.cuda.device_of(weights):
        _square[(blocks, rows)](
            gradient, gradient.stride(0), weights, weights.stride(0), sums, size, _BLOCK,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return sums.sum(1, keepdim=True).div_(size)


def move_on_gpu_(
    gradient: Tensor,
    weights: Tensor,
    variable: Tensor,
    mask: Tensor,
    *,
    divisor: Tensor,
    rate: Tensor,
    anchor: Tensor | None,
    cap: Tensor | None,
    removed: Tensor | None,
) -> None:
    """One step of the mask variables, which go back to |w̃|, up to `cap`, by the share `anchor`; gradients of removed
    weights are multiplied by `removed`. All five are columns."""
    rows, size = variable.shape
    with torch.cuda.device_of(variable):
        _move[(triton.cdiv(size, _BLOCK), rows)](
            gradient,
            gradient.stride(0),
            weights,
            weights.stride(0),
            variable,
            mask.view(torch.uint8),
            divisor,
            rate,
            anchor,
            cap,
            removed,
            size,
            _BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
