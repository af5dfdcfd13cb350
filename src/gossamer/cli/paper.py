"""Exhibits of the paper: `gossamer reproduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from gossamer.cli.arguments import OptionalFolder, at_home
from gossamer.cli.telling import lines_to
from gossamer.lab import tables
from gossamer.lab.batched.folder import held
from gossamer.lab.reproduce import map_fitting, mnist
from gossamer.lab.results import map_fitting_rows, mnist_decay_table, mnist_estimator_table
from gossamer.lab.training.place import check_one_process, join


@dataclass(frozen=True)
class Reproduce:
    """Repeat an exhibit of the paper and show its table."""

    exhibit: tyro.conf.Positional[Literal["map-fitting", "mnist"]]
    out: OptionalFolder = None
    """Folder for the records (results/EXHIBIT); what is there already is not computed again."""
    seeds: int = 3
    """Runs of each kind, with seeds from 0 on."""
    steps: int = map_fitting.STEPS
    """Of map-fitting."""
    epochs: int = mnist.EPOCHS
    """Of mnist."""
    device: str = "auto"
    """Of mnist: auto takes a GPU where there is one."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        check_one_process()
        out = at_home(self.out or Path("results") / self.exhibit)
        with held(out):
            self._repeat(out, console)

    def _repeat(self, out: Path, console: Console) -> None:
        if self.exhibit == "map-fitting":
            records = map_fitting.reproduce(out, seeds=self.seeds, steps=self.steps, progress=lines_to(console))
            console.print(tables.of_map_fitting(map_fitting_rows(records)))
            console.print(
                "The paper has curves and no numbers: clipped ReLU worst, ReLU better, the other three better still "
                "and alike, and normalisation reduces all errors."
            )
            console.print(f"the records and, where matplotlib is installed, their curves are in {out}")
            return
        device = join(self.device).device
        records = mnist.reproduce(out, seeds=self.seeds, epochs=self.epochs, device=device, progress=lines_to(console))
        for head, rows in (mnist_decay_table(records), mnist_estimator_table(records)):
            console.print(tables.of_rows(head, rows))
        console.print(f"the records and, where matplotlib is installed, the picture {mnist.PICTURE} are in {out}")
