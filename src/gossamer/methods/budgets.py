"""Choosing which connections stay: over the whole network by one threshold, or tensor by tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.budget import meet_budgets_
from gossamer.methods.rule import Layout, Request, Timeline

_FLOOR_EVERY = 100  # steps between two choices of the connections that the floor keeps


class GlobalBudget:
    """Keeps, in each row, the connections with the largest scores: as many as the budget of the step allows.

    `score` is lowered in place by the threshold, so that what stays is above zero (budget.py). The floor, one share for
    all rows or one per row, keeps the strongest connections of each tensor whatever the threshold is. The `ramp` of the
    budget is "cubic", "at_once", or "none" where only the final budget is ever met.
    """

    def __init__(
        self,
        layout: Layout,
        requests: Sequence[Request[Any]],
        timeline: Timeline,
        score: Tensor,
        *,
        floor: float | Sequence[float],
        ramp: str = "cubic",
    ) -> None:
        self._layout, self._timeline = layout, timeline
        floors = [floor] * len(requests) if isinstance(floor, float | int) else floor
        self._floors = [layout.floors(each) for each in floors]
        self.score = score
        self.mask = torch.ones_like(score, dtype=torch.bool)
        keep = [layout.keep(request.sparsity) for request in requests]
        for request, least in zip(requests, self._floors, strict=True):
            check_floor(layout, request.sparsity, least)
        self._table = None if ramp == "none" else timeline.budgets(layout.count, keep, ramp)
        self._final = torch.tensor(keep, device=score.device)
        self._protected = self._strongest() if any(floors) else None

    def meet_(self) -> Tensor:
        """Meet the budget of this step. Returns the thresholds."""
        assert self._table is not None
        return self.allow_(self._timeline.now(self._table)[:, 0])

    def cut_(self) -> Tensor:
        """Meet the final budget, if that has not been done yet. Returns the thresholds."""
        return self.allow_(self._final)

    def allow_(self, budget: Tensor) -> Tensor:
        """Keep exactly so many connections of each row, whatever the sign of their scores. Returns the thresholds."""
        return meet_budgets_(self.score, self.mask, budget, self._protected)

    def floor_is_due(self, step: int) -> bool:
        return self._protected is not None and step % _FLOOR_EVERY == 0

    def choose_floor_(self) -> None:
        if self._protected is not None:
            self._protected.copy_(self._strongest())

    def keep_floor_(self) -> None:
        """Where no budget is met: what the floor keeps stays above zero."""
        if self._protected is not None:
            kept = self.score.gather(1, self._protected).clamp_min(torch.finfo(self.score.dtype).tiny)
            self.score.scatter_(1, self._protected, kept)

    def state(self) -> dict[str, Tensor]:
        tensors = {"score": self.score, "mask": self.mask}
        return tensors if self._protected is None else {**tensors, "protected": self._protected}

    def _strongest(self) -> Tensor:
        """Positions, in each row, of the scores of each tensor that the floor keeps; where these are fewer than in
        another row, the first of them again."""
        found, offset = [], 0
        for part, counts in zip(self._layout.split(self.score), zip(*self._floors, strict=True), strict=True):
            best = part.topk(max(counts), dim=1).indices + offset
            if len(set(counts)) > 1:
                own = torch.arange(max(counts), device=best.device) < torch.tensor(counts, device=best.device)[:, None]
                best = torch.where(own, best, best[:, :1])
            found.append(best)
            offset += part.shape[1]
        return torch.cat(found, dim=1)


def check_floor(layout: Layout, sparsity: float, floors: Sequence[int]) -> None:
    """Refuse a sparsity that leaves fewer connections than the floors of the tensors keep."""
    left = layout.keep(sparsity)
    if sum(floors) > left:
        raise ValueError(
            f"sparsity={sparsity} leaves {left} connections, but the floor keeps {sum(floors)} of them: ask for less, "
            "or lower floor= (0 lets whole tensors die)"
        )


def magnitude(weights: Tensor) -> Tensor:
    """|w| as a score, above zero also where a weight is exactly zero."""
    return weights.abs().clamp_min_(torch.finfo(weights.dtype).tiny)


def shares(sizes: Sequence[int], total: int, densities: Sequence[float]) -> list[int]:
    """Whole numbers near size · density, at least one and at most the size each, whose sum is exactly `total`."""
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
            raise ValueError(f"expected a total from {len(sizes)} to {sum(sizes)} connections, got {total}")
        # The largest remainders first; a tensor with much room takes all that is missing only when others are full.
        for _, index in sorted(room, reverse=True)[: abs(total - sum(counts))]:
            counts[index] += 1 if up else -1
    return counts


def largest(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """For each row its so many largest scores, as a mask; of equal ones the earliest."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    chosen = rank < torch.tensor(counts, device=scores.device)[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


class MasksOfBudget:
    """What rules have in common that keep what scores highest in the whole network: a mixin for any rule."""

    _budget: GlobalBudget

    @property
    def mask(self) -> Tensor:
        return self._budget.mask

    def due(self, step: int) -> bool:
        return self._budget.floor_is_due(step)

    def refresh_(self, weights: Tensor, step: int) -> None:
        self._budget.choose_floor_()

    def freeze_(self, weights: Tensor) -> Tensor:
        self._budget.cut_()
        return self._budget.mask

    def state(self) -> dict[str, Tensor]:
        return self._budget.state()
