"""Tables for the terminal: of results, and of everything that can be trained.

Names from files and users are shown literally: brackets in them are not markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gossamer.lab import data, models
from gossamer.lab.recipes import RECIPES, Published, Recipe
from gossamer.methods import METHODS

_NUMBERS = 70  # characters for the numbers of a row, on a terminal with 80 columns


def of_results(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """One row per result. The numbers of a diverged run in a batch are meaningless and not shown."""
    table = _table("", "test", "validation", "sparsity", "nonzeros", "FLOPs", "time", left=1)
    for name, result in results:
        metric = "perplexity" if "perplexity" in result else "accuracy"
        if result.get("diverged"):
            table.add_row(Text(name), "diverged", "–", "–", "–", "–", _time(result["seconds"]))
            continue
        table.add_row(
            Text(name),
            _metric(metric, result[metric]),
            _metric(metric, result.get(f"validation_{metric}")),
            f"{result['sparsity']:.2%}",
            f"{result['nonzeros']:,}",
            _short(result.get("flops")),
            _time(result["seconds"]),
        )
    return _with_whole_numbers(table)


def of_rows(head: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, *, left: int = 1) -> Table:
    """A table from given cells, such as those in the docs; the first columns, `left` of them, are words."""
    table = _table(*head, left=left, title=title)
    for row in rows:
        table.add_row(*map(Text, row))
    return _with_whole_numbers(table)


def against_paper(recipe: Recipe, result: Mapping[str, Any]) -> str:
    """The comparison with the paper for this run, in one line."""
    metric = "perplexity" if "perplexity" in result else "accuracy"
    expected = recipe.expected()
    if expected is None:
        return "The paper has no number for this run."
    if result["run_id"] != recipe.run.run_id:  # on another device or with another log, it is the same run
        return f"The paper's number for the recipe as it stands is {_metric(metric, expected.value)}."
    verdict = "reached" if recipe.agrees(metric, result[metric]) else "not reached"
    tolerance = f"{recipe.tolerance:.2f}" if metric == "perplexity" else f"{100 * recipe.tolerance:.1f} points"
    return f"The paper's number is {_metric(metric, expected.value)} ({expected.table}): {verdict} within {tolerance}."


def of_everything() -> tuple[Table, ...]:
    """Tables of the models, data sets, methods and recipes, each with a count."""
    zoo = _table("model", "data", "weights", "", left=2, title=f"{len(models.names())} models")
    for entry in models.MODELS:
        zoo.add_row(entry.name, entry.data, f"{entry.weights:,}", entry.description)
    sets = _table("data set", "", left=2, title=f"{len(data.names())} data sets")
    for name, description in data.table():
        sets.add_row(name, description)
    methods = _table("method", "", left=2, title=f"{len(METHODS)} methods")
    for name, rule in METHODS.items():
        methods.add_row(name, rule.title)
    recipes = _table("recipe", "", "epochs", "paper", left=2, title=f"{len(RECIPES)} recipes")
    for recipe in RECIPES:
        recipes.add_row(recipe.name, recipe.about, str(recipe.run.epochs), _published(recipe.expected()))
    return zoo, sets, methods, recipes


def _published(number: Published | None) -> str:
    if number is None:
        return "–"
    return _metric("accuracy" if number.accuracy is not None else "perplexity", number.value)


def _table(*titles: str, left: int, title: str | None = None) -> Table:
    shown = None if title is None else Text(title, "bold")
    table = Table(box=box.SIMPLE_HEAD, title=shown, title_justify="left")
    for index, each in enumerate(titles):
        words = index < left or each == ""
        table.add_column(Text(each), justify="left" if words else "right", no_wrap=index == 0, overflow="fold")
    return table


def _with_whole_numbers(table: Table) -> Table:
    """If space is short, break long names instead of numbers; this cannot help with very many numbers."""
    first, *others = table.columns
    words = [[*str(column.header).split(), *map(str, column.cells)] for column in others]
    widths = [max(map(len, each), default=0) for each in words]
    if sum(widths) + 3 * len(widths) <= _NUMBERS:
        first.no_wrap = False
        for column, width in zip(others, widths, strict=True):
            column.min_width = width
    return table


def _metric(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" if metric == "accuracy" else f"{value:.2f} ppl"


def _short(number: float | None) -> str:
    """A count with three digits and a unit."""
    if number is None:
        return "–"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
