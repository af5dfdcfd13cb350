"""`gossamer list` of what is available, and `gossamer report` of finished runs and of models."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from tyro.conf import arg

from gossamer.cli.arguments import OptionalFile, OptionalName, at_home
from gossamer.cli.console import Answer, live_bar
from gossamer.io.checkpoints import is_checkpoint, read_checkpoint
from gossamer.io.container import writable
from gossamer.io.kinds import kind_of
from gossamer.lab import tables
from gossamer.lab.frontier import FRONTIER, SPARSITIES, WITHIN, frontier, frontier_table, write_frontier
from gossamer.lab.model_files import knows_its_network, open_network
from gossamer.lab.report_pages import page_of_panels, page_of_run, panel_of_sweep, panels_of_comparison
from gossamer.lab.results import sweep_table
from gossamer.lab.training.result import RESULT, RUN, read_layers, read_result_file
from gossamer.report import report
from gossamer.report.page import Page, page_of, write_page


@dataclass(frozen=True)
class List:
    """Show the available models, data sets, methods and recipes, and the settings of methods."""

    kinds: Annotated[
        tyro.conf.Positional[tuple[Literal["models", "data", "methods", "recipes", "settings"], ...]],
        arg(metavar="[models|data|methods|recipes|settings ...]"),
    ] = ()
    """What to list. Default: everything but the settings."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        kinds: tuple[str, ...] = self.kinds or tuple(each for each in tables.KINDS if each != "settings")
        for kind in kinds:
            console.print(tables.of_kind(kind))
        return Answer({kind: tables.rows_of_kind(kind) for kind in kinds})


@dataclass(frozen=True)
class Report:
    """Show finished runs in one table, for a sweep with the settings that differ, and models by layer. With --html also
    write a page with charts."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], arg(metavar="PATH [PATH ...]")]
    """Folders of runs, folders that contain such folders or the records of a sweep, result.json files; or a model:
    safetensors, a state dict of torch.save, or a folder from Hugging Face."""
    layers: bool = False
    """Also show one table per run with every layer."""
    html: OptionalFile = None
    """Write a page to look at into this file: one run, one model, a sweep or a comparison. It needs no network. Needs
    plotly (pip install 'gossamer[report]')."""
    net: OptionalName = None
    """Architecture of a model file, for its multiply-adds: a name from `gossamer list`, or module:function. Default: as
    the file or its run.json says."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        if not self.files:
            raise ValueError("expected folders of finished runs, or a model, got none: gossamer report PATH")
        if self.html is not None:
            writable(at_home(self.html))
        is_model = len(self.files) == 1 and _is_model(self.files[0])
        values, page = self._model(console, self.files[0]) if is_model else self._runs(console)
        if page is not None and self.html is not None:
            path = write_page(page, at_home(self.html))
            console.print(f"The page is in {path}", soft_wrap=True, highlight=False)
        return Answer(values)

    def _model(self, console: Console, path: Path) -> tuple[Any, Page | None]:
        if self.net is not None or knows_its_network(path):
            stored = open_network(path, self.net, shape=self.shape or None)
            found = report(stored.model, stored.example(1), batch_size=1)
        else:
            found = report(read_checkpoint(path))
        console.print(found)
        title = path.resolve().name
        return found.to_dict(), None if self.html is None else page_of(found.rows, found.tensors, title=title)

    def _runs(self, console: Console) -> tuple[Any, Page | None]:
        if self.html is not None and (panels := panels_of_comparison(self.files)):
            values = {"panels": [{"heading": heading, **asdict(panel)} for heading, panel in panels]}
            return values, page_of_panels("Comparison", ", ".join(map(str, self.files)), panels)
        found = {run: read_result_file(run) for file in self.files for run in _runs_in(file)}
        results: list[dict[str, Any]] = [{"path": str(run), **result} for run, result in found.items()]
        console.print(tables.of_results([(_name(run), result) for run, result in found.items()]))
        swept = [result for result in found.values() if {"config", "diverged"} <= result.keys()]
        if len(swept) > 1:  # the names of their files do not describe them
            console.print(tables.of_rows(*sweep_table(sorted(swept, key=lambda each: json.dumps(each["config"])))))
        for file, each in zip(found if self.layers else (), results, strict=False):
            layers = read_layers(file)
            console.print(layers.table(str(file)))
            each["layers"] = layers.to_dict()["rows"]
        if self.html is None:
            return results, None
        if len(found) == 1:
            (run,) = found
            return results, page_of_run(run if run.is_dir() else run.parent)
        about = f"{len(found)} runs in {', '.join(map(str, self.files))}"
        return results, page_of_panels("Sweep", about, [("Runs", panel_of_sweep([*found.values()]))])


@dataclass(frozen=True)
class Frontier:
    """Show the accuracy of one trained network at every sparsity, by thresholding its mask variables, with the gap to
    networks that were trained for their sparsity. Nothing is trained but batch-norm statistics."""

    run: Annotated[tyro.conf.Positional[Path], arg(metavar="DIR")]
    """Folder of a finished run; the whole curve needs one of gossamer train --keep-mask-variables, others give the part
    beyond their sparsity, by magnitude."""
    sparsity: tuple[float, ...] = SPARSITIES
    """Sparsities: 0.95 is 95 % zeros."""
    against: tuple[Path, ...] = ()
    """Folders of other finished runs, or of a sweep, to compare with: the same network and data."""
    device: OptionalName = None
    """Device, such as cpu or cuda:1. Default: that of the run."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        others = [run for path in self.against for run in _runs_in(path)]
        with live_bar(console, "evaluating") as bar:
            found = frontier(
                self.run,
                sparsities=self.sparsity,
                against=others,
                device=self.device,
                progress=lambda sparsity, share: bar.move(share, f"at {sparsity:.1%}"),
            )
        write_frontier(found, self.run / FRONTIER)
        console.print(tables.of_rows(*frontier_table(found), f"One network at every sparsity, by {found.order}"))
        console.print(
            f"The knee, {found.knee.sparsity:.1%}, is the sparsest point within {100 * WITHIN:g} point of the best "
            f"accuracy. gossamer report {self.run} --html FILE draws the curve.",
            soft_wrap=True,
            highlight=False,
        )
        return Answer(found.to_dict())


def _name(run: Path) -> str:
    """The name of a run in a table: its folder, or its record without the suffix."""
    return str(run.with_suffix("") if run.suffix == ".json" and run.name != RESULT else run)


def _is_model(path: Path) -> bool:
    kind = kind_of(path)
    return kind in ("torch", "pickle", "safetensors") or (is_checkpoint(path) and kind != "run")


def _runs_in(path: Path) -> list[Path]:
    """The path itself if it is a run, finished or not; otherwise the runs in the folder."""
    if not path.is_dir() or (path / RESULT).exists() or (path / RUN).exists():
        return [path]
    folders = sorted(child for child in path.iterdir() if (child / RESULT).is_file())
    return folders or sorted(path.glob("*.json")) or [path]
