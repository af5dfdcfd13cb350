"""Methods against each other: a row a method, a column a sparsity.

Runs of different tiers, lengths and kinds (single connections, whole filters) have tables of their own. Runs whose
settings are not the defaults say so in their row, or above the table where all have them. Records of other tiers, in which settings are tried out and not
methods, belong to no table here.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gossamer.methods import find
from gossamer.results.records import BEFORE, Record, mean_and_spread, read_races, table

_NAMES = {"resnet20": "ResNet-20", "vgg16_cifar": "VGG-16", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
_WEIGHT_DECAY = 1e-4  # of a run that is asked for nothing else
_ASKED = {"seed", "method", "sparsity"}
_PHASES = {"warmup", "sparsify", "stabilise", "finetune"}


def race_table(records: Sequence[Record], key: str = "accuracy") -> tuple[list[str], list[list[str]]]:
    """Head and rows: mean ± standard deviation over seeds. The best in the test first, at the sparsity that most rows
    have, of several the one nearest to 95 %.

    Where a cell has fewer seeds than others their number is given behind it, and how many of its runs have diverged.
    """
    cells: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for label, record in zip(labels(records), records, strict=True):
        cells[label][record["asked_sparsity"]].append(record)
    columns = sorted({sparsity for row in cells.values() for sparsity in row})
    seeds = max((len(runs) for row in cells.values() for runs in row.values()), default=0)
    counted = Counter(sparsity for row in cells.values() for sparsity in row if sparsity)
    at = max(counted, key=lambda sparsity: (counted[sparsity], -abs(sparsity - 0.95)), default=0.0)
    rows = [
        [label, *(_cell_of(cells[label][sparsity], seeds, key) for sparsity in columns)]
        for label in sorted(cells, key=lambda label: _rank(cells[label], at))
    ]
    return ["method", *(f"{100 * sparsity:g} %" for sparsity in columns)], rows


def race_blocks(records: Sequence[Record], key: str = "accuracy") -> list[tuple[str, list[str], list[list[str]]]]:
    """A table of single connections and, apart from it, one of whole filters: title, head and rows of each.

    The title has the settings that all the methods of a table have."""
    whole = [each for each in records if find(each["method"]).structured]
    single = [each for each in records if each not in whole]
    blocks = (("single connections", single), ("whole filters", whole))
    return [(f"{title}{_all_with(own)}", *race_table(own, key)) for title, own in blocks if own]


def race_page(records: Sequence[Record]) -> str:
    """The tables of one comparison as Markdown."""
    parts = [about(records)]
    for title, head, rows in race_blocks(records):
        parts += [f"{title.capitalize()}:", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def about(records: Sequence[Record]) -> str:
    """What was run, in a sentence."""
    first, seeds = records[0], len({record["seed"] for record in records})
    held_out = first.get("validation_images") or 0
    images = f"{held_out:,} training images held out" if held_out else "all training images"
    return (
        f"{first['tier'].capitalize()} of {first['net']} on {first['data']}: {first['epochs']} epochs, {images}; test "
        f"accuracy in percent at the last epoch against the share of zeros, {_over(seeds)}."
    )


def _over(seeds: int) -> str:
    return f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"


def labels(records: Sequence[Record]) -> list[str]:
    """For each run the title of its method, and in which settings it differs from the defaults, where not all do."""
    usual, known = _usual_race(records), shared(records)
    changes = ([each for each in _changes(record, usual) if each not in known] for record in records)
    return [", ".join([find(record["method"]).title, *own]) for record, own in zip(records, changes, strict=True)]


def shared(records: Sequence[Record]) -> list[str]:
    """In what all runs differ from the defaults, dense ones apart, where there are several methods."""
    sparse = [record for record in records if record["method"] != "dense"]
    if len({record["method"] for record in sparse}) < 2:
        return []
    first, *others = (_changes(record, _usual_race(records)) for record in sparse)
    return [each for each in first if all(each in other for other in others)]


def _all_with(records: Sequence[Record]) -> str:
    return f", all with {', '.join(known)}" if (known := shared(records)) else ""


def _changes(record: Record, usual_race: dict[str, Any]) -> list[str]:
    """Settings that are not the defaults, of the method and of the run; of the race, those that are not the usual ones.

    In early records any run names some settings of learned masks, whatever its method.
    """
    options = find(record["method"]).options()
    usual = {field.name: getattr(options, field.name) for field in fields(options)} | {"weight_decay": _WEIGHT_DECAY}
    foreign = {field.name for field in fields(find("scl").options)} - set(usual)
    then = {name: value for name, value in BEFORE.items() if name in usual}
    told = {name: value for name, value in (then | record["settings"]).items() if name not in foreign | _ASKED}
    changed = {name: value for name, value in told.items() if name not in usual or value != usual[name]}
    if not told.get("anchor", 1.0):
        changed.pop("anchor_cap", None)  # of nothing
    changed |= {name: value for name, value in record.get("race", {}).items() if value != usual_race.get(name, value)}
    if changed.keys() & _PHASES:
        phases = "+".join(str(record["race"][name]) for name in ("warmup", "sparsify", "stabilise", "finetune"))
        changed = {name: value for name, value in changed.items() if name not in _PHASES} | {"phases": phases}
    return [f"{name}={_said(value)}" for name, value in changed.items()]


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _usual_race(records: Sequence[Record]) -> dict[str, Any]:
    """What most runs share."""
    seen: dict[str, Counter[Any]] = defaultdict(Counter)
    for record in records:
        for name, value in record.get("race", {}).items():
            seen[name][value] += 1
    return {name: counted.most_common(1)[0][0] for name, counted in seen.items()}


def _rank(row: Mapping[float, Sequence[Record]], at: float) -> tuple[int, float]:
    """Dense first; what has no run at this sparsity last."""
    runs = row.get(at) or [run for each in row.values() for run in each]
    place = 0 if set(row) == {0.0} else 1 if at in row else 2
    return place, -statistics.mean(run["accuracy"] for run in runs)


def _cell_of(runs: Sequence[Record], seeds: int, key: str) -> str:
    diverged = sum(run["train_loss"] is None for run in runs)  # JSON has no NaN
    return _cell([run[key] for run in runs], seeds, key) + (f" ({diverged} diverged)" if diverged else "")


def _cell(values: Sequence[float | None], seeds: int, key: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    shown = f"{statistics.mean(known):.3f}" if key == "train_loss" else mean_and_spread(known)
    return shown + (f" ({len(known)})" if len(known) < seeds else "")


def races(root: Path) -> str:
    """A section for each network, that of the paper's first table before the others."""
    folders = sorted(root.glob("race-*"), key=lambda folder: (folder.name != "race-resnet20", folder.name))
    return "\n\n".join(_of_network(folder, name, own) for folder in folders for name, own in subjects(folder).items())


