"""The general suite: its summary, one row per problem, sparsity and method, and the section of the page made of it."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.lab.checkpoint import write_atomically
from gossamer.lab.json_files import read_object
from gossamer.lab.recipes.general import PROBLEMS, Problem
from gossamer.lab.results.records import table
from gossamer.lab.training.result import check_result, with_current_keys
from gossamer.lab.training.run import Run

Row = dict[str, Any]
SUMMARY, TUNING = "summary.json", "tuning.json"
OURS, DENSE = "scl", "dense"


def summarise(out: Path) -> list[Row]:
    """The rows of all problems that have records in a folder. The dense network is at a sparsity of 0."""
    rows = []
    for problem in PROBLEMS:
        cells: dict[tuple[float, str], list[Row]] = {}
        for path in sorted((out / problem.name).glob("*.json")):
            record = read_run_record(path)
            run = Run.from_dict(record["config"])
            cells.setdefault((run.sparsity or 0.0, variant(run, problem)), []).append(record)
        rows += [_row(problem, *cell, records) for cell, records in sorted(cells.items())]
    return rows


def write_summary(out: Path) -> list[Row]:
    """Write the summary beside the records, and return its rows."""
    rows = summarise(out)
    if rows:
        text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
        write_atomically(out / SUMMARY, lambda file: file.write(text.encode()))
    return rows


def variant(run: Run, problem: Problem) -> str:
    """The name of the method, and what differs from its run in the report."""
    usual = problem.run if run.method == DENSE else problem.sparse_run(run.method, run.sparsity or 0.0)
    names = run.differences_from(replace(usual, seed=run.seed))
    return ":".join(
        [run.method, ",".join(f"{name.removeprefix('settings.')}={_value(run, name)}" for name in names)]
    ).rstrip(":")


def _value(run: Run, name: str) -> Any:
    field, _, key = name.partition(".")
    return getattr(run, field).get(key) if key else getattr(run, field)


def read_run_record(path: Path) -> Row:
    """The record of a run, which may have diverged, or have a perplexity."""
    remedy = ": delete it to train the run again"
    record = with_current_keys(read_object(path, "the record of a run", remedy))
    if not isinstance(record.get("config"), dict):
        raise ValueError(f"expected the record of a run in {path}, got one without its config{remedy}")
    check_result(record, path)
    return record


def _row(problem: Problem, sparsity: float, method: str, records: Sequence[Row]) -> Row:
    metric = "perplexity" if problem.run.data == "wikitext2" else "accuracy"
    values = [record[metric] for record in records if not record.get("diverged")]
    return {
        "problem": problem.name,
        "sparsity": sparsity,
        "method": method,
        "mean": statistics.mean(values) if values else None,
        "stderr": statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        "n": len(values),
        "better": "lower" if metric == "perplexity" else "higher",
        "metric": metric,
        "diverged": len(records) - len(values),
    }


# --- the pages ---


def readme_table(root: Path) -> str:
    """One line per problem: ours and the best rival at two sparsities, and the dense network; empty without records."""
    rows = [row for row in summarise(root / "general") if row["n"]]
    cells, lines = _cells(rows), []
    for problem in PROBLEMS:
        line = [problem.about]
        for sparsity in _IN_THE_README:
            own = cells.get((problem.name, sparsity), [])
            ours = next((_number(row) for row in own if row["method"] == OURS), "–")
            rival = next((f"{_number(row)} ({row['method']})" for row in own if row["method"] != OURS), "–")
            line += [ours, rival]
        dense = next((_number(row) for row in rows if (row["problem"], row["method"]) == (problem.name, DENSE)), "–")
        if any(cell != "–" for cell in line[1:]):
            lines.append([*line, dense])
    if not lines:
        return ""
    head = [title for sparsity in _IN_THE_README for title in (f"ours, {sparsity:.0%}", f"best rival, {sparsity:.0%}")]
    return f"{_ABOUT_README}\n\n{table(['', *head, 'dense'], lines)}"


_IN_THE_README = (0.9, 0.95)
_ABOUT_README = (
    "Test accuracy in percent, or perplexity, at the last epoch of short runs, mean ± standard error; a line for each "
    "problem of the general suite, with the best of the other methods ([all results](docs/results.md#general-suite)):"
)


def general(root: Path) -> str:
    """The section of docs/results.md; empty without records."""
    rows = [row for row in summarise(root / "general") if row["n"]]
    if not rows:
        return ""
    parts = ["## General suite", _ABOUT]
    for problem in PROBLEMS:
        if own := [row for row in rows if row["problem"] == problem.name]:
            parts += [f"### {problem.about}", table(*problem_table(own, bold="**"))]
    tuning = root / "tuning" / TUNING
    tuned = read_object(tuning)["methods"] if tuning.is_file() else {}
    parts += [_verdict(rows), "### Average rank", _RANKS, table(*_ranks(rows, tuned))]
    return "\n\n".join(filter(None, parts))


_ABOUT = (
    "Every method on problems of different kinds (`gossamer compare --suite general`), each trained as a practitioner "
    "would, in short runs. Test accuracy in percent, or perplexity, at the last epoch: mean ± standard error, and in "
    "brackets the difference to the best method of the column, which is bold."
)
_RANKS = (
    "Over all problems and sparsities that all methods of the table have; 1 is the best. Beside it, what the tuning of "
    "each method has cost (`gossamer tune`, on development problems only): trials, and the sum of their epochs."
)


def _cells(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """The sparse rows by problem and sparsity, the best method first."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["sparsity"]:
            found.setdefault((row["problem"], row["sparsity"]), []).append(row)
    return {cell: sorted(own, key=_badness) for cell, own in found.items()}


