"""Methods against each other: a row a method, a column a sparsity.

Runs of different tiers, lengths and kinds (single connections, whole filters) have tables of their own. Runs whose
settings are not the defaults say so in their row, or above the table where all have them. Records of other tiers, in
which settings are tried out and not methods, belong to no table here.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer.lab.results.records import BEFORE, Record, mean_and_spread, read_races, table
from gossamer.methods import find

_NAMES = {
    "resnet20": "ResNet-20",
    "resnet110": "ResNet-110",
    "vgg16_cifar": "VGG-16",
    "fc_densenet_mnist": "Fully connected DenseNet",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
_OURS = "scl"
_CHOSEN_ON = "resnet20"
_WEIGHT_DECAY = 5e-4  # of a comparison that is asked for nothing else
_PAPER = "preset=paper"
_ASKED = {"seed", "method", "sparsity"}
_OUTCOMES = {"validation_accuracy": "validation", "accuracy": "test accuracy", "train_loss": "training loss"}
_OTHERS = "The same methods with other settings"
_CHOICE = (
    "Of each method the setting that was run at most sparsities (with `python benchmarks/all_methods.py` chosen at "
    "95 %, on held-out images, out of those of one race), of several the best on held-out images, of ours the default "
    "and, where they ran, the paper's settings; the others are folded away below."
)
# What the paper prints, by share of zeros.
PUBLISHED: Mapping[tuple[str, str], Mapping[float, float]] = MappingProxyType(
    {
        ("resnet20", "cifar10"): {0.0: 91.25, 0.5: 92.61, 0.7: 92.35, 0.95: 90.08},
        ("resnet110", "cifar10"): {0.0: 93.57, 0.7: 94.82, 0.9: 94.56, 0.95: 93.58},
        ("vgg16_cifar", "cifar10"): {0.97: 94.39},
    }
)
_PHASES = {"warmup", "sparsify", "stabilise", "finetune"}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but seed and sparsity: a row of a table, a line of a plot."""

    method: str
    changes: tuple[str, ...]  # settings that are not the defaults
    runs: Mapping[float, Sequence[Record]]  # by the sparsity that was asked for

    def label(self, known: Sequence[str] = ()) -> str:
        """The title of the method, and what the reader does not know yet of its settings."""
        return ", ".join([find(self.method).title, *(each for each in self.changes if each not in known)])


@dataclass(frozen=True)
class Block:
    """What stands in one table, or one panel of a plot."""

    kind: str
    shared: tuple[str, ...]  # in what all groups differ from the defaults, dense ones apart
    groups: tuple[Group, ...]  # the best first

    @property
    def about_all(self) -> str:
        return f"all with {', '.join(self.shared)}" if self.shared else ""

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.kind, self.about_all)))


