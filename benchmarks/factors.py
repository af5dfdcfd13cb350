"""Many hypotheses at once: two levels of every setting, in a design in which each run tells something of all of them.

    python benchmarks/factors.py --out results/race-resnet20

Changing one setting at a time tells of it by the few runs that have it. Here 48 runs (a Plackett-Burman design of 24
and its mirror image) change all settings at once, each in half of the runs and evenly against every other, so that all
runs tell of every setting: with a spread of 0.3 points between seeds the standard error of an effect is below 0.1,
against 0.24 of three runs against three, and effects of pairs of settings do not blur it. Half of the runs have 90 %
zeros, half 97 %. ResNet-20 on CIFAR-10, 50 epochs, 5,000 images held out; effects are on these images, the test set is
not looked at.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypotheses import FORMER, SEEDS
from screen import VALIDATION, make_run, race_all, tiny_images

from gossamer.lab import data
from gossamer.lab.batched import Member, Race
from gossamer.lab.batched.compare import Comparison
from gossamer.lab.data.sets import ImageSet

GENERATOR = "+++++-+-++--++--+-+----"  # of the design of 24 runs and 23 settings (Plackett and Burman, 1946)


@dataclass(frozen=True)
class Factor:
    """A setting with the value that half of the runs have instead of the default."""

    name: str
    changes: dict[str, Any]


SPARSITIES = (0.9, 0.97)
FACTORS = (
    Factor("learns from the dense run", {"distil": 0.5, "temperature": 4.0}),
    Factor("gradient of removed halved", {"removed_gradient": 0.5}),
    Factor("score remembered (.99)", {"score_memory": 0.99}),
    Factor("budget met in half the time", {"ramp_share": 0.5}),
    Factor("curvature in the score", {"curvature": 1.0}),
    Factor("mask rate .05 instead of .01", {"mask_lr": 0.05}),
    Factor("peak learning rate .2 instead of .1", {"peak_rate": 0.2}),
    Factor("learning rate held for 30 %", {"hold": 0.3}),
    Factor("half the warm-up", {"short_warmup": True}),
    Factor("masks learn to the end", {"to_the_end": True}),
    Factor("weight decay 5e-4 instead of 1e-4", {"weight_decay": 5e-4}),
    Factor("no weight decay of removed", {"removed_weight_decay": 0.0}),
    Factor("half the scale by layer", {"layer_power": 0.5}),
    Factor("half the scale by feature", {"feature_power": 0.5}),
    Factor("hysteresis", {"hysteresis": 3.0}),
    Factor("mask momentum .9", {"mask_momentum": 0.9}),
    Factor("start even over layers", {"start": "layer_magnitude"}),
)
AVERAGED = {"average_decay": 0.998}  # of every run; the accuracy of the last weights is in the records as well


def design(columns: int) -> np.ndarray:
    """48 rows of ±1, each column orthogonal to all others and to all products of two."""
    first = np.array([1 if sign == "+" else -1 for sign in GENERATOR])
    half = np.vstack([*(np.roll(first, shift) for shift in range(23)), -np.ones(23, dtype=int)])
    return np.vstack([half, -half])[:, :columns]


def phases(*, short_warmup: bool, to_the_end: bool) -> dict[str, Any]:
    """Masks begin earlier, the target is met at the same time; or they are never frozen."""
    if not short_warmup and not to_the_end:
        return {}
    warmup, finetune = 0.12 if short_warmup else 0.24, 0.0 if to_the_end else 0.24
    return {"phases": (warmup, 0.6 - warmup, 0.4 - finetune, finetune)}


def members() -> list[tuple[tuple[int, ...], Member]]:
    """Every row of the design with its run; a row and its mirror image have the same seed."""
    found = []
    for number, row in enumerate(design(1 + len(FACTORS)).tolist()):
        changes = AVERAGED | FORMER | {"sparsity": SPARSITIES[row[0] > 0]}
        for factor, level in zip(FACTORS, row[1:], strict=True):
            changes |= factor.changes if level > 0 else {}
        asked = {name: bool(changes.pop(name, False)) for name in ("short_warmup", "to_the_end")}
        seed = SEEDS[number % 24 % len(SEEDS)]
        found.append((tuple(row), Member.of(seed, **changes, **phases(**asked))))
    return found


def effects(rows: Sequence[Sequence[int]], seeds: Sequence[int], values: Sequence[float]) -> list[tuple[float, float]]:
    """What each column adds to the value from its low to its high level, with its standard error, by least squares."""
    levels = np.array(rows, dtype=float) / 2.0
    which = np.array(seeds)[:, None] == np.unique(seeds)[None, :]
    matrix, told = np.hstack([levels, which]), np.array(values, dtype=float)
    solution, _, rank, _ = np.linalg.lstsq(matrix, told, rcond=None)
    variance = np.square(told - matrix @ solution).sum() / max(1, len(told) - int(rank))
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(matrix.T @ matrix)))
    count = levels.shape[1]
    return list(zip(solution[:count].tolist(), errors[:count].tolist(), strict=True))


def tell(rows: Sequence[Sequence[int]], records: Sequence[dict[str, Any]]) -> list[str]:
    """Effects on held-out images, of averaged and of last weights, and on the training loss, best first."""
    seeds = [each["seed"] for each in records]
    averaged = effects(rows, seeds, [each["validation_accuracy"] for each in records])
    last = effects(rows, seeds, [each["of_the_last_weights"]["validation_accuracy"] for each in records])
    loss = effects(rows, seeds, [each["train_loss"] or math.nan for each in records])
    crossed = [[row[0] * level for level in row] for row in rows]  # the products with the sparsity
    by_sparsity = effects(crossed, seeds, [each["of_the_last_weights"]["validation_accuracy"] for each in records])
    gain = [
        each["validation_accuracy"] - each["of_the_last_weights"]["validation_accuracy"] for each in records
    ]  # of averaging itself
    lines = [f"averaged weights over the last ones: {np.mean(gain):+.2f} ± {np.std(gain) / np.sqrt(len(gain)):.2f}"]
    lines += [f"{'setting':<40} last weights   averaged       training loss     more at 97 % than at 90 %"]
    for number in np.argsort([-effect for effect, _ in last]):
        name = FACTORS[number - 1].name if number else "97 % zeros instead of 90 %"
        figures = (f"{effect:+.2f} ± {error:.2f}" for effect, error in (last[number], averaged[number]))
        crossing = by_sparsity[number] if number else (0.0, 0.0)
        figures = (
            *figures,
            f"{loss[number][0]:+.4f} ± {loss[number][1]:.4f}",
            f"{crossing[0]:+.2f} ± {crossing[1]:.2f}",
        )
        lines.append(f"{name:<40} {'  '.join(figures)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/race-resnet20"))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tiny", action="store_true", help="a few steps on random images")
    told = parser.parse_args(arguments)
    told.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    race = Comparison("resnet20", "cifar10", epochs=told.epochs).race()
    if told.tiny:
        race = Race(2, 3, 1, 2, batch_size=16)
    planned = members()
    runs = [
        make_run(f"row {number:02d}", member, race, "factors", told.out) for number, (_, member) in enumerate(planned)
    ]
    if any(not run.path.exists() for run in runs):
        images = tiny_images() if told.tiny else data.load("cifar10")
        assert isinstance(images, ImageSet)
        images = images.split(32 if told.tiny else VALIDATION)
        race_all(runs, images, "factors", told.commit, device, together=len(runs), seconds=float("inf"))
    records = [json.loads(run.path.read_text()) for run in runs]
    sys.stdout.write("\n".join(tell([row for row, _ in planned], records)) + "\n")


if __name__ == "__main__":
    main()
