# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""One step of SCL on CUDA GPUs in four fused kernels, equivalent to the torch operations of `SCL._descend`.

It handles float32 state, the identity estimator, and one scale for the whole network or none. The passes over memory of
the size of the weights (a quarter for the masks) are:

    `_square`    reads gradient and w̃, writes sums of squares of the mask gradient, one per block; `_total` reduces them
                 by tensor, and `_judge` checks per run whether they are finite and computes the scale
    `_descend`   reads gradient, w̃ and m̃; writes m̃ and, if there is a parameter, copies w̃ to it (and writes the
                 gradient, if that of pruned weights is scaled)

The operations on each weight are those of scl.py, with a rounding after each (no fused multiply-add). So w̃ and the
gradients are bitwise equal to those without kernels, and so is m̃ without a scale. Only the sums of squares are reduced
in another (fixed) order, which changes the last digits of the scale, and with it m̃.

A single run is divided by tensor, several runs by row (`Blocks`): a segment is a tensor or a row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.methods.blocks import BLOCK, Blocks
from gossamer.methods.launch_triton import LAUNCH, filled, filled_gradients, launches, locate, pick

_SUMS = 1024  # sums of squares reduced together
_EPSILON = 1e-12  # EPSILON of scl.py, which imports this file


@triton.jit
def _mask_gradient(gradient, weight, unscale):
    """Eq. (step_redefine) with the identity."""
    if unscale is not None:
        gradient = gradient * tl.load(unscale)
    return gradient * weight


@triton.jit(do_not_specialize=["first", "present"])
def _square(gradients, dense, blocks, first, present, unscale, sums, multiple: tl.constexpr, block: tl.constexpr):
    _, in_dense, in_tensor, inside, which, _ = locate(blocks, first, multiple, block)
    learns = tl.where(((present >> which) & 1) != 0, inside, False)
    gradient = tl.load(pick(gradients, which) + in_tensor, mask=learns, other=0.0).to(tl.float32)
    weight = tl.load(dense + in_dense, mask=inside, other=0.0)
    work = _mask_gradient(gradient, weight, unscale)
    tl.store(sums + first + tl.program_id(0), tl.sum(work * work, 0))


@triton.jit
def _total(sums, firsts, totals, most: tl.constexpr, block: tl.constexpr):
    segment = tl.program_id(0)
    first, end = tl.load(firsts + segment), tl.load(firsts + segment + 1)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, most, block):
        place = first + start + tl.arange(0, block)
        total += tl.load(sums + place, mask=place < end, other=0.0).to(tl.float64)
    tl.store(totals + segment, tl.sum(total, 0).to(tl.float32))


@triton.jit
def _judge(totals, segments, found_inf, finite, divide, weights, epsilon, block: tl.constexpr):
    """Per run, whether the gradients are finite, and the global scale of the mask gradient."""
    run = tl.program_id(0)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, segments, block):
        place = start + tl.arange(0, block)
        total += tl.load(totals + run * segments + place, mask=place < segments, other=0.0).to(tl.float64)
    squares = tl.sum(total, 0).to(tl.float32)
    good = squares < float("inf")  # also False for NaN
    if found_inf is not None:
        good = good & (tl.load(found_inf) == 0)
    tl.store(finite + run, good.to(tl.uint8))
    scale = tl.sqrt_rn(tl.div_rn(squares, weights))
    tl.store(divide + run, tl.where(scale > 0, scale + epsilon, 1.0))


