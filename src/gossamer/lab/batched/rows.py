"""The rows of a batch: which runs share one, and which are trained by one method object.

A run whose masks do not learn yet is a dense network, and dense networks with the same seed, learning rates, momentum
and weight decay are the same network: they share one row, their dense warm-up, until masks begin to learn or learning
rates part. From then on each run has a row of its own. Runs with the same method and phases form a method group: one
method object trains their rows, which are adjacent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from torch import Tensor

from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.methods.base import Layout, Method, Options, Request
from gossamer.patterns import Shape, assign, parse_option, target_of
from gossamer.schedule import Phase, Plan, leave_interval
from gossamer.target import make_target


@dataclass(frozen=True, eq=False)
class BatchedRun:
    """One run of a batch, with its phases and learning rates in steps."""

    run: Run
    plan: Plan | None  # None for a dense run, which is a warm-up to its end
    rates: Tensor  # the learning rate of each step, in double precision
    left: int | None = None  # the step at which it left the sparsify phase early
    first_plan: Plan | None = None  # the one that it began with, if it left early

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.run.method == "dense"):
            raise ValueError(f"run {self.run.run_id}: expected phases for every run but a dense one")
        if self.plan is not None and self.plan.total != len(self.rates):
            raise ValueError(f"run {self.run.run_id}: expected {self.plan.total} learning rates, got {len(self.rates)}")

    @property
    def method_type(self) -> type[Method[Any]]:
        return find(self.run.method)

    @cached_property
    def options(self) -> Options:
        return self.run.options

    @cached_property
    def min_density(self) -> float:
        return self.run.phases.min_density

    def request(self, layout: Layout) -> Request[Any]:
        """What it asks of its method."""
        return request_of(self.run, layout)

    @property
    def group(self) -> tuple[Any, ...]:
        """Runs with the same group share one method object."""
        shared = (getattr(self.options, name) for name in self.method_type.shared)
        solved = self.run.decay is None
        return self.method_type.name, *shared, solved, self.run.pattern, self.begun, self.min_density

    @property
    def begun(self) -> Plan | None:
        """The plan that it began with; runs of a group share it, whenever they leave the sparsify phase."""
        return self.first_plan or self.plan

    @property
    def warmup_steps(self) -> int:
        return 0 if self.plan is None else self.plan.warmup

    @property
    def mask_steps(self) -> int:
        return 0 if self.begun is None else self.begun.sparsify + self.begun.stabilise

    @property
    def leave_steps(self) -> int:
        """Steps between two checks whether it may leave the sparsify phase."""
        return 1 if self.begun is None else leave_interval(self.begun)

    def may_leave(self, step: int) -> bool:
        """Whether its sparsity decides, before this step, if the sparsify phase ends."""
        if self.plan is None or self.run.leave_at is None or step <= self.plan.warmup:
            return False
        in_phase = self.plan.at(step).phase is Phase.SPARSIFY
        return in_phase and (step - self.plan.warmup) % self.leave_steps == 0

    def has_masks(self, step: int) -> bool:
        return self.plan is not None and step >= self.plan.warmup

    def is_frozen(self, step: int) -> bool:
        return self.plan is not None and step >= self.plan.total - self.plan.finetune

    def phase(self, step: int) -> str:
        return "dense" if self.plan is None else str(self.plan.at(step).phase)


def request_of(run: Run, layout: Layout) -> Request[Any]:
    """What a run asks of its method. `layout` has the output features first and the input channels last."""
    target = patterns = None
    if run.pattern is not None:
        shapes = [Shape.features_first(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        patterns = assign(parse_option(run.pattern), shapes)
        assert patterns is not None
        density = run.phases.min_density
        target = target_of(patterns, shapes, sparsity=run.sparsity, decay=run.decay, min_density=density)
    elif run.decay is not None:
        target = make_target(layout.sizes, decay=run.decay, floors=[0] * len(layout.sizes))
    return Request(run.sparsity or 0.0, run.seed, run.options, target, patterns)


@dataclass(frozen=True)
class Outcome:
    """One finished run. Accuracies are shares, at the last epoch."""

    sparsity: float
    accuracy: float
    validation_accuracy: float | None
    train_loss: float  # cross-entropy in the last epoch
    nonzeros_by_tensor: tuple[int, ...]
    warmup_steps: int = 0  # before its masks began to learn
    mask_steps: int = 0  # planned, in which weights could be pruned
    left: int | None = None  # the step at which it left the sparsify phase early
    sparsity_by_epoch: tuple[float, ...] = ()  # with a fixed λ1: after each epoch in which masks learned
    seconds_before: float = field(default=0.0, compare=False)  # of the whole batch, in interrupted sessions


def settled(method: type[Method[Any]], options: Options, *, mask_steps: int, density: float | None) -> dict[str, float]:
    """The values in use of settings that a run may leave open, for its record."""
    chosen, usual = (
        method.resolve(each, mask_steps=mask_steps, density=density) for each in (options, method.options())
    )
    open_ones = [each.name for each in fields(chosen) if each.default is None and getattr(usual, each.name) is not None]
    return {name: getattr(chosen, name) for name in open_ones}


@dataclass(frozen=True)
class Rows:
    """The runs of each row: first those with masks, group by group, then the shared dense warm-ups."""

    groups: tuple[tuple[int, ...], ...]  # one run per row
    warmups: tuple[tuple[int, ...], ...]  # several runs per row

    @property
    def runs(self) -> list[tuple[int, ...]]:
        """The runs of each row."""
        return [*((number,) for group in self.groups for number in group), *self.warmups]

    def of_runs(self) -> list[int]:
        """The row of each run."""
        found = {number: row for row, numbers in enumerate(self.runs) for number in numbers}
        return [found[number] for number in range(len(found))]


def row_changes(runs: Sequence[BatchedRun]) -> list[int]:
    """The steps at which masks of any run begin to learn, or are frozen in all runs of a group, and step 0."""
    frozen: dict[tuple[Any, ...], int] = {}
    for each in runs:
        if each.plan is not None:
            end = each.plan.total - each.plan.finetune
            frozen[each.group] = max(end, frozen.get(each.group, 0))
    return sorted({0, *(each.plan.warmup for each in runs if each.plan is not None), *frozen.values()})


def rows_at(runs: Sequence[BatchedRun], step: int) -> Rows:
    """The rows from this step on, until masks of another run begin to learn.

    Later warm-ups are parts of earlier ones: what two runs share in a stretch of steps they have shared since step 0.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    warmups: dict[tuple[Any, ...], list[int]] = {}
    later = [each.plan.warmup for each in runs if each.plan is not None and each.plan.warmup > step]
    until = min(later, default=None)
    for number, each in enumerate(runs):
        if each.has_masks(step):
            groups.setdefault(each.group, []).append(number)
        else:
            run = each.run
            shared = (run.seed, run.weight_decay, run.momentum, each.rates[:until].numpy().tobytes())
            warmups.setdefault(shared, []).append(number)
    return Rows(tuple(map(tuple, groups.values())), tuple(map(tuple, warmups.values())))
