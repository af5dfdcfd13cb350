"""What there is and what came out: `gossamer list` and `gossamer report`."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from gossamer import tables
from gossamer.training.result import read_layers, read_result_file


@dataclass(frozen=True)
class List:
    """Show the models, data sets, methods and recipes there are."""

    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        for table in tables.of_everything():
            console.print(table)


@dataclass(frozen=True)
class Report:
    """Show finished runs in one table, and with --layers the connections of every layer."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their result.json files."""
    layers: bool = False
    """Also one table a run with every layer."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        found = [(str(file), read_result_file(file)) for file in self.files]
        console.print(tables.of_results(found))
        for file in self.files if self.layers else ():
            console.print(tables.of_layers(read_layers(file), str(file)))
