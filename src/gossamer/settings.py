"""The settings of `Sparsifier`: the phases of the run, the settings of its method, and named presets of both."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from gossamer.hints import did_you_mean
from gossamer.methods import Method, Options, make_options
from gossamer.methods.scl import OF_GRADIENTS
from gossamer.schedule import steps_of


@dataclass(frozen=True)
class Phases:
    """The lengths of the phases, and the minimum density of every tensor; the same for all methods and networks."""

    warmup: str = "0.25run"
    sparsify: str = "0.35run"
    stabilise: str = "0.15run"
    min_density: float = 0.001  # fraction of each tensor that is never pruned, at least one weight; 0 disables it

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {problem}"
            for name in ("warmup", "sparsify", "stabilise")
            if (problem := _wrong_duration(getattr(self, name))) is not None
        ]
        if not 0 <= self.min_density < 1:
            problems.append(f"min_density: expected a number of at least 0 and below 1, got {self.min_density!r}")
        if problems:
            raise ValueError("invalid settings:\n  " + "\n  ".join(problems))


def _wrong_duration(duration: str) -> str | None:
    try:
        steps_of(duration, total_steps=1, steps_per_epoch=1)
    except ValueError as error:
        return str(error)
    return None


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": MappingProxyType({}),
        # The settings of the paper; those that it does not state were chosen to fit its tables (docs/method.md). For
        # scl only.
        "paper": MappingProxyType(
            {
                "scale": "batch",
                "mask_decay": 0.0,
                "pruned_grad_scale": 1.0,
                "mask_lr": 0.1,
                "anneal": "step",
                "start": "constant",
                "min_density": 0.0,
                "warmup": "0.43run",
                "sparsify": "0.06run",
                "stabilise": "0.06run",
            }
        ),
    }
)


ADAPTIVE: Mapping[str, Any] = MappingProxyType(
    {"mask_travel": 1.0, "fade": 3.0, "pruned_grad_scale": 1.0}
    | {"warmup": "0.1run", "sparsify": "0.5run", "stabilise": "0.3run"}
)
"""What preset="default" means for scl under optimizers with adaptive rates, such as Adam (docs/method.md)."""
_LENGTHS = {"warmup", "sparsify", "stabilise"}

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "anchor": "mask_decay",
        "anchor_cap": "mask_decay_cap",
        "floor": "min_density",
        "removed_gradient": "pruned_grad_scale",
    }
)
"""New names of renamed settings by their old name, which works for one more version."""


def with_current_names(settings: Mapping[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """The settings under their current names. `warn` about old names, unless they come from a file."""
    both = [name for name, new in RENAMED.items() if name in settings and new in settings]
    if both:
        raise TypeError(f"{both[0]} is the old name of {RENAMED[both[0]]}, and both are set: drop the old one")
    old = [name for name in settings if name in RENAMED]
    if old and warn:
        pairs = ", ".join(f"{name} is {RENAMED[name]}" for name in old)
        warnings.warn(
            f"settings have new names ({pairs}); the old ones will be removed in the next version",
            DeprecationWarning,
            stacklevel=4,
        )
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def choose(
    method: type[Method[Any]], preset: str, overrides: Mapping[str, Any], *, adaptive: bool = False
) -> tuple[Phases, Options]:
    """The phases and the settings of a method: those of a preset with `overrides`.

    `adaptive`: the optimizer has adaptive rates, and the target suits masks that follow its steps. Any override of a
    setting of learning from gradients means that masks should learn from these.
    """
    if preset not in PRESETS:
        raise ValueError(f"expected one of the presets {', '.join(PRESETS)}, got {preset!r}")
    if preset != "default" and method.name != "scl":
        raise ValueError(f"preset={preset!r} is for method='scl', got method={method.name!r}: omit preset=")
    overrides = with_current_names(overrides, warn=True)
    of_phases = [field.name for field in fields(Phases)]
    of_method = [field.name for field in fields(method.options) if field.name not in of_phases]
    known = [*of_method, *of_phases]
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known, f"the settings are {', '.join(known)}")
            raise TypeError(f"unknown setting {name!r} of method={method.name!r}: {hint}")
    usual = PRESETS[preset]
    if adaptive and preset == "default" and method.name == "scl" and not overrides.keys() & set(OF_GRADIENTS):
        # Whoever sets the length of one phase counts on the usual lengths of the others.
        left_out = _LENGTHS if _LENGTHS & overrides.keys() else ()
        usual = {name: value for name, value in ADAPTIVE.items() if name not in left_out}
    values = {**method.usual_phases, **usual, **overrides}
    phases = Phases(**{name: value for name, value in values.items() if name in of_phases})
    return phases, make_options(method, {name: value for name, value in values.items() if name in of_method})
