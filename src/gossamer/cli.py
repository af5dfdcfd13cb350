"""The command line: `gossamer quickstart`, `train`, `sweep`, `compare`, `reproduce`, `list`, `report`, `speed` and
`export`.

Errors are one message on stderr and exit code 2; `--debug` shows the traceback. A run stopped by Ctrl-C exits with 130
and goes on when the same command is given again.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, assert_never

import torch
import tyro
from rich.console import Console
from rich.progress import Progress as Bar

from gossamer import tables
from gossamer.checkpoint import load
from gossamer.exports import Exported, to_dense, to_onnx, to_torch
from gossamer.methods import METHODS
from gossamer.recipes import Recipe, find
from gossamer.reproduce import map_fitting, mnist
from gossamer.results import about, map_fitting_rows, mnist_decay_table, mnist_estimator_table, race_blocks, sweep_table
from gossamer.side_by_side import runs_of, sweep
from gossamer.side_by_side.compare import TIERS, Comparison, compare
from gossamer.speed import ENGINES, measure
from gossamer.speed.report import plot as plot_speed
from gossamer.stored import open_network
from gossamer.training import Interrupted, train
from gossamer.training.place import join
from gossamer.training.progress import JsonLines, LiveLine, Observer, TensorBoard
from gossamer.training.result import MODEL, SPARSE_MODEL, commit, read_layers, read_result_file

# What a user's input or machine can cause. Anything else is a fault of ours and keeps its traceback.
_EXPECTED = (ValueError, OSError, ImportError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Train:
    """Train a recipe, or go on with it where it was stopped or killed."""

    recipe: tyro.conf.Positional[str]
    """Name of a recipe (see `gossamer list`), or a JSON file such as a run.json."""
    out: Path
    """Folder for checkpoints, log, model and result."""
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Changes to the recipe, as key=value: lr=0.05, sparsity=0.9, settings.mask_lr=0.1, device=cuda."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Quickstart:
    """Train a small network on digits, dense and 95 % sparse, and compare. Needs no data and no GPU."""

    out: Path = Path("gossamer-quickstart")
    """Folder for both runs."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Sweep:
    """Train every combination of some settings of a recipe, all runs side by side as one stacked network."""

    recipe: tyro.conf.Positional[str]
    """Name of a recipe (see `gossamer list`), or a JSON file such as a run.json."""
    out: Path
    """Folder for one record a run; runs that have one are not trained again."""
    grid: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
    """What the runs differ in, as key=value,value: seed=0,1,2 method=scl,dpf settings.mask_lr=0.01,0.03."""
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Changes to the recipe, as key=value, for all runs."""
    together: int = 32
    """Runs trained at the same time."""
    save_models: bool = False
    """Leave each network beside its record, as a file for `gossamer.load`."""
    device: str = "auto"
    """auto takes a GPU where there is one."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Compare:
    """Train methods against each other, all runs side by side as one stacked network, and show the table."""

    out: Path | None = None
    """Folder for records, table and plot (results/race-NET); runs that have a record are not trained again."""
    net: str = "resnet20"
    """Network out of `gossamer list`, for `data`: a set of images."""
    data: str = "cifar10"
    methods: tuple[str, ...] = ("scl", "dpf")
    """Names out of `gossamer list`, or all, or with settings: autoprune:two_pass=True. dense always runs with them."""
    sparsity: tuple[float, ...] = (0.9, 0.95, 0.98)
    seeds: int = 3
    tier: Literal["screening", "final"] = "screening"
    """screening: 50 epochs, 5,000 training images held out. final: 350 epochs, on all of them."""
    epochs: int | None = None
    """Other than the tier's."""
    validation: int | None = None
    """Training images held out, other than the tier's; 0 trains on all of them."""
    plot: Path | None = None
    """Draw accuracy against sparsity into this file, not accuracy.svg in OUT; needs matplotlib."""
    together: int = 32
    """Runs trained at the same time."""
    save_models: bool = False
    """Leave each network beside its record, as a file for `gossamer.load`."""
    device: str = "auto"
    """auto takes a GPU where there is one."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Reproduce:
    """Repeat an exhibit of the paper and show its table."""

    exhibit: tyro.conf.Positional[Literal["map-fitting", "mnist"]]
    out: Path | None = None
    """Folder for the records (results/EXHIBIT); what is there already is not computed again."""
    seeds: int = 3
    steps: int = 2000
    """Of map-fitting."""
    epochs: int = mnist.EPOCHS
    """Of mnist."""
    device: str = "auto"
    """Of mnist: auto takes a GPU where there is one."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class List:
    """Show the models, data sets, methods and recipes there are."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Report:
    """Show finished runs in one table, and with --layers the connections of every layer."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their result.json files."""
    layers: bool = False
    """Also one table a run with every layer."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Speed:
    """Time a network with every engine there is, dense and sparse, and say what its zeros gain on this machine."""

    file: tyro.conf.Positional[Path]
    """A safetensors file, sparse or plain."""
    net: str | None = None
    """Its network: a name out of `gossamer list`, or module:function. By default as the file or its run.json says."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for a network of your own."""
    batch: tuple[int, ...] = (1, 64)
    threads: tuple[int, ...] = (1,)
    engines: tuple[str, ...] = tuple(ENGINES)
    seconds: float = 5.0
    """Time for each batch size and number of threads, besides getting ready."""
    out: Path | None = None
    """Write the measurement to this JSON file."""
    plot: Path | None = None
    """Draw it to this file (png, svg, pdf)."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Export:
    """Write a network for other programs: ONNX, torch.export or plain dense safetensors. All are checked."""

    file: tyro.conf.Positional[Path]
    """A safetensors file, sparse or plain."""
    out: tyro.conf.Positional[Path]
    to: Literal["onnx", "pt2", "dense"]
    net: str | None = None
    """Its network: a name out of `gossamer list`, or module:function. By default as the file or its run.json says."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for a network of your own."""
    debug: bool = False
    """Show the traceback of an error."""


