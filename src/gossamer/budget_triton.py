# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"
"""The exact budget on CUDA GPUs in six kernels: a fused form of the digit-by-digit search in budget.py.

It handles float32 values, one row per network, without costs and in one process, and gives bitwise the same result.
Four rounds of `_count` examine a few bits of the ordered keys each. Every program first finds, in the histogram of the
previous round, the bin in which the budget runs out. It then adds those of its values that share the digits found so
far to the histogram of the next digit. If only some of the ties at the cut are kept (the earliest), they are counted
block by block. Finally `_apply` writes the masks and the lowered mask variables in one pass.

Each program repeats the search for the bin: for ResNet-20, a separate kernel for it took 1.5 µs, and a kernel that
counts takes 2.5. Triton's histogram of a block takes several instructions per value for every 32 bins, so the first two
digits, in which most values take part, are short. Later, blocks contain only a few of the values, which are counted one
by one.
"""

# ruff: noqa: SIM108 - the branches on `digit` are taken when a kernel is compiled
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_DIGITS = ((25, 7), (18, 7), (9, 9), (0, 9))  # lowest bit and width of each
_BINS = tl.constexpr(512)  # of the widest digit
_FEW = tl.constexpr(128)  # at most this many values of a block are counted one by one
_TOGETHER = 256  # blocks whose ties are added up together, and protected values of a program
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _keys(values):
    """Integers that sort like the floating-point values."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _found(histograms, budgets, states, digit: tl.constexpr, width: tl.constexpr):
    """The digits found so far of the key at which the budget runs out, as a number, and the remaining budget there.

    Both are stored in `states` for the next round.
    """
    row, rows = tl.program_id(1), tl.num_programs(1)
    bins = tl.arange(0, 1 << width)
    counts = tl.load(histograms + (digit * rows + row) * _BINS + bins)
    if digit == 0:
        left = tl.load(budgets + row)
    else:
        before = states + ((digit - 1) * rows + row) * 2
        left = tl.load(before + 1)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    chosen = tl.maximum(tl.sum(((above + counts).to(tl.int64) > left).to(tl.int32), 0) - 1, 0)
    left -= tl.sum(tl.where(bins == chosen, above, 0), 0)
    if digit == 0:
        prefix = (chosen - (1 << (width - 1))).to(tl.int64)  # the highest digit carries the sign
    else:
        prefix = (tl.load(before) << width) + chosen
    here = states + (digit * rows + row) * 2
    tl.store(here, prefix, mask=tl.program_id(0) == 0)
    tl.store(here + 1, left, mask=tl.program_id(0) == 0)
    return prefix.to(tl.int32), left


@triton.jit
def _count(
    values,
    histograms,
    budgets,
    states,
    size,
    digit: tl.constexpr,
    shift: tl.constexpr,
    width: tl.constexpr,
    width_before: tl.constexpr,
    block: tl.constexpr,
):
    row, rows = tl.program_id(1), tl.num_programs(1)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
    bin_ = (keys >> shift) & ((1 << width) - 1)
    if digit == 0:
        bin_ = bin_ ^ (1 << (width - 1))
    else:
        prefix, _ = _found(histograms, budgets, states, digit - 1, width_before)
        inside = inside & ((keys >> (shift + width)) == prefix)
    histogram = histograms + (digit * rows + row) * _BINS
    found = tl.sum(inside.to(tl.int32), 0)
    if digit == 0 or found > _FEW:
        bins = tl.arange(0, 1 << width)
        counts = tl.histogram(bin_, 1 << width, mask=inside)
        tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")
    elif found > 0:
        tl.atomic_add(histogram + bin_, 1, mask=inside, sem="relaxed")


@triton.jit
def _count_ties(
    values, histograms, budgets, states, ties, size, digit: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(1)
    cut, left = _found(histograms, budgets, states, digit, width)
    if left > 0:  # otherwise none of them is kept
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < size
        keys = _keys(tl.load(values + row.to(tl.int64) * size + place, mask=inside, other=0.0))
        tied = inside & (keys == cut)
        tl.store(ties + row * tl.num_programs(0) + tl.program_id(0), tl.sum(tied.to(tl.int32), 0))


@triton.jit
def _apply(values, mask, budgets, state, ties, thresholds, flips, size, block: tl.constexpr, together: tl.constexpr):
    row = tl.program_id(1)
    start = row.to(tl.int64) * size
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    old = tl.load(values + start + place, mask=inside, other=0.0)
    before = tl.load(mask + start + place, mask=inside, other=0) != 0
    keys = _keys(old)
    cut = tl.load(state + row * 2).to(tl.int32)
    left = tl.load(state + row * 2 + 1)
    fits = tl.load(budgets + row) >= size
    kept = (keys > cut) | fits
    if left > 0:
        earlier = tl.zeros((together,), tl.int32)
        for first in range(0, tl.program_id(0), together):
            blocks = first + tl.arange(0, together)
            here = ties + row * tl.num_programs(0) + blocks
            earlier += tl.load(here, mask=blocks < tl.program_id(0), other=0)
        tied = inside & (keys == cut)
        rank = tl.sum(earlier, 0) + tl.cumsum(tied.to(tl.int32), 0)
        kept = kept | (tied & (rank <= left))
    bits = tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut)
    threshold = tl.where(fits, 0.0, bits.to(tl.float32, bitcast=True))
    threshold = tl.where(
        threshold == float("-inf"), 0.0, threshold
    )  # only weights dropped before are at minus infinity
    lowered = old - threshold
    new = tl.where(kept, tl.maximum(lowered, _SMALLEST), tl.minimum(lowered, 0.0))
    tl.store(values + start + place, new, mask=inside)
    tl.store(mask + start + place, kept.to(tl.uint8), mask=inside)
    tl.atomic_add(flips + row, tl.sum((inside & (kept != before)).to(tl.int32), 0), sem="relaxed")
    tl.store(thresholds + row, threshold, mask=tl.program_id(0) == 0)


@triton.jit
def _lower(values, places, old, thresholds, size, count, block: tl.constexpr):
    """Restore the protected values of each row, lowered by the threshold but positive."""
    row = tl.program_id(1)
    each = tl.program_id(0) * block + tl.arange(0, block)
    inside = each < count
    place = tl.load(places + row * count + each, mask=inside, other=0)
    lowered = tl.load(old + row * count + each, mask=inside, other=0.0) - tl.load(thresholds + row)
    tl.store(values + row.to(tl.int64) * size + place, tl.maximum(lowered, _SMALLEST), mask=inside)


def meet_budgets_on_gpu_(values: Tensor, mask: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
    """`meet_budgets_` for contiguous float32 matrices on a CUDA device. Returns the threshold of each row and the
    number of its masks that changed."""
    rows, size = values.shape
    blocks, bins = triton.cdiv(size, _BLOCK), _BINS.value
    with torch.cuda.device_of(values):
        counters = torch.zeros(len(_DIGITS) * rows * bins + rows, dtype=torch.int32, device=values.device)
        flips = counters[-rows:]
        states = torch.empty(len(_DIGITS), rows, 2, dtype=torch.int64, device=values.device)
        width_before = 0
        for digit, (shift, width) in enumerate(_DIGITS):
            _count[(blocks, rows)](
                values, counters, budgets, states, size, digit, shift, width, width_before, _BLOCK, num_warps=8
            )
            width_before = width
        ties = torch.empty(rows, blocks, dtype=torch.int32, device=values.device)
        last = len(_DIGITS) - 1
        _count_ties[(blocks, rows)](
            values, counters, budgets, states, ties, size, last, width_before, _BLOCK, num_warps=8
        )
        thresholds = torch.empty(rows, device=values.device)
        _apply[(blocks, rows)](
            values,
            mask.view(torch.uint8),
            budgets,
            states[last],
            ties,
            thresholds,
            flips,
            size,
            _BLOCK,
            _TOGETHER,
            num_warps=8,
        )
    return thresholds, flips


def lower_on_gpu_(values: Tensor, protected: Tensor, kept: Tensor, thresholds: Tensor) -> None:
    """`_lower_` of budget.py for the rows of such a matrix, lowered by `thresholds`."""
    rows, count = protected.shape
    with torch.cuda.device_of(values):
        grid = (triton.cdiv(count, _TOGETHER), rows)
        _lower[grid](values, protected, kept, thresholds, values.shape[1], count, _TOGETHER, num_warps=4)
