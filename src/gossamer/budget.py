"""Exact connectivity decay: the λ1 that leaves exactly as many connections as the budget allows.

Connectivity decay lowers every mask variable by the same amount, so a step of it moves one common threshold. Hence λ1
is the Lagrange multiplier of "Σ m ≤ budget" and can be solved for: it is an order statistic of all the mask variables.
Where connection i costs c_i (its multiply-adds), the decay is λ1·c_i, and the order is that of m̃_i / c_i.

`meet_budget_` lowers the mask variables in place by the solved threshold and writes the masks. What it guarantees, for
any input, is the count: the longest prefix in the order of m̃/c that fits the budget is kept, equal values are kept in
the order of their position, kept mask variables end up positive and dropped ones at or below zero.

Two ways to find the threshold, both exact. On a CPU a sample brackets it and one pass over the values counts and
collects what lies in the bracket. On an accelerator, or when the values are spread over processes, digit by digit from
histograms of 2,048 bins: no sort, no host synchronisation (so it can be captured in a CUDA graph), and the histograms
are all that processes exchange. Temporary memory: one megabyte or so on the CPU, at most 26 bytes a connection on an
accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

Array = npt.NDArray[Any]

_DIGIT_BITS = 11
_CHUNK = 1 << 16  # connections looked at together on the CPU: 256 KiB, fits the cache


@dataclass(frozen=True, eq=False)
class Costs:
    """What one connection costs, tensor by tensor, along the vector of all connections."""

    count: int  # connections in all
    sizes: Tensor  # connections in each tensor
    prices: Tensor  # the distinct costs
    kinds: Tensor  # for each tensor, which of the prices is its

    @classmethod
    def of(cls, sizes: Sequence[int], each: Sequence[int], device: torch.device) -> "Costs":
        """From the number of connections in each tensor and the cost of one connection of each."""
        prices = sorted(set(each))
        kinds = [prices.index(cost) for cost in each]
        return cls(
            count=sum(sizes),
            sizes=torch.tensor(sizes, device=device),
            prices=torch.tensor(prices, device=device),
            kinds=torch.tensor(kinds, device=device),
        )

    def kind_of_connections(self) -> Tensor:
        return torch.repeat_interleave(self.kinds, self.sizes, output_size=self.count)


def meet_budget_(
    mask_variable: Tensor,
    mask: Tensor,
    budget: Tensor,
    *,
    protected: Tensor | None = None,
    costs: Costs | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Lower `mask_variable` in place so that exactly `budget` connections (or cost) are left; fill `mask`.

    Vectors over all connections; `budget` is an int64 scalar; the connections at the indices `protected` are kept
    whatever their value. Returns the threshold: λ1 times the mask learning rate (and, with costs, per unit of cost).
    """
    kept_values = None
    if protected is not None:
        kept_values = mask_variable[protected]
        mask_variable[protected] = torch.inf
    on_cpu = mask_variable.device.type == "cpu" and costs is None and group is None
    lower = _lower_by_bracket_ if on_cpu else _lower_by_digits_
    threshold, decay = lower(mask_variable, mask, budget, costs, group)
    if protected is not None and kept_values is not None:
        smallest = torch.finfo(mask_variable.dtype).tiny
        lowered = kept_values - (decay[protected] if decay.dim() else decay)
        mask_variable[protected] = lowered.clamp_min_(smallest)
    return threshold


# --- one process, CPU ---


def _lower_by_bracket_(
    values: Tensor, mask: Tensor, budget: Tensor, costs: Costs | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    keep = int(budget)
    if keep >= values.numel():
        # Everything stays, also what the loss has pushed to zero or below.
        values.clamp_min_(torch.finfo(values.dtype).tiny)
        mask.fill_(True)
        nothing = values.new_zeros(())
        return nothing, nothing
    threshold, above = _largest_dropped(values, keep)
    missing = keep - above
    if missing:
        # Connections tied with the first dropped one: the earliest of them are kept.
        ties = (values == threshold).nonzero().flatten()[:missing]
    values.sub_(threshold)
    if missing:
        values[ties] = torch.finfo(values.dtype).tiny
    torch.gt(values, 0, out=mask)
    return threshold, threshold


def _largest_dropped(values: Tensor, keep: int) -> tuple[Tensor, int]:
    """The (keep + 1)-th largest value, and how many values are larger than it."""
    array = values.numpy()
    low, high = _bracket(array, keep)
    above, inside = 0, []
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK]
        over_low, over_high = chunk > low, chunk > high
        above += int(np.count_nonzero(over_high))
        inside.append(chunk[np.flatnonzero(over_low ^ over_high)])
    candidates = np.concatenate(inside)
    if not above <= keep < above + len(candidates):
        candidates, above = array, 0  # the sample misled us: look at everything
    rank = len(candidates) - 1 - (keep - above)
    threshold = np.partition(candidates, rank)[rank]
    above += int(np.count_nonzero(candidates > threshold))
    return torch.from_numpy(np.array(threshold)), above


