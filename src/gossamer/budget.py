"""Exact connectivity decay: the λ1 with which exactly as many weights are kept as the budget allows.

Connectivity decay lowers every mask variable by the same amount, so a step of it moves one common threshold. Hence λ1
is the Lagrange multiplier of "Σ m ≤ budget" and can be solved for: it is an order statistic of all the mask variables.
If weight i costs c_i (its multiply-adds), the decay is λ1·c_i, and the order is that of m̃_i / c_i.

`meet_budgets_` lowers the mask variables in place by the solved threshold and writes the masks. It guarantees the count
for any input: the longest prefix in the order of m̃/c that fits the budget is kept, ties are broken by position, kept
mask variables end up positive, and pruned ones at or below zero.

There are two exact ways to find the threshold. A CPU brackets it, using the thresholds of earlier steps or a sample;
one pass over the values then counts them and collects those inside the bracket. An accelerator, or a group of processes
that share the values, finds it digit by digit from histograms of up to 2,048 bins. That needs no sort and no host
synchronization (so it can be captured in a CUDA graph), and processes exchange only the histograms. Temporary memory is
about 1 % of the values on a CPU and at most 40 bytes per weight on an accelerator; with costs up to 52 on either.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.sharding import of_all_processes

Array = npt.NDArray[Any]

_FAST_BINS = 12_288  # 32-bit counters in 48 KiB
_SAMPLE = 1 << 13  # sample size for bracketing the threshold; up to eight times as many for large inputs
_LARGE = 1 << 22  # tensors up to this size have room for temporary memory
_CHUNK = 1 << 17  # weights per pass on a CPU: 512 KiB, which fits the cache


@dataclass(frozen=True, eq=False)
class Costs:
    """The cost of one weight of each tensor, along the vector of all weights."""

    count: int  # weights in total
    sizes: Tensor  # weights in each tensor
    prices: Tensor  # the distinct costs
    kinds: Tensor  # for each tensor, the index of its price

    @classmethod
    def of(cls, sizes: Sequence[int], each: Sequence[int], device: torch.device) -> "Costs":
        """Costs from the number of weights in each tensor and the cost of one weight of each."""
        prices = sorted(set(each))
        kinds = [prices.index(cost) for cost in each]
        return cls(
            count=sum(sizes),
            sizes=torch.tensor(sizes, device=device),
            prices=torch.tensor(prices, device=device),
            kinds=torch.tensor(kinds, device=device),
        )

    def of_tensors(self) -> Tensor:
        return self.prices.index_select(0, self.kinds)

    def kind_of_weights(self) -> Tensor:
        return torch.repeat_interleave(self.kinds, self.sizes, output_size=self.count)


class Met(NamedTuple):
    """The outcome of meeting a budget."""

    threshold: Tensor  # what was subtracted: λ1 times the mask learning rate (with costs: per unit of cost), per row
    flips: Tensor  # masks that changed, per row


def meet_budgets_(
    mask_variables: Tensor,
    masks: Tensor,
    budgets: Tensor,
    protected: Tensor | None = None,
    *,
    costs: Costs | None = None,
    group: dist.ProcessGroup | None = None,
    reach: Sequence[float] | None = None,
) -> Met:
    """Lower `mask_variables` in place so that exactly `budgets` weights (or cost) are kept in each row; fill `masks`.

    Each row is a separate network with its own budget. The weights at the indices `protected` of each row are kept
    whatever their value; indices may repeat. `reach`, one number per row, is a guess of the largest threshold: a good
    guess makes a CPU faster, and the outcome does not depend on it.
    """
    if costs is None and group is None and _has_kernels(mask_variables):
        return Met(*_meet_with_kernels_(mask_variables, masks, budgets, protected))
    kept = _raise_(mask_variables, protected)
    if costs is None and group is None and on_cpu(mask_variables):
        reaches = [0.0] * len(masks) if reach is None else reach
        rows = zip(mask_variables, masks, budgets.numpy(), reaches, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are values like any other, as in torch
            found = [_lower_by_bracket_(values, mask, int(budget), near) for values, mask, budget, near in rows]
        thresholds = torch.stack([threshold for threshold, _ in found])
        flips = torch.stack([changed for _, changed in found])
        decay = thresholds[:, None]
    else:
        thresholds, decay, flips = _lower_rows_by_digits_(mask_variables, masks, budgets, costs, group)
    if protected is not None:
        _lower_(mask_variables, protected, kept, decay if decay.shape[1] == 1 else decay.gather(1, protected))
    return Met(thresholds, flips)


def _raise_(values: Tensor, protected: Tensor | None) -> Tensor:
    """Set the protected values of each row to infinity, so that they are kept. Returns the old values."""
    if protected is None:
        return values.new_empty(0)
    kept = values.gather(-1, protected)
    values.scatter_(-1, protected, torch.inf)
    return kept


def _lower_(values: Tensor, protected: Tensor, kept: Tensor, decay: Tensor) -> None:
    """Undo `_raise_`: restore the protected values, lowered like all others but positive."""
    values.scatter_(-1, protected, (kept - decay).clamp_min_(torch.finfo(values.dtype).tiny))


# --- one process, CPU ---


def _lower_by_bracket_(values: Tensor, mask: Tensor, keep: int, reach: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the threshold and how many masks changed."""
    array, kept = values.numpy(), mask.numpy()
    if keep >= len(array):
        # All weights are kept, even those whose mask variable the loss has pushed to zero or below.
        values.clamp_min_(torch.finfo(values.dtype).tiny)
        flips = len(kept) - int(np.count_nonzero(kept))
        mask.fill_(True)
        return values.new_zeros(()), torch.tensor(flips, device=values.device)
    threshold, above = _largest_dropped(array, keep, reach)
    missing = keep - above
    if threshold == -np.inf:
        # All weights to drop are already at minus infinity: nothing has to be lowered.
        now = array > threshold
        now[_first_equal(array, -np.inf, missing)] = True
        flips = int(np.count_nonzero(now != kept))
        np.maximum(array, torch.finfo(values.dtype).tiny, out=array, where=now)
        kept[:] = now
        return values.new_zeros(()), torch.tensor(flips, device=values.device)
    if missing:
        # Weights tied with the first dropped one: the earliest of them are kept.
        ties = _first_equal(array, float(threshold), missing)
        kept_before = int(np.count_nonzero(kept[ties]))
        kept[ties] = False
    flips = 0
    changed = np.empty(_CHUNK, dtype=bool)
    for start in range(0, len(array), _CHUNK):
        part, masks = array[start : start + _CHUNK], kept[start : start + _CHUNK]
        differs = changed[: len(masks)]
        np.copyto(differs, masks)
        np.subtract(part, threshold, out=part)
        np.greater(part, 0, out=masks)
        flips += int(np.count_nonzero(np.logical_xor(differs, masks, out=differs)))
    if missing:
        array[ties] = torch.finfo(values.dtype).tiny
        kept[ties] = True
        flips += missing - kept_before
    return torch.from_numpy(threshold), torch.tensor(flips, device=values.device)