def subjects(folder: Path) -> dict[str, list[Record]]:
    """The records of comparisons in a folder, by what they are of, as a network may have raced on several data sets;
    those with most records first. That one's name is empty, the others' is added to the names of their plots."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in read_races(folder):
        if record["tier"] in ("final", "screening"):
            found[record["net"], record["data"]].append(record)
    most_first = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return {f"-{net}-{data}" if number else "": own for number, ((net, data), own) in enumerate(most_first)}


def _of_network(folder: Path, name: str, records: Sequence[Record]) -> str:
    first = records[0]
    parts = [
        f"## {_NAMES.get(first['net'], first['net'])} on {_NAMES.get(first['data'], first['data'])}",
        "Test accuracy in percent at the last epoch against the share of zeros, mean ± standard deviation over seeds "
        "(three, or their number in brackets). Batch 64, cosine learning rate from 0.1 to 0, runs side by side on one "
        f"{first['hardware']}; settings were chosen on held-out images. A row names what differs from the defaults.",
    ]
    for number, (epochs, final) in enumerate(by_epochs(records, "final")):
        parts += [f"### Final: {epochs} epochs on all training images", *_tables(final)]
        parts += _drawing(folder, f"final{name}") if number == 0 else []
        parts += _more("Training loss in the last epoch", final, "train_loss")
    for number, (epochs, screening) in enumerate(by_epochs(records, "screening")):
        current = [record for record in screening if "validation_images" in record]
        if current:
            held_out = current[0]["validation_images"]
            parts += [
                f"### Screening: {epochs} epochs, {held_out:,} training images held out (`gossamer compare`)",
                *_tables(current),
                *(_drawing(folder, f"screening{name}") if number == 0 else []),
                *_more("Accuracy on the images held out", current, "validation_accuracy"),
                *_more("Training loss in the last epoch", current, "train_loss"),
            ]
        early = [record for record in screening if "validation_images" not in record]
        if early:
            parts += [
                f"### Settings of learned masks against each other: {epochs} epochs, 5,000 training images held out",
                "An early screening, made to choose the mask learning rate, the scale and the weight decay (sections 1 "
                "and 3 of the [lab book](lab-book.md); `python benchmarks/race_cifar10.py --stage screening`). Its "
                "dense and magnitude runs stand for those of its own engine and belong to no race above.",
                table(*_settings_table(early)),
            ]
    return "\n\n".join(parts)


def _settings_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """One row for each kind of run, the best on held-out images first."""
    groups: dict[tuple[float, str], list[Record]] = defaultdict(list)
    for label, record in zip(labels(records), records, strict=True):
        groups[record["asked_sparsity"], label].append(record)

    def held_out(group: Sequence[Record]) -> float:
        return float(statistics.mean(record["validation_accuracy"] for record in group))

    rows = [
        [
            label,
            f"{100 * sparsity:g} %",
            *(
                _cell([record[key] for record in group], len(group), key)
                for key in ("validation_accuracy", "accuracy", "train_loss")
            ),
        ]
        for (sparsity, label), group in sorted(groups.items(), key=lambda each: (each[0][0], -held_out(each[1])))
    ]
    return ["method", "zeros", "validation", "test accuracy", "training loss"], rows


def by_epochs(records: Sequence[Record], tier: str) -> list[tuple[int, list[Record]]]:
    """The records of a tier by the epochs that they share, the most methods first, then the longest runs."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record["tier"] == tier:
            groups.setdefault(record["epochs"], []).append(record)
    return sorted(groups.items(), key=lambda group: (len({each["method"] for each in group[1]}), group[0]), reverse=True)


def _drawing(folder: Path, name: str) -> list[str]:
    """The plot of the first runs of a tier, where it has been drawn."""
    file = folder / f"{name}.svg"
    return [f"![accuracy against sparsity](../results/{folder.name}/{file.name})"] if file.exists() else []


def _more(summary: str, records: Sequence[Record], key: str) -> list[str]:
    """Tables that are folded away."""
    return [f"<details><summary>{summary}</summary>", *_tables(records, key), "</details>"]


def _tables(records: Sequence[Record], key: str = "accuracy") -> list[str]:
    parts: list[str] = []
    for title, head, rows in race_blocks(records, key):
        parts += [f"{title.capitalize()}:"] if parts or ", all with" in title else []
        parts.append(table(head, rows))
    return parts
