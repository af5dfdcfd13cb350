"""Tiny networks and data sets under names of their own, so that whole runs take a fraction of a second."""

import pytest
import torch

from gossamer.data import ImageSet, Labelled, TextSet
from gossamer.training import task


def tiny_images(name: str = "tiny", count: int = 40) -> ImageSet:
    """Images of 1 × 8 × 8 pixels whose class shows in their brightness."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 3
    noise = torch.randint(0, 60, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    images = noise + (labels * 70).to(torch.uint8).view(-1, 1, 1, 1)
    part = Labelled(images, labels)
    return ImageSet(name, part, part, ("dark", "grey", "bright"), (0.4,), (0.2,))


def tiny_text() -> TextSet:
    stream = torch.arange(400) * 7 % 11
    return TextSet("tiny text", stream, stream[:120], stream[120:260], tuple("abcdefghijk"))


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    """Every data set that a run names is this one."""
    dataset = tiny_images()
    monkeypatch.setattr(task.data, "load", lambda name, root=None: dataset)
    return dataset


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> TextSet:
    dataset = tiny_text()
    monkeypatch.setattr(task.data, "load", lambda name, root=None: dataset)
    return dataset
