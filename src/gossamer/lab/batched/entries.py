"""What is raced: the epochs and learning rates that all runs of a race share, and the runs."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gossamer.lab.batched.course import How, train_side_by_side
from gossamer.lab.batched.lanes import Common, Lane, Outcome
from gossamer.lab.batched.training import NAMES, Training
from gossamer.lab.data.sets import ImageSet
from gossamer.methods import find, make_options
from gossamer.methods.base import Method, Options
from gossamer.methods.lottery import rewound
from gossamer.schedule import Plan, cosine


@dataclass(frozen=True)
class Member:
    """One run of a race. `settings` are those of its method (gossamer.methods), `training` those that any can have."""

    seed: int
    method: str = "scl"
    sparsity: float = 0.95
    weight_decay: float = 1e-4
    settings: Options | None = None  # None: the defaults of the method
    training: Training = field(default_factory=Training)
    decay: float | None = None  # a fixed λ1, of methods that know it; the sparsity is then what comes out

    def __post_init__(self) -> None:
        method = find(self.method)
        settings = method.options() if self.settings is None else self.settings
        if type(settings) is not method.options:
            raise ValueError(
                f"expected {method.options.__name__} as the settings of {method.name}, got {type(settings).__name__}"
            )
        for name, what, good in (
            ("seed", "a whole number from 0 to below 2^63", 0 <= self.seed < 2**63),
            ("sparsity", "a number of at least 0 and below 1", 0 <= self.sparsity < 1),
            ("weight_decay", "a number of at least 0", 0 <= self.weight_decay < math.inf),
            ("decay", "a number of at least 0, or none", self.decay is None or 0 <= self.decay < math.inf),
            ("decay", f"none with method={method.name}", self.decay is None or method.solves_targets),
        ):
            if not good:
                raise ValueError(f"{name}: expected {what}, got {getattr(self, name)!r}")
        object.__setattr__(self, "method", method.name)
        object.__setattr__(self, "settings", settings)

    @staticmethod
    def of(
        seed: int, method: str = "scl", sparsity: float = 0.95, weight_decay: float = 1e-4, **settings: Any
    ) -> "Member":
        """A run with settings of its method, and of its training, by name."""
        training = Training(**{name: settings.pop(name) for name in NAMES if name in settings})
        decay = settings.pop("decay", None) if find(method).solves_targets else None
        return Member(seed, method, sparsity, weight_decay, make_options(find(method), settings), training, decay)

    @property
    def method_type(self) -> type[Method[Any]]:
        return find(self.method)

    @property
    def options(self) -> Options:
        assert self.settings is not None
        return self.settings

    def to_dict(self) -> dict[str, Any]:
        """Everything that was asked, as plain values in one level; of the training what differs from the defaults."""
        told = {"seed": self.seed, "method": self.method, "sparsity": self.sparsity, "weight_decay": self.weight_decay}
        decay = {"decay": self.decay} if self.method_type.solves_targets else {}
        return {**told, **decay, **asdict(self.options), **self.training.changes()}


def teachers_of(members: Sequence[Member]) -> list[Member]:
    """Dense runs that members learn from and that are not among them."""
    taught = [each for each in members if each.training.distil and each.training.teacher == "dense"]
    wanted = [Member(each.seed, "dense", 0.0, each.training.teacher_weight_decay) for each in taught]
    return [member for member in dict.fromkeys(wanted) if member not in members]


@dataclass(frozen=True)
class Race:
    """What all runs of a race share. Durations in epochs."""

    warmup: int
    sparsify: int
    stabilise: int
    finetune: int
    batch_size: int = 64
    learning_rate: float = 0.1
    schedule: str = "cosine"  # to zero over all epochs; staged: the paper's steps, with a cosine in the mask phases
    momentum: float = 0.9
    floor: float = 0.001
    label_smoothing: float = 0.0
    hold: float = 0.0  # share of the epochs before the cosine begins, at the full learning rate
    restart: float | None = None  # a cosine to zero in the warm-up, and another one from this rate

    @property
    def epochs(self) -> int:
        return self.warmup + self.sparsify + self.stabilise + self.finetune

    @property
    def common(self) -> Common:
        return Common(self.epochs, self.batch_size, self.label_smoothing)

    def rate(self, epoch: float) -> float:
        """The learning rate of the weights at a (fractional) epoch."""
        if self.restart is not None:
            first, rest = self.warmup, self.epochs - self.warmup
            if epoch < first:
                return self.learning_rate * cosine(epoch / first)
            return self.restart * cosine((epoch - first) / rest)
        if self.schedule == "cosine":
            held = self.hold * self.epochs
            return self.learning_rate * cosine(max(0.0, epoch - held) / (self.epochs - held))
        masks = self.sparsify + self.stabilise
        if epoch < self.warmup:
            return self.learning_rate
        if epoch < self.warmup + masks:
            return self.learning_rate * (0.1 + 0.9 * cosine((epoch - self.warmup) / masks))
        return self.learning_rate * (0.1 if epoch < self.warmup + masks + self.finetune / 2 else 0.01)


def run_race(
    race: Race,
    members: Sequence[Member],
    data: ImageSet,
    make_network: Callable[[], nn.Module],
    *,
    keep: Callable[[int, nn.Module], None] | None = None,
    **how: Unpack[How],
) -> list[Outcome]:
    """Train all members side by side: the warm-up once for each seed, then every member from its seed's trunk.

    All else is as in `train_side_by_side`.
    """
    lanes = lanes_of(race, members, len(data.train) // race.batch_size)
    return train_side_by_side(race.common, lanes, data, make_network, keep=keep, **how)


def lanes_of(race: Race, members: Sequence[Member], steps_per_epoch: int) -> list[Lane]:
    """The members as a stack sees them."""
    return [_lane(race, member, steps_per_epoch) for member in members]


def identity_of(race: Race, member: Member) -> str:
    """What a checkpoint knows a member by."""
    return json.dumps([asdict(race), member.to_dict()])


def _lane(race: Race, member: Member, steps_per_epoch: int) -> Lane:
    own = _own(race, member)
    plan = _plan(own, steps_per_epoch)
    return Lane(
        name=f"{member.method} with seed {member.seed}",
        identity=identity_of(race, member),
        method_type=member.method_type,
        options=member.options,
        sparsity=member.sparsity,
        seed=member.seed,
        plan=member.method_type.phases(plan),
        rates=_rates(own, steps_per_epoch, again=member.method_type.rewinds),
        weight_decay=member.weight_decay,
        momentum=race.momentum,
        min_density=race.floor,
        training=member.training,
        average_from=plan.warmup,
        decay=member.decay,
    )


def _own(race: Race, member: Member) -> Race:
    """The race with the phases and the learning rate of one of its members."""
    training = member.training
    rates = {"learning_rate": training.peak_rate, "hold": training.hold, "restart": training.restart}
    changes: dict[str, Any] = {name: value for name, value in rates.items() if value is not None}
    return replace(race, **{**changes, **training.epochs(race.epochs)})


def _plan(race: Race, steps_per_epoch: int) -> Plan:
    phases = (race.warmup, race.sparsify, race.stabilise, race.finetune)
    return Plan(*(epochs * steps_per_epoch for epochs in phases))


# Most members of a race share them, and steps are many.
@lru_cache(maxsize=16)
def _rates(race: Race, steps_per_epoch: int, *, again: bool) -> Tensor:
    """The learning rate of each step; `again`: with a second training after the cut."""
    plan = _plan(race, steps_per_epoch)

    def shared(step: int) -> float:
        return race.rate(step / steps_per_epoch)

    if not again:
        return torch.tensor([shared(step) for step in range(plan.total)], dtype=torch.float64)
    found = [rewound(plan, step, shared=shared, peak=race.learning_rate) for step in range(plan.total)]
    return torch.tensor(found, dtype=torch.float64)
