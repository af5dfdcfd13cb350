# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""The exact budget on CUDA GPUs in a dozen kernels: what budget.py does digit by digit, fused.

The same answer to the last bit: float32 values, a row for each network, no costs, one process. Four rounds look at some
bits of the ordered keys each: `_count` makes a histogram of the digit among the values that share the digits found so
far, `_choose` picks the bin in which the budget runs out. Then ties at the cut are counted block by block, if some of
them are kept (the earliest), and `_apply` writes masks and lowered mask variables in one pass.

Triton's histogram of a block takes several instructions a value for every 32 bins, so the first two digits, which most
values have a part in, are short. Later on, blocks have only a few of the values, and these are counted one by one.
"""

# ruff: noqa: SIM108 - the branches on `first` are taken when a kernel is compiled
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_DIGITS = ((25, 7), (18, 7), (9, 9), (0, 9))  # lowest bit and width of each
_BINS = tl.constexpr(512)  # of the widest
_FEW = tl.constexpr(128)  # values of a block that are counted one by one
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _keys(values):
    """Integers in the order of the floating-point values."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count(
    values, histogram, state, size, shift: tl.constexpr, width: tl.constexpr, first: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
    digit = (keys >> shift) & ((1 << width) - 1)
    if first:
        digit = digit ^ (1 << (width - 1))  # the highest digit carries the sign
    else:
        prefix = tl.load(state + row * 2).to(tl.int32)
        inside = inside & ((keys >> (shift + width)) == prefix)
    found = tl.sum(inside.to(tl.int32), 0)
    if first or found > _FEW:
        bins = tl.arange(0, 1 << width)
        counts = tl.histogram(digit, 1 << width, mask=inside)
        tl.atomic_add(histogram + row * _BINS + bins, counts, mask=counts > 0, sem="relaxed")
    elif found > 0:
        tl.atomic_add(histogram + row * _BINS + digit, 1, mask=inside, sem="relaxed")


@triton.jit
def _choose(histogram, budgets, state, width: tl.constexpr, first: tl.constexpr):
    """state: the digits found so far as a number, and what is left of the budget; prefix and left of each row."""
    row = tl.program_id(0)
    bins = tl.arange(0, 1 << width)
    counts = tl.load(histogram + row * _BINS + bins).to(tl.int64)
    if first:
        left = tl.load(budgets + row)
    else:
        left = tl.load(state + row * 2 + 1)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    chosen = tl.maximum(tl.sum((above + counts > left).to(tl.int32), 0) - 1, 0)
    left -= tl.sum(tl.where(bins == chosen, above, 0), 0)
    if first:
        prefix = (chosen - (1 << (width - 1))).to(tl.int64)
    else:
        prefix = (tl.load(state + row * 2) << width) + chosen
    tl.store(state + row * 2, prefix)
    tl.store(state + row * 2 + 1, left)


@triton.jit
def _count_ties(values, state, ties, size, block: tl.constexpr):
    row = tl.program_id(1)
    here = ties + row * tl.num_programs(0) + tl.program_id(0)
    if tl.load(state + row * 2 + 1) == 0:
        tl.store(here, 0)  # none of them is kept
    else:
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < size
        keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
        tied = inside & (keys == tl.load(state + row * 2).to(tl.int32))
        tl.store(here, tl.sum(tied.to(tl.int32), 0))


@triton.jit
def _apply(values, mask, budgets, state, ties, ties_so_far, thresholds, flips, size, block: tl.constexpr):
    row = tl.program_id(1)
    start = row.to(tl.int64) * size
    here = row * tl.num_programs(0) + tl.program_id(0)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    old = tl.load(values + start + place, mask=inside, other=0.0)
    before = tl.load(mask + start + place, mask=inside, other=0) != 0
    keys = _keys(old)
    cut = tl.load(state + row * 2).to(tl.int32)
    left = tl.load(state + row * 2 + 1)
    fits = tl.load(budgets + row) >= size
    tied = inside & (keys == cut)
    rank = tl.load(ties_so_far + here) - tl.load(ties + here) + tl.cumsum(tied.to(tl.int32), 0)
    kept = (keys > cut) | (tied & (rank <= left)) | fits
    bits = tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut)
    threshold = tl.where(fits, 0.0, bits.to(tl.float32, bitcast=True))
    threshold = tl.where(threshold == float("-inf"), 0.0, threshold)  # only what was dropped before lies there
    lowered = old - threshold
    new = tl.where(kept, tl.maximum(lowered, _SMALLEST), tl.minimum(lowered, 0.0))
    tl.store(values + start + place, new, mask=inside)
    tl.store(mask + start + place, kept.to(tl.uint8), mask=inside)
    tl.store(flips + here, tl.sum((inside & (kept != before)).to(tl.int32), 0))
    tl.store(thresholds + row, threshold, mask=tl.program_id(0) == 0)


def meet_budgets_on_gpu_(values: Tensor, mask: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
    """`meet_budgets_` for contiguous float32 matrices on a CUDA device. Returns the threshold of each row, and how many
    of its masks have changed."""
    rows, size = values.shape
    blocks = triton.cdiv(size, _BLOCK)
    with torch.cuda.device_of(values):
        histograms = torch.zeros(len(_DIGITS), rows, _BINS.value, dtype=torch.int32, device=values.device)
        state = torch.empty(rows, 2, dtype=torch.int64, device=values.device)
        for histogram, (shift, width) in zip(histograms, _DIGITS, strict=True):
            first = shift + width == 32
            _count[(blocks, rows)](values, histogram, state, size, shift, width, first, _BLOCK, num_warps=8)
            _choose[(rows,)](histogram, budgets, state, width, first, num_warps=4)
        ties = torch.empty(rows, blocks, dtype=torch.int32, device=values.device)
        _count_ties[(blocks, rows)](values, state, ties, size, _BLOCK, num_warps=8)
        so_far = ties.cumsum(1, dtype=torch.int32)
        thresholds = torch.empty(rows, device=values.device)
        flips = torch.empty_like(ties)
        _apply[(blocks, rows)](
            values,
            mask.view(torch.uint8),
            budgets,
            state,
            ties,
            so_far,
            thresholds,
            flips,
            size,
            _BLOCK,
            num_warps=8,
        )
    return thresholds, flips.sum(1)
