"""Tuning a fixed λ1 by short runs: the procedure of the paper, for the paper's fixed connectivity decay.

Reaching a sparsity does not need it: `Sparsifier(sparsity=…)` meets the sparsity exactly in one run. The paper trains
for about a tenth of the iterations with a large λ1, which takes effect fast, and lowers λ1 until the run ends at the
target sparsity. Sparsity grows with λ1, so here the target is bracketed from above and then found by bisection of
log λ1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One short run."""

    decay: float
    sparsity: float


@dataclass(frozen=True)
class TunedDecay:
    """The λ1 whose short run came closest to the target, and all runs in order."""

    decay: float
    sparsity: float
    trials: tuple[Trial, ...]
    within_tolerance: bool


def tune_decay(
    short_run: Callable[[float], float],
    sparsity: float,
    *,
    start: float = 0.1,
    factor: float = 4.0,
    tolerance: float = 0.005,
    max_trials: int = 12,
) -> TunedDecay:
    """Find the λ1 with which `short_run(λ1)` ends at `sparsity`.

    `short_run` trains a fresh model for about a tenth of the iterations with `Sparsifier(decay=λ1, …)` and returns its
    sparsity. `start` should be a large λ1. It is divided by `factor` until the sparsity falls below the target, or
    multiplied if it is too small, and the bracket is then bisected in log λ1.
    """
    if not 0 < sparsity < 1:
        raise ValueError(f"expected sparsity to be between 0 and 1, got {sparsity}")
    if start <= 0 or factor <= 1 or tolerance <= 0 or max_trials < 1:
        raise ValueError(
            "expected start > 0, factor > 1, tolerance > 0 and max_trials of at least 1, "
            f"got {start}, {factor}, {tolerance} and {max_trials}"
        )
    trials: list[Trial] = []
    too_sparse: float | None = None
    too_dense: float | None = None
    decay = start
    while len(trials) < max_trials:
        found = float(short_run(decay))  # a scalar tensor is fine
        if not 0 <= found <= 1:
            raise ValueError(f"expected short_run to return a sparsity from 0 to 1, got {found} for a decay of {decay}")
        trials.append(Trial(decay, found))
        if abs(found - sparsity) <= tolerance:
            break
        if found > sparsity:
            too_sparse = decay
        else:
            too_dense = decay
        if too_dense is None:
            decay /= factor
        elif too_sparse is None:
            decay *= factor
        else:
            decay = math.sqrt(too_sparse * too_dense)
    best = min(trials, key=lambda trial: abs(trial.sparsity - sparsity))
    return TunedDecay(best.decay, best.sparsity, tuple(trials), abs(best.sparsity - sparsity) <= tolerance)
