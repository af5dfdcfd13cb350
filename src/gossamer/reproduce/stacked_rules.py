"""Mask learning of many runs at once: the equations of method.py on matrices with a row for each run.

Runs that learn by the same rule are neighbours, so that a rule works on a block of rows; what differs within a block,
λ1 or the budget, is a column of numbers. Learning rates and budgets come from tables on the device, read at the number
of the step, so that a captured step can be replayed without a word from the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer import method
from gossamer.budget import meet_budget_, meet_budgets_
from gossamer.connectivity import floors
from gossamer.reproduce.stacked_densenet import DenseNetStack
from gossamer.schedule import Phase, Plan, connections_left, make_plan
from gossamer.settings import Settings
from gossamer.training.optimise import learning_rate
from gossamer.training.run import Run

_FLOOR_EVERY = 100  # mask steps between two choices of what the floor keeps, as in the Sparsifier


@dataclass(frozen=True, eq=False)
class Tables:
    """What changes from step to step for the runs of a block."""

    learning_rate: Tensor  # (steps,)
    mask_rate: Tensor  # (steps,)
    budget: Tensor  # (steps, runs)


class Block:
    """Neighbouring rows of a stack, all trained by one rule: SGD on the weights and, unless dense, mask learning."""

    def __init__(self, stack: DenseNetStack, rows: slice, runs: Sequence[Run], steps_per_epoch: int) -> None:
        self.run, self._rows, self._stack = runs[0], rows, stack
        self._settings, self._total = runs[0].mask_settings, steps_per_epoch * runs[0].epochs
        self.plan = _plan(self._settings, self._total, steps_per_epoch)
        self._tables = _tables(runs, self.plan, stack, steps_per_epoch)
        self._decay = stack.variables.new_tensor([run.decay or 0.0 for run in runs])[:, None]
        self._velocity = torch.zeros_like(stack.variables[rows])
        self.mask_variable: Tensor | None = None
        self.mask: Tensor | None = None
        self._protected: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        return self._stack.variables[self._rows, : self._stack.connections]

    def phase(self, step: int) -> Phase:
        return Phase.WARMUP if self.run.method == "dense" else self.plan.at(step).phase

    def prepare(self, step: int) -> None:
        """What a step needs that is not part of a captured one."""
        if not self.phase(step).masks_train:
            return
        if self.mask_variable is None:
            self._begin()
        if (step - self.plan.warmup) % _FLOOR_EVERY == 0 and self._protected is not None:
            self._protected.copy_(self._strongest())

    def learn(self, gradient: Tensor, step: Tensor, phase: Phase) -> None:
        """One step: masks first, from the weights as they were, then the weights."""
        if phase.masks_train:
            self._learn_masks(gradient[self._rows, : self._stack.connections], step)
        self._descend(gradient[self._rows], step)
        variables, shown = self._stack.variables[self._rows], self._stack.shown[self._rows]
        if self.mask is None:
            shown.copy_(variables)
            return
        count = self._stack.connections
        weights, others = torch.split(variables, [count, variables.shape[1] - count], dim=1)
        masked = method.masked_weight(weights, self.mask)
        if phase is Phase.FINETUNE:
            weights.copy_(masked)  # what is frozen at zero stays there
        torch.cat((masked, others), dim=1, out=shown)

    def connections(self) -> list[int]:
        runs = self._rows.stop - self._rows.start
        return [self._stack.connections] * runs if self.mask is None else self.mask.sum(1).tolist()

    def _begin(self) -> None:
        weights = self.weights
        if self._settings.start == "magnitude":
            self.mask_variable = weights.abs().clamp_min_(torch.finfo(weights.dtype).tiny)
        else:
            self.mask_variable = torch.full_like(weights, self._settings.start_value)
        self.mask = torch.ones_like(weights, dtype=torch.bool)
        if self._settings.floor:
            self._protected = self._strongest()

    def _descend(self, gradient: Tensor, step: Tensor) -> None:
        """SGD with momentum and L2, as torch has it."""
        variables = self._stack.variables[self._rows]
        self._velocity.mul_(self.run.momentum).add_(gradient).add_(variables, alpha=self.run.weight_decay)
        variables.sub_(self._velocity * self._tables.learning_rate.index_select(0, step))

    def _learn_masks(self, gradient: Tensor, step: Tensor) -> None:
        assert self.mask_variable is not None
        assert self.mask is not None
        settings = self._settings
        direction = method.mask_gradient(
            gradient,
            self.weights,
            self.mask_variable,
            estimator=settings.estimator,
            alpha=settings.alpha,
            l2=settings.l2,
        )
        self._rescale_(direction)
        direction.add_(self._decay)
        rate = self._tables.mask_rate.index_select(0, step)
        method.update_mask_variable_(self.mask_variable, direction, learning_rate=rate)
        if self.run.decay is None:
            budgets = self._tables.budget.index_select(0, step)[0]
            by_row = budgets.device.type == "cpu"
            meet_budgets_of_rows_(self.mask_variable, self.mask, budgets, self._protected, by_row=by_row)
            return
        if self._protected is not None:
            kept = self.mask_variable.gather(1, self._protected)
            self.mask_variable.scatter_(1, self._protected, kept.clamp_min_(torch.finfo(kept.dtype).tiny))
        self.mask.copy_(method.unit_step(self.mask_variable))

    def _rescale_(self, direction: Tensor) -> None:
        settings = self._settings
        if settings.scale == "global":
            scale = direction.square().mean(1, keepdim=True).sqrt()
            direction.div_(method.divisor(scale, settings.power))
        elif settings.scale == "batch":
            parts = torch.split(direction, self._stack.connection_sizes, dim=1)
            for part, shape in zip(parts, self._stack.connection_shapes, strict=True):
                features = part.view(len(part), *shape)
                scale = features.square().mean(2, keepdim=True).sqrt()
                features.div_(method.divisor(scale, settings.power))

    def _strongest(self) -> Tensor:
        """Positions, in each row, of the mask variables of each tensor that the floor keeps."""
        assert self.mask_variable is not None
        sizes = self._stack.connection_sizes
        found, offset = [], 0
        parts = torch.split(self.mask_variable, sizes, dim=1)
        for part, floor in zip(parts, floors(sizes, self._settings.floor), strict=True):
            found.append(part.topk(floor, dim=1).indices + offset)
            offset += part.shape[1]
        return torch.cat(found, dim=1)


def meet_budgets_of_rows_(
    mask_variable: Tensor, mask: Tensor, budgets: Tensor, protected: Tensor | None, *, by_row: bool
) -> None:
    """Exact connectivity decay for each row; one after the other, which is faster on a CPU, or all at once."""
    if by_row:
        for row in range(len(mask_variable)):
            keep = None if protected is None else protected[row]
            meet_budget_(mask_variable[row], mask[row], budgets[row], protected=keep)
        return
    if protected is None:
        meet_budgets_(mask_variable, mask, budgets)
        return
    kept = mask_variable.gather(1, protected)
    mask_variable.scatter_(1, protected, torch.inf)
    thresholds = meet_budgets_(mask_variable, mask, budgets)
    lowered = (kept - thresholds[:, None]).clamp_min_(torch.finfo(kept.dtype).tiny)
    mask_variable.scatter_(1, protected, lowered)


def by_rule(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in groups that differ in nothing but seed and the value of λ1 or of the sparsity."""
    groups: dict[tuple[Run, Settings], list[Run]] = {}
    for run in runs:
        request = {
            "decay": None if run.decay is None else 0.0,
            "sparsity": None if run.sparsity is None else 0.5,
        }
        alike = replace(run, seed=0, **request)  # type: ignore[arg-type]
        groups.setdefault((alike, run.mask_settings), []).append(run)
    return list(groups.values())


