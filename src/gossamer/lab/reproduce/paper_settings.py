"""The paper's accuracy tables under its own settings: a fixed λ1, and its staged schedule.

First, short runs find the λ1 and the sparsity at which to leave the sparsify phase, for each cell. Then the whole
runs are trained. Both are sweeps, so what has a record is not trained again, and an interrupted one resumes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gossamer.lab.batched.sweeps import Record, sweep
from gossamer.lab.recipes import cifar, find
from gossamer.lab.recipes.cifar import ESTIMATORS
from gossamer.lab.short_runs import DECAYS, Found, find_decay, short_run
from gossamer.lab.training.parsing import Scalar
from gossamer.lab.training.run import Run

RECIPES = {recipe.exhibit: recipe.name for recipe in cifar.RECIPES if recipe.name.endswith("-paper")}
SHORT_RUNS = "short-runs"  # the folder of their records
# Raw mask gradients are about 1e-5 of normalised ones; a mask rate of 30 lets them move masks, and λ1 is as small.
RAW_RATE = 30.0
RAW_DECAYS = (1e-6, 3e-6, 6e-6, 1e-5, 2e-5, 4e-5, 1e-4)


@dataclass(frozen=True)
class Cell:
    """One number of the paper: a target sparsity, an estimator, and whether mask gradients are normalised."""

    sparsity: float
    accuracy: float | None
    estimator: str = "identity"
    normalised: bool = True

    @property
    def settings(self) -> dict[str, Scalar]:
        own: dict[str, Scalar] = {} if self.estimator == "identity" else {"estimator": self.estimator}
        return own if self.normalised else {**own, "scale": "none", "mask_lr": RAW_RATE}

    @property
    def decays(self) -> Sequence[float]:
        if not self.normalised:
            return RAW_DECAYS
        return DECAYS if self.estimator == "identity" else DECAYS[-8:]  # others are wanted at 95 % only


def cells(recipe: str) -> list[Cell]:
    """The cells of a recipe, the paper's method first."""
    found = find(recipe)
    own = [Cell(each.sparsity, each.value) for each in found.published if each.sparsity]
    if not own:  # VGG-19: a figure without numbers, up to the sparsity of the recipe
        own = [Cell(find(recipe.removesuffix("-paper")).run.sparsity or 0.0, None)]
    others = ESTIMATORS.get((found.run.data, found.run.model), {})
    sparsity = max((cell.sparsity for cell in own), default=0.0)
    return own + [
        Cell(sparsity, accuracy, estimator, normalised)
        for (estimator, normalised), accuracy in others.items()
        if (estimator, normalised) != ("identity", True)
    ]


def short_runs(run: Run, cell: Cell, *, epochs: int | None = None) -> list[Run]:
    """The short runs of a cell, from the recipe's run; cells that differ in their sparsity share them."""
    base = replace(run, settings={**run.settings, **cell.settings})
    return [short_run(base, decay, epochs=epochs) for decay in cell.decays]


def whole_run(run: Run, cell: Cell, found: Found, *, seed: int = 0) -> Run:
    settings = {**run.settings, **cell.settings}
    return replace(run, decay=found.decay, leave_at=found.leave_at, settings=settings, seed=seed)


def rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """A table with one row per run."""
    head = ["zeros", "reached", "seed", "estimator", "scale", "λ1", "paper", "accuracy"]
    found = []
    for record in sorted(records, key=lambda each: (each["paper_sparsity"], str(each["config"]["settings"]))):
        config, paper = record["config"], record["paper_accuracy"]
        settings = config["settings"]
        kind = [settings.get("estimator", "identity"), settings.get("scale", "batch"), f"{config['decay']:g}"]
        zeros = [f"{100 * record[name]:.1f} %" for name in ("paper_sparsity", "sparsity")]
        accuracies = ["–" if each is None else f"{100 * each:.2f}" for each in (paper, record["accuracy"])]
        found.append([*zeros, str(record["seed"]), *kind, *accuracies])
    return head, found


def reproduce(
    recipe: str,
    out: Path,
    *,
    seeds: int = 3,
    epochs: int | None = None,
    device: torch.device,
    changes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
    moved: Callable[[float], None] = lambda share: None,
) -> list[Record]:
    """Train what has no record under `out` yet, and return the records of the whole runs.

    The paper's own method has `seeds` runs per sparsity, each other estimator one. `epochs` are those of short runs,
    and `changes` are made to all runs, as key=value.
    """
    base, folder = find(recipe).run.with_settings(changes), out / SHORT_RUNS
    short = {cell: short_runs(base, cell, epochs=epochs) for cell in cells(recipe)}
    sweep([run for runs in short.values() for run in runs], folder, device=device, together=64, progress=progress)
    wanted: dict[str, tuple[Cell, Run]] = {}
    for cell, runs in short.items():
        found = find_decay(sweep(runs, folder, device=device), cell.sparsity)
        for seed in range(seeds if cell.normalised and cell.estimator == "identity" else 1):
            run = whole_run(base, cell, found, seed=seed)
            wanted[run.run_id] = cell, run
        kind, bracketed = "normalised" if cell.normalised else "raw", "" if found.reached else " (not bracketed)"
        progress(
            f"{cell.sparsity:.1%}, {cell.estimator}, {kind}: λ1 = {found.decay:g}{bracketed}, "
            f"the sparsify phase is left at {found.leave_at:.1%}"
        )

    def further(run: Run, network: torch.nn.Module) -> dict[str, object]:
        cell, _ = wanted[run.run_id]
        return {"exhibit": recipe, "paper_accuracy": cell.accuracy, "paper_sparsity": cell.sparsity}

    runs = [run for _, run in wanted.values()]
    return sweep(runs, out, device=device, together=len(runs), progress=progress, further=further, moved=moved)
