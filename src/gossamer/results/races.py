"""Methods against each other."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gossamer.methods import find
from gossamer.results.records import Record, mean_and_spread, read, table


def race_rows(records: Sequence[Record], *, settings: bool) -> list[list[str]]:
    """One row for each kind of run, best first within a sparsity: accuracy on the test set at the last epoch."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        options = {key: value for key, value in record["settings"].items() if key != "seed"}
        groups[json.dumps([record["method"], options], sort_keys=True)].append(record)
    ordered = sorted(
        groups.values(),
        key=lambda group: (group[0]["asked_sparsity"], -statistics.mean(each["accuracy"] for each in group)),
    )
    return [_race_row(group, settings=settings) for group in ordered]


def race_blocks(records: Sequence[Record]) -> list[tuple[str, list[list[str]]]]:
    """The rows of single connections and, apart from them, those of whole filters, each with its title."""
    single, whole = _single_and_whole(records)
    blocks = (("single connections", single), ("whole filters", whole))
    return [(title, race_rows(own, settings=False)) for title, own in blocks if own]


def _single_and_whole(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Methods that remove whole filters stand apart from those that remove single connections."""
    whole = [each for each in records if find(each["method"]).structured]
    return [each for each in records if each not in whole], whole


def _race_row(group: Sequence[Record], *, settings: bool) -> list[str]:
    first = group[0]
    row = [find(first["method"]).title, f"{100 * first['asked_sparsity']:.0f} %"]
    if settings:
        used = first["settings"]
        masks = [f"{used[name]:g}" for name in ("mask_lr", "global_power", "feature_power") if name in used]
        row += [" / ".join(masks) if first["method"] == "scl" else "–", f"{used['weight_decay']:g}"]
        held_out = [each["validation_accuracy"] for each in group if each["validation_accuracy"] is not None]
        row += [mean_and_spread(held_out) if held_out else "–"]
    row += [mean_and_spread([each["accuracy"] for each in group])]
    return [*row, f"{statistics.mean(each['train_loss'] for each in group):.3f}", str(len(group))]


def races(root: Path) -> str:
    """Runs of different lengths, and of whole filters, have tables of their own."""
    records = read(root / "race-resnet20")
    parts = ["## ResNet-20 on CIFAR-10"]
    for epochs, final in by_epochs(records, "final"):
        parts += [
            f"Final runs: {epochs} epochs, batch 64, cosine learning rate from 0.1 to 0, on all 50,000 "
            "training images; test accuracy in percent at the last epoch, mean ± standard deviation over seeds. "
            "Settings were chosen in the screening, on held-out images. One H200, all runs side by side "
            "(`python benchmarks/race_cifar10.py --stage screening final`).",
            *_race_tables(["method", "zeros", "test accuracy", "training loss", "seeds"], final, settings=False),
        ]
    for epochs, screening in by_epochs(records, "screening"):
        head = ["method", "zeros", "masks", "weight decay", "validation", "test accuracy", "training loss", "seeds"]
        parts += [
            f"Screening: {epochs} epochs on 45,000 images, 5,000 held out (`gossamer compare`, and for variants of the "
            "mask settings `python benchmarks/race_cifar10.py --stage screening`). "
            "Masks: learning rate / power of the global scale / power of the per-feature scale.",
            *_race_tables(head, screening, settings=True),
        ]
    return "\n\n".join(parts)


def by_epochs(records: Sequence[Record], tier: str) -> list[tuple[int, list[Record]]]:
    own = [record for record in records if record["tier"] == tier]
    lengths = sorted({record["epochs"] for record in own}, reverse=True)
    return [(epochs, [record for record in own if record["epochs"] == epochs]) for epochs in lengths]


def _race_tables(head: Sequence[str], records: Sequence[Record], *, settings: bool) -> list[str]:
    single, whole = _single_and_whole(records)
    tables = [table(head, race_rows(single, settings=settings))]
    return [*tables, "Whole filters:", table(head, race_rows(whole, settings=settings))] if whole else tables