def _plan(settings: Settings, total: int, steps_per_epoch: int) -> Plan:
    durations = {"warmup": settings.warmup, "sparsify": settings.sparsify, "stabilise": settings.stabilise}
    return make_plan(total, steps_per_epoch=steps_per_epoch, **durations)


def _tables(runs: Sequence[Run], plan: Plan, stack: DenseNetStack, steps_per_epoch: int) -> Tables:
    run, total, weights = runs[0], steps_per_epoch * runs[0].epochs, stack.variables
    moments = [plan.at(step) for step in range(total)]
    settings = run.mask_settings

    def anneal(settling: float, phase: Phase) -> float:
        if settings.anneal == "cosine":
            return method.cosine(settling)
        return 0.1 if settings.anneal == "step" and phase is Phase.STABILISE else 1.0

    lengths = {"total_steps": total, "steps_per_epoch": steps_per_epoch}
    rates = [learning_rate(run, plan, step, **lengths) for step in range(total)]
    mask_rates = [settings.mask_lr * anneal(moment.settling, moment.phase) for moment in moments]
    count = stack.connections
    keep = [count - math.floor(count * (each.sparsity or 0.0) + 0.5) for each in runs]
    budgets = [[connections_left(moment.ramp, count, each) for each in keep] for moment in moments]
    return Tables(
        weights.new_tensor(rates),
        weights.new_tensor(mask_rates),
        torch.tensor(budgets, device=weights.device),
    )
