"""A check that the durations of a run fit, as far as possible before its data is loaded."""

from gossamer.schedule import steps_of
from gossamer.settings import PRESETS, Phases

PHASES = ("warmup", "sparsify", "stabilise")
_FINE = 1000  # assumed steps per epoch


def phases_too_long(phases: Phases, preset: str, epochs: int) -> str | None:
    """Why the mask phases cannot fit into this many epochs; None if they may fit.

    The number of steps per epoch is not known yet, so an excess of less than an epoch is left to `make_plan`.
    """
    given = {name: str(getattr(phases, name)) for name in PHASES}
    taken = sum(_epochs_of(duration, epochs) for duration in given.values())
    if taken < epochs + 1:
        return None
    usual = " ".join(f"settings.{name}={PRESETS[preset].get(name, getattr(Phases, name))}" for name in PHASES)
    return (
        f"{', '.join(f'settings.{name}={duration}' for name, duration in given.items())}: the phases take {taken:g} "
        f"epochs, but the run has epochs={epochs}: shorten them, or set them as fractions of the run, such as {usual}"
    )


def _epochs_of(duration: str, epochs: int) -> float:
    if duration.strip().endswith("it"):
        return 0.0  # at least
    return steps_of(duration, total_steps=epochs * _FINE, steps_per_epoch=_FINE) / _FINE