def _largest_dropped(array: Array, keep: int, reach: float) -> tuple[Array, int]:
    """The (keep + 1)-th largest value, and how many values are larger than it."""
    few = max(_SAMPLE, len(array) // 16)  # where thresholds are still large, the sample leaves fewer candidates
    found = _between(array, keep, -reach, reach, few) if reach > 0 else None
    # If the guess fails, use a sample; if the sample fails, use all values.
    found = found or _between(array, keep, *_bracket(array, keep), len(array))
    if found is None:
        array[np.isnan(array)] = -np.inf  # NaN comes last
    candidates, above = found or (array, 0)
    rank = len(candidates) - 1 - (keep - above)
    threshold = np.partition(candidates, rank)[rank]
    above += int(np.count_nonzero(candidates > threshold))
    return np.array(threshold), above


def _between(array: Array, keep: int, low: float, high: float, most: int) -> tuple[Array, int] | None:
    """The values in (low, high] and the number of larger ones; None if the (keep + 1)-th largest is not among them, or
    if there are more than `most`."""

    above, found, total = 0, list[Array](), 0
    buffers = np.empty((2, _CHUNK), dtype=bool)
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK]
        inside, over_high = buffers[:, : len(chunk)]
        np.greater(chunk, low, out=inside)
        np.greater(chunk, high, out=over_high)
        above += int(np.count_nonzero(over_high))
        np.not_equal(inside, over_high, out=inside)
        found.append(chunk[_true_positions(inside)])
        total += len(found[-1])
        if total > most:
            return None
    candidates = np.concatenate(found)
    return (candidates, above) if above <= keep < above + len(candidates) else None


