"""One run: `gossamer train`; and two on a small network: `gossamer quickstart`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gossamer.cli.arguments import Assignments, Folder, OptionalFolder, RecipeName, at_home, joined
from gossamer.cli.console import Answer
from gossamer.cli.run_options import RunOptions, assignments
from gossamer.deployment.runtime.memory import processor
from gossamer.deployment.speed import measure
from gossamer.deployment.speed.engines import OURS
from gossamer.lab import tables
from gossamer.lab.model_files import open_network
from gossamer.lab.recipes import find
from gossamer.lab.report_pages import SPEED, page_of_run, speed_ratios
from gossamer.lab.training import train
from gossamer.lab.training.progress import LiveLine, Observer, PlainLines, TensorBoard
from gossamer.lab.training.result import MODEL, RESULT, SPARSE_MODEL, read_layers
from gossamer.lab.training.run import Run
from gossamer.report.page import write_page


@dataclass(frozen=True)
class Train:
    """Train a recipe, or resume it after a stop or a kill. Options override the recipe."""

    recipe: RecipeName
    """Name of a recipe (see `gossamer list`), or a JSON file such as a run.json."""
    options: RunOptions
    out: OptionalFolder = None
    """Folder for checkpoints, log, model and result. Default: runs/RECIPE-ID, where the ID identifies the settings."""
    set: Assignments = ()
    """Changes to the recipe as key=value, the same as the options below: lr=0.05 settings.mask_lr=0.1."""
    keep_mask_variables: bool = False
    """Also write the mask variables and dense weights, for `gossamer frontier`."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        recipe, run, out = find(self.recipe), self._run(), self.folder()
        written_before = _written(out / RESULT)
        result = _train(recipe.name, run, out, keep_mask_variables=self.keep_mask_variables)
        if leads():
            if _written(out / RESULT) == written_before:
                _say(console, f"This run had already finished in {out}: nothing was trained.")
            console.print(tables.of_results([(recipe.name, result)]))
            console.print(tables.against_paper(recipe, result))
            if (out / MODEL).is_file():
                _say(console, f"The model is in {out / MODEL}")
        return Answer(result)

    def folder(self) -> Path:
        """The folder of the run."""
        return at_home(self.out or Path("runs") / f"{find(self.recipe).name}-{self._run().run_id}")

    def _run(self) -> Run:
        changes = joined(self.set)
        return find(self.recipe).run.with_settings(changes + assignments(self.options, changes))


@dataclass(frozen=True)
class Quickstart:
    """Train a small network on digits, dense and 95 % sparse, compare them, and write a page about the sparse one.
    Needs no data and no GPU."""

    out: Folder = Path("gossamer-quickstart")
    """Folder for both runs."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        torch.set_num_threads(1)  # a second thread does not help a network this small, and costs much on a busy machine
        folders = {name: at_home(self.out) / name for name in ("digits-dense", "digits")}
        results = [(name, _train(name, find(name).run, folder)) for name, folder in folders.items()]
        console.print(tables.of_results(results))
        console.print(read_layers(folders["digits"]).table("Nonzeros by layer"))
        plain, small = (folders["digits"] / name for name in (MODEL, SPARSE_MODEL))
        smaller = plain.stat().st_size / small.stat().st_size
        _say(
            console,
            f"The sparse network is in {plain}, for any PyTorch program, and {smaller:.0f} times smaller in {small}, "
            "for gossamer.load.",
        )
        _say(console, _timed(folders["digits"]))
        _say(console, self._page(folders["digits"], dense=results[0][1]))
        _say(console, "Next: gossamer list, then gossamer train RECIPE --out DIR")
        return Answer(dict(results))

    def _page(self, folder: Path, dense: dict[str, Any]) -> str:
        path = at_home(self.out) / "report.html"
        try:
            write_page(page_of_run(folder, dense), path)
        except ImportError as error:  # plotly is optional
            return str(error)
        return f"A page with its curves and layers, for your browser, is in {path}"


def _timed(folder: Path) -> str:
    """Measure how fast the network of a run is on this machine, and say it in a sentence."""
    stored = open_network(folder / MODEL)
    engines = ("torch", "onnxruntime", OURS)
    measured = measure(
        stored.model, stored.example, name=stored.name, batches=(1,), engines=engines, seconds=1.0, break_even=False
    )
    (folder / SPEED).write_text(measured.to_json())
    (case,) = measured.to_dict()["cases"]
    ratios = [f"{ratio:.1f} times as fast as {engine}" for engine, ratio in speed_ratios(case).items()]
    if not ratios:
        return f"The speed on this machine could not be measured: {case['rows'][-1]['note']}"
    busy = " The machine was busy: gossamer speed measures again." if measured.cases[0].busy else ""
    return (
        f"On this machine ({processor()}, one thread, one image at a time) gossamer.deploy runs it "
        f"{' and '.join(ratios)}, which multipl{'y' if len(ratios) > 1 else 'ies'} its zeros.{busy}"
    )


def _train(name: str, run: Run, out: Path, *, keep_mask_variables: bool = False) -> dict[str, Any]:
    on_terminal = Console(stderr=True).is_terminal
    observers: list[Observer] = [(LiveLine if on_terminal else PlainLines)(name)]
    if TensorBoard.is_installed():
        observers.append(TensorBoard(out))
    return train(run, out, observers=observers, keep_mask_variables=keep_mask_variables)


def _say(console: Console, sentence: str) -> None:
    """Print a line with a path in it without wrapping it, so that the path can be copied."""
    console.print(sentence, soft_wrap=True, highlight=False)


def _written(path: Path) -> int | None:
    """When a file was written, None if it does not exist."""
    return path.stat().st_mtime_ns if path.is_file() else None


def leads() -> bool:
    """Whether this process prints results; torchrun may have started several."""
    return os.environ.get("RANK", "0") == "0"
