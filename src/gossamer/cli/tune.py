"""`gossamer tune`: the same number of trials for every method, on problems of development."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gossamer.cli.arguments import OptionalFile, OptionalFolder, at_home
from gossamer.cli.console import Answer, lines_to
from gossamer.lab import tables
from gossamer.lab.suite import REPORTED, Tuning, freeze, tune, unstructured


@dataclass(frozen=True)
class Tune:
    """Tune methods, all in the same way: random settings, judged on held-out images of the development problems of the
    general suite."""

    out: OptionalFolder = None
    """Folder for one record per run, and tuning.json (default: results/tuning); runs with a record are not trained
    again."""
    methods: tuple[str, ...] = REPORTED
    """Names from `gossamer list`; all: every method that prunes single weights."""
    trials: int = Tuning.trials
    """Trials of each method; the first has its defaults."""
    problem: tuple[str, ...] = Tuning.problems
    """Development problems of the suite."""
    sparsity: float = Tuning.sparsity
    """The sparsity of all runs."""
    seeds: int = Tuning.seeds
    """Runs of each trial on each problem, with seeds 0, 1, …"""
    share: float = Tuning.share
    """The length of a run, as a share of that in the report."""
    freeze: OptionalFile = None
    """Write the best settings of each method into this file. Those of the suite are in
    src/gossamer/lab/recipes/frozen.json."""
    together: int = 32
    """Runs of a batch trained at the same time."""
    jobs: int = 1
    """Processes of problems that cannot be trained as a batch."""
    device: str = "auto"
    """auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        names = tuple(name for each in self.methods for name in (unstructured() if each == "all" else (each,)))
        tuning = Tuning(tuple(dict.fromkeys(names)), self.trials, self.problem, self.sparsity, self.seeds, self.share)
        found = tune(
            tuning,
            at_home(self.out or Path("results") / "tuning"),
            device=self.device,
            together=self.together,
            jobs=self.jobs,
            progress=lines_to(console),
        )
        if self.freeze is not None:
            freeze(found, at_home(self.freeze))
        rows = [
            [name, str(each["trials"]), str(each["run_epochs"]), ", ".join(each["settings"]) or "the defaults"]
            for name, each in found.items()
        ]
        console.print(tables.of_rows(["method", "trials", "run-epochs", "best settings"], rows))
        return Answer(found)
