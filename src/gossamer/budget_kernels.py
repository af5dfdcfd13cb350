# mypy: disable-error-code="no-untyped-def, untyped-decorator, override"
"""The exact budget on CUDA GPUs in a dozen kernels: what budget.py does digit by digit, fused.

The same answer to the last bit: float32 values, a row for each network, no costs, one process. Four rounds look at
eight bits of the ordered keys each: `_count` makes a histogram of the digit among the values that share the digits
found so far, `_choose` picks the bin in which the budget runs out. Then ties at the cut are counted block by block, so
that the earliest of them can be kept, and `_apply` writes masks and lowered mask variables in one pass.
"""

# ruff: noqa: SIM108 - the branches on `shift` are taken when a kernel is compiled
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _keys(values):
    """Integers in the order of the floating-point values."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count(values, histogram, state, size, shift: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(1)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
    digit = (keys >> shift) & 255
    if shift == 24:
        digit = digit ^ 128  # the highest digit carries the sign
    else:
        prefix = tl.load(state + row * 2).to(tl.int32)
        inside = inside & ((keys >> (shift + 8)) == prefix)
    counts = tl.histogram(tl.where(inside, digit, 256), 512)
    bins = tl.arange(0, 512)
    tl.atomic_add(histogram + row * 256 + bins, counts, mask=(bins < 256) & (counts > 0))


@triton.jit
def _choose(histogram, budgets, state, size, shift: tl.constexpr):
    """state: the digits found so far as a number, and what is left of the budget; prefix and left of each row."""
    row = tl.program_id(0)
    bins = tl.arange(0, 256)
    counts = tl.load(histogram + row * 256 + bins).to(tl.int64)
    if shift == 24:
        left = tl.load(budgets + row)
    else:
        left = tl.load(state + row * 2 + 1)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    chosen = tl.maximum(tl.sum((above + counts > left).to(tl.int32), 0) - 1, 0)
    left -= tl.sum(tl.where(bins == chosen, above, 0), 0)
    if shift == 24:
        prefix = (chosen - 128).to(tl.int64)
    else:
        prefix = (tl.load(state + row * 2) << 8) + chosen
    tl.store(state + row * 2, prefix)
    tl.store(state + row * 2 + 1, left)


@triton.jit
def _count_ties(values, state, ties, size, block: tl.constexpr):
    row = tl.program_id(1)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
    tied = inside & (keys == tl.load(state + row * 2).to(tl.int32))
    tl.store(ties + row * tl.num_programs(0) + tl.program_id(0), tl.sum(tied.to(tl.int32), 0))


@triton.jit
def _apply(values, mask, budgets, state, ties_before, thresholds, size, block: tl.constexpr):
    row = tl.program_id(1)
    start = row.to(tl.int64) * size
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    old = tl.load(values + start + place, mask=inside, other=0.0)
    keys = _keys(old)
    cut = tl.load(state + row * 2).to(tl.int32)
    left = tl.load(state + row * 2 + 1)
    fits = tl.load(budgets + row) >= size
    tied = inside & (keys == cut)
    rank = tl.load(ties_before + row * tl.num_programs(0) + tl.program_id(0)) + tl.cumsum(tied.to(tl.int32), 0)
    kept = (keys > cut) | (tied & (rank <= left)) | fits
    bits = tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut)
    threshold = tl.where(fits, 0.0, bits.to(tl.float32, bitcast=True))
    threshold = tl.where(threshold == float("-inf"), 0.0, threshold)  # only what was dropped before lies there
    lowered = old - threshold
    new = tl.where(kept, tl.maximum(lowered, _SMALLEST), tl.minimum(lowered, 0.0))
    tl.store(values + start + place, new, mask=inside)
    tl.store(mask + start + place, kept, mask=inside)
    tl.store(thresholds + row, threshold, mask=tl.program_id(0) == 0)


def meet_budgets_on_gpu_(values: Tensor, mask: Tensor, budgets: Tensor) -> Tensor:
    """`meet_budgets_` for contiguous float32 matrices on a CUDA device. Returns the threshold of each row."""
    rows, size = values.shape
    blocks = triton.cdiv(size, _BLOCK)
    histograms = torch.zeros(4, rows, 256, dtype=torch.int32, device=values.device)
    state = torch.empty(rows, 2, dtype=torch.int64, device=values.device)
    for round_, shift in enumerate((24, 16, 8, 0)):
        _count[(blocks, rows)](values, histograms[round_], state, size, shift, _BLOCK, num_warps=8)
        _choose[(rows,)](histograms[round_], budgets, state, size, shift, num_warps=4)
    ties = torch.empty(rows, blocks, dtype=torch.int32, device=values.device)
    _count_ties[(blocks, rows)](values, state, ties, size, _BLOCK, num_warps=8)
    before = ties.cumsum(1, dtype=torch.int32) - ties
    thresholds = torch.empty(rows, device=values.device)
    _apply[(blocks, rows)](values, mask, budgets, state, before, thresholds, size, _BLOCK, num_warps=8)
    return thresholds
