"""Selection of the weights to keep: by one threshold for the network, or tensor by tensor."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from gossamer.budget import Costs, Met, meet_budgets_, on_cpu, strongest
from gossamer.methods.base import Context, Layout, Method, S, min_nonzeros
from gossamer.sharding import of_all_processes
from gossamer.target import Target

_PROTECT_EVERY = 100  # steps between two updates of the weights that min_density protects


class Budget(ABC):
    """Lowers the scores of weights so that as many as the budget allows are positive, and sets the masks."""

    score: Tensor
    mask: Tensor
    met: Tensor
    """The current budgets."""
    costs: Costs | None
    protected: Tensor | None = None

    @abstractmethod
    def meet_(self, finite: Tensor | None = None) -> Met:
        """Meet the budget of this step. In rows that are not `finite`, budget and masks do not change."""

    @abstractmethod
    def cut_(self) -> Met:
        """Meet the final budget."""

    @abstractmethod
    def is_final(self) -> bool:
        """Whether the final budget is met. Synchronizes with the device."""

    @abstractmethod
    def protection_due(self, step: int) -> bool:
        """Whether to call `protect_` after this many steps of the mask phases."""

    @abstractmethod
    def protect_(self) -> None:
        """Update the weights that `min_density` protects: those with the largest scores of each tensor."""

    @abstractmethod
    def raise_protected_(self) -> None:
        """Keep the scores of protected weights positive when no budget is met."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that change."""


class GlobalBudget(Budget):
    """Keeps, in each row, the weights with the largest scores: as many as the budget of the step allows.

    `score` is lowered in place by the threshold, so that the scores of kept weights are positive (budget.py).
    `min_density`, one number or one per row, protects that fraction of each tensor, those with the largest scores,
    whatever the threshold. The `ramp` of the budget is "cubic", "at_once", or "none" if only the final budget is met.
    """

    def __init__(
        self,
        context: Context[Any],
        score: Tensor,
        *,
        min_density: float | Sequence[float] | None = None,
        ramp: str = "cubic",
    ) -> None:
        self._layout, self._timeline, self._group = context.layout, context.timeline, context.group
        chosen = context.min_density if min_density is None else min_density
        densities = [chosen] * len(context.requests) if isinstance(chosen, float | int) else list(chosen)
        sizes = context.layout.sizes
        if self._group is not None:
            sizes = [view.size for view in context.layout.views]
        self._least = [min_nonzeros(sizes, each) for each in densities]
        self.score = score
        self.mask = torch.ones_like(score, dtype=torch.bool)
        for target, least in zip(context.targets, self._least, strict=True):
            check_min_nonzeros(target, least)
        self._budgets = None if ramp == "none" else context.timeline.budgets(context.targets, ramp)
        self._final = torch.tensor(context.keep, device=score.device)
        self.met = torch.tensor([target.total for target in context.targets], device=score.device)
        first = context.targets[0]
        self.costs = None if first.costs is None else Costs.of(context.layout.sizes, first.costs, score.device)
        self._reach = [0.0] * len(score)  # of the last thresholds: the next one is rarely much larger
        self.protected = self._strongest() if any(densities) else None

    def meet_(self, finite: Tensor | None = None) -> Met:
        assert self._budgets is not None
        budget = self._timeline.now(self._budgets)[:, 0]
        return self.allow_(budget if finite is None else torch.where(finite, budget, self.met))

    def cut_(self) -> Met:
        return self.allow_(self._final)

    def is_final(self) -> bool:
        return torch.equal(self.met, self._final)

    def allow_(self, budget: Tensor) -> Met:
        """Keep exactly this many weights of each row, whatever the sign of their scores."""
        self.met.copy_(budget)
        met = meet_budgets_(
            self.score,
            self.mask,
            budget,
            self.protected,
            costs=self.costs,
            group=self._group,
            reach=[2 * size for size in self._reach],
        )
        if on_cpu(self.score):
            sizes = met.threshold.abs().tolist()
            self._reach = [max(size, 0.8 * before) for size, before in zip(sizes, self._reach, strict=True)]
        return met

    def protection_due(self, step: int) -> bool:
        return self.protected is not None and step % _PROTECT_EVERY == 0

    def protect_(self) -> None:
        if self.protected is None:
            return
        strongest = self._strongest()
        if self._group is None:
            self.protected.copy_(strongest)  # in place, because a captured step reads it
        else:
            self.protected = strongest  # their number in this process may change

    def raise_protected_(self) -> None:
        if self.protected is not None:
            kept = self.score.gather(1, self.protected).clamp_min(torch.finfo(self.score.dtype).tiny)
            self.score.scatter_(1, self.protected, kept)

    def state(self) -> dict[str, Tensor]:
        tensors = {"score": self.score, "mask": self.mask, "budget": self.met}
        return tensors if self.protected is None else {**tensors, "protected": self.protected}

    def _strongest(self) -> Tensor:
        """The positions of the protected scores of each tensor, per row. Rows with fewer of them repeat the first."""
        if self._group is not None:
            return self._strongest_of_all(self._group)
        found, offset = [], 0
        for part, counts in zip(self._layout.split(self.score), zip(*self._least, strict=True), strict=True):
            best = strongest(part, max(counts)) + offset
            if len(set(counts)) > 1:
                own = torch.arange(max(counts), device=best.device) < torch.tensor(counts, device=best.device)[:, None]
                best = torch.where(own, best, best[:, :1])
            found.append(best)
            offset += part.shape[1]
        return torch.cat(found, dim=1)

    def _strongest_of_all(self, group: dist.ProcessGroup) -> Tensor:
        """The same for one run with sharded tensors: the processes exchange their largest scores."""
        counts, parts = self._least[0], self._layout.split(self.score)
        best = [part[0].topk(min(count, part.shape[1])) for part, count in zip(parts, counts, strict=True)]
        offers = [
            functional.pad(each.values, (0, count - len(each.values)), value=-torch.inf)
            for each, count in zip(best, counts, strict=True)
        ]
        everything = torch.split_with_sizes(of_all_processes(torch.cat(offers), group), counts, dim=1)
        found, offset = [], 0
        for each, offered, count, part in zip(best, everything, counts, parts, strict=True):
            taken = torch.zeros(offered.numel(), dtype=torch.bool, device=offered.device)
            taken[offered.flatten().topk(count).indices] = True
            own = taken.view_as(offered)[dist.get_rank(group)][: len(each.indices)]
            found.append(each.indices[own] + offset)
            offset += part.shape[1]
        return torch.cat(found)[None]


