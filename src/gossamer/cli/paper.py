"""Experiments of the paper: `gossamer reproduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from gossamer.cli.arguments import OptionalFolder, at_home
from gossamer.cli.console import Answer, live_bar
from gossamer.lab import tables
from gossamer.lab.reproduce import map_fitting, mnist
from gossamer.lab.results import map_fitting_rows, mnist_decay_table, mnist_estimator_table
from gossamer.lab.training.distributed import check_one_process, join


@dataclass(frozen=True)
class Reproduce:
    """Repeat an experiment of the paper and show its table."""

    exhibit: tyro.conf.Positional[Literal["map-fitting", "mnist"]]
    out: OptionalFolder = None
    """Folder for the records (default: results/EXHIBIT); records that exist are not computed again."""
    seeds: int = 3
    """Runs of each kind, with seeds 0, 1, …"""
    steps: int = map_fitting.STEPS
    """Steps of map-fitting."""
    epochs: int = mnist.EPOCHS
    """Epochs of mnist."""
    device: str = "auto"
    """Device of mnist: auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        check_one_process()
        out = at_home(self.out or Path("results") / self.exhibit)
        with live_bar(console, self.exhibit) as bar:
            if self.exhibit == "map-fitting":
                records = map_fitting.reproduce(out, seeds=self.seeds, steps=self.steps, progress=bar.line)
            else:
                device = join(self.device).device
                records = mnist.reproduce(
                    out, seeds=self.seeds, epochs=self.epochs, device=device, progress=bar.line, moved=bar.move
                )
        if self.exhibit == "map-fitting":
            console.print(tables.of_map_fitting(map_fitting_rows(records)))
            console.print(
                "The paper prints curves and no numbers: clipped ReLU is worst, ReLU is better, the other three "
                "are best and similar, and normalisation reduces all errors."
            )
            console.print(f"the records and, if matplotlib is installed, their curves are in {out}")
        else:
            for head, rows in (mnist_decay_table(records), mnist_estimator_table(records)):
                console.print(tables.of_rows(head, rows))
            console.print(f"the records and, if matplotlib is installed, the picture {mnist.PICTURE} are in {out}")
        return Answer(records)
