"""Every accuracy of the paper beside ours: under its own settings, and with our defaults at no more epochs.

The paper's numbers are those of the recipes. Ours are means over the committed records. Where there is none, the row
says in what state the run is, from the queue of runs that wait for a GPU.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gossamer.flops import positions
from gossamer.lab import models
from gossamer.lab.recipes import RECIPES, Published, Recipe
from gossamer.lab.recipes.cifar import ESTIMATORS
from gossamer.lab.recipes.mnist import ESTIMATOR_SPARSITY, ESTIMATOR_TABLE
from gossamer.lab.results.comparisons import NAMES
from gossamer.lab.results.records import Record, asked_sparsity, read_records, table
from gossamer.lab.training.durations import PHASES
from gossamer.methods.dense import Dense
from gossamer.prunable import select

FILE = "exhibits.json"
MOST_EPOCHS = 370  # of the paper's schedule
_SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "mnist": (1, 28, 28)}
_USUAL = ("identity", True)

Row = dict[str, Any]


@dataclass(frozen=True)
class _Cell:
    recipe: Recipe
    sparsity: float
    paper: float | None  # an accuracy in percent, or a perplexity
    decay: float | None = None
    flops_reduction: float | None = None
    estimator: str = "identity"
    normalised: bool = True

    @property
    def network(self) -> str:
        run = self.recipe.run
        return NAMES.get(run.model, run.model) + ("" if run.data == "cifar10" else f" {NAMES[run.data]}")

    @property
    def usual(self) -> bool:
        return (self.estimator, self.normalised) == _USUAL


def rows(checkout: Path) -> list[Row]:
    """One row per accuracy that the paper prints."""
    root, waiting = checkout / "results", _waiting(checkout / "benchmarks" / "gpu_queue.toml")
    return [_row(cell, root, waiting) for cell in _cells()]


def section(checkout: Path) -> str:
    """The rows as Markdown."""
    found = rows(checkout)
    head = ["network", "zeros", "paper", "its settings", "difference", "our defaults", "difference"]
    head += ["seeds", "epochs", "FLOPs saved: paper", "its settings", "our defaults", "GPU minutes", "command", "state"]
    measured = sum(row["paper_settings"] is not None or row["ours"] is not None for row in found)
    return "\n\n".join(
        [
            "## The paper's accuracies",
            f"Test accuracy in percent (perplexity of the LSTM) at the last epoch, {measured} of {len(found)} rows "
            "measured so far. *Its settings* are `preset=paper` with a fixed λ1 found by short runs and the staged "
            "schedule (`gossamer reproduce`); *our defaults* have one cosine and meet the sparsity exactly, at no more "
            "epochs. Seeds and epochs are those of its settings / our defaults. The numbers are in "
            f"[results/{FILE}](../results/{FILE}); [reproduction](reproduction.md) says which claims hold.",
            table(head, [_cells_of(row) for row in found]),
        ]
    )


def _cells_of(row: Row) -> list[str]:
    kind = "" if (row["estimator"], row["normalised"]) == _USUAL else f", {row['estimator']}"
    kind += "" if row["normalised"] else ", raw"
    kind += "" if row["decay"] is None else f", λ1 = {row['decay']:g}"
    paper, theirs, ours = row["paper"], row["paper_settings"], row["ours"]
    pairs = [(row[f"{name}_paper_settings"], row[name]) for name in ("seeds", "epochs")]
    return [
        f"{row['network']}{kind}",
        f"{100 * row['sparsity']:.3g} %",
        _text(paper),
        _text(theirs),
        _difference(theirs, paper),
        _text(ours),
        _difference(ours, paper),
        *(" / ".join("–" if each is None else str(each) for each in pair) for pair in pairs),
        *(_percent(row[f"flops_reduction{of}"]) for of in ("_paper", "_paper_settings", "")),
        "–" if row["gpu_minutes"] is None else f"{row['gpu_minutes']:.1f}",
        f"`{row['command']}`",
        row["state"],
    ]


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _difference(ours: float | None, paper: float | None) -> str:
    return "–" if ours is None or paper is None else f"{ours - paper:+.2f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _cells() -> Iterator[_Cell]:
    seen = set()
    for recipe in RECIPES:
        place = recipe.run.data, recipe.run.model
        if place in seen or not recipe.published:
            continue
        seen.add(place)
        for each in recipe.published:
            if not (each.decay is None and recipe.run.data == "mnist" and each.sparsity == ESTIMATOR_SPARSITY):
                yield _Cell(recipe, each.sparsity or 0.0, _printed(each), each.decay, each.flops_reduction)
        own = ESTIMATOR_TABLE if recipe.run.data == "mnist" else ESTIMATORS.get(place, {})
        for (estimator, normalised), accuracy in own.items():
            if own is ESTIMATOR_TABLE or (estimator, normalised) != _USUAL:
                value = round(100 * accuracy, 2)
                yield _Cell(recipe, ESTIMATOR_SPARSITY, value, estimator=estimator, normalised=normalised)


def _printed(published: Published) -> float:
    return published.value if published.accuracy is None else round(100 * published.accuracy, 2)


def _row(cell: _Cell, root: Path, waiting: Mapping[str, Mapping[str, Any]]) -> Row:
    theirs, ours = _of_paper_settings(cell, root), _of_defaults(cell, root)
    lacking = []
    if not theirs and cell.sparsity > 0:
        lacking.append(("its settings", f"paper-{cell.recipe.exhibit}"))
    if not ours and cell.usual:
        lacking.append(("our defaults", f"default-{cell.recipe.exhibit}"))
    state = "; ".join(f"{title}: {_state(name, cell, waiting)}" for title, name in lacking)
    if cell.recipe.run.data == "imagefolder":
        state = "needs ImageNet; the recipe is exercised end to end by a test on a few images"
    solved = bool(theirs) and theirs[0]["config"]["decay"] is None
    return {
        "network": cell.network,
        "sparsity": cell.sparsity,
        "decay": cell.decay,
        "estimator": cell.estimator,
        "normalised": cell.normalised,
        "metric": _metric(cell),
        "paper": cell.paper,
        "paper_settings": _mean(theirs, cell),
        "ours": _mean(ours, cell),
        "seeds": len(ours) or None,
        "epochs": ours[0]["config"]["epochs"] if ours else None,
        "seeds_paper_settings": len(theirs) or None,
        "epochs_paper_settings": theirs[0]["config"]["epochs"] if theirs else None,
        "sparsity_paper_settings": _average(theirs, lambda each: each["sparsity"]),
        "flops_reduction_paper": cell.flops_reduction,
        "flops_reduction_paper_settings": _average(theirs, _flops_reduction),
        "flops_reduction": _average(ours, _flops_reduction),
        "gpu_minutes": _gpu_minutes([*theirs, *ours]),
        "command": _command(cell),
        "state": state or ("its settings but for λ1, which is solved for" if solved else "measured"),
    }


def _gpu_minutes(records: Sequence[Record]) -> float | None:
    """Of all runs of a row, each with its share of its batch."""
    seconds = [float(each["seconds"]) for each in records if "gpu" in each["hardware"]]
    return round(sum(seconds) / 60, 1) if seconds else None


def _command(cell: _Cell) -> str:
    run = cell.recipe.run
    if run.data == "mnist":
        return "gossamer reproduce mnist"
    if run.data in ("imagefolder", "wikitext2"):
        return f"gossamer train {cell.recipe.name.removesuffix('-dense')}"
    return f"gossamer reproduce {cell.recipe.exhibit}"


def _metric(cell: _Cell) -> str:
    return "perplexity" if cell.recipe.run.data == "wikitext2" else "accuracy"


def _mean(records: Sequence[Record], cell: _Cell) -> float | None:
    factor = 100.0 if _metric(cell) == "accuracy" else 1.0
    return _average(records, lambda each: factor * each[_metric(cell)], digits=2)


def _average(records: Sequence[Record], of: Callable[[Record], float | None], digits: int = 4) -> float | None:
    values = [value for each in records if (value := of(each)) is not None]
    return round(statistics.mean(values), digits) if values else None


def _state(name: str, cell: _Cell, waiting: Mapping[str, Mapping[str, Any]]) -> str:
    for queued, run in waiting.items():  # the runs of a large network are queued one by one, as NAME-…
        if (queued == name or queued.startswith(f"{name}-")) and _trains(run["command"], cell.sparsity):
            return f"not run yet, about {run['minutes']:g} GPU minutes, in the queue as `{queued}`"
    return "not run yet, not in the queue"


def _trains(command: str, sparsity: float) -> bool:
    """Whether a queued command has a run of this sparsity. `reproduce` has all those of its exhibit."""
    if "gossamer.lab.reproduce" in command:
        return True
    named = re.findall(r"sparsity[= ]([\d.,]+)", command)
    if sparsity == 0.0:
        return "dense" in command
    if "sparsity=none" in command:
        return False
    return not named or sparsity in {float(each) for part in named for each in part.split(",")}


def _waiting(queue: Path) -> dict[str, dict[str, Any]]:
    """The queued runs by their names."""
    if not queue.is_file():
        return {}
    return {run["name"]: run for run in tomllib.loads(queue.read_text())["run"]}


# --- our records ---


def _of_paper_settings(cell: _Cell, root: Path) -> list[Record]:
    """Those of `gossamer reproduce`."""
    if cell.recipe.run.data == "mnist":
        return _of_mnist(cell, root)
    found = []
    for record in _records(root / f"paper-{cell.recipe.exhibit}"):
        settings = record["config"]["settings"]
        kind = settings.get("estimator", "identity"), settings.get("scale", "batch") != "none"
        aim = record.get("paper_sparsity", asked_sparsity(record))  # of a run alone, what was asked for
        if aim == cell.sparsity and kind == (cell.estimator, cell.normalised):
            found.append(record)
    return found


def _of_mnist(cell: _Cell, root: Path) -> list[Record]:
    """Of each cell those with the longest mask phase and, of raw gradients, the mask rate that suits them better."""
    found: dict[tuple[str, float], list[Record]] = {}
    for record in _records(root / "mnist"):
        config = record["config"]
        settings = config["settings"]
        if cell.decay is not None:
            fits = record["part"] == "decay" and config["decay"] == cell.decay
        else:
            kind = settings.get("estimator"), settings.get("scale") != "none"
            fits = record["part"] == "estimator" and kind == (cell.estimator, cell.normalised)
        if fits and cell.sparsity > 0:
            found.setdefault((settings["sparsify"], settings.get("mask_lr", 0.0)), []).append(record)
    longest = max(found, default=None, key=lambda key: (float(key[0].removesuffix("ep")), key[1]))
    return [] if longest is None else found[longest]


def _of_defaults(cell: _Cell, root: Path) -> list[Record]:
    """Runs with our defaults, the longest of at most as many epochs as the paper's."""
    run = cell.recipe.run
    if not cell.usual:
        return []
    folders = [*root.glob("compare-*"), *root.glob(f"default-{cell.recipe.exhibit}"), *root.glob("mnist")]
    found: dict[int, list[Record]] = {}
    for folder in folders:
        for record in _records(folder):
            config = record["config"]
            asked = [config[name] for name in ("data", "model", "weight_decay")] == [
                run.data,
                run.model,
                run.weight_decay,
            ]
            asked = asked and asked_sparsity(record) == cell.sparsity and _is_default(record)
            if asked and (config["method"] == Dense.name) == (cell.sparsity == 0):
                found.setdefault(config["epochs"], []).append(record)
    lengths = [epochs for epochs in found if epochs <= MOST_EPOCHS]
    return found[max(lengths)] if lengths else []


