"""The paper's search for λ1: short runs, each with another λ1, show which one reaches a sparsity.

A short run is a tenth of the whole one: a warm-up in proportion, and masks that train for the rest. The paper tries one
λ1 after another, from the largest down; here all are one sweep. Between two of them, λ1 is interpolated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gossamer.lab.recipes.recipe import share
from gossamer.lab.training.parsing import Scalar
from gossamer.lab.training.run import Run
from gossamer.schedule import steps_of

SHARE = 0.1  # of the epochs of the whole run
DECAYS = (0.0, 0.0001, 0.0003, 0.001, 0.002, 0.004, 0.006, 0.01, 0.016, 0.025, 0.04, 0.07)
SETTLING = 2  # epochs at the full rate in which masks move as far as in the 20 that follow at a tenth of it
_SOONEST = 0.25  # epochs after which the sparsify phase may be left
_ROUNDING = 1e-6
_COLUMNS = 6  # of a table of traces
_FINE = 1000  # assumed steps per epoch


@dataclass(frozen=True)
class Found:
    """The λ1 for a sparsity, and the sparsity at which to leave the sparsify phase."""

    decay: float
    leave_at: float
    reached: bool  # whether short runs reach this sparsity, and with a smaller λ1 do not


def short_run(run: Run, decay: float, *, epochs: int | None = None) -> Run:
    """The short run of a run with this λ1. Without `epochs`, a tenth of its epochs."""
    epochs = max(2, round(SHARE * run.epochs)) if epochs is None else epochs
    total = run.epochs * _FINE
    before = steps_of(run.phases.warmup, total_steps=total, steps_per_epoch=_FINE)
    settings: dict[str, Scalar] = dict(run.settings)
    settings |= {"warmup": share(before, of=total), "sparsify": share(total - before, of=total), "stabilise": "0it"}
    return replace(
        run, epochs=epochs, method="scl", sparsity=None, flops=None, decay=decay, leave_at=None, settings=settings
    )


def trace(record: Mapping[str, Any]) -> list[float]:
    """The sparsity of a short run after each epoch in which its masks trained."""
    return [float(each) for each in record["sparsity_by_epoch"]]


def rows_of_traces(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A table with the trace of each λ1, the smallest first."""
    runs = sorted((float(record["config"]["decay"]), trace(record)) for record in records)
    most = max(len(of) for _, of in runs)
    head = ["λ1", *(f"zeros after mask epoch {epoch + 1}" for epoch in range(most))]
    if most > _COLUMNS:
        head = ["λ1", f"zeros after mask epoch {most // 4}", f"{most // 2}", f"{most}"]
        return head, [
            [f"{decay:g}", *(_zeros(of[at - 1]) for at in (most // 4, most // 2, most))] for decay, of in runs
        ]
    return head, [[f"{decay:g}", *map(_zeros, of)] for decay, of in runs]


def _zeros(share: float) -> str:
    return f"{100 * share:.1f} %"


def find_decay(records: Sequence[Mapping[str, Any]], sparsity: float) -> Found:
    """The λ1 whose short run ends at a sparsity, interpolated between the two runs that end below and above it.

    Masks are to settle at the sparsity in the epochs after the sparsify phase, at a tenth of the rate. So that phase
    is left two epochs before the sparsity is reached.
    """
    runs = sorted((float(record["config"]["decay"]), trace(record)) for record in records)
    if not runs or not all(of for _, of in runs):
        raise ValueError("expected the records of short runs with a fixed λ1, got none, or some without a trace")
    below = [each for each in runs if each[1][-1] < sparsity]
    above = [each for each in runs if each[1][-1] >= sparsity and (not below or each[0] > below[-1][0])]
    if not below or not above:
        decay, of = (above or below[-1:])[0]
        return Found(decay, _before(of, sparsity), reached=False)
    (low, of_low), (high, of_high) = below[-1], above[0]
    part = (sparsity - of_low[-1]) / (of_high[-1] - of_low[-1])
    decay = math.exp((1 - part) * math.log(low) + part * math.log(high)) if low > 0 else part * high
    between = [(1 - part) * one + part * other for one, other in zip(of_low, of_high, strict=True)]
    return Found(float(f"{decay:.3g}"), _before(between, sparsity), reached=True)


def _before(of: Sequence[float], sparsity: float) -> float:
    """The sparsity two epochs before a run reaches `sparsity`; that itself if it does not."""
    epochs, curve = range(len(of) + 1), np.maximum.accumulate([0.0, *of])
    if curve[-1] < sparsity - _ROUNDING:
        return sparsity
    reached = float(np.interp(sparsity, curve, epochs))
    return round(float(np.interp(max(_SOONEST, reached - SETTLING), epochs, curve)), 4)