def _true_positions(chosen: Array) -> Array:
    """The indices where a mask is True. A sparse mask is first searched eight bytes at a time."""
    if len(chosen) % 8:
        return np.flatnonzero(chosen)
    words = np.flatnonzero(chosen.view(np.uint64) != 0)
    if 64 * len(words) > len(chosen):
        return np.flatnonzero(chosen)
    near: Array = (8 * words[:, None] + np.arange(8)).ravel()
    return near[chosen[near]]


def _first_equal(array: Array, value: float, count: int) -> Array:
    """The first `count` positions that hold the value."""
    found: list[Array] = []
    for start in range(0, len(array), _CHUNK):
        found.append(np.flatnonzero(array[start : start + _CHUNK] == value) + start)
        count -= len(found[-1])
        if count <= 0:
            break
    positions = np.concatenate(found)
    return positions[: len(positions) + min(count, 0)]


def _sample(length: int, size: int) -> Array:
    """This many positions, always the same. At a fixed distance they could all lie in the same columns of a matrix."""
    starts = np.linspace(0, length, size, endpoint=False, dtype=np.int64)
    places: Array = starts + np.random.default_rng(0).integers(length // size, size=size)
    return places


def _bracket(array: Array, keep: int) -> tuple[float, float]:
    """Two values that very probably enclose the threshold, estimated from a sample."""
    if len(array) <= _SAMPLE:
        return -np.inf, np.inf
    size = min(8 * _SAMPLE, max(_SAMPLE, len(array) // 512))
    sample = np.sort(array[_sample(len(array), size)])[::-1]
    share = keep / len(array)
    position = share * len(sample)
    margin = 4 * (position * (1 - share)) ** 0.5 + 8
    first, last = int(position - margin), int(position + margin) + 1
    high = float(sample[first]) if first >= 0 else np.inf
    low = float(sample[last]) if last < len(sample) else -np.inf
    return low, high


def strongest(values: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest values of each row."""
    if not on_cpu(values) or values.shape[1] <= _LARGE:
        return values.topk(count, dim=1).indices
    # Not by topk, which takes 16 bytes for each value on a CPU.
    return torch.stack([torch.from_numpy(_positions_of_largest(row.numpy(), count)) for row in values])


def _positions_of_largest(array: Array, count: int) -> Array:
    if count >= len(array):
        return np.arange(len(array))
    threshold, above = _largest_dropped(array, count, 0.0)
    chunks = range(0, len(array), _CHUNK)
    larger = [np.flatnonzero(array[start : start + _CHUNK] > threshold) + start for start in chunks]
    ties = [_first_equal(array, float(threshold), count - above)] if count > above else []
    return np.concatenate([*larger, *ties])


# --- accelerators, several processes, several networks ---


def _meet_with_kernels_(
    values: Tensor, masks: Tensor, budgets: Tensor, protected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the threshold of each row and the number of its masks that changed."""
    from gossamer.budget_triton import lower_on_gpu_, meet_budgets_on_gpu_  # needs Triton, which comes with GPU builds

    kept = _raise_(values, protected)
    thresholds, flips = meet_budgets_on_gpu_(values, masks, budgets)
    if protected is not None:
        lower_on_gpu_(values, protected, kept, thresholds)
    return thresholds, flips


def on_cpu(matrix: Tensor) -> bool:
    """On a CPU, reading a value needs no synchronization, and rows are faster one by one."""
    return matrix.device.type == "cpu"


def _lower_rows_by_digits_(
    values: Tensor, mask: Tensor, budgets: Tensor, costs: Costs | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the threshold of each row, the decay of its values (one number, or one per value), and the number of its
    masks that changed."""
    before = mask.clone()
    smallest = torch.finfo(values.dtype).tiny
    if costs is None:
        order, cost, kind, prices = values, None, None, budgets.new_ones(1)
    else:
        prices, kind = costs.prices, costs.kind_of_weights()
        cost = prices[kind]
        order = torch.where(cost > 0, values / cost, torch.inf)  # weights that cost nothing are never dropped
    keys = _ordered_keys(order)
    cut, remaining, fits = _first_not_affordable(keys, budgets[:, None], kind, prices, group)
    tied = keys == cut
    # Of the weights tied at the cut, the earliest are kept as far as the budget allows.
    spent = tied.int() if cost is None else torch.where(tied, cost, 0)
    kept_ties = tied & (spent.cumsum(1) + _spent_by_earlier_processes(spent.sum(1), group) <= remaining)
    torch.logical_or(keys > cut, kept_ties | fits, out=mask)
    threshold = torch.where(fits, 0.0, _value_of_key(cut, values.dtype))
    threshold = torch.where(
        threshold == -torch.inf, 0.0, threshold
    )  # only weights dropped before are at minus infinity
    decay = threshold if cost is None else threshold * cost
    lowered = values - decay
    # Rounding (and ties) may leave a value on the wrong side of zero: the mask decides.
    torch.where(mask, lowered.clamp_min(smallest), lowered.clamp_max(0.0), out=values)
    return threshold[:, 0], decay, torch.count_nonzero(mask != before, dim=1)


def _has_kernels(values: Tensor) -> bool:
    return values.is_cuda and values.dtype == torch.float32 and values.is_contiguous() and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton, for the CUDA kernels, is available."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def _first_not_affordable(
    keys: Tensor, budget: Tensor, kind: Tensor | None, prices: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the key at which its budget runs out, the remaining budget there, and whether all weights fit.

    Examines a few bits of the keys at a time, from the highest: a histogram shows the bin in which the budget runs out,
    and the next round refines that bin.
    """
    bits = 8 * keys.element_size()
    most = _digit_bits(keys.shape[0] * prices.numel())
    prefix = torch.zeros_like(keys[:, :1])
    remaining, fits, shift = budget, None, bits
    while shift > 0:
        width = min(most, shift)
        shift -= width
        digit = keys >> shift
        if fits is None:
            digit = digit + (1 << (width - 1))  # the highest digit carries the sign
        else:
            digit = torch.where((keys >> (shift + width)) == prefix, digit & ((1 << width) - 1), -1)
        cost = _cost_histogram(digit, 1 << width, kind, prices, group)
        at_most = cost.cumsum(1)
        above = at_most[:, -1:] - at_most  # the cost of all higher bins
        bin_ = (above + cost > remaining).sum(1, keepdim=True).sub_(1).clamp_min_(0)
        remaining = remaining - above.gather(1, bin_)
        if fits is None:
            fits = at_most[:, -1:] <= budget
            prefix = (bin_ - (1 << (width - 1))).to(keys.dtype)
        else:
            prefix = ((prefix << width) + bin_).to(keys.dtype)
    assert fits is not None
    return prefix, remaining, fits


def _digit_bits(histograms: int) -> int:
    """The number of bits with which all histograms fit the shared memory of a GPU multiprocessor."""
    return max(4, min(11, (_FAST_BINS // histograms).bit_length() - 1))


def _cost_histogram(
    digit: Tensor, bins: int, kind: Tensor | None, prices: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """The cost in each bin, per row; digits of -1 are ignored."""
    rows, kinds = digit.shape[0], prices.numel()
    count = rows * kinds * bins
    if rows * kinds > 1:
        histogram = torch.arange(rows, device=digit.device, dtype=digit.dtype)[:, None] * kinds
        if kind is not None:
            histogram = histogram + kind
        digit = torch.where(digit >= 0, digit + histogram * bins, -1)
    flat = digit.flatten()
    if flat.device.type == "cpu":
        counts = torch.bincount(flat + 1, minlength=count + 1)[1:]
    else:
        counts = torch.histc(flat.int(), bins=count, min=0, max=count).long()  # exact for integers
    cost = counts.view(rows, kinds, bins)
    cost = cost[:, 0] if kind is None else (cost * prices[:, None]).sum(1)
    if group is not None:
        dist.all_reduce(cost, group=group)
    return cost


def _ordered_keys(values: Tensor) -> Tensor:
    """Integers that sort like the floating-point values."""
    positive_zeros = values + 0.0
    bits = positive_zeros.view(torch.int32 if values.element_size() == 4 else torch.int64)
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _value_of_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(key < 0, key ^ torch.iinfo(key.dtype).max, key).view(dtype)


def _spent_by_earlier_processes(spent: Tensor, group: dist.ProcessGroup | None) -> Tensor | int:
    if group is None:
        return 0
    return of_all_processes(spent, group)[: dist.get_rank(group)].sum()
