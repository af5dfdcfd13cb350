"""The step of all runs at once: SGD on the weight variables, mask learning by each run's own method.

The same equations as in learning.py and torch's SGD, on matrices with a row for each run; the settings that differ
between runs are columns of numbers. Everything a step needs is read from tables on the device at the number of the
step, so a captured step can be replayed without a word from the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import method
from gossamer.budget import meet_budgets_
from gossamer.side_by_side.stack import NetworkStack


@dataclass(frozen=True, eq=False)
class Columns:
    """What differs between runs: one number a run."""

    weight_decay: Tensor
    global_power: Tensor  # of the scale over the whole network: 0 leaves the mask gradient raw
    feature_power: Tensor  # of the scale of each output feature
    by_magnitude: Tensor  # 1 where the score is |w̃| instead of a learned mask variable
    for_good: Tensor  # 1 where a removed connection never returns: its weight is zero and gets no gradient


@dataclass(frozen=True, eq=False)
class Tables:
    """What changes from step to step; a row a step."""

    learning_rate: Tensor  # (steps, 1)
    mask_rate: Tensor  # (steps, runs)
    budget: Tensor  # (steps, runs)


class StackedLearner:
    """Weight variables, momentum, mask variables and masks of all runs."""

    def __init__(self, stack: NetworkStack, columns: Columns, *, momentum: float, floor: float) -> None:
        self.stack, self.columns, self._momentum, self._floor = stack, columns, momentum, floor
        self.velocity = torch.zeros_like(stack.variables)
        self.mask_variable: Tensor | None = None
        self.mask: Tensor | None = None
        self._look_at_columns()
        self._protected: Tensor | None = None
        self.step = torch.zeros(1, dtype=torch.int64, device=stack.device)

    def branch(self, rows: list[int], columns: Columns) -> None:
        self.stack.branch(rows)
        self.velocity = self.velocity[torch.tensor(rows, device=self.velocity.device)]
        self.columns = columns
        self._look_at_columns()

    def _look_at_columns(self) -> None:
        """What no run asks for is left out of the step."""
        self._uses_features = bool((self.columns.feature_power > 0).any())
        self._removes_for_good = bool((self.columns.for_good > 0).any())

    def begin_masks(self) -> None:
        """Masks start to learn, from the magnitude of the warmed-up weights."""
        weights = self.stack.variables[:, : self.stack.connections]
        self.mask_variable = weights.abs().clamp_min_(torch.finfo(weights.dtype).tiny)
        self.mask = torch.ones_like(weights, dtype=torch.bool)
        self._protected = self._strongest()

    def choose_floor(self) -> None:
        strongest = self._strongest()
        if self._protected is not None and strongest is not None:
            self._protected.copy_(strongest)

    def dense_step(self, tables: Tables) -> None:
        self._descend(self.stack.take_gradients(), tables)
        self.stack.show_(self.stack.variables)
        self.step += 1

    def mask_step(self, tables: Tables) -> None:
        assert self.mask is not None
        gradient = self.stack.take_gradients()
        if self._removes_for_good:
            gradient = self._without_removed(gradient)
        self._learn_masks(gradient[:, : self.stack.connections], tables)
        self._descend(gradient, tables)
        if self._removes_for_good:
            self.stack.variables.copy_(self._without_removed(self.stack.variables))
        self.stack.show_(self._masked())
        self.step += 1

    def frozen_step(self, tables: Tables) -> None:
        self._descend(self.stack.take_gradients(), tables)
        self.stack.variables.copy_(self._masked())
        self.stack.show_(self.stack.variables)
        self.step += 1

    def sparsity(self) -> list[float]:
        if self.mask is None:
            return [0.0] * len(self.stack)
        return (1.0 - self.mask.float().mean(1)).tolist()

    def _without_removed(self, values: Tensor) -> Tensor:
        """Zero for the connections that some runs have removed for good."""
        assert self.mask is not None
        count = self.stack.connections
        gone = (self.columns.for_good > 0) & ~self.mask
        return torch.cat([values[:, :count].masked_fill(gone, 0.0), values[:, count:]], dim=1)

    def _masked(self) -> Tensor:
        assert self.mask is not None
        variables, count = self.stack.variables, self.stack.connections
        return torch.cat([method.masked_weight(variables[:, :count], self.mask), variables[:, count:]], dim=1)

    def _descend(self, gradient: Tensor, tables: Tables) -> None:
        """SGD with momentum and L2, as torch has it."""
        variables = self.stack.variables
        rate = tables.learning_rate.index_select(0, self.step)
        self.velocity.mul_(self._momentum).add_(gradient).addcmul_(variables, self.columns.weight_decay)
        variables.sub_(self.velocity * rate)

    def _learn_masks(self, gradient: Tensor, tables: Tables) -> None:
        assert self.mask_variable is not None
        assert self.mask is not None
        weights = self.stack.variables[:, : self.stack.connections]
        rate = tables.mask_rate.index_select(0, self.step)[0][:, None]
        budget = tables.budget.index_select(0, self.step)[0]
        direction = method.mask_gradient(gradient, weights, self.mask_variable)
        if self._uses_features:
            direction = self._over_features(direction)
        size = direction.square().mean(1, keepdim=True).sqrt() + method.EPSILON
        direction = direction / size**self.columns.global_power
        learned = self.mask_variable - direction * rate
        score = torch.where(self.columns.by_magnitude > 0, weights.abs(), learned)
        if self._removes_for_good:
            score = score.masked_fill((self.columns.for_good > 0) & ~self.mask, -torch.inf)
        self.mask_variable.copy_(score)
        if self._protected is None:
            meet_budgets_(self.mask_variable, self.mask, budget)
            return
        kept = self.mask_variable.gather(1, self._protected)
        self.mask_variable.scatter_(1, self._protected, torch.inf)
        thresholds = meet_budgets_(self.mask_variable, self.mask, budget)
        lowered = (kept - thresholds[:, None]).clamp_min(torch.finfo(kept.dtype).tiny)
        self.mask_variable.scatter_(1, self._protected, lowered)

    def _over_features(self, direction: Tensor) -> Tensor:
        parts = []
        for name, part in zip(
            self.stack.names,
            torch.split(direction, self.stack.connection_sizes, dim=1),
            strict=False,
        ):
            rows = part.reshape(len(part), self.stack.shapes[name][0], -1)
            size = rows.square().mean(2, keepdim=True).sqrt() + method.EPSILON
            parts.append((rows / size ** self.columns.feature_power[:, :, None]).flatten(1))
        return torch.cat(parts, dim=1)

    def _strongest(self) -> Tensor | None:
        """Positions, in each row, of the mask variables of each tensor that the floor keeps."""
        if not self._floor:
            return None
        assert self.mask_variable is not None
        found, offset = [], 0
        for part in torch.split(self.mask_variable, self.stack.connection_sizes, dim=1):
            share = max(1, -int(-self._floor * part.shape[1] // 1))
            found.append(part.topk(share, dim=1).indices + offset)
            offset += part.shape[1]
        return torch.cat(found, dim=1)
