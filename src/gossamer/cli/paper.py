"""Experiments of the paper: `gossamer reproduce`, and its search for λ1, `gossamer tune-decay`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import arg

from gossamer.cli.arguments import (
    Assignments,
    Folder,
    OptionalFile,
    OptionalFolder,
    OptionalNumber,
    RecipeName,
    at_home,
    joined,
)
from gossamer.cli.console import Answer, live_bar
from gossamer.lab import tables
from gossamer.lab.batched import sweep
from gossamer.lab.recipes import find
from gossamer.lab.reproduce import map_fitting
from gossamer.lab.reproduce.registry import EXHIBITS, Asked, exhibit
from gossamer.lab.short_runs import DECAYS, find_decay, rows_of_traces, short_run, trace
from gossamer.lab.training.distributed import check_one_process


@dataclass(frozen=True)
class Reproduce:
    """Repeat an experiment of the paper and show its table; --list shows all of them."""

    exhibit: Annotated[tyro.conf.Positional[str], arg(metavar="EXHIBIT")] = ""
    """Name of an exhibit, from --list."""
    out: OptionalFolder = None
    """Folder for the records (default: results/EXHIBIT); records that exist are not computed again."""
    list: bool = False
    """Show all exhibits, what each takes, and whether its records exist."""
    seeds: int = 3
    """Runs of each kind, with seeds 0, 1, …"""
    steps: int = map_fitting.STEPS
    """Steps of map-fitting."""
    epochs: OptionalNumber = None
    """Epochs of mnist; of other networks, of the short runs that find λ1."""
    device: str = "auto"
    """auto takes a GPU if there is one."""
    network: OptionalFile = None
    """File with the trained network of mask-gradients."""
    set: Assignments = ()
    """Changes to all runs of a network as key=value."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        if self.list:
            rows = [[each.name, each.about, each.cost, _state(each.default_out)] for each in EXHIBITS]
            console.print(tables.of_rows(("exhibit", "of the paper", "takes", "records here"), rows, left=4))
            return Answer([{"exhibit": name, "about": about, "takes": cost} for name, about, cost, _ in rows])
        if not self.exhibit:
            raise ValueError("expected the name of an exhibit, got none: gossamer reproduce --list shows all of them")
        chosen = exhibit(self.exhibit)
        check_one_process()
        with live_bar(console, self.exhibit) as bar:
            found = chosen.reproduce(
                Asked(
                    out=at_home(self.out or chosen.default_out),
                    seeds=self.seeds,
                    steps=self.steps,
                    epochs=self.epochs,
                    device=self.device,
                    network=None if self.network is None else at_home(self.network),
                    changes=joined(self.set),
                    progress=bar.line,
                    moved=bar.move,
                )
            )
        for head, cells in found.tables:
            console.print(tables.of_rows(head, cells))
        for note in found.notes:
            console.print(note)
        return Answer(found.records)


def _state(folder: Path) -> str:
    count = len(list(folder.glob("*.json"))) if folder.is_dir() else 0
    return f"{count} in {folder}" if count else "none"


@dataclass(frozen=True)
class TuneDecay:
    """Find the λ1 with which a run reaches a sparsity, by short runs with a fixed λ1, as in the paper."""

    recipe: RecipeName
    """Name of a recipe (see `gossamer list`), or a JSON file such as a run.json."""
    out: Folder
    """Folder for the records of the short runs; those that have one are not trained again."""
    sparsity: float
    """Fraction of zeros to reach: 0.95 is 95 %."""
    decays: tuple[float, ...] = DECAYS
    """The λ1 to try, all in one batch."""
    epochs: OptionalNumber = None
    """Epochs of a short run (default: a tenth of those of the recipe)."""
    set: Assignments = ()
    """Changes to the recipe as key=value."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        if not 0 < self.sparsity < 1:
            raise ValueError(f"expected --sparsity between 0 and 1, such as 0.95, got {self.sparsity}")
        run = find(self.recipe).run.with_settings(joined(self.set))
        runs = [short_run(run, decay, epochs=self.epochs) for decay in self.decays]
        with live_bar(console, self.recipe) as bar:
            records = sweep(runs, at_home(self.out), device=run.device, progress=bar.line, moved=bar.move)
        console.print(tables.of_rows(*rows_of_traces(records)))
        found = find_decay(records, self.sparsity)
        if not found.reached:
            console.print(f"No two of these λ1 end below and above {self.sparsity:.1%}: try others with --decays.")
        console.print(f"--decay {found.decay:g} --leave-at {found.leave_at:g}")
        return Answer({**asdict(found), "trace": {each["config"]["decay"]: trace(each) for each in records}})
