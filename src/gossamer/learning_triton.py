# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""One step of mask learning on CUDA GPUs in five kernels: what learning.py and connectivity.py do, fused.

For float32 stores, the identity estimator, one scale for the whole network or none. Passes over memory of the size of
the weights (a quarter for the masks):

    `_square`    reads gradient and w̃, leaves sums of squares of the mask gradient, one a block; `_total` adds them up,
                 `_judge` says whether they are finite and makes the scale of them
    `_descend`   reads gradient, w̃ and m̃; writes m̃ and, into the parameter, w̃ (and the gradient, where it is damped)
    `_show`      after the optimizer: reads parameter and mask; writes w̃ and, into the parameter, w = w̃ ⊙ m

The operations on each connection are those of method.py, one rounding after the other (no fused multiply-add), so that
w̃ and gradients have the bits they have without kernels, and m̃ too where nothing is scaled. Only the sums of squares are
added up in another order, always the same one, which the scale feels in its last digits, and with it m̃.

A launch covers up to 32 tensors, whose addresses are arguments: nothing is copied to the GPU in a step, and the
step can be captured. `Store.blocks` says which block is which part of which tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.method import EPSILON
from gossamer.state import BLOCK, TOGETHER, Store

_SUMS = 1024  # sums of squares added up together
# Rounding after every operation, as torch does.
_LAUNCH: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _pick(pointers, which):
    pointer = pointers[0]
    for number in tl.static_range(1, len(pointers)):
        pointer = tl.where(which == number, pointers[number], pointer)
    return pointer


@triton.jit
def _block(blocks, first, multiple: tl.constexpr, block: tl.constexpr):
    """Where this program's connections lie: in the store, in their tensor, which of them exist, and whose they are."""
    row = blocks + (first + tl.program_id(0)).to(tl.int64) * 4
    lane = tl.arange(0, block)
    in_store = tl.multiple_of(tl.load(row), multiple) + lane
    in_tensor = tl.multiple_of(tl.load(row + 1), multiple) + lane
    inside = lane < tl.multiple_of(tl.load(row + 2), multiple).to(tl.int32)
    return in_store, in_tensor, inside, tl.load(row + 3).to(tl.int32)


@triton.jit
def _mask_gradient(gradient, weight, unscale):
    """Eq. (step_redefine) with the identity."""
    if unscale is not None:
        gradient = gradient * tl.load(unscale)
    return gradient * weight


@triton.jit(do_not_specialize=["first", "present"])
def _square(gradients, dense, blocks, first, present, unscale, sums, multiple: tl.constexpr, block: tl.constexpr):
    in_store, in_tensor, inside, which = _block(blocks, first, multiple, block)
    learns = tl.where(((present >> which) & 1) != 0, inside, False)
    gradient = tl.load(_pick(gradients, which) + in_tensor, mask=learns, other=0.0).to(tl.float32)
    weight = tl.load(dense + in_store, mask=inside, other=0.0)
    work = _mask_gradient(gradient, weight, unscale)
    tl.store(sums + first + tl.program_id(0), tl.sum(work * work, 0))


@triton.jit
def _total(sums, firsts, totals, most: tl.constexpr, block: tl.constexpr):
    tensor = tl.program_id(0)
    first, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, most, block):
        place = first + start + tl.arange(0, block)
        total += tl.load(sums + place, mask=place < end, other=0.0).to(tl.float64)
    tl.store(totals + tensor, tl.sum(total, 0).to(tl.float32))


