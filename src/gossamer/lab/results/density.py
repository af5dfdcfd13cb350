"""Density profiles: the share of kept weights of each layer, from the records of runs.

The paper draws those of DenseNet-40 and ResNet-110 at 10 and 30 % density.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.lab import models
from gossamer.lab.results.plot import save_figure
from gossamer.lab.results.records import Record, read_records
from gossamer.prunable import select

NAME = "profiles.svg"  # in results/density
WANTED = (("densenet40", 0.1), ("densenet40", 0.3), ("resnet110", 0.1), ("resnet110", 0.3))
_NEAR = 0.03  # in density


@dataclass(frozen=True)
class Profile:
    """The share of kept weights of each tensor, in the order of the network."""

    title: str
    density: Sequence[float]


def profile_of(record: Record) -> Profile:
    config = record["config"]
    classes = 100 if config["data"] == "cifar100" else 10
    network = models.create(config["model"], num_classes=classes, **config["model_options"])
    sizes = [weight.parameter.numel() for weight in select(network)]
    density = [kept / size for kept, size in zip(record["nonzeros_by_tensor"], sizes, strict=True)]
    return Profile(f"{config['model']}, {1 - record['sparsity']:.0%} dense", density)


def profiles(records: Iterable[Record], wanted: Sequence[tuple[str, float]] = WANTED) -> list[Profile]:
    """For each network and density, that of the run of learned masks with the nearest density, if one is near."""
    sparse = [each for each in records if each["config"]["method"] == "scl" and "nonzeros_by_tensor" in each]
    found = []
    for model, density in wanted:
        distances = [
            (abs(1 - each["sparsity"] - density), each["config"]["epochs"], index)
            for index, each in enumerate(sparse)
            if each["config"]["model"] == model
        ]
        distance, _, index = min(distances, key=lambda each: (round(each[0], 3), -each[1]), default=(1.0, 0, 0))
        if distance < _NEAR:
            found.append(profile_of(sparse[index]))
    return found


def committed_profiles(root: Path) -> list[Profile]:
    """Those of the records under `root`."""
    names = dict.fromkeys(model for model, _ in WANTED)
    folders = [root / f"{kind}-{name}" for name in names for kind in ("paper", "default", "compare")]
    return profiles(record for folder in folders for record in read_records(folder))


def draw(found: Sequence[Profile], path: Path) -> None:
    rows, columns = (len(found) + 1) // 2, min(2, len(found))
    with save_figure(path, width=5.0 * columns, height=2.4 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for each, axes in zip(found, grid, strict=False):
            axes.bar(range(1, len(each.density) + 1), [100 * share for share in each.density], width=0.9)
            axes.set_title(each.title, fontsize=9)
            axes.set_xlabel("layer")
            axes.set_ylabel("density in percent")
            axes.set_ylim(0, 100)
        for axes in list(grid):
            axes.set_axis_off()