def check_min_nonzeros(target: Target, least: Sequence[int]) -> None:
    """Refuse a target with fewer weights than min_density protects."""
    if target.decay is None and target.costs is None and sum(least) > target.final:
        raise ValueError(
            f"the target leaves {target.final} of {target.total} weights, but min_density keeps {sum(least)} of them: "
            "ask for less, or lower min_density= (0 lets whole tensors die)"
        )


def magnitude(weights: Tensor) -> Tensor:
    """|w| as a score, positive even if a weight is exactly zero."""
    return weights.abs().clamp_min_(torch.finfo(weights.dtype).tiny)


def shares(sizes: Sequence[int], total: int, densities: Sequence[float]) -> list[int]:
    """Integers close to size · density, each between 1 and its size, with the exact sum `total`."""
    wanted = [size * density for size, density in zip(sizes, densities, strict=True)]
    counts = [min(size, max(1, int(share))) for size, share in zip(sizes, wanted, strict=True)]
    while sum(counts) != total:
        up = sum(counts) < total
        room = [
            (wanted[index] - counts[index] if up else counts[index] - wanted[index], index)
            for index, size in enumerate(sizes)
            if (counts[index] < size if up else counts[index] > 1)
        ]
        if not room:
            raise ValueError(f"expected a total from {len(sizes)} to {sum(sizes)} weights, got {total}")
        # Largest remainders first. A tensor takes more than one missing weight only if the others are full.
        for _, index in sorted(room, reverse=True)[: abs(total - sum(counts))]:
            counts[index] += 1 if up else -1
    return counts


def largest(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """A mask of the `counts` largest scores of each row; ties are broken by position."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    chosen = rank < torch.tensor(counts, device=scores.device)[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


def keep_largest_(masks: Tensor, layout: Layout, scores: Tensor, counts: Sequence[Sequence[int]]) -> None:
    """Keep the largest scores of each tensor: `counts` has a row per run and a column per tensor."""
    for index, (part, mask) in enumerate(zip(layout.split(scores), layout.split(masks), strict=True)):
        mask.copy_(largest(part, [row[index] for row in counts]))


class BudgetedMethod(Method[S]):
    """Base of methods whose masks are those of a `Budget`."""

    _budget: Budget

    def _begin(self, budget: Budget) -> None:
        self._budget, self.mask = budget, budget.mask

    def state(self) -> dict[str, Tensor]:
        return self._budget.state()

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        if "protected" in saved:
            self._budget.protected = saved[
                "protected"
            ]  # their number in this process depends on the number of processes
        super().load_state(saved)


class GlobalThreshold(BudgetedMethod[S]):
    """Base of methods that keep the weights with the largest scores of the network in every step."""

    shardable = any_order = True

    def topology_due(self, step: int) -> bool:
        return self._budget.protection_due(step)

    def update_topology(self, weights: Tensor, step: int) -> Tensor | None:
        self._budget.protect_()
        return None

    def finalize(self, weights: Tensor) -> Tensor:
        self._budget.cut_()
        return self.mask
