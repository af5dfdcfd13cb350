"""Methods on the problems of the general suite: `gossamer compare --suite general`.

Every problem has a folder with one record per run. Problems that batched training supports are trained as one batch,
the others in several processes. A run that has its record is not trained again. Each method has the phases that suit it
and its frozen settings, if tuning has chosen any.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.lab.batched.compare import parse_variant
from gossamer.lab.batched.supported import unsupported
from gossamer.lab.batched.sweeps import check_defaults, missing_in, record_path, sweep
from gossamer.lab.recipes.general import PROBLEMS, Problem, problem_named
from gossamer.lab.results.general import read_run_record, write_summary
from gossamer.lab.suite.pool import train_in_processes
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS, find

_RIVALS = ("feather", "movement", "acdc", "autoprune", "gradual", "str", "dpf", "platon")
REPORTED = ("scl", *_RIVALS)
"""The methods of the report."""


@dataclass(frozen=True)
class SuiteComparison:
    """What is compared: problems by name (none: all), methods with or without settings, seeds 0, 1, …"""

    problems: tuple[str, ...] = ()
    methods: tuple[str, ...] = REPORTED
    sparsity: tuple[float, ...] = ()  # none: those of each problem
    seeds: int = 3
    epochs: int | None = None  # None: those of each problem

    def __post_init__(self) -> None:
        for name in self.problems:
            problem_named(name)
        if self.seeds < 1 or not self.methods:
            raise ValueError(
                f"expected methods and at least 1 seed, got {len(self.methods)} methods, {self.seeds} seeds"
            )

    @property
    def chosen(self) -> tuple[Problem, ...]:
        return tuple(map(problem_named, self.problems)) or PROBLEMS

    def runs(self, problem: Problem) -> list[Run]:
        """The runs on a problem: the dense network once per seed, then every method at every sparsity."""
        if self.epochs is not None:
            problem = replace(problem, run=replace(problem.run, epochs=self.epochs))
        found = [replace(problem.run, seed=seed) for seed in range(self.seeds)]
        for variant in dict.fromkeys(self.methods):
            method, changes = parse_variant(variant)
            if method == "dense":
                continue
            for sparsity in self.sparsity or problem.sparsities:
                run = problem.sparse_run(method, sparsity, changes or None)
                found += [replace(run, seed=seed) for seed in range(self.seeds)]
        return found

    def missing(self, out: Path) -> int:
        """The number of runs without a record in a folder."""
        return sum(len(missing_in(out / problem.name, self.runs(problem))) for problem in self.chosen)


def unstructured() -> tuple[str, ...]:
    """All methods that prune single weights."""
    return tuple(name for name in METHODS if name != "dense" and not find(name).structured)


def compare_suite(
    comparison: SuiteComparison,
    out: Path,
    *,
    device: str = "auto",
    together: int = 32,
    jobs: int = 1,
    save_models: bool = False,
    minutes: float = math.inf,
    alone: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train the runs that have no record in `out` yet, and return the rows of the summary of all that have one.

    After `minutes` no more runs begin; the same call goes on with them. With `alone`, every run has a process of its
    own, even where a batch could train it.
    """
    planned = {problem.name: comparison.runs(problem) for problem in comparison.chosen}
    problems = train_missing(
        planned,
        out,
        device=device,
        together=together,
        jobs=jobs,
        minutes=minutes,
        alone=alone,
        save_models=save_models,
        progress=progress,
        done=lambda: write_summary(out),
    )
    rows = write_summary(out)
    if problems:
        raise RuntimeError(
            f"{len(problems)} of the runs could not be trained; the others have their records in {out}:\n  "
            + "\n  ".join(problems)
        )
    return rows


def train_missing(
    planned: Mapping[str, Sequence[Run]],
    out: Path,
    *,
    device: str,
    together: int,
    jobs: int,
    minutes: float,
    save_models: bool,
    progress: Callable[[str], None],
    alone: bool = False,
    done: Callable[[], object] = lambda: None,
) -> list[str]:
    """Train the runs of each problem that have no record yet, in a folder of the problem's name in `out`.

    Returns what went wrong, a line for each run. `done` is called after each problem.
    """
    until, problems = time.monotonic() + 60.0 * minutes, list[str]()
    for name, runs in planned.items():
        folder = out / name
        missing = len(missing_in(folder, runs))
        for run in runs:
            if (path := record_path(folder, run)).exists():
                check_defaults(run, read_run_record(path), path)
        progress(f"{name}: {len(runs)} runs, {missing} to train")
        started = time.monotonic()
        if not missing or started > until:
            continue
        try:
            if alone or any(unsupported(run) for run in runs):
                problems += train_in_processes(
                    runs, folder, device=device, jobs=jobs, save_models=save_models, until=until, progress=progress
                )
            else:
                _train_batches(runs, folder, device, together, save_models, until, progress)
        except (ValueError, RuntimeError, ArithmeticError) as error:  # of a batch; the next problem may work
            problems.append(f"{name}: {error}")
        trained, took = missing - len(missing_in(folder, runs)), time.monotonic() - started
        progress(f"{name}: {trained} of {missing} runs trained in {took / 60:.1f} min")
        done()
    return problems


def _train_batches(
    runs: Sequence[Run],
    folder: Path,
    device: str,
    together: int,
    save_models: bool,
    until: float,
    progress: Callable[[str], None],
) -> None:
    """Train the runs without a record, `together` at a time, as long as the next batch should end before `until`."""
    missing, took = missing_in(folder, runs), 0.0
    for first in range(0, len(missing), together):
        started = time.monotonic()
        if started + took > until:
            progress(f"{len(missing) - first} runs are left: run the same command again")
            break
        batch = missing[first : first + together]
        sweep(batch, folder, device=device, together=together, save_models=save_models, progress=progress)
        took = time.monotonic() - started
