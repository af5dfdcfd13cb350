"""`gossamer list` of what is available, and `gossamer report` of finished runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import arg

from gossamer.lab import tables
from gossamer.lab.results import sweep_table
from gossamer.lab.training.result import RESULT, RUN, read_layers, read_result_file


@dataclass(frozen=True)
class List:
    """Show the available models, data sets, methods and recipes."""

    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        for table in tables.of_everything():
            console.print(table)


@dataclass(frozen=True)
class Report:
    """Show finished runs in one table, for a sweep with the settings that differ, and with --layers the nonzeros of
    every layer."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], arg(metavar="DIR [DIR ...]")]
    """Folders of runs, folders that contain such folders or the records of a sweep, or result.json files."""
    layers: bool = False
    """Also show one table per run with every layer."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        if not self.files:
            raise ValueError("expected folders of finished runs, got none: gossamer report DIR")
        found = {run: read_result_file(run) for file in self.files for run in _runs_in(file)}
        console.print(tables.of_results([(str(run), result) for run, result in found.items()]))
        swept = [result for result in found.values() if {"config", "diverged"} <= result.keys()]
        if len(swept) > 1:  # the names of their files do not describe them
            console.print(tables.of_rows(*sweep_table(sorted(swept, key=lambda each: json.dumps(each["config"])))))
        for file in found if self.layers else ():
            console.print(tables.of_layers(read_layers(file), str(file)))


def _runs_in(path: Path) -> list[Path]:
    """The path itself if it is a run, finished or not; otherwise the runs in the folder."""
    if not path.is_dir() or (path / RESULT).exists() or (path / RUN).exists():
        return [path]
    folders = sorted(child for child in path.iterdir() if (child / RESULT).is_file())
    return folders or sorted(path.glob("*.json")) or [path]
