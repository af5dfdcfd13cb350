"""Loaded data sets: frozen values, with pixels as bytes.

An image set keeps the original uint8 pixels; normalisation and augmentation happen later, batch by batch and
on the device (see `gossamer.lab.data.batches`). A text set keeps token ids. Neither depends on its source.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["ImageSet", "Labelled", "SentenceSet", "Sentences", "TextSet"]


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """Images (uint8, N × C × H × W) and their labels (int64, N)."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"expected uint8 images of shape (N, C, H, W), got {self.images.dtype} {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"expected {len(self.images)} int64 labels, got {self.labels.dtype} {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> Labelled:
        return Labelled(self.images.to(device), self.labels.to(device))


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """A classification set. `mean` and `std` are per channel, of the training pixels scaled to 0…1.

    `padding` and `flip` are the usual augmentation for the set (CIFAR: crop after padding by 4, mirror); 0 and False
    mean none. `validation` exists only after `split`.
    """

    name: str
    train: Labelled
    test: Labelled
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    flip: bool = False
    validation: Labelled | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.images.shape[1:])

    def split(self, validation: int = 5000, seed: int = 0) -> ImageSet:
        """Hold out `validation` random training images, drawn by `seed`; the test set does not change.

        The result's `train` and `validation` are disjoint and together are this set's `train`.
        """
        if self.validation is not None:
            raise ValueError(f"{self.name} has been split already; split the set that load() returned instead")
        kept, held_out = split_indices(len(self.train), validation, seed, self.name)
        return dataclasses.replace(
            self,
            train=Labelled(self.train.images[kept], self.train.labels[kept]),
            validation=Labelled(self.train.images[held_out], self.train.labels[held_out]),
        )

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with its pixels and labels on `device`, where several runs can share it."""
        validation = None if self.validation is None else self.validation.to(device)
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device), validation=validation)


def split_indices(count: int, held_out: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """The kept and the held-out indices of `count` training images, drawn by `seed`."""
    if not 0 < held_out < count:
        raise ValueError(f"expected 1 to {count - 1} images to hold out of {name}, got {held_out}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    # Sorted, so that both parts keep the original order and a batch reads memory forwards.
    return order[held_out:].sort().values, order[:held_out].sort().values


@dataclasses.dataclass(frozen=True, eq=False)
class TextSet:
    """A language-modelling set: one stream of int64 token ids per part, and the vocabulary."""

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Sentences:
    """Token ids (int64, N × tokens, padded) and their labels (int64, N)."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> Sentences:
        return Sentences(self.tokens.to(device), self.labels.to(device))


@dataclasses.dataclass(frozen=True, eq=False)
class SentenceSet:
    """A set of sentences to classify."""

    name: str
    train: Sentences
    validation: Sentences
    test: Sentences
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)
