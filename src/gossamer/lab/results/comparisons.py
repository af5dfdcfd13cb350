"""Methods against each other: a row per method, a column per sparsity.

Runs of different tiers, lengths and kinds (single weights, whole filters) have tables of their own. A row names the
settings that are not the defaults; what all rows share stands above the table. Records of other tiers, in which
settings are tried out and not methods, belong to no table here.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer.lab.results.records import (
    Record,
    asked_sparsity,
    machine,
    mean_and_spread,
    percent,
    read_records,
    table,
)
from gossamer.lab.training.run import Run
from gossamer.methods import find
from gossamer.schedule import steps_of
from gossamer.settings import Phases

NAMES = {
    "resnet20": "ResNet-20",
    "resnet110": "ResNet-110",
    "vgg16_cifar": "VGG-16",
    "vgg19_cifar": "VGG-19",
    "densenet40": "DenseNet-40",
    "densenet_bc100": "DenseNet-BC-100",
    "wrn28_10": "WRN-28-10",
    "fc_densenet_mnist": "Fully connected DenseNet",
    "lstm_lm": "LSTM",
    "vgg16": "VGG-16",
    "resnet50": "ResNet-50",
    "efficientnet_b0": "EfficientNet-B0",
    "wikitext2": "WikiText-2",
    "imagefolder": "ImageNet",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
_OURS = "scl"
_CHOSEN_ON = "resnet20"
_FIRST = "compare-resnet20"
_PAPER = "preset=paper"
_OUTCOMES = {"validation_accuracy": "validation", "accuracy": "test accuracy", "train_loss": "training loss"}
_OTHERS = "The same methods with other settings"
_CHOICE = (
    "Of each method the setting that was run at most sparsities (with `python benchmarks/all_methods.py` chosen at "
    "95 %, on held-out images, out of those of one comparison), of several the best on held-out images, of ours the "
    "default and, where they ran, the paper's settings; the others are folded away below."
)
# What the paper prints, by sparsity.
PUBLISHED: Mapping[tuple[str, str], Mapping[float, float]] = MappingProxyType(
    {
        ("resnet20", "cifar10"): {0.0: 91.25, 0.5: 92.61, 0.7: 92.35, 0.95: 90.08},
        ("resnet110", "cifar10"): {0.0: 93.57, 0.7: 94.82, 0.9: 94.56, 0.95: 93.58},
        ("vgg16_cifar", "cifar10"): {0.97: 94.39},
    }
)
# Fields of a run in which those of a comparison may differ, with their values in a comparison without options.
_DECAY = ("weight_decay", "weight_decay_power")
_RATES = ("lr", "schedule", "lr_warmup", "lr_factor", "lr_restart")
_FIELDS = (*_DECAY, "pattern", "distil", "temperature", "teacher", "momentum", "batch_size", "label_smoothing", *_RATES)
_USUAL = {name: getattr(Run, name) for name in _FIELDS} | {"weight_decay": 5e-4}
_PHASES = ("warmup", "sparsify", "stabilise")


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but seed and sparsity: a row of a table, a line of a plot."""

    method: str
    changes: tuple[str, ...]  # settings that are not the defaults
    runs: Mapping[float, Sequence[Record]]  # by the sparsity that was asked for

    def label(self, known: Sequence[str] = ()) -> str:
        """The title of the method, and its settings that are not `known` already."""
        return ", ".join([find(self.method).title, *(each for each in self.changes if each not in known)])


@dataclass(frozen=True)
class Block:
    """The content of one table, or of one panel of a plot."""

    kind: str
    shared: tuple[str, ...]  # in what all groups differ from the defaults, dense ones apart
    groups: tuple[Group, ...]  # the best first

    @property
    def about_all(self) -> str:
        return f"all with {', '.join(self.shared)}" if self.shared else ""

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.kind, self.about_all)))