def _is_default(record: Record) -> bool:
    """Whether a run differs from our defaults in nothing but its length and the spelling of its phases."""
    config = record["config"]
    known = {"scl", Dense.name}
    usual = config["preset"] == "default" and not config["distil"] and config["schedule"] in ("cosine", "plateau")
    own = set(config["settings"]) <= set(PHASES) and config["decay"] is None and not config["validation"]
    return usual and own and config["method"] in known and "retired" not in record and not record["diverged"]


@cache
def _records(folder: Path) -> tuple[Record, ...]:
    return tuple(read_records(folder))


def _flops_reduction(record: Record) -> float | None:
    """The share of the multiply-adds that is saved, of all prunable layers, as the paper counts it."""
    if record.get("flops") is not None and record.get("flops_dense"):
        return 1.0 - float(record["flops"]) / float(record["flops_dense"])
    config = record["config"]
    if config["data"] not in _SHAPES or "nonzeros_by_tensor" not in record:
        return None
    classes = 100 if config["data"] == "cifar100" else 10
    costs, sizes = _costs(config["model"], config["data"], classes)
    kept = sum(cost * count for cost, count in zip(costs, record["nonzeros_by_tensor"], strict=True))
    everything = sum(cost * size for cost, size in zip(costs, sizes, strict=True))
    return 1.0 - float(kept) / everything


@cache
def _costs(model: str, data: str, classes: int) -> tuple[list[int], list[int]]:
    """Multiply-adds per weight, and weights, of each tensor."""
    network = models.create(model, num_classes=classes).eval()
    weights = select(network)
    found = positions(network, weights, torch.zeros(1, *_SHAPES[data]))
    return [found[weight.name] for weight in weights], [weight.parameter.numel() for weight in weights]
