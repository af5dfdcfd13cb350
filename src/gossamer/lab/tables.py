"""Tables for the terminal: of results, and of everything that can be trained.

Names from files and users are shown literally: brackets in them are not markup.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gossamer.lab import data, models
from gossamer.lab.recipes import RECIPES, Published, Recipe
from gossamer.lab.training.setting_names import setting_types
from gossamer.methods import METHODS
from gossamer.settings import Phases

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


def of_words(head: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """A table of texts, whose last column wraps."""
    table = _table(*head, left=len(head), title=title)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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


KINDS = ("models", "data", "methods", "recipes", "settings")


def of_kind(kind: str) -> Table:
    """The table of the models, data sets, methods, recipes or settings, with a count."""
    rows = rows_of_kind(kind)
    heads = {
        "models": ("model", "data", "weights", ""),
        "data": ("data set", ""),
        "methods": ("method", ""),
        "recipes": ("recipe", "", "epochs", "paper"),
        "settings": ("setting", "type", "methods"),
    }
    cells: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
        "models": lambda row: (row["name"], row["data"], f"{row['weights']:,}", row["description"]),
        "recipes": lambda row: (row["name"], row["description"], str(row["epochs"]), row["paper"] or "–"),
        "settings": lambda row: (row["name"], row["type"], ", ".join(row["methods"])),
    }
    counted = {"data": "data sets"}.get(kind, kind)
    table = _table(*heads[kind], left=3 if kind == "settings" else 2, title=f"{len(rows)} {counted}")
    for row in rows:
        table.add_row(*map(Text, cells.get(kind, _described)(row)))
    return table


def _described(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["name"], row["description"]


def rows_of_kind(kind: str) -> list[dict[str, Any]]:
    """What `of_kind` shows, as plain values."""
    if kind == "models":
        return [
            {"name": each.name, "data": each.data, "weights": each.weights, "description": each.description}
            for each in models.MODELS
        ]
    if kind == "data":
        return [{"name": name, "description": description} for name, description in data.table()]
    if kind == "methods":
        return [{"name": name, "description": rule.title} for name, rule in METHODS.items()]
    if kind == "recipes":
        return [
            {
                "name": each.name,
                "description": each.about,
                "epochs": each.run.epochs,
                "paper": None if (expected := each.expected()) is None else _published(expected),
            }
            for each in RECIPES
        ]
    methods: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    phases = {field.name for field in fields(Phases)}
    for method in (each for each in METHODS if each != "dense"):
        for name, kind_of_value in setting_types(method).items():
            methods.setdefault(name, []).append(method)
            kinds.setdefault(name, _type(kind_of_value))
    return [
        {"name": f"settings.{name}", "type": kinds[name], "methods": ["all"] if name in phases else takers}
        for name, takers in sorted(methods.items())
    ]


def _type(kind: Any) -> str:
    """A type as it is written on the command line."""
    if isinstance(kind, type):
        return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
            kind.__name__, kind.__name__
        )
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, parts))
    return " or ".join("none" if each is NoneType else _type(each) for each in parts) or str(kind)


def _published(number: Published) -> str:
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
