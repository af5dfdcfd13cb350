"""Every choice the method leaves open, with its default, and the named sets of them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from gossamer.method import ESTIMATORS
from gossamer.schedule import steps_of

SCALES = ("none", "global", "batch", "per_sample")
STARTS = ("magnitude", "constant")
ANNEALS = ("cosine", "step", "constant")


@dataclass(frozen=True)
class Settings:
    """How masks are learned. The defaults are what our measurements favour, the same for all networks."""

    estimator: str = "identity"  # straight-through estimator, one of method.ESTIMATORS
    alpha: float = 0.1  # slope of leaky_relu, upper bound of clipped_relu
    scale: str = "global"  # what the mask gradient is divided by: none, global, batch (a feature), per_sample
    mask_lr: float | None = None  # learning rate of the mask variables; None: by the steps in which they learn
    mask_momentum: float = 0.0
    anneal: str = "cosine"  # of mask_lr: cosine to zero over the mask phases; step: a tenth once stabilising; constant
    start: str = "magnitude"  # of the mask variables: |w̃| of the warmed-up weights, or one constant
    start_value: float = 1.0  # that constant
    anchor: float = 0.001  # share by which mask variables go back to |w̃| in each step; 0: they remember all steps
    anchor_cap: float = 3.0  # |w̃| counts up to so many times the size at which weights go, or usual ones; 0: always
    removed_gradient: float | None = None  # share for removed weights: 0 rests, 1 as in the paper, None by sparsity
    l2: float = 0.0  # λ2 in the mask gradient, for the reading where the L2 term acts on the masks
    floor: float = 0.001  # share of each tensor that is never removed, at least one connection; 0 switches it off
    warmup: str = "0.25run"
    sparsify: str = "0.35run"
    stabilise: str = "0.15run"

    def __post_init__(self) -> None:
        problems = [
            f"{name}: expected one of {', '.join(choices)}, got {value!r}"
            for name, value, choices in (
                ("estimator", self.estimator, tuple(ESTIMATORS)),
                ("scale", self.scale, SCALES),
                ("start", self.start, STARTS),
                ("anneal", self.anneal, ANNEALS),
            )
            if value not in choices
        ]
        problems += [
            f"{name}: expected {what}, got {getattr(self, name)!r}"
            for name, what, good in (
                ("alpha", "a number above 0", self.alpha > 0),
                ("mask_lr", "a number above 0, or None", self.mask_lr is None or self.mask_lr > 0),
                ("mask_momentum", "a number from 0 to below 1", 0 <= self.mask_momentum < 1),
                ("anchor", "a share from 0 to below 1", 0 <= self.anchor < 1),
                ("anchor_cap", "a number of at least 1, or 0", self.anchor_cap >= 1 or self.anchor_cap == 0),
                (
                    "removed_gradient",
                    "a share from 0 to 1, or None",
                    self.removed_gradient is None or 0 <= self.removed_gradient <= 1,
                ),
                ("start_value", "a number above 0, as masks start as connections", self.start_value > 0),
                (
                    "l2",
                    "a number of at least 0, and 0 with scale='per_sample'",
                    self.l2 >= 0 and not (self.l2 and self.scale == "per_sample"),
                ),
                ("floor", "a share from 0 to below 1", 0 <= self.floor < 1),
            )
            if not good
        ]
        problems += [
            f"{name}: {problem}"
            for name in ("warmup", "sparsify", "stabilise")
            if (problem := _wrong_duration(getattr(self, name))) is not None
        ]
        if problems:
            raise ValueError("settings that cannot be used:\n  " + "\n  ".join(problems))


def _wrong_duration(duration: str) -> str | None:
    try:
        steps_of(duration, total_steps=1, steps_per_epoch=1)
    except ValueError as error:
        return str(error)
    return None


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "default": Settings(),
        # What the paper states, and for what it does not state, what fits its tables (docs/method.md).
        "paper": Settings(
            scale="batch",
            anchor=0.0,
            removed_gradient=1.0,
            mask_lr=0.1,
            anneal="step",
            start="constant",
            floor=0.0,
            warmup="0.43run",
            sparsify="0.06run",
            stabilise="0.06run",
        ),
    }
)


def choose(preset: str, overrides: Mapping[str, Any]) -> Settings:
    """A preset with some of its settings replaced."""
    if preset not in PRESETS:
        raise ValueError(f"expected a preset out of {', '.join(PRESETS)}, got {preset!r}")
    known = [field.name for field in fields(Settings)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}"
            raise TypeError(f"unknown setting {name!r}: {hint}")
    return replace(PRESETS[preset], **overrides)
