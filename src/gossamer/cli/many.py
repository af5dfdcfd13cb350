"""Many runs at once: `gossamer sweep` over settings, `gossamer compare` of methods under the same rules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gossamer.cli.arguments import (
    Assignments,
    Folder,
    OptionalFile,
    OptionalFolder,
    OptionalNames,
    OptionalNumber,
    RecipeName,
    at_home,
    joined,
)
from gossamer.cli.console import Answer, lines_to, live_bar
from gossamer.cli.run_options import RunOptions, assignments, is_list
from gossamer.lab import tables
from gossamer.lab.batched import runs_of, sweep
from gossamer.lab.batched.compare import TIERS, Comparison, compare
from gossamer.lab.batched.sweeps import record_path
from gossamer.lab.batched.tuned import tuned
from gossamer.lab.recipes import find
from gossamer.lab.results import about, blocks_of, problem_table, sweep_table, table_of
from gossamer.lab.suite import REPORTED, SuiteComparison, compare_suite, unstructured
from gossamer.methods import METHODS

_OF_A_METHOD = ("sparsity=", "flops=", "decay=", "settings.")  # options that only some methods take


@dataclass(frozen=True)
class Sweep:
    """Train every combination of some settings of a recipe, all runs batched in one process. Each option below may have
    several values: --seed 0,1,2."""

    recipe: RecipeName
    """Name of a recipe (see `gossamer list`), or a JSON file such as a run.json."""
    out: Folder
    """Folder for one record per run; runs that have one are not trained again."""
    options: RunOptions
    grid: Assignments = ()
    """Grid as key=value,value: seed=0,1,2 method=scl,dpf sparsity=0.9,0.95."""
    set: Assignments = ()
    """Changes to the recipe as key=value, for all runs."""
    together: int = 32
    """Runs trained at the same time."""
    save_models: bool = False
    """Save each network next to its record, for `gossamer.load`."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        changes, grid = joined(self.set), joined(self.grid)
        options = assignments(self.options, (*changes, *grid))
        grid += [each for each in options if _has_several(each)]
        if not grid:
            raise ValueError(
                "expected a grid, got no option with several values: add --seed 0,1,2, for example, "
                "or train one run with gossamer train"
            )
        if any(each.startswith("method=") for each in grid):
            # A grid also takes single values, and knows which methods take which.
            grid += [each for each in options if each not in grid and each.startswith(_OF_A_METHOD)]
        changes += [each for each in options if each not in grid]
        runs, out = runs_of(find(self.recipe).run.with_settings(changes), grid), at_home(self.out)
        there = sum(record_path(out, run).exists() for run in runs)
        if there:
            console.print(
                f"{there} of {len(runs)} runs have their record in {out} and are not trained again", soft_wrap=True
            )
        with live_bar(console, self.recipe) as bar:
            records = sweep(
                runs,
                out,
                device=runs[0].device,
                together=self.together,
                save_models=self.save_models,
                progress=bar.line,
                moved=bar.move,
            )
        console.print(tables.of_rows(*sweep_table(records)))
        return Answer(records)