def _bracket(array: Array, keep: int) -> tuple[float, float]:
    """Two values that very probably enclose the threshold, from every n-th value."""
    if len(array) <= 1 << 20:
        return -np.inf, np.inf
    sample = np.sort(array[:: len(array) // (1 << 16)])[::-1]
    share = keep / len(array)
    position = share * len(sample)
    margin = 4 * (position * (1 - share)) ** 0.5 + 8
    first, last = int(position - margin), int(position + margin) + 1
    high = float(sample[first]) if first >= 0 else np.inf
    low = float(sample[last]) if last < len(sample) else -np.inf
    return low, high


# --- accelerators and several processes ---


def _lower_by_digits_(
    values: Tensor, mask: Tensor, budget: Tensor, costs: Costs | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    smallest = torch.finfo(values.dtype).tiny
    if costs is None:
        order, cost, kind, prices = values, None, None, budget.new_ones(1)
    else:
        prices, kind = costs.prices, costs.kind_of_connections()
        cost = prices[kind]
        order = torch.where(cost > 0, values / cost, torch.inf)  # what is free is never dropped
    keys = _ordered_keys(order)
    cut, left, fits = _first_not_affordable(keys, budget, kind, prices, group)
    tied = keys == cut
    # Of the connections tied at the cut the earliest are kept, as far as the budget reaches.
    spent = tied.long() if cost is None else torch.where(tied, cost, 0)
    kept_ties = tied & (spent.cumsum(0) + _spent_by_earlier_processes(spent.sum(), group) <= left)
    torch.logical_or(keys > cut, kept_ties | fits, out=mask)
    threshold = torch.where(fits, 0.0, _value_of_key(cut, values.dtype))
    decay = threshold if cost is None else threshold * cost
    lowered = values - decay
    # Rounding (and ties) may leave a value on the wrong side of zero: the mask decides.
    torch.where(mask, lowered.clamp_min(smallest), lowered.clamp_max(0.0), out=values)
    return threshold, decay


def _first_not_affordable(
    keys: Tensor, budget: Tensor, kind: Tensor | None, prices: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The key at which the budget runs out, what is left of the budget there, and whether everything fits.

    Looks at `_DIGIT_BITS` bits of the keys at a time, from the highest: a histogram says in which bin the budget runs
    out, and the next round looks into that bin.
    """
    bits = 8 * keys.element_size()
    prefix = torch.zeros((), dtype=keys.dtype, device=keys.device)
    left, fits, shift = budget, None, bits
    while shift > 0:
        width = min(_DIGIT_BITS, shift)
        shift -= width
        digit = keys >> shift
        if fits is None:
            digit = digit + (1 << (width - 1))  # the highest digit carries the sign
        else:
            digit = torch.where((keys >> (shift + width)) == prefix, digit & ((1 << width) - 1), -1)
        cost = _cost_histogram(digit, 1 << width, kind, prices, group)
        at_least = cost.flip(0).cumsum(0).flip(0)
        if fits is None:
            fits = at_least[0] <= budget
        bin_ = ((at_least > left).sum() - 1).clamp_min(0)
        left = left - (at_least[bin_] - cost[bin_])
        prefix = (prefix << width) + bin_ if shift + width < bits else bin_ - (1 << (width - 1))
        prefix = prefix.to(keys.dtype)
    assert fits is not None
    return prefix, left, fits


def _cost_histogram(
    digit: Tensor, bins: int, kind: Tensor | None, prices: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """The cost that lies in each bin; digits of -1 do not count."""
    rows = prices.numel()
    if kind is not None:
        digit = torch.where(digit >= 0, digit + kind * bins, -1)
    if digit.device.type == "cpu":
        counts = torch.bincount(digit + 1, minlength=rows * bins + 1)[1:]
    else:
        # histc counts in the type of its input: 32-bit integers, so exactly. It knows no 64-bit keys' digits.
        counts = torch.histc(digit.int(), bins=rows * bins, min=0, max=rows * bins).long()
    counts = (counts.view(rows, bins) * prices[:, None]).sum(0)
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


def _ordered_keys(values: Tensor) -> Tensor:
    """Integers in the order of the floating-point values."""
    positive_zeros = values + 0.0
    bits = positive_zeros.view(torch.int32 if values.element_size() == 4 else torch.int64)
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _value_of_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(key < 0, key ^ torch.iinfo(key.dtype).max, key).view(dtype)


def _spent_by_earlier_processes(spent: Tensor, group: dist.ProcessGroup | None) -> Tensor | int:
    if group is None:
        return 0
    everyone = spent.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, spent.reshape(1), group=group)
    return everyone[: dist.get_rank(group)].sum()
