"""How a run of a race trains, beside its method: a teacher, averaged weights, weight decay by phase, phases of its own.

Every default means that nothing is done. What is not the default is told in the record of a run.
"""

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

TEACHERS = ("dense", "trunk")
PHASES = ("warmup", "sparsify", "stabilise", "finetune")


@dataclass(frozen=True)
class Training:
    """Settings of one run that any method can have.

    With `distil` = a and `temperature` = T the loss is (1-a)·CE + a·T²·KL(teacher ‖ student), both softened by T. The
    teacher sees the same augmented images in the same step: "dense" is the dense run of the same seed that trains
    beside it with `teacher_weight_decay`, "trunk" is the network from which the runs branched off, as it was then.

    `average_decay` or `average_tail` evaluate the averaged weight variables, masked by the final masks, with batch-norm
    statistics of their own: an exponential mean with that decay a step, or the plain mean over that last share of the
    run. `recalibrate` takes fresh batch-norm statistics for the last weights.

    `phases` are the shares of warm-up, sparsify, stabilise and fine-tune in the epochs, in the place of the race's own.
    """

    distil: float = 0.0
    temperature: float = 4.0
    teacher: str = "dense"
    teacher_weight_decay: float = 1e-4
    average_decay: float = 0.0
    average_tail: float = 0.0
    recalibrate: bool = False
    weight_decay_power: float = 0.0  # once masks learn, weight decay is multiplied by (1 - sparsity) to this power
    finetune_weight_decay: float | None = None  # once masks are frozen; None: as before
    removed_weight_decay: float = 1.0  # factor of weight decay behind the masks: 0 decays only what is kept
    phases: tuple[float, float, float, float] | None = None
    peak_rate: float | None = None  # the learning rate of the race, for this run
    hold: float | None = None  # share of the epochs before the learning rate begins to fall, in the place of the race's
    restart: float | None = None  # the warm-up has a cosine to zero of its own, and the rest one from this rate

    def __post_init__(self) -> None:
        for name, low, high in (
            ("distil", 0.0, 1.0),
            ("average_decay", 0.0, 1.0),
            ("average_tail", 0.0, 1.0),
            ("removed_weight_decay", 0.0, 100.0),
            ("weight_decay_power", 0.0, 10.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value}")
        if self.average_decay == 1.0:
            raise ValueError("average_decay: expected a number below 1, got 1.0, with which nothing new is averaged in")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")
        if self.teacher not in TEACHERS:
            raise ValueError(f"teacher: expected one of {', '.join(TEACHERS)}, got {self.teacher!r}")
        if self.phases is not None:
            shares = tuple(self.phases)  # from JSON it is a list
            if len(shares) != 4 or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-6:
                raise ValueError(f"phases: expected four shares of at least 0 with the sum 1, got {self.phases}")
            object.__setattr__(self, "phases", shares)
        if self.hold is not None and not 0.0 <= self.hold < 1.0:
            raise ValueError(f"hold: expected a number of at least 0 and below 1, got {self.hold}")
        for name in ("restart", "peak_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{name}: expected a learning rate above 0, got {rate}")
        for name in ("teacher_weight_decay", "finetune_weight_decay"):
            decay = getattr(self, name)
            if decay is not None and not 0 <= decay < math.inf:
                raise ValueError(f"{name}: expected a number of at least 0, got {decay}")
        if self.average_decay and self.average_tail:
            raise ValueError("expected average_decay or average_tail, got both: choose one")

    @property
    def averages(self) -> bool:
        return bool(self.average_decay or self.average_tail)

    @property
    def fresh_statistics(self) -> bool:
        """Whether batch norms get statistics of their own before the network is evaluated."""
        return self.recalibrate or self.averages

    def epochs(self, total: int) -> dict[str, int]:
        """The phases in whole epochs, by name; none where they are those of the race."""
        if self.phases is None:
            return {}
        ends = [round(sum(self.phases[:number]) * total) for number in range(5)]
        return dict(zip(PHASES, (end - start for start, end in pairwise(ends)), strict=True))

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


NAMES = tuple(field.name for field in fields(Training))