@triton.jit
def _judge(totals, tensors, found_inf, healthy, divisor, connections, epsilon, block: tl.constexpr):
    """Whether the step can be learned from, and the global scale of the mask gradient, by which it is divided."""
    total = tl.zeros((block,), tl.float64)
    for start in range(0, tensors, block):
        place = start + tl.arange(0, block)
        total += tl.load(totals + place, mask=place < tensors, other=0.0).to(tl.float64)
    squares = tl.sum(total, 0).to(tl.float32)
    good = squares < float("inf")  # which what is not a number is not either
    if found_inf is not None:
        good = good & (tl.load(found_inf) == 0)
    tl.store(healthy, good.to(tl.uint8))
    scale = tl.sqrt_rn(tl.div_rn(squares, connections))
    tl.store(divisor, tl.where(scale > 0, scale + epsilon, 1.0))


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
    divisor,
    healthy,
    learning_rate,
    decay,
    anchor,
    fixed_anchor,
    cap,
    removed,
    multiple: tl.constexpr,
    block: tl.constexpr,
):
    in_store, in_tensor, inside, which = _block(blocks, first, multiple, block)
    learns = tl.where(((present >> which) & 1) != 0, inside, False)
    places = _pick(gradients, which) + in_tensor
    gradient = tl.load(places, mask=learns, other=0.0)
    weight = tl.load(dense + in_store, mask=inside, other=0.0)
    old = tl.load(mask_variable + in_store, mask=inside, other=0.0)
    direction = _mask_gradient(gradient.to(tl.float32), weight, unscale)
    if divisor is not None:
        direction = tl.div_rn(direction, tl.load(divisor))
    if decay is not None:
        direction = direction + decay
    new = old - direction * tl.load(learning_rate)
    if anchor is not None or fixed_anchor is not None:
        size = tl.abs(weight)
        if cap is not None:
            size = tl.minimum(size, tl.load(cap))
        share = fixed_anchor if anchor is None else tl.load(anchor)
        new = new + (size - new) * share
    # Where gradients were not finite, everything stays as it is.
    tl.store(mask_variable + in_store, tl.where(tl.load(healthy) != 0, new, old), mask=inside)
    if removed is not None:
        gone = tl.load(mask + in_store, mask=inside, other=1) == 0
        damped = (gradient.to(tl.float32) * removed).to(gradient.dtype)
        tl.store(places, tl.where(gone, damped, gradient), mask=learns)
    parameter = _pick(parameters, which)
    tl.store(parameter + in_tensor, weight.to(parameter.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _show(parameters, dense, mask, blocks, first, multiple: tl.constexpr, block: tl.constexpr):
    in_store, in_tensor, inside, which = _block(blocks, first, multiple, block)
    places = _pick(parameters, which) + in_tensor
    gone = tl.load(mask + in_store, mask=inside, other=1) == 0
    weight = tl.load(places, mask=inside, other=0.0)
    if dense is not None:
        tl.store(dense + in_store, weight.to(tl.float32), mask=inside)
    tl.store(places, tl.where(gone, 0.0, weight), mask=inside)


def sums_of_squares_on_gpu(store: Store, gradients: Sequence[Tensor | None], unscale: Tensor | None) -> Tensor:
    """The sum of squares of the mask gradient of each tensor."""
    sums = torch.empty(len(store.blocks.table), dtype=torch.float32, device=store.mask.device)
    totals = torch.empty(len(store.sizes), dtype=torch.float32, device=store.mask.device)
    with torch.cuda.device_of(sums):
        for grid, first, these in _launches(store):
            some, present = _gradients(gradients, these)
            _square[grid](
                some, store.dense, store.blocks.table, first, present, unscale, sums, store.blocks.multiple, BLOCK,
                **_LAUNCH,
            )  # fmt: skip
        most = -(-max(store.sizes) // BLOCK)
        _total[(len(totals),)](sums, store.blocks.firsts, totals, most, _SUMS, num_warps=4)
    return totals


def judge_on_gpu(squares: Tensor, found_inf: Tensor | None, connections: int) -> tuple[Tensor, Tensor]:
    """Whether a step with these sums of squares can be learned from, and what the mask gradient is divided by:
    `_healthy` of learning.py, `global_scale` and `divisor` of method.py."""
    healthy, divisor = torch.empty((), dtype=torch.bool, device=squares.device), squares.new_empty(())
    with torch.cuda.device_of(squares):
        _judge[(1,)](
            squares, len(squares), found_inf, healthy.view(torch.uint8), divisor, float(connections), EPSILON, _SUMS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return healthy, divisor


def descend_on_gpu_(
    store: Store,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    *,
    unscale: Tensor | None,
    divisor: Tensor | None,
    healthy: Tensor,
    learning_rate: Tensor,
    decay: float,
    anchor: Tensor | float | None,
    cap: Tensor | None,
    removed_gradient: float,
) -> None:
    """Update the mask variables, which go back to |w̃| by the share `anchor`, damp gradients of removed weights, leave w̃
    in the parameters."""
    varying = isinstance(anchor, Tensor)
    with torch.cuda.device_of(store.mask):
        for grid, first, these in _launches(store):
            some, present = _gradients(gradients, these)
            _descend[grid](
                some,
                _filled(parameters, these),
                store.dense,
                store.mask_variable,
                store.mask.view(torch.uint8),
                store.blocks.table,
                first,
                present,
                unscale,
                divisor,
                healthy.view(torch.uint8),
                learning_rate,
                decay if decay else None,
                anchor if varying else None,
                None if varying else anchor,
                cap,
                removed_gradient if removed_gradient != 1.0 else None,
                store.blocks.multiple,
                BLOCK,
                **_LAUNCH,
            )


def show_on_gpu_(store: Store, parameters: Sequence[Tensor]) -> None:
    """Keep what the parameters hold as w̃, unless masks are frozen, and leave w = w̃ ⊙ m in them."""
    with torch.cuda.device_of(store.mask):
        for grid, first, these in _launches(store):
            _show[grid](
                _filled(parameters, these),
                None if store.frozen else store.dense,
                store.mask.view(torch.uint8),
                store.blocks.table,
                first,
                store.blocks.multiple,
                BLOCK,
                **_LAUNCH,
            )


def _launches(store: Store) -> Iterator[tuple[tuple[int], int, range]]:
    """Grid, first block and tensors of each launch."""
    for start in range(0, len(store.sizes), TOGETHER):
        these = range(start, min(start + TOGETHER, len(store.sizes)))
        first, end = store.blocks.first[start], store.blocks.first[these.stop]
        if end > first:
            yield (end - first,), first, these


def _filled(tensors: Sequence[Tensor], these: range) -> tuple[Tensor, ...]:
    return _to_a_power_of_two([tensors[index] for index in these])


def _gradients(gradients: Sequence[Tensor | None], these: range) -> tuple[tuple[Tensor, ...], int]:
    """The gradients, with others in place of those that are not there, and a bit for each that is."""
    some = [gradients[index] for index in these]
    present = sum(1 << number for number, gradient in enumerate(some) if gradient is not None)
    any_one = next(gradient for gradient in gradients if gradient is not None)
    return _to_a_power_of_two([any_one if gradient is None else gradient for gradient in some]), present


def _to_a_power_of_two(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """The last ones for nothing, so that few kernels serve any number of tensors."""
    length = 1 << (len(tensors) - 1).bit_length()
    return tuple(tensors + tensors[:1] * (length - len(tensors)))
