"""Tuning: one protocol for all methods, ours included, on the development problems of the suite.

Every method has the same number of trials. Trial 0 is its defaults; the others are drawn at random, from the number of
the trial and the name of the method alone. The phases and the power of the weight decay are drawn alike for all
methods. Of a method's own settings, a number is multiplied by a factor from a quarter to four (if it is from one half
to one, its distance from one is), and a switch is thrown; names, and numbers that follow from others (none), stay.

A trial is trained on every problem, shorter than in the report, and judged on held-out training images, never on the
test set: by the mean logarithm of its error over problems and seeds. Runs that have a record are not trained again.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gossamer.lab.checkpoint import write_atomically
from gossamer.lab.recipes.general import Problem, problem_named
from gossamer.lab.results.general import TUNING, read_run_record
from gossamer.lab.suite.comparison import train_missing
from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.settings import Phases

_PHASES = (
    ("warmup", (0.0, 0.1, 0.25, 0.4)),
    ("sparsify", (0.2, 0.35, 0.5, 0.7)),
    ("stabilise", (0.0, 0.15, 0.3, 0.5)),
)
_LONGEST = 0.95  # of the run, for these three; fine-tuning takes the rest
_DECAY_POWERS = (0.0, 0.25, 0.5)
_FACTOR = 4.0
_DRAWS = 1000  # attempts to draw settings that a method accepts


@dataclass(frozen=True)
class Tuning:
    """What is tuned, and how thoroughly."""

    methods: tuple[str, ...]
    trials: int = 16
    problems: tuple[str, ...] = ("resnet20-cifar10", "vit-cifar10", "fc-mnist-adam")
    sparsity: float = 0.95
    seeds: int = 1
    share: float = 0.3  # of the epochs in the report

    def __post_init__(self) -> None:
        for name in self.methods:
            if find(name).structured or name == "dense":
                raise ValueError(f"expected methods that prune single weights, got {name}: leave it out")
        for name in self.problems:
            if not problem_named(name).development:
                raise ValueError(f"nothing may be chosen on {name}, a problem of the report: choose others")
        if not self.methods or not self.problems or self.trials < 1 or self.seeds < 1 or not 0 < self.share <= 1:
            raise ValueError(
                f"expected methods, problems, at least 1 trial and 1 seed, and a share from 0 to 1, got {self}"
            )

    def runs(self, problem: Problem, settings: Sequence[str], method: str) -> list[Run]:
        """The runs of a trial on a problem."""
        epochs = max(1, round(self.share * problem.run.epochs))
        run = replace(problem.sparse_run(method, self.sparsity, settings), epochs=epochs, validation=problem.validation)
        return [replace(run, seed=seed) for seed in range(self.seeds)]


def trial_settings(method: str, trial: int) -> tuple[str, ...]:
    """The settings of a trial, as `Run.with_settings` takes them; none for trial 0."""
    if trial == 0:
        return ()
    common, own = random.Random(trial), random.Random(f"{method} {trial}")
    shared = _draw_shared(common)
    for _ in range(_DRAWS):
        settings = (*shared, *_draw_own(method, own))
        try:
            Run().with_settings([f"method={method}", "sparsity=0.9", *settings])
        except ValueError:
            continue
        return settings
    raise ValueError(f"no settings of {method} near its defaults are accepted, of {_DRAWS} drawn")


def _draw_shared(draw: random.Random) -> tuple[str, ...]:
    power = draw.choice(_DECAY_POWERS)
    decay = (f"weight_decay_power={power}",) if power else ()
    if draw.random() < 0.5:
        return decay  # the phases that are usual for the method
    while True:
        lengths = {name: draw.choice(choices) for name, choices in _PHASES}
        if sum(lengths.values()) <= _LONGEST:
            return (*decay, *(f"settings.{name}={length}run" for name, length in lengths.items()))


def _draw_own(method: str, draw: random.Random) -> tuple[str, ...]:
    of_phases = {each.name for each in fields(Phases)}
    found = []
    for each in fields(find(method).options):
        if each.name in of_phases or each.default is None:
            continue
        value = _vary(each.default, draw)
        if value != each.default:
            found.append(f"settings.{each.name}={value}")
    return tuple(found)


def _vary(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return draw.random() < 0.5
    if not isinstance(value, int | float):
        return value
    factor = _FACTOR ** draw.uniform(-1.0, 1.0)
    if isinstance(value, int):
        return max(1, round(value * factor))
    varied = 1.0 - (1.0 - value) * factor if 0.5 <= value < 1.0 else value * factor
    return float(f"{varied:.3g}")


def tune(
    tuning: Tuning,
    out: Path,
    *,
    device: str = "auto",
    together: int = 32,
    jobs: int = 1,
    minutes: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """Train what has no record in `out` yet. Returns, and writes to tuning.json, by method: all trials with their
    scores (none where runs are missing), the settings of the best one, and what they cost."""
    trials = {method: [trial_settings(method, number) for number in range(tuning.trials)] for method in tuning.methods}
    problems = [problem_named(name) for name in tuning.problems]
    runs = {
        problem.name: [
            run for name, each in trials.items() for settings in each for run in tuning.runs(problem, settings, name)
        ]
        for problem in problems
    }
    wrong = train_missing(
        runs, out, device=device, together=together, jobs=jobs, minutes=minutes, save_models=False, progress=progress
    )
    for line in wrong:
        progress(f"a trial that cannot be trained: {line}")
    found = {}
    for method, each in trials.items():
        scores = [_score(tuning, out, problems, settings, method) for settings in each]
        done = [(score, number) for number, score in enumerate(scores) if score is not None]
        if not done:
            continue
        best = min(done)[1]  # of equal ones the earliest
        found[method] = {
            "settings": list(each[best]),
            "trials": len(done),
            "run_epochs": len(done)
            * sum(run.epochs for problem in problems for run in tuning.runs(problem, (), method)),
            "scores": [
                {"settings": list(settings), "score": score} for settings, score in zip(each, scores, strict=True)
            ],
        }
    if found:
        content = {"protocol": asdict(tuning), "methods": found}
        write_atomically(out / TUNING, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))
    return found


def _score(
    tuning: Tuning, out: Path, problems: Sequence[Problem], settings: Sequence[str], method: str
) -> float | None:
    """The mean logarithm of the error on held-out images; lower is better. None if a run is missing."""
    errors = []
    for problem in problems:
        for run in tuning.runs(problem, settings, method):
            path = out / problem.name / f"{run.run_id}.json"
            if not path.is_file():
                return None
            record = read_run_record(path)
            accuracy = 0.0 if record.get("diverged") else record["validation_accuracy"]
            errors.append(math.log(max(1.0 - accuracy, 1e-6)))
    return statistics.mean(errors)


def freeze(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the best settings of each method to a file, beside those of other methods that it has already."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content |= {name: {key: each[key] for key in ("settings", "trials", "run_epochs")} for name, each in found.items()}
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))
