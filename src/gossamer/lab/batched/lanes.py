"""Runs as a stack sees them, and who sits in which row of it.

A run that does not learn masks yet is a dense network, and dense networks with the same seed, learning rates and weight
decay are the same network: they share one row, the trunk, until their masks begin or their learning rates part. From
then on each has a row of its own. Runs whose masks are learned by one method object, with the same phases, are a team:
they sit side by side, and begin and freeze together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from torch import Tensor

from gossamer.lab.batched.training import Training
from gossamer.methods.base import Layout, Method, Options, Request
from gossamer.methods.dense import Dense
from gossamer.schedule import Plan
from gossamer.target import make_target


@dataclass(frozen=True)
class Common:
    """What all runs of a stack share."""

    epochs: int
    batch_size: int = 64
    label_smoothing: float = 0.0


@dataclass(frozen=True, eq=False)
class Lane:
    """One run of a stack. Its rates and phases are in steps."""

    name: str  # in messages
    identity: str  # all that decides what comes out, so that a checkpoint of other runs is recognised
    method_type: type[Method[Any]]
    options: Options
    sparsity: float
    seed: int
    plan: Plan | None  # None for a dense network that is its trunk to the end
    rates: Tensor  # the learning rate of each step, in double precision
    weight_decay: float
    momentum: float
    min_density: float  # share of each tensor that is never pruned
    training: Training = field(default_factory=Training)  # once it has a row of its own
    average_from: int = 0  # the step at which an exponential mean of its weights begins
    decay: float | None = None  # a fixed λ1 instead of the sparsity

    def __post_init__(self) -> None:
        if self.plan is None and (self.method_type is not Dense or self.training.changes()):
            raise ValueError(f"run {self.name}: expected phases for every run but a plain dense one, got none")
        if self.plan is not None and self.plan.total != len(self.rates):
            raise ValueError(f"run {self.name}: expected {self.plan.total} learning rates, got {len(self.rates)}")

    def request(self, layout: Layout) -> Request[Any]:
        """What it asks of its method."""
        target = None
        if self.decay is not None:
            target = make_target(layout.sizes, decay=self.decay, floors=[0] * len(layout.sizes))
        return Request(self.sparsity, self.seed, self.options, target)

    @property
    def team(self) -> tuple[Any, ...]:
        """Runs with the same one share one method object."""
        shared = (getattr(self.options, name) for name in self.method_type.shared)
        return self.method_type.name, *shared, self.decay, self.plan, self.min_density

    @property
    def turns(self) -> tuple[int, ...]:
        """The steps at which it gets a row of its own, as masks begin to learn, and at which they are frozen."""
        return () if self.plan is None else (self.plan.warmup, self.plan.total - self.plan.finetune)

    @property
    def mask_steps(self) -> int:
        return 0 if self.plan is None else self.plan.sparsify + self.plan.stabilise

    def has_masks(self, step: int) -> bool:
        return self.plan is not None and step >= self.plan.warmup

    def is_frozen(self, step: int) -> bool:
        return self.plan is not None and step >= self.plan.total - self.plan.finetune

    def phase(self, step: int) -> str:
        return "dense" if self.plan is None else str(self.plan.at(step).phase)


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    sparsity: float
    accuracy: float  # on the test set, at the last epoch, in percent
    validation_accuracy: float | None
    train_loss: float  # cross-entropy in the last epoch
    connections_by_tensor: tuple[int, ...]
    mask_steps: int = 0  # in which connections could go
    plain_accuracy: float | None = None  # of the last weights, where `accuracy` is of averaged or recalibrated ones
    plain_validation_accuracy: float | None = None
    seconds_before: float = field(default=0.0, compare=False)  # of all runs together, in sittings that were cut short


def settled(method: type[Method[Any]], options: Options, *, mask_steps: int, density: float | None) -> dict[str, float]:
    """The values in use of settings that a run may leave open, for its record."""
    chosen, usual = (
        method.resolve(each, mask_steps=mask_steps, density=density) for each in (options, method.options())
    )
    open_ones = [each.name for each in fields(chosen) if each.default is None and getattr(usual, each.name) is not None]
    return {name: getattr(chosen, name) for name in open_ones}


@dataclass(frozen=True)
class Seats:
    """The lanes of each row: team by team those that have masks, then the trunks."""

    teams: tuple[tuple[int, ...], ...]  # one lane a row
    trunks: tuple[tuple[int, ...], ...]  # several lanes a row

    @property
    def rows(self) -> list[tuple[int, ...]]:
        return [*((lane,) for team in self.teams for lane in team), *self.trunks]

    @property
    def begun(self) -> int:
        """How many rows are not trunks: they come first."""
        return sum(map(len, self.teams))

    def row_of_lanes(self) -> list[int]:
        """For each lane the number of its row."""
        found = {lane: row for row, lanes in enumerate(self.rows) for lane in lanes}
        return [found[lane] for lane in range(len(found))]


def turns(lanes: Sequence[Lane]) -> list[int]:
    """The steps at which somebody's masks begin or are frozen, and the first one."""
    return sorted({0, *chain.from_iterable(lane.turns for lane in lanes)})


def seats(lanes: Sequence[Lane], step: int) -> Seats:
    """Who sits where from this step on, until masks of somebody begin.

    Later trunks are parts of earlier ones: what two runs share in a stretch of steps they have shared since step 0.
    """
    teams: dict[tuple[Any, ...], list[int]] = {}
    trunks: dict[tuple[Any, ...], list[int]] = {}
    later = [lane.plan.warmup for lane in lanes if lane.plan is not None and lane.plan.warmup > step]
    until = min(later, default=None)
    for number, lane in enumerate(lanes):
        if lane.has_masks(step):
            teams.setdefault(lane.team, []).append(number)
        else:
            shared = (lane.seed, lane.weight_decay, lane.momentum, lane.rates[:until].numpy().tobytes())
            trunks.setdefault(shared, []).append(number)
    return Seats(tuple(map(tuple, teams.values())), tuple(map(tuple, trunks.values())))
