"""Data sets small enough for whole runs in a fraction of a second."""

import torch

from gossamer.lab.data import ImageSet, Labelled, TextSet


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