@dataclass(frozen=True)
class Compare:
    """Compare methods under the same rules, all runs batched in one process, and show the table. With --suite, on
    problems of several kinds."""

    out: OptionalFolder = None
    """Folder for records, table and plot (default: results/compare-NET, or results/general); runs with a record are not
    trained again."""
    suite: Literal["general"] | None = None
    """general: compare on the problems of the general suite, each with the data and recipe that it has there."""
    problem: tuple[str, ...] = ()
    """With --suite: problems by name, from `gossamer list`. Default: all of them."""
    net: str = "resnet20"
    """Network from `gossamer list`, for images like those of the data set."""
    data: str = "cifar10"
    """Image set from `gossamer list`."""
    methods: OptionalNames = None
    """Names from `gossamer list`, also with settings: autoprune:two_pass=True; all: every method with its defaults;
    tuned: every method with the settings of the published table. dense is always included. Default: scl dpf, or with
    --suite those of its report, each with its tuned settings."""
    sparsity: tuple[float, ...] | None = None
    """Sparsities: 0.95 is 95 % zeros. Default: 0.9 0.95 0.98, or with --suite those of each problem."""
    seeds: int = 3
    """Runs of each kind, with seeds 0, 1, …"""
    tier: Literal["screening", "final"] = "screening"
    """screening: 50 epochs with a validation set of 5,000 training images. final: 350 epochs on all of them."""
    epochs: OptionalNumber = None
    """Epochs. Default: those of the tier."""
    validation: OptionalNumber = None
    """Size of the validation set, of training images; 0 trains on all of them. Default: that of the tier."""
    weight_decay: float = Comparison.weight_decay
    """Weight decay of all runs except those with their own, such as str:weight_decay=1e-4."""
    plot: OptionalFile = None
    """Plot accuracy against sparsity into this file instead of TIER.svg in OUT; needs matplotlib."""
    together: int = 32
    """Runs trained at the same time."""
    jobs: int = 1
    """With --suite: processes of problems that cannot be trained as a batch."""
    save_models: bool = False
    """Save each network next to its record, for `gossamer.load`."""
    device: str = "auto"
    """auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        if self.suite is not None:
            return self._compare_suite(console)
        if self.problem:
            raise ValueError("problems are those of a suite: add --suite general")
        tier = TIERS[self.tier]
        methods = ("scl", "dpf") if self.methods is None else self.methods
        comparison = Comparison(
            self.net,
            self.data,
            tuple(dict.fromkeys(name for each in ("dense", *methods) for name in _named(each))) if methods else (),
            (0.9, 0.95, 0.98) if self.sparsity is None else self.sparsity,
            self.seeds,
            tier.epochs if self.epochs is None else self.epochs,
            tier.validation if self.validation is None else self.validation,
            self.tier,
            self.weight_decay,
        )
        out = at_home(self.out or Path("results") / f"compare-{self.net}")

        def show(records: list[dict[str, Any]]) -> None:
            console.print(about(records, self.tier), highlight=False)
            for block in blocks_of(records):
                console.print(tables.of_rows(*table_of(block), block.title))

        with live_bar(console, f"{self.net} on {self.data}") as bar:
            records = compare(
                comparison,
                out,
                device=self.device,
                together=self.together,
                save_models=self.save_models,
                plot=self.plot,
                progress=bar.line,
                moved=bar.move,
                finished=show,
            )
        return Answer(records)

    def _compare_suite(self, console: Console) -> Answer:
        fixed = ("net", "data", "tier", "validation", "weight_decay", "plot")
        wrong = [name for name in fixed if getattr(self, name) != getattr(Compare, name)]
        if wrong:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise ValueError(f"the problems of a suite have recipes of their own: omit {options}")
        given = REPORTED if self.methods is None else self.methods
        methods = tuple(name for each in given for name in (unstructured() if each == "all" else (each,)))
        comparison = SuiteComparison(self.problem, methods, self.sparsity or (), self.seeds, self.epochs)
        rows = compare_suite(
            comparison,
            at_home(self.out or Path("results") / "general"),
            device=self.device,
            together=self.together,
            jobs=self.jobs,
            save_models=self.save_models,
            progress=lines_to(console),
        )
        for problem in comparison.chosen:
            own = [row for row in rows if row["problem"] == problem.name and row["n"]]
            console.print(tables.of_rows(*problem_table(own), problem.about))
        return Answer(rows)


def _has_several(assignment: str) -> bool:
    key, _, value = assignment.partition("=")
    return "," in value and not is_list(key)


def _named(text: str) -> tuple[str, ...]:
    return {"all": tuple(METHODS), "tuned": tuple(map(tuned, METHODS))}.get(text, (text,))
