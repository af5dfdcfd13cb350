"""The phases of a run as a frozen value: `plan.at(step)` is what happens at any step.

    warm-up     masks frozen at one: plain dense training
    sparsify    masks train; connectivity decay prunes weights until the target is met
    stabilise   masks continue to train at the target
    fine-tune   masks frozen: pruned weights stay exactly zero

Durations carry units: '150ep' (epochs), '2000it' (steps of the optimizer), '0.3run' (fraction of the run).
"""

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Real
from typing import cast


class Phase(StrEnum):
    WARMUP = "warm-up"
    SPARSIFY = "sparsify"
    STABILISE = "stabilise"
    FINETUNE = "fine-tune"
    FINISHED = "finished"

    @property
    def masks_train(self) -> bool:
        return self in (Phase.SPARSIFY, Phase.STABILISE)


_LEAVE_EVERY = 20
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ep|it|run)\s*")


def steps_of(duration: str, *, total_steps: int, steps_per_epoch: int | None) -> int:
    """The number of optimizer steps in a duration such as '150ep', '2000it' or '0.3run'."""
    return round(_exact_steps(duration, total_steps, steps_per_epoch))


def _exact_steps(duration: str, total_steps: int, steps_per_epoch: int | None) -> float:
    match = _DURATION.fullmatch(str(duration))  # a bare number is a likely mistake and gets the same error
    if match is None:
        raise ValueError(f"expected a duration with its unit, such as '150ep', '2000it' or '0.3run', got {duration!r}")
    number, unit = float(match[1]), match[2]
    if unit == "it":
        if number != int(number):
            raise ValueError(f"expected a whole number of steps, got {duration!r}")
        return number
    if unit == "run":
        if number > 1:
            raise ValueError(f"expected a fraction of the run between 0 and 1, got {duration!r}")
        return number * total_steps
    if steps_per_epoch is None:
        raise ValueError(
            f"{duration!r} counts epochs, but the length of an epoch is unknown: "
            "give steps_per_epoch=len(loader), or use 'it' or 'run'"
        )
    return number * steps_per_epoch


@dataclass(frozen=True)
class Moment:
    """The state of the plan at one step."""

    phase: Phase
    ramp: float  # progress of the budget from dense (0) to the target (1)
    settling: float  # progress of the mask phases (sparsify and stabilise), 0 to 1


@dataclass(frozen=True)
class Plan:
    """Lengths of the four phases in optimizer steps. Steps past the end belong to fine-tuning."""

    warmup: int
    sparsify: int
    stabilise: int
    finetune: int

    def __post_init__(self) -> None:
        if min(self.warmup, self.sparsify, self.stabilise, self.finetune) < 0:
            raise ValueError(f"expected phases of at least 0 steps, got {self}")
        if self.sparsify == 0:
            raise ValueError("expected a sparsify phase of at least one step, got none: make it or the run longer")

    @property
    def total(self) -> int:
        return self.warmup + self.sparsify + self.stabilise + self.finetune

    def at(self, step: int) -> Moment:
        start, end = self.warmup, self.warmup + self.sparsify + self.stabilise
        if step < start:
            return Moment(Phase.WARMUP, 0.0, 0.0)
        if step >= end:
            return Moment(Phase.FINETUNE, 1.0, 1.0)
        done = step - start
        # The last step of the sparsify phase is the first one at the full target.
        ramp = min(1.0, (done + 1) / self.sparsify)
        phase = Phase.SPARSIFY if done < self.sparsify else Phase.STABILISE
        return Moment(phase, ramp, done / (end - start))

    def leave_sparsify(self, step: int) -> "Plan":
        """The same plan with the sparsify phase ended at `step`; fine-tuning gets the remaining steps."""
        length = max(1, step - self.warmup)
        return replace(self, sparsify=length, finetune=self.finetune + self.sparsify - length)


def leave_interval(plan: Plan) -> int:
    """Steps between two checks whether the sparsify phase can end because a sparsity is reached."""
    return min(_LEAVE_EVERY, max(1, plan.sparsify // 10))


def make_plan(
    total_steps: int,
    *,
    warmup: str,
    sparsify: str,
    stabilise: str,
    steps_per_epoch: int | None = None,
) -> Plan:
    """A plan from durations; fine-tuning takes the rest of the run."""
    if not isinstance(cast(object, total_steps), Real) or total_steps is True or total_steps < 1 or total_steps % 1:
        raise ValueError(
            f"expected a whole number of total_steps of at least 1 (len(loader) * epochs), got {total_steps!r}"
        )
    if steps_per_epoch is not None and not 1 <= steps_per_epoch < math.inf:
        raise ValueError(f"expected steps_per_epoch of at least 1 (len(loader)), got {steps_per_epoch}")
    exact = [_exact_steps(duration, total_steps, steps_per_epoch) for duration in (warmup, sparsify, stabilise)]
    lengths = [round(steps) for steps in exact]
    if sum(lengths) > total_steps >= math.floor(sum(exact) + 0.001):
        lengths[lengths.index(max(lengths))] -= 1  # they fit but for rounding
    finetune = total_steps - sum(lengths)
    if finetune < 0:
        raise ValueError(
            f"the phases warmup={warmup}, sparsify={sparsify} and stabilise={stabilise} take {sum(lengths)} steps, "
            f"but the run has only {total_steps}: shorten these settings or train longer; a duration such as "
            "'0.3run' follows the length of the run"
        )
    return Plan(lengths[0], lengths[1], lengths[2], finetune)


ANNEALS = ("cosine", "step", "constant")


def cosine(progress: float) -> float:
    """A factor that falls from 1 to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def cubic_budget(ramp: float, total: int, target: int) -> int:
    """The budget along the ramp: a cubic from dense to the target, steep at first, while many weights are redundant."""
    return target + int((total - target) * (1.0 - ramp) ** 3 + 0.5)


def sparse_weight_decay(dense: float, *, density: float, power: float) -> float:
    """The weight decay once masks train, from that of the dense network and the target density."""
    return dense * math.pow(density, power)