def _badness(row: Row) -> float:
    mean = float(row["mean"])
    return mean if row["better"] == "lower" else -mean


def problem_table(rows: Sequence[Row], bold: str = "") -> tuple[list[str], list[list[str]]]:
    """The table of one problem: methods by sparsity, with the difference to the best, which `bold` surrounds."""
    cells = {sparsity: own for (_, sparsity), own in sorted(_cells(rows).items())}
    dense = [row for row in rows if not row["sparsity"] and row["method"] == DENSE]
    names = dict.fromkeys(row["method"] for own in cells.values() for row in own)
    lines = [["dense", *[_number(dense[0]) if dense else "–"] * len(cells)]]
    for name in sorted(names, key=lambda name: name != OURS):
        line = [f"{name} (ours)" if name == OURS else name]
        for own in cells.values():
            row = next((each for each in own if each["method"] == name), None)
            line.append("–" if row is None else _cell(row, own[0], bold))
        lines.append(line)
    return ["", *(f"{sparsity:.0%}" for sparsity in cells)], lines


def _scale(row: Row) -> float:
    return 1.0 if row["metric"] == "perplexity" else 100.0


def _number(row: Row) -> str:
    scale = _scale(row)
    spread = "" if row["stderr"] is None else f" ± {scale * row['stderr']:.2f}"
    return f"{scale * row['mean']:.2f}{spread}"


def _cell(row: Row, best: Row, bold: str) -> str:
    lost = f", {row['diverged']} diverged" if row["diverged"] else ""
    if row is best:
        return f"{bold}{_number(row)}{bold}{lost}"
    return f"{_number(row)} ({_scale(row) * (row['mean'] - best['mean']):+.2f}){lost}"


def _verdict(rows: Sequence[Row]) -> str:
    """In how many cells ours is the best or about as good, and where it is not."""
    cells = {cell: own for cell, own in _cells(rows).items() if any(row["method"] == OURS for row in own)}
    behind = [
        f"{problem} at {sparsity:.0%}"
        for (problem, sparsity), own in cells.items()
        if _badness(next(row for row in own if row["method"] == OURS)) - _badness(own[0]) > (own[0]["stderr"] or 0.0)
    ]
    if not cells:
        return ""
    fraction = f"{len(cells) - len(behind)} of {len(cells)} cells"
    good = f"{OURS} is the best, or within one standard error of the best, in {fraction}"
    return f"{good}; it is not in {', '.join(behind)}." if behind else f"{good}."


def average_ranks(rows: Iterable[Row]) -> Mapping[str, float]:
    """The mean rank of each method over the cells that most methods have; methods that lack one of these are left
    out."""
    cells = _cells(row for row in rows if ":" not in row["method"])
    counts = dict.fromkeys((row["method"] for own in cells.values() for row in own), 0)
    for own in cells.values():
        for row in own:
            counts[row["method"]] += 1
    whole = [name for name, count in counts.items() if count == max(counts.values())]
    ranks: dict[str, list[int]] = {name: [] for name in whole}
    for own in cells.values():
        present = [row["method"] for row in own if row["method"] in ranks]
        for rank, name in enumerate(present, 1):
            ranks[name].append(rank)
    return dict(sorted(((name, statistics.mean(each)) for name, each in ranks.items()), key=lambda pair: pair[1]))


def _ranks(rows: Iterable[Row], tuned: Mapping[str, Row]) -> tuple[list[str], list[list[str]]]:
    def cost(name: str, key: str) -> str:
        return f"{tuned[name][key]:,}" if name in tuned else "–"

    lines = [
        [name, f"{rank:.2f}", cost(name, "trials"), cost(name, "run_epochs")]
        for name, rank in average_ranks(rows).items()
    ]
    return ["method", "average rank", "trials", "run-epochs"], lines
