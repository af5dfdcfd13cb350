"""How a run of a race trains, beside its method: a teacher, averaged weights, weight decay by phase.

Every default means that nothing is done. What is not the default is told in the record of a run.
"""

from dataclasses import dataclass, fields
from typing import Any

TEACHERS = ("dense", "trunk")


@dataclass(frozen=True)
class Training:
    """Settings of one run that any method can have.

    With `distil` = a and `temperature` = T the loss is (1-a)·CE + a·T²·KL(teacher ‖ student), both softened by T. The
    teacher sees the same augmented images in the same step: "dense" is the dense run of the same seed that trains
    beside it with `teacher_weight_decay`, "trunk" is the network from which the runs branched off, as it was then.

    `average_decay` or `average_tail` evaluate the averaged weight variables, masked by the final masks, with batch-norm
    statistics of their own: an exponential mean with that decay a step, or the plain mean over that last share of the
    run. `recalibrate` takes fresh batch-norm statistics for the last weights.
    """

    distil: float = 0.0
    temperature: float = 4.0
    teacher: str = "dense"
    teacher_weight_decay: float = 1e-4
    average_decay: float = 0.0
    average_tail: float = 0.0
    recalibrate: bool = False
    finetune_weight_decay: float | None = None  # once masks are frozen; None: as before
    removed_weight_decay: float = 1.0  # factor of weight decay behind the masks: 0 decays only what is kept

    def __post_init__(self) -> None:
        for name, low, high in (
            ("distil", 0.0, 1.0),
            ("average_decay", 0.0, 1.0),
            ("average_tail", 0.0, 1.0),
            ("removed_weight_decay", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value}")
        if self.average_decay == 1.0:
            raise ValueError("average_decay: expected a number below 1, got 1.0, with which nothing new is averaged in")
        if self.temperature <= 0:
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")
        if self.teacher not in TEACHERS:
            raise ValueError(f"teacher: expected one of {', '.join(TEACHERS)}, got {self.teacher!r}")
        if self.average_decay and self.average_tail:
            raise ValueError("expected average_decay or average_tail, got both: choose one")

    @property
    def averages(self) -> bool:
        return bool(self.average_decay or self.average_tail)

    @property
    def fresh_statistics(self) -> bool:
        """Whether batch norms get statistics of their own before the network is evaluated."""
        return self.recalibrate or self.averages

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


NAMES = tuple(field.name for field in fields(Training))