AnyCommand = Train | Quickstart | Sweep | Compare | Reproduce | List | Report | Speed | Export
Command = (
    Annotated[Quickstart, tyro.conf.subcommand("quickstart")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Speed, tyro.conf.subcommand("speed")]
    | Annotated[Export, tyro.conf.subcommand("export")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    command: Any = tyro.cli(
        Command,
        args=arguments,
        prog="gossamer",
        description="Neural networks that become sparse while they train.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    sys.exit(run(command))


def run(command: AnyCommand) -> int:
    """The exit code of a command that has been carried out."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _carry_out(command, Console())
        return 0
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("gossamer: stopped; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    except _EXPECTED as error:
        if command.debug:
            traceback.print_exc()
        else:
            print(f"gossamer: {error}", file=sys.stderr)
        return 2


def _carry_out(command: AnyCommand, console: Console) -> None:
    match command:
        case Train():
            recipe = find(command.recipe)
            changes = [assignment for several in command.set for assignment in several]
            result = _train(recipe, command.out, changes)
            if _leads():
                console.print(tables.of_results([(recipe.name, result)]))
                console.print(tables.against_paper(recipe, result))
                console.print(f"The model is in {command.out / MODEL}")
        case Quickstart():
            _quickstart(command.out, console)
        case Sweep():
            _sweep(command, console)
        case Compare():
            _compare(command, console)
        case Reproduce():
            _reproduce(command, console)
        case List():
            for table in tables.of_everything():
                console.print(table)
        case Report():
            found = [(str(file), read_result_file(file)) for file in command.files]
            console.print(tables.of_results(found))
            for file in command.files if command.layers else ():
                console.print(tables.of_layers(read_layers(file), str(file)))
        case Speed():
            _speed(command, console)
        case Export():
            console.print(str(_export(command)), highlight=False, soft_wrap=True)
        case _:
            assert_never(command)


def _train(recipe: Recipe, out: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    observers: list[Observer] = [LiveLine(recipe.name), JsonLines(out)]
    if TensorBoard.is_installed():
        observers.append(TensorBoard(out))
    return train(recipe.run.with_settings(changes), out, observers=observers)


def _quickstart(out: Path, console: Console) -> None:
    torch.set_num_threads(1)  # so small a network gains nothing from a second one, and loses much on a busy machine
    folders = {name: out / name for name in ("digits-dense", "digits")}
    results = [(name, _train(find(name), folder)) for name, folder in folders.items()]
    console.print(tables.of_results(results))
    console.print(tables.of_layers(read_layers(folders["digits"]), "The connections that are left"))
    plain, small = (folders["digits"] / name for name in (MODEL, SPARSE_MODEL))
    smaller = plain.stat().st_size / small.stat().st_size
    console.print(
        f"The sparse network is in {plain}, for any PyTorch program, and {smaller:.0f} times smaller in {small}, for "
        "gossamer.load. Next: gossamer list, then gossamer train RECIPE --out DIR"
    )


def _sweep(command: Sweep, console: Console) -> None:
    grid, changes = ([each for several in given for each in several] for given in (command.grid, command.set))
    base = find(command.recipe).run.with_settings(changes)
    records = sweep(
        runs_of(base, grid),
        command.out,
        device=base.device if command.device == "auto" else command.device,
        together=command.together,
        save_models=command.save_models,
        progress=console.print,
    )
    console.print(tables.of_rows(*sweep_table(records)))


def _compare(command: Compare, console: Console) -> None:
    tier = TIERS[command.tier]
    comparison = Comparison(
        command.net,
        command.data,
        tuple(dict.fromkeys(("dense", *(METHODS if command.methods == ("all",) else command.methods)))),
        command.sparsity,
        command.seeds,
        tier.epochs if command.epochs is None else command.epochs,
        tier.validation if command.validation is None else command.validation,
        commit() or "unknown",
        command.tier,
    )
    out = command.out or Path("results") / f"race-{command.net}"

    def show(records: list[dict[str, Any]]) -> None:
        console.print(about(records), highlight=False)
        for title, head, rows in race_blocks(records):
            console.print(tables.of_rows(head, rows, title))

    compare(
        comparison,
        out,
        device=join(command.device).device,
        together=command.together,
        save_models=command.save_models,
        plot=command.plot,
        progress=console.print,
        finished=show,
    )


def _reproduce(command: Reproduce, console: Console) -> None:
    out = command.out or Path("results") / command.exhibit
    if command.exhibit == "map-fitting":
        records = map_fitting.reproduce(out, seeds=command.seeds, steps=command.steps, progress=console.print)
        console.print(tables.of_map_fitting(map_fitting_rows(records)))
        return
    device = join(command.device).device
    records = mnist.reproduce(out, seeds=command.seeds, epochs=command.epochs, device=device, progress=console.print)
    for head, rows in (mnist_decay_table(records), mnist_estimator_table(records)):
        console.print(tables.of_rows(head, rows))


def _speed(command: Speed, console: Console) -> None:
    stored = open_network(command.file, command.net, shape=command.shape or None)
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(stored.name, total=1.0)
        measured = measure(
            stored.model,
            stored.example,
            name=stored.name,
            batches=command.batch,
            threads=command.threads,
            engines=command.engines,
            seconds=command.seconds,
            progress=lambda what, share: bar.update(task, description=f"{stored.name}, {what}", completed=share),
        )
    console.print(measured, highlight=False)
    if command.out is not None:
        command.out.write_text(measured.to_json())
    if command.plot is not None:
        plot_speed(measured, command.plot)


def _export(command: Export) -> Exported:
    if command.to == "dense":  # needs no network: tensors are tensors
        return to_dense(load(command.file), command.out)
    stored = open_network(command.file, command.net, shape=command.shape or None)
    write = to_onnx if command.to == "onnx" else to_torch
    return write(stored.model, stored.example(2), command.out, batch_axis=stored.batch_axis)


def _leads() -> bool:
    """Whether this process shows results, where torchrun has started several."""
    return os.environ.get("RANK", "0") == "0"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=sys.stderr)
