"""Methods against each other."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

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
    single, whole = ([each for each in records if (each["method"] in STRUCTURED) is kind] for kind in (False, True))
    blocks = (("single connections", single), ("whole filters", whole))
    return [(title, race_rows(own, settings=False)) for title, own in blocks if own]


def _race_row(group: Sequence[Record], *, settings: bool) -> list[str]:
    first = group[0]
    row = [NAMES[first["method"]], f"{100 * first['asked_sparsity']:.0f} %"]
    if settings:
        used = first["settings"]
        masks = [f"{used[name]:g}" for name in ("mask_lr", "global_power", "feature_power") if name in used]
        row += [" / ".join(masks) if first["method"] == "scl" else "–", f"{used['weight_decay']:g}"]
        held_out = [each["validation_accuracy"] for each in group if each["validation_accuracy"] is not None]
        row += [mean_and_spread(held_out) if held_out else "–"]
    row += [mean_and_spread([each["accuracy"] for each in group])]
    return [*row, f"{statistics.mean(each['train_loss'] for each in group):.3f}", str(len(group))]


NAMES = {
    "dense": "dense",
    "scl": "gossamer (learned masks)",
    "magnitude": "magnitude, re-chosen every step (DPF)",  # its name in older records
    "dpf": "magnitude, re-chosen every step (DPF)",
    "gradual": "gradual magnitude, global (Zhu & Gupta)",
    "gradual_per_layer": "gradual magnitude, per layer (Zhu & Gupta)",
    "one_shot": "one-shot magnitude + fine-tuning (Han)",
    "narang": "rising thresholds (Narang)",
    "surgery": "dynamic network surgery (Guo)",
    "lottery": "one cut, learning rate rewound (Renda)",
    "snip": "sensitivity at the start (SNIP)",
    "rigl": "drop by magnitude, grow by gradient (RigL)",
    "str": "soft thresholds, one a layer (STR)",
    "l0": "hard-concrete gates (L0)",
    "autoprune": "sign rule for masks (AutoPrune)",
    "hyperflux": "Adam masks under controlled pressure (Hyperflux)",
    "soft_filter": "soft filter pruning (He)",
    "l1_filter": "filters by L1 norm, at once (Li)",
    "slimming": "channels by batch-norm gain (network slimming)",
}
STRUCTURED = {"soft_filter", "l1_filter", "slimming"}  # they remove whole filters, and have a block of their own


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
            f"Screening: {epochs} epochs on 45,000 images, 5,000 held out. "
            "Masks: learning rate / power of the global scale / power of the per-feature scale.",
            *_race_tables(head, screening, settings=True),
        ]
    return "\n\n".join(parts)


def by_epochs(records: Sequence[Record], tier: str) -> list[tuple[int, list[Record]]]:
    own = [record for record in records if record["tier"] == tier]
    lengths = sorted({record["epochs"] for record in own}, reverse=True)
    return [(epochs, [record for record in own if record["epochs"] == epochs]) for epochs in lengths]


def _race_tables(head: Sequence[str], records: Sequence[Record], *, settings: bool) -> list[str]:
    single, whole = ([each for each in records if (each["method"] in STRUCTURED) is kind] for kind in (False, True))
    tables = [table(head, race_rows(single, settings=settings))]
    return [*tables, "Whole filters:", table(head, race_rows(whole, settings=settings))] if whole else tables