def race_groups(records: Sequence[Record]) -> list[Group]:
    """In the order in which they first appear."""
    usual = _usual_race(records)
    found: dict[tuple[str, tuple[str, ...]], dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        name = find(record["method"]).name  # records may have an older one
        found[name, tuple(_changes(record, usual))][record["asked_sparsity"]].append(record)
    return [Group(method, changes, dict(runs)) for (method, changes), runs in found.items()]


def race_blocks(records: Sequence[Record]) -> list[Block]:
    """Single connections and, apart from them, whole filters; those of them that there are.

    The best in the test first, at the sparsity that most groups have, of several the one nearest to 95 %.
    """
    groups = race_groups(records)
    kinds = (("single connections", False), ("whole filters", True))
    parts = ((kind, [each for each in groups if find(each.method).structured is whole]) for kind, whole in kinds)
    return [Block(kind, _shared(own), tuple(_ranked(own))) for kind, own in parts if own]


def one_a_method(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Of each method the runs of one setting, and the other runs: the setting with which most sparsities were run, of
    several the best on held-out images, where there were any, as near to 95 % as there are runs, of those the one
    nearest to the defaults. Ours has to do with the one nearest to the defaults; the paper's settings of it stand
    beside."""

    def preference(group: Group) -> tuple[float, ...]:
        changes, at = len(group.changes), min(group.runs, key=_from_95)
        return (
            changes if group.method == _OURS else 0,
            -len(group.runs),
            _from_95(at),
            -_held_out(group.runs[at]),
            changes,
        )

    def kind(group: Group) -> tuple[str, bool]:
        return group.method, _PAPER in group.changes

    groups = [group for block in race_blocks(records) for group in block.groups]
    chosen: dict[tuple[str, bool], Group] = {}
    for group in sorted(groups, key=preference):
        chosen.setdefault(kind(group), group)

    def runs(wanted: bool) -> list[Record]:
        found = (group for group in groups if (chosen[kind(group)] is group) is wanted)
        return [run for group in found for own in group.runs.values() for run in own]

    return runs(True), runs(False)


def shown(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What a page shows, and what it folds away: of each method one setting, but where one method has run alone its
    settings are what was compared."""
    methods = {find(record["method"]).name for record in records} - {"dense"}
    return one_a_method(records) if len(methods) > 1 else (list(records), [])


def _from_95(sparsity: float) -> float:
    return abs(sparsity - 0.95)


def _held_out(runs: Sequence[Record]) -> float:
    known: list[float | None] = [run["validation_accuracy"] for run in runs]
    return statistics.mean([each for each in known if each is not None] or [0.0])


def race_table(block: Block, key: str = "accuracy") -> tuple[list[str], list[list[str]]]:
    """Head and rows: mean ± standard deviation over seeds.

    Where a cell has fewer seeds than others their number is given behind it, and how many of its runs have diverged.
    """
    columns = sorted({sparsity for group in block.groups for sparsity in group.runs})
    seeds = max((len(runs) for group in block.groups for runs in group.runs.values()), default=0)
    rows = [
        [group.label(block.shared), *(_cell_of(group.runs.get(sparsity, ()), seeds, key) for sparsity in columns)]
        for group in block.groups
    ]
    return ["method", *(f"{100 * sparsity:g} %" for sparsity in columns)], rows


def race_page(records: Sequence[Record]) -> str:
    """The tables of one comparison as Markdown."""
    return "\n\n".join([about(records), *_tables(records)]) + "\n"


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


def _shared(groups: Sequence[Group]) -> tuple[str, ...]:
    """What stands above the rows: with one method alone, its row says it."""
    sparse = [group for group in groups if group.method != "dense"]
    if len({group.method for group in sparse}) < 2:
        return ()
    first, *others = sparse
    return tuple(each for each in first.changes if all(each in other.changes for other in others))


def _changes(record: Record, usual_race: dict[str, Any]) -> list[str]:
    """Settings that are not the defaults, of the method and of the run; of the race, those that are not the usual ones.

    In early records any run names some settings of learned masks, whatever its method.
    """
    options = find(record["method"]).options()
    usual = {field.name: getattr(options, field.name) for field in fields(options)} | {"weight_decay": _WEIGHT_DECAY}
    foreign = {field.name for field in fields(find(_OURS).options)} - set(usual)
    then = {name: value for name, value in BEFORE.items() if name in usual}
    told = {name: value for name, value in (then | record["settings"]).items() if name not in foreign | _ASKED}
    changed = {name: value for name, value in told.items() if value != usual.get(name)}
    if not told.get("mask_decay", 1.0):
        changed.pop("mask_decay_cap", None)  # of nothing
    if record.get("preset") == "paper":
        changed = {"preset": "paper", **{name: value for name, value in changed.items() if name == "weight_decay"}}
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


def _ranked(groups: Sequence[Group]) -> list[Group]:
    """Dense first; what has no run at the sparsity that is looked at last."""
    counted = Counter(sparsity for group in groups for sparsity in group.runs if sparsity)
    at = max(counted, key=lambda sparsity: (counted[sparsity], -_from_95(sparsity)), default=0.0)

    def rank(group: Group) -> tuple[int, float]:
        runs = group.runs.get(at) or [run for each in group.runs.values() for run in each]
        place = 0 if set(group.runs) == {0.0} else 1 if at in group.runs else 2
        return place, -statistics.mean(run["accuracy"] for run in runs)

    return sorted(groups, key=rank)


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
    first, seeds = records[0], len({record["seed"] for record in records})
    parts = [
        f"## {_NAMES.get(first['net'], first['net'])} on {_NAMES.get(first['data'], first['data'])}",
        f"Test accuracy in percent at the last epoch against the share of zeros, {_over(seeds)} (or their number in "
        "brackets). Batch 64, cosine learning rate from 0.1 to 0, weight decay 5e-4, runs side by side on one "
        f"{'CPU' if first['hardware'] == 'cpu' else first['hardware']}; settings were chosen on held-out images"
        f"{'' if first['net'] == _CHOSEN_ON else f', with {_NAMES[_CHOSEN_ON]}'}. A row names what differs from the "
        "defaults.",
    ]
    parts += filter(None, [over_lengths(records), published(first["net"], first["data"])])
    for number, (epochs, every) in enumerate(by_epochs(records, "final")):
        final, others = shown(every)
        parts += [f"### Final: {epochs} epochs on all training images", *_tables(final), _commits(final)]
        parts += _drawing(folder, f"final{name}") if number == 0 else []
        parts += _more("Training loss in the last epoch", final, "train_loss")
        parts += _more(_OTHERS, others)
    for number, (epochs, screening) in enumerate(by_epochs(records, "screening")):
        current = [record for record in screening if "validation_images" in record]
        if current:
            held_out = current[0]["validation_images"]
            current, others = shown(current)
            parts += [
                f"### Screening: {epochs} epochs, {held_out:,} training images held out",
                *([_CHOICE] if others else []),
                *_tables(current),
                _commits(current),
                *(_drawing(folder, f"screening{name}") if number == 0 else []),
                *_more("Accuracy on the images held out", current, "validation_accuracy"),
                *_more("Training loss in the last epoch", current, "train_loss"),
                *_more(_OTHERS, others),
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


def published(net: str, data: str) -> str:
    """What the paper prints for a network; nothing where it has none of it."""
    numbers = dict(PUBLISHED.get((net, data), {}))
    if not numbers:
        return ""
    dense = numbers.pop(0.0, None)
    at = f"{_listed([f'{value:.2f}' for value in numbers.values()])} at "
    at += f"{_listed([f'{100 * sparsity:g}' for sparsity in numbers])} % zeros"
    return f"The paper prints {at}{'' if dense is None else f', and {dense:.2f} for the dense network'}."


def over_lengths(records: Sequence[Record], sparsity: float = 0.95) -> str:
    """What our defaults reach over all final runs that have them: three seeds of one length may agree by chance."""
    found: dict[int, list[float]] = {}
    for epochs, final in by_epochs(records, "final"):
        for group in race_groups(final):
            if group.method == _OURS and not group.changes and sparsity in group.runs:
                found[epochs] = [run["accuracy"] for run in group.runs[sparsity]]
    if len(found) < 2:
        return ""
    every = [accuracy for own in found.values() for accuracy in own]
    each = " and ".join(f"{mean_and_spread(own)} in {epochs} epochs" for epochs, own in found.items())
    return (
        f"At {100 * sparsity:g} % zeros the defaults give {each}: {mean_and_spread(every)} over all {len(every)} runs, "
        "which is the better estimate of their spread."
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _commits(records: Sequence[Record]) -> str:
    """Which methods were trained by which state of the code."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        found[record.get("commit", "unknown")].add(find(record["method"]).name)
    told = (f"{commit} ({', '.join(sorted(names))})" for commit, names in sorted(found.items()))
    return f"Trained at {'; '.join(told)}."


def _settings_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """One row for each kind of run and sparsity, the best on held-out images first."""

    def held_out(runs: Sequence[Record]) -> float:
        return float(statistics.mean(run["validation_accuracy"] for run in runs))

    kinds = [(sparsity, group.label(), runs) for group in race_groups(records) for sparsity, runs in group.runs.items()]
    rows = [
        [
            label,
            f"{100 * sparsity:g} %",
            *(_cell([run[key] for run in runs], len(runs), key) for key in _OUTCOMES),
        ]
        for sparsity, label, runs in sorted(kinds, key=lambda kind: (kind[0], -held_out(kind[2])))
    ]
    return ["method", "zeros", *_OUTCOMES.values()], rows


def by_epochs(records: Sequence[Record], tier: str) -> list[tuple[int, list[Record]]]:
    """The records of a tier by the epochs that they share, the most methods first, then the longest runs."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record["tier"] == tier:
            groups.setdefault(record["epochs"], []).append(record)
    return sorted(
        groups.items(), key=lambda group: (len({each["method"] for each in group[1]}), group[0]), reverse=True
    )


def _drawing(folder: Path, name: str) -> list[str]:
    """The plot of the first runs of a tier, where it has been drawn."""
    file = folder / f"{name}.svg"
    return [f"![accuracy against sparsity](../results/{folder.name}/{file.name})"] if file.exists() else []


def _more(summary: str, records: Sequence[Record], key: str = "accuracy") -> list[str]:
    """Tables that are folded away; nothing where there are no runs."""
    return [] if not records else [f"<details><summary>{summary}</summary>", *_tables(records, key), "</details>"]


def _tables(records: Sequence[Record], key: str = "accuracy") -> list[str]:
    blocks = race_blocks(records)
    return [part for block in blocks for part in (f"{_sentence(block.title)}:", table(*race_table(block, key)))]


def _sentence(text: str) -> str:
    """With a capital letter; names and values of settings stay as they are."""
    return text[:1].upper() + text[1:]
