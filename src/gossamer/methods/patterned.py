"""The budget of patterned masks: one mask variable per group, or N of M weights in every group.

Methods have one score per weight, as without a pattern, and `PatternBudget` takes the place of `GlobalBudget`.

Blocks, rows and filters. The score of a group is the mean of its weights' scores. The budget is met over groups, each
as expensive as its weights, and every weight gets the score and the mask of its group. From then on, the scores of a
group are equal, so the next step moves the group by the mean of ∂L/∂w ⊙ w̃ · σ'(m̃): this is gradient descent on one
mask variable per group, whose gradient is the sum over the group divided by the group's size. SCL takes this mean first
(`share_over_groups_`), so that its scale is that of the groups' gradients: the noise of single weights averages out in
large groups. With flops=, a group costs its multiply-adds.

N:M. Every weight has its own mask variable. The N largest of each group are never pruned, and the others share one
budget, which falls from all of them to none. So groups become constrained in the order of their weakest weights, and in
the end, exactly N of M are kept. The decay of a group stops where only N are left: it is the smaller of the common
threshold and the group's (N + 1)-th largest mask variable, which is the Lagrange multiplier of the group's own budget.
Only differences within the group matter from then on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gossamer.budget import Costs, Met
from gossamer.methods.base import Context, Layout
from gossamer.methods.budgets import Budget, GlobalBudget
from gossamer.patterns import NM, Block, Pattern, canonical
from gossamer.target import Target


def make_budget(
    context: Context[Any], score: Tensor, *, min_density: float | None = None, ramp: str = "cubic"
) -> Budget:
    """The budget of a method that supports patterns: a `PatternBudget` if the run has patterns."""
    kind = GlobalBudget if context.patterns is None else PatternBudget
    return kind(context, score, min_density=min_density, ramp=ramp)


def tied_groups(context: Context[Any]) -> list[tuple[int, Tensor]]:
    """The tensors whose groups are kept or pruned as a whole, and the columns of each group within the tensor."""
    patterns, layout = context.patterns or (), context.layout
    return [
        (index, _groups(layout, index, pattern).to(context.weights.device))
        for index, pattern in enumerate(patterns)
        if isinstance(pattern, Block)
    ]


def share_over_groups_(views: Sequence[Tensor], tied: Sequence[tuple[int, Tensor]]) -> None:
    """Give every weight the mean of its group. `views` are the tensors as (runs, *shape), dense in memory."""
    for index, groups in tied:
        view = views[index]
        flat = view.as_strided((len(view), groups.numel()), (view.stride(0), 1), view.storage_offset())
        columns = groups.flatten()
        means = flat.index_select(1, columns).view(len(view), *groups.shape).mean(2)
        flat.index_copy_(1, columns, means.repeat_interleave(groups.shape[1], dim=1))


class PatternBudget(Budget):
    """Keeps, in each row, the groups with the largest scores, and N of M weights in the N:M groups."""

    def __init__(
        self, context: Context[Any], score: Tensor, *, min_density: float | None = None, ramp: str = "cubic"
    ) -> None:
        patterns, layout, costs = context.patterns, context.layout, context.targets[0].costs
        assert patterns is not None
        self.score, self.mask = score, torch.ones_like(score, dtype=torch.bool)
        self.met = torch.full((len(score),), layout.count, device=score.device)
        self.costs = None if costs is None else Costs.of(layout.sizes, costs, score.device)
        fixed = [_Tensor.of(layout, index, each) for index, each in enumerate(patterns) if isinstance(each, NM)]
        others = [_Tensor.of(layout, index, each) for index, each in enumerate(patterns) if not isinstance(each, NM)]
        kept = sum(each.fixed for each in fixed)
        density = context.min_density if min_density is None else min_density
        self._tied: _TiedGroups | None = None
        self._pools: list[_Pool] = []
        if fixed:
            self._pools.append(_FixedGroups(context, score, fixed, ramp))
        if others:
            finals = [target.final - kept for target in context.targets]
            self._tied = _TiedGroups(context, score, others, finals, density, ramp)
            self._pools.append(self._tied)

    def meet_(self, finite: Tensor | None = None) -> Met:
        return self._meet_(lambda budget: budget.meet_(finite))

    def cut_(self) -> Met:
        return self._meet_(GlobalBudget.cut_)

    def _meet_(self, act: Callable[[GlobalBudget], Met]) -> Met:
        before = self.mask.clone()
        thresholds = [pool.meet_(self.score, self.mask, act) for pool in self._pools]
        self.met.copy_(torch.count_nonzero(self.mask, dim=1))
        flips = torch.count_nonzero(before.bitwise_xor_(self.mask), dim=1)
        return Met(torch.stack(thresholds).amax(0), flips)

    def is_final(self) -> bool:
        return all(pool.budget.is_final() for pool in self._pools)

    def protection_due(self, step: int) -> bool:
        return self._tied is not None and self._tied.budget.protection_due(step)

    def protect_(self) -> None:
        if self._tied is not None:
            self._tied.budget.protect_()

    def raise_protected_(self) -> None:
        raise ValueError("expected a budget with a pattern, got a fixed decay: pass sparsity= instead of decay=")

    def state(self) -> dict[str, Tensor]:
        found = {"score": self.score, "mask": self.mask, "budget": self.met}
        for pool in self._pools:
            found[f"budget_of_{pool.name}"] = pool.budget.met
        if self._tied is not None and self._tied.budget.protected is not None:
            found["protected_groups"] = self._tied.budget.protected
        return found


class _Tensor:
    """A tensor and its groups."""

    def __init__(self, index: int, name: str, pattern: Pattern | None, groups: Tensor) -> None:
        self.index, self.name, self.pattern = index, name, pattern
        self.groups = groups
        """The columns of each group, (groups, weights of a group)."""

    @staticmethod
    def of(layout: Layout, index: int, pattern: Pattern | None) -> "_Tensor":
        groups = _groups(layout, index, pattern) + sum(layout.sizes[:index])
        return _Tensor(index, layout.names[index], pattern, groups)

    @property
    def size(self) -> int:
        """Weights of a group."""
        return self.groups.shape[1]

    @property
    def fixed(self) -> int:
        """The nonzeros that an N:M pattern keeps."""
        return self.pattern.keep * len(self.groups) if isinstance(self.pattern, NM) else 0


def _groups(layout: Layout, index: int, pattern: Pattern | None) -> Tensor:
    """The columns of each group of a tensor, counted from the tensor's first: (groups, weights of a group)."""
    numbers, shape = torch.arange(layout.sizes[index]), layout.shapes[index]
    if layout.views:  # in the order of the parameter's memory
        view = layout.views[index]
        weights = canonical(numbers.as_strided(view.shape, view.strides), view.feature_axis, view.groups)
    elif len(shape) == 4:  # features first, inputs last
        weights = numbers.view(shape[0], -1, shape[3])
    else:
        weights = canonical(numbers.view(shape))
    return weights.reshape(-1, 1) if pattern is None else pattern.grouped(weights)