@triton.jit(do_not_specialize=["first", "present"])
def _descend(
    gradients,
    parameters,
    dense,
    mask_variable,
    mask,
    blocks,
    first,
    present,
    unscale,
    divide,
    finite,
    rate,
    decay,
    mask_decay,
    cap,
    pruned_scale,
    same_scale,
    multiple: tl.constexpr,
    block: tl.constexpr,
):
    in_state, in_dense, in_tensor, inside, which, run = locate(blocks, first, multiple, block)
    learns = tl.where(((present >> which) & 1) != 0, inside, False)
    places = pick(gradients, which) + in_tensor
    gradient = tl.load(places, mask=learns, other=0.0)
    weight = tl.load(dense + in_dense, mask=inside, other=0.0)
    old = tl.load(mask_variable + in_state, mask=inside, other=0.0)
    direction = _mask_gradient(gradient.to(tl.float32), weight, unscale)
    if divide is not None:
        direction = tl.div_rn(direction, tl.load(divide + run))
    if decay is not None:
        direction = direction + tl.load(decay + run)
    new = old - direction * tl.load(rate + run)
    if mask_decay is not None:
        size = tl.abs(weight)
        if cap is not None:
            size = tl.minimum(size, tl.load(cap + run))
        new = new + (size - new) * tl.load(mask_decay + run)
    # If gradients were not finite, nothing changes.
    tl.store(mask_variable + in_state, tl.where(tl.load(finite + run) != 0, new, old), mask=inside)
    if pruned_scale is not None or same_scale is not None:
        share = same_scale if pruned_scale is None else tl.load(pruned_scale + run)
        pruned = tl.load(mask + in_state, mask=inside, other=1) == 0
        damped = (gradient.to(tl.float32) * share).to(gradient.dtype)
        tl.store(places, damped, mask=learns & pruned)
    if parameters is not None:
        parameter = pick(parameters, which)
        tl.store(parameter + in_tensor, weight.to(parameter.dtype.element_ty), mask=inside)


def sums_of_squares_on_gpu(
    blocks: Blocks, gradients: Sequence[Tensor | None], dense: Tensor, unscale: Tensor | None
) -> Tensor:
    """The sum of squares of the mask gradient of each segment."""
    sums = torch.empty(len(blocks.table), dtype=torch.float32, device=dense.device)
    totals = torch.empty(len(blocks.sizes), dtype=torch.float32, device=dense.device)
    with torch.cuda.device_of(sums):
        for grid, first, these in launches(blocks):
            some, present = filled_gradients(gradients, these)
            _square[grid](
                some, dense, blocks.table, first, present, unscale, sums, blocks.multiple, BLOCK, **LAUNCH
            )  # fmt: skip
        most = -(-max(blocks.sizes) // BLOCK)
        _total[(len(totals),)](sums, blocks.firsts, totals, most, _SUMS, num_warps=4)
    return totals


def judge_on_gpu(squares: Tensor, found_inf: Tensor | None, weights: int) -> tuple[Tensor, Tensor]:
    """For each row of sums of squares, whether it is finite, and the divisor of the mask gradient: `_finite`,
    `global_scale` and `divisor` of scl.py."""
    runs, segments = squares.shape
    finite, divide = torch.empty(runs, dtype=torch.bool, device=squares.device), squares.new_empty(runs, 1)
    with torch.cuda.device_of(squares):
        _judge[(runs,)](
            squares, segments, found_inf, finite.view(torch.uint8), divide, float(weights), _EPSILON, _SUMS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return finite, divide


def descend_on_gpu_(
    blocks: Blocks,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor] | None,
    dense: Tensor,
    mask_variable: Tensor,
    mask: Tensor,
    *,
    unscale: Tensor | None,
    divide: Tensor | None,
    finite: Tensor,
    rate: Tensor,
    decay: Tensor | None,
    mask_decay: Tensor | None,
    caps: Tensor | None,
    pruned_scale: Tensor | float,
) -> None:
    """Update the mask variables, scale the gradients of pruned weights, and copy w̃ to the parameters. `divide`, `rate`,
    `decay`, `mask_decay`, `caps` and `pruned_scale` are columns with one number per run; `pruned_scale` may be a
    scalar."""
    same = None if isinstance(pruned_scale, Tensor) or pruned_scale == 1.0 else pruned_scale
    with torch.cuda.device_of(mask):
        for grid, first, these in launches(blocks):
            some, present = filled_gradients(gradients, these)
            _descend[grid](
                some,
                None if parameters is None else filled(parameters, these),
                dense,
                mask_variable,
                mask.view(torch.uint8),
                blocks.table,
                first,
                present,
                unscale,
                divide,
                finite.view(torch.uint8),
                rate,
                decay,
                mask_decay,
                caps,
                pruned_scale if isinstance(pruned_scale, Tensor) else None,
                same,
                blocks.multiple,
                BLOCK,
                **LAUNCH,
            )
