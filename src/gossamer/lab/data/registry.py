"""The data sets by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, overload

from gossamer.hints import did_you_mean
from gossamer.lab.data.cifar import CIFAR10, CIFAR100, CifarSpec, cifar_layouts, load_cifar
from gossamer.lab.data.digits import load_digits, locate_digits
from gossamer.lab.data.folder import FolderSet, load_folder, locate_folder
from gossamer.lab.data.idx import FASHION_MNIST, MNIST, IdxSpec, idx_layouts, load_idx
from gossamer.lab.data.locate import locate
from gossamer.lab.data.sentences import load_sst2, locate_sst2
from gossamer.lab.data.sets import ImageSet, SentenceSet, TextSet
from gossamer.lab.data.text import PTB, WIKITEXT2, TextSpec, load_text, text_layouts

__all__ = ["DATA_SETS", "DataEntry", "DataSet", "kind_of", "load", "names", "table", "training_images"]

DataSet: TypeAlias = ImageSet | TextSet | FolderSet | SentenceSet


@dataclasses.dataclass(frozen=True)
class DataEntry:
    """A registered set: its name, a description, a reader for a root (None: the first place that has it), a function
    that finds that place without reading it, and its kind: images that fit the device, a streamed folder of images,
    text, or sentences to classify."""

    name: str
    description: str
    load: Callable[[Path | str | None], DataSet]
    locate: Callable[[], Path | None]
    kind: Literal["images", "folder", "text", "sentences"] = "images"
    training_images: int | None = None  # of a set with fewer than 10,000


def _cifar(spec: CifarSpec) -> DataEntry:
    description = "50,000 + 10,000 colour images, 32 × 32"
    return DataEntry(spec.name, description, partial(load_cifar, spec), lambda: locate(cifar_layouts(spec)))


def _idx(spec: IdxSpec) -> DataEntry:
    description = "60,000 + 10,000 grey images, 28 × 28"
    return DataEntry(
        spec.name, description, partial(load_idx, spec), lambda: locate(idx_layouts(spec), system=spec.system)
    )


def _text(spec: TextSpec, description: str) -> DataEntry:
    return DataEntry(spec.name, description, partial(load_text, spec), lambda: locate(text_layouts(spec)), "text")


DATA_SETS: tuple[DataEntry, ...] = (
    DataEntry(
        "digits",
        "1,437 + 360 grey images, 8 × 8, of scikit-learn",
        load_digits,
        locate_digits,
        training_images=1_437,
    ),
    _idx(MNIST),
    _idx(FASHION_MNIST),
    _cifar(CIFAR10),
    _cifar(CIFAR100),
    DataEntry("imagefolder", "colour images in train/<class>/ and val/<class>/", load_folder, locate_folder, "folder"),
    _text(WIKITEXT2, "2,088,628 training words, 33,278 different"),
    _text(PTB, "929,589 training words, 10,000 different"),
    DataEntry(
        "sst2", "60,614 + 6,735 + 872 sentences of film reviews, good or bad", load_sst2, locate_sst2, "sentences"
    ),
)


def names() -> tuple[str, ...]:
    return tuple(entry.name for entry in DATA_SETS)


def kind_of(name: str) -> Literal["images", "folder", "text", "sentences"] | None:
    """The kind of a set; None for an unknown one."""
    return next((entry.kind for entry in DATA_SETS if entry.name == name), None)


def training_images(name: str) -> int | None:
    """The number of training images of a small set, None for all others."""
    return next((entry.training_images for entry in DATA_SETS if entry.name == name), None)


def table() -> list[tuple[str, str]]:
    """One row per set for listings: (name, description)."""
    return [(entry.name, entry.description) for entry in DATA_SETS]


@overload
def load(
    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100"], root: Path | str | None = None
) -> ImageSet: ...
@overload
def load(name: Literal["wikitext2", "ptb"], root: Path | str | None = None) -> TextSet: ...
@overload
def load(name: Literal["sst2"], root: Path | str | None = None) -> SentenceSet: ...
@overload
def load(name: Literal["imagefolder"], root: Path | str | None = None) -> FolderSet: ...
@overload
def load(name: str, root: Path | str | None = None) -> DataSet: ...
def load(name: str, root: Path | str | None = None) -> DataSet:
    """Load a set by name from `root`, or from the first place that has it (see `gossamer.lab.data.locate`)."""
    for entry in DATA_SETS:
        if entry.name == name:
            return entry.load(root)
    hint = did_you_mean(name, names(), f"the data sets are {', '.join(names())}", most=3)
    raise ValueError(f"expected the name of a data set, got {name!r}: {hint}")