def groups_of(records: Sequence[Record]) -> list[Group]:
    """In the order in which they first appear."""
    usual = _usual_phases(records)
    found: dict[tuple[str, tuple[str, ...]], dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        name = find(record["config"]["method"]).name  # records may have an older one
        found[name, tuple(_changes(record, usual))][asked_sparsity(record)].append(record)
    return [Group(method, changes, dict(runs)) for (method, changes), runs in found.items()]


def blocks_of(records: Sequence[Record]) -> list[Block]:
    """Single weights and, apart from them, whole filters, if there are any.

    The best in the test come first, at the sparsity that most groups have, of several the one nearest to 95 %.
    """
    groups = groups_of(records)
    kinds = (("single weights", False), ("whole filters", True))
    parts = ((kind, [each for each in groups if find(each.method).structured is whole]) for kind, whole in kinds)
    return [Block(kind, _shared(own), tuple(_ranked(own))) for kind, own in parts if own]


def one_per_method(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The runs of one setting for each method, and the other runs.

    The setting is the one with which most sparsities were run, of several the best on held-out images, if there were
    any, as near to 95 % as there are runs, of those the one nearest to the defaults. Of ours it is always the one
    nearest to the defaults; the paper's settings of it stand beside."""

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

    groups = [group for block in blocks_of(records) for group in block.groups]
    chosen: dict[tuple[str, bool], Group] = {}
    for group in sorted(groups, key=preference):
        chosen.setdefault(kind(group), group)

    def runs(wanted: bool) -> list[Record]:
        found = (group for group in groups if (chosen[kind(group)] is group) is wanted)
        return [run for group in found for own in group.runs.values() for run in own]

    return runs(True), runs(False)


def displayed(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What a page displays, and what it folds away: one setting per method, but if only one method ran, its settings
    are what was compared."""
    methods = {find(record["config"]["method"]).name for record in records} - {"dense"}
    return one_per_method(records) if len(methods) > 1 else (list(records), [])


def _from_95(sparsity: float) -> float:
    return abs(sparsity - 0.95)


def _held_out(runs: Sequence[Record]) -> float:
    return statistics.mean(percent(runs, "validation_accuracy") or [0.0])


def table_of(block: Block, key: str = "accuracy") -> tuple[list[str], list[list[str]]]:
    """Head and rows: mean ± standard deviation over seeds.

    A cell with fewer seeds than others gives their number, and how many of its runs have diverged.
    """
    columns = sorted({sparsity for group in block.groups for sparsity in group.runs})
    seeds = max((len(runs) for group in block.groups for runs in group.runs.values()), default=0)
    rows = [
        [group.label(block.shared), *(_cell_of(group.runs.get(sparsity, ()), seeds, key) for sparsity in columns)]
        for group in block.groups
    ]
    return ["method", *(f"{100 * sparsity:g} %" for sparsity in columns)], rows


def comparison_page(records: Sequence[Record], tier: str) -> str:
    """The tables of one comparison as Markdown."""
    return "\n\n".join([about(records, tier), *_tables(records)]) + "\n"


def about(records: Sequence[Record], tier: str) -> str:
    """What was run, in a sentence."""
    config, seeds = records[0]["config"], _seeds(records)
    validation = config["validation"]
    images = f"{validation:,} training images held out" if validation else "all training images"
    return (
        f"{tier.capitalize()} of {config['model']} on {config['data']}: {config['epochs']} epochs, "
        f"{images}; test accuracy in percent at the last epoch by sparsity, {_over(seeds)}."
    )


def _seeds(records: Sequence[Record]) -> int:
    return len({record["config"]["seed"] for record in records})


def _over(seeds: int) -> str:
    return f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"


def _shared(groups: Sequence[Group]) -> tuple[str, ...]:
    """The settings that all rows share; with only one method they stay in its row."""
    sparse = [group for group in groups if group.method != "dense"]
    if len({group.method for group in sparse}) < 2:
        return ()
    first, *others = sparse
    return tuple(each for each in first.changes if all(each in other.changes for other in others))


def _changes(record: Record, usual_phases: tuple[float, ...]) -> list[str]:
    """Settings that are not the defaults: of the method, of the run, and those that no longer exist."""
    config, settings = record["config"], record["config"]["settings"]
    options = find(config["method"]).options()
    usual = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = {name: value for name, value in record["options"].items() if value != usual.get(name)}
    if not record["options"].get("mask_decay", 1.0):
        changed.pop("mask_decay_cap", None)  # without effect
    if config["preset"] != "default":
        changed = {name: value for name, value in settings.items() if name not in _PHASES}
        changed = {"preset": config["preset"], **_not_of_paper(config), **changed}
    elif settings.get("min_density", Phases.min_density) != Phases.min_density:
        changed["min_density"] = settings["min_density"]
    changed |= {name: config[name] for name, value in _USUAL.items() if config.get(name, value) != value}
    changed |= record.get("retired", {})
    if config["preset"] == "default" and (phases := _phases(record)) not in ((), usual_phases):
        changed["phases"] = "+".join(f"{share:.2f}" for share in phases)
    return [f"{name}={_text(value)}" for name, value in changed.items()]


def _not_of_paper(config: Mapping[str, Any]) -> dict[str, str]:
    """In what a run with the preset of the paper differs from the paper: it has a fixed λ1 and a staged schedule."""
    return ({} if config["decay"] is not None else {"λ1": "solved for"}) | (
        {} if config["schedule"] == "phases" else {"schedule": config["schedule"]}
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _phases(record: Record) -> tuple[float, ...]:
    """The shares of warm-up, sparsify, stabilise and fine-tune in a run; none for a dense one."""
    config = record["config"]
    if find(config["method"]).name == "dense":
        return ()
    fine, epochs = 1000, config["epochs"]  # steps of an imagined epoch
    durations = (config["settings"].get(name, getattr(Phases, name)) for name in _PHASES)
    steps = [steps_of(each, total_steps=fine * epochs, steps_per_epoch=fine) for each in durations]
    return *(each / (fine * epochs) for each in steps), 1.0 - sum(steps) / (fine * epochs)


def _usual_phases(records: Sequence[Record]) -> tuple[float, ...]:
    """What most runs share."""
    counted = Counter(phases for record in records if (phases := _phases(record)))
    return counted.most_common(1)[0][0] if counted else ()


def _ranked(groups: Sequence[Group]) -> list[Group]:
    """Dense first; groups without a run at the sparsity of the ranking last."""
    counted = Counter(sparsity for group in groups for sparsity in group.runs if sparsity)
    at = max(counted, key=lambda sparsity: (counted[sparsity], -_from_95(sparsity)), default=0.0)

    def rank(group: Group) -> tuple[int, float]:
        runs = group.runs.get(at) or [run for each in group.runs.values() for run in each]
        place = 0 if set(group.runs) == {0.0} else 1 if at in group.runs else 2
        return place, -statistics.mean(run["accuracy"] for run in runs)

    return sorted(groups, key=rank)


def _cell_of(runs: Sequence[Record], seeds: int, key: str) -> str:
    diverged = sum(run["diverged"] for run in runs)
    return _cell(runs, seeds, key) + (f" ({diverged} diverged)" if diverged else "")


def _cell(runs: Sequence[Record], seeds: int, key: str) -> str:
    if key == "train_loss":
        known = [run[key] for run in runs if run[key] is not None]
        text = f"{statistics.mean(known):.3f}" if known else "–"
    else:
        known = percent(runs, key)
        text = mean_and_spread(known) if known else "–"
    return text + (f" ({len(known)})" if 0 < len(known) < seeds else "")


def comparisons(root: Path) -> str:
    """A section for each network, that of the paper's first table before the others."""
    folders = sorted(root.glob("compare-*"), key=lambda folder: (folder.name != _FIRST, folder.name))
    return "\n\n".join(_of_network(folder, name, own) for folder in folders for name, own in subjects(folder).items())


def subjects(folder: Path) -> dict[str, list[Record]]:
    """The records of a folder by network and data set, those with most records first. That one's name is empty, the
    others' is added to the names of their plots."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in read_records(folder, ("tier", "options", "hardware")):
        if record["tier"] in ("final", "screening", "early"):
            found[record["config"]["model"], record["config"]["data"]].append(record)
    most_first = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return {f"-{net}-{data}" if number else "": own for number, ((net, data), own) in enumerate(most_first)}


def _of_network(folder: Path, name: str, records: Sequence[Record]) -> str:
    config, seeds = records[0]["config"], _seeds(records)
    net, data = config["model"], config["data"]
    on_gpu = "gpu" in records[0]["hardware"]
    parts = [
        f"## {NAMES.get(net, net)} on {NAMES.get(data, data)}",
        f"Test accuracy in percent at the last epoch by sparsity, {_over(seeds)} (or their number in brackets). Batch "
        f"64, cosine learning rate from 0.1 to 0, weight decay 5e-4, runs batched on one "
        f"{machine(records[0]) if on_gpu else 'CPU'}; settings were chosen on held-out images"
        f"{'' if net == _CHOSEN_ON else f', with {NAMES[_CHOSEN_ON]}'}. A row names what differs from the defaults.",
    ]
    parts += filter(None, [over_lengths(records), published(net, data)])
    for number, (epochs, every) in enumerate(by_epochs(records, "final")):
        final, others = displayed(every)
        parts += [f"### Final: {epochs} epochs on all training images", *_tables(final), _commits(final)]
        parts += _drawing(folder, f"final{name}") if number == 0 else []
        parts += _more("Training loss in the last epoch", final, "train_loss")
        parts += _more(_OTHERS, others)
    for number, (epochs, every) in enumerate(by_epochs(records, "screening")):
        screening, others = displayed(every)
        parts += [
            f"### Screening: {epochs} epochs, {screening[0]['config']['validation']:,} training images held out",
            *([_CHOICE] if others else []),
            *_tables(screening),
            _commits(screening),
            *(_drawing(folder, f"screening{name}") if number == 0 else []),
            *_more("Accuracy on the validation set", screening, "validation_accuracy"),
            *_more("Training loss in the last epoch", screening, "train_loss"),
            *_more(_OTHERS, others),
        ]
    for epochs, early in by_epochs(records, "early"):
        parts += [
            f"### Settings of learned masks against each other: {epochs} epochs, 5,000 training images held out",
            "An early screening, made to choose the mask learning rate, the scale and the weight decay (sections 1 "
            "and 3 of the [lab book](lab-book.md)). Its dense and magnitude runs are those of its own engine and "
            "belong to no comparison above.",
            table(*_settings_table(early)),
        ]
    return "\n\n".join(parts)


def published(net: str, data: str) -> str:
    """What the paper prints for a network; nothing if it has none of it."""
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
        for group in groups_of(final):
            if group.method == _OURS and not group.changes and sparsity in group.runs:
                found[epochs] = percent(group.runs[sparsity])
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
        found[record.get("commit") or "unknown"].add(find(record["config"]["method"]).name)
    each = (f"{commit} ({', '.join(sorted(names))})" for commit, names in sorted(found.items()))
    return f"Trained at {'; '.join(each)}."


def _settings_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """One row for each kind of run and sparsity, the best on held-out images first."""
    kinds = [(sparsity, group.label(), runs) for group in groups_of(records) for sparsity, runs in group.runs.items()]
    rows = [
        [label, f"{100 * sparsity:g} %", *(_cell(runs, len(runs), key) for key in _OUTCOMES)]
        for sparsity, label, runs in sorted(kinds, key=lambda kind: (kind[0], -_held_out(kind[2])))
    ]
    return ["method", "zeros", *_OUTCOMES.values()], rows


def by_epochs(records: Sequence[Record], tier: str) -> list[tuple[int, list[Record]]]:
    """The records of a tier by their epochs, the most methods first, then the longest runs."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record["tier"] == tier:
            groups.setdefault(record["config"]["epochs"], []).append(record)
    return sorted(
        groups.items(), key=lambda group: (len({each["config"]["method"] for each in group[1]}), group[0]), reverse=True
    )


def _drawing(folder: Path, name: str) -> list[str]:
    """The plot of the first runs of a tier, if it has been drawn."""
    file = folder / f"{name}.svg"
    return [f"![accuracy against sparsity](../results/{folder.name}/{file.name})"] if file.exists() else []


def _more(summary: str, records: Sequence[Record], key: str = "accuracy") -> list[str]:
    """Tables that are folded away; nothing if there are no runs."""
    return [] if not records else [f"<details><summary>{summary}</summary>", *_tables(records, key), "</details>"]


def _tables(records: Sequence[Record], key: str = "accuracy") -> list[str]:
    blocks = blocks_of(records)
    return [part for block in blocks for part in (f"{_sentence(block.title)}:", table(*table_of(block, key)))]


def _sentence(text: str) -> str:
    """With a capital letter; names and values of settings stay as they are."""
    return text[:1].upper() + text[1:]