class _Pool(ABC):
    """Tensors that share one budget."""

    name: str
    budget: GlobalBudget

    def __init__(self, tensors: Sequence[_Tensor], device: torch.device) -> None:
        self._columns = torch.cat([each.groups.flatten() for each in tensors]).to(device)

    @abstractmethod
    def meet_(self, score: Tensor, mask: Tensor, act: Callable[[GlobalBudget], Met]) -> Tensor:
        """Meet the budget, and write scores and masks. Returns the threshold of each row."""

    def _write_(self, score: Tensor, mask: Tensor, values: Tensor, kept: Tensor) -> None:
        """Write scores, whose signs follow the masks whatever the rounding."""
        smallest = torch.finfo(values.dtype).tiny
        values = torch.where(kept, values.clamp_min(smallest), values.clamp_max(0.0))
        score.index_copy_(1, self._columns, values)
        mask.index_copy_(1, self._columns, kept)


class _TiedGroups(_Pool):
    """Groups that are kept or pruned as a whole, among them single weights."""

    name = "groups"

    def __init__(
        self,
        context: Context[Any],
        score: Tensor,
        tensors: Sequence[_Tensor],
        finals: Sequence[int],
        min_density: float,
        ramp: str,
    ) -> None:
        tensors = sorted(tensors, key=lambda each: each.size)
        super().__init__(tensors, score.device)
        counts = [len(each.groups) for each in tensors]
        by_size = groupby(tensors, key=lambda each: each.size)
        self._runs = [(sum(len(each.groups) for each in alike), size) for size, alike in by_size]
        """Groups of one size, in the order of the columns, with that size."""
        positions = context.targets[0].costs
        costs = [each.size * (1 if positions is None else positions[each.index]) for each in tensors]
        self._alike = len(set(costs)) == 1 and positions is None
        size = costs[0] if self._alike else 1  # groups of one size are counted, others are weighed
        total = sum(count * cost for count, cost in zip(counts, costs, strict=True)) // size
        targets = [Target(None, total, final // size, None if self._alike else tuple(costs)) for final in finals]
        self._first = torch.cat([each.groups[:, 0] for each in tensors]).to(score.device)
        inner = replace(
            context,
            layout=Layout(tuple(each.name for each in tensors), tuple((count,) for count in counts)),
            requests=[
                replace(each, target=to, patterns=None) for each, to in zip(context.requests, targets, strict=True)
            ],
        )
        self.budget = GlobalBudget(inner, self._pooled(score), min_density=min_density, ramp=ramp)

    def meet_(self, score: Tensor, mask: Tensor, act: Callable[[GlobalBudget], Met]) -> Tensor:
        self.budget.score.copy_(self._pooled(score))
        torch.index_select(mask, 1, self._first, out=self.budget.mask)
        met = act(self.budget)
        values, kept = self._by_weight(self.budget.score, mean=not self._alike), self._by_weight(self.budget.mask)
        self._write_(score, mask, values, kept)
        return met.threshold

    def _pooled(self, score: Tensor) -> Tensor:
        """The score of each group: the mean of its weights' scores or, if groups have costs, the sum."""
        values = score.index_select(1, self._columns)
        parts = torch.split(values, [count * size for count, size in self._runs], dim=1)
        grouped = [part.view(len(part), *run) for part, run in zip(parts, self._runs, strict=True)]
        return torch.cat([part.mean(2) if self._alike else part.sum(2) for part in grouped], dim=1)

    def _by_weight(self, values: Tensor, *, mean: bool = False) -> Tensor:
        """Values of groups, given to each of their weights, or divided among them."""
        parts = torch.split(values, [count for count, _ in self._runs], dim=1)
        pairs = zip(parts, self._runs, strict=True)
        return torch.cat(
            [(part / size if mean else part).repeat_interleave(size, dim=1) for part, (_, size) in pairs], 1
        )


class _FixedGroups(_Pool):
    """N:M groups: the N largest of each are protected, and the rest share a budget that falls to zero."""

    name = "fixed"

    def __init__(self, context: Context[Any], score: Tensor, tensors: Sequence[_Tensor], ramp: str) -> None:
        tensors = sorted(tensors, key=lambda each: str(each.pattern))
        super().__init__(tensors, score.device)
        self._runs = [
            (pattern, sum(len(each.groups) for each in alike))
            for pattern, alike in groupby(tensors, key=lambda each: each.pattern)
        ]
        """N:M patterns, in the order of the columns, and the number of their groups."""
        total = len(self._columns)
        target = Target(None, total, sum(each.fixed for each in tensors), None)
        inner = replace(
            context,
            layout=Layout(("N:M",), ((total,),)),
            requests=[replace(each, target=target, patterns=None) for each in context.requests],
        )
        values = score.index_select(1, self._columns)
        self.budget = GlobalBudget(inner, values, min_density=0.0, ramp=ramp)
        self.budget.protected, _ = self._largest(values)

    def meet_(self, score: Tensor, mask: Tensor, act: Callable[[GlobalBudget], Met]) -> Tensor:
        values = score.index_select(1, self._columns)
        protected, limit = self._largest(values)
        assert self.budget.protected is not None
        self.budget.protected.copy_(protected)
        self.budget.score.copy_(values)
        torch.index_select(mask, 1, self._columns, out=self.budget.mask)
        threshold = act(self.budget).threshold
        decay = torch.minimum(limit, threshold[:, None])
        self._write_(score, mask, values - decay, self.budget.mask)
        return decay.mean(1)

    def _largest(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the N largest of each group, and for each weight the largest of the others in its group."""
        positions, limits, offset = [], [], 0
        for pattern, groups in self._runs:
            assert isinstance(pattern, NM)
            part = values[:, offset : offset + groups * pattern.of].view(len(values), groups, pattern.of)
            ordered, order = part.sort(dim=2, descending=True, stable=True)  # on a CPU, topk takes longer
            starts = torch.arange(groups, device=values.device)[:, None] * pattern.of + offset
            positions.append((order[:, :, : pattern.keep] + starts).flatten(1))
            limit = ordered[:, :, pattern.keep : pattern.keep + 1]
            limit = torch.where(limit == -torch.inf, torch.inf, limit)  # all others were pruned before
            limits.append(limit.expand(-1, -1, pattern.of).flatten(1))
            offset += groups * pattern.of
        return torch.cat(positions, dim=1), torch.cat(limits, dim=1)
