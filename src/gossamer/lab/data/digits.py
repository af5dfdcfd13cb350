"""Scikit-learn's digits: 1,797 grey images of 8 × 8 pixels that come with its wheel.

The only set that needs neither files nor network. Its sixteen grey levels are scaled to 0…240, so that the images are
bytes like all others; the split into 1,437 training and 360 test images is drawn once and fixed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from gossamer.lab.data.files import check_digest
from gossamer.lab.data.sets import ImageSet, Labelled

__all__ = ["load_digits", "locate_digits"]

_TEST_IMAGES = 360
_SPLIT_SEED = 0
_CONTENT = "sha256:87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def locate_digits() -> Path | None:
    """The folder of scikit-learn, if it is installed."""
    found = importlib.util.find_spec("sklearn")
    return None if found is None or found.origin is None else Path(found.origin).parent


def load_digits(root: Path | str | None = None) -> ImageSet:
    """The digits; they come with scikit-learn, so `root` must be None."""
    if root is not None:
        raise ValueError(f"expected no root for the digits, which come with scikit-learn, got {root}; leave it out")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: run pip install 'gossamer[demo]'") from error
    bunch = datasets.load_digits()
    levels = np.ascontiguousarray(bunch.images, dtype=np.uint8)
    labels = np.ascontiguousarray(bunch.target, dtype=np.int64)
    check_digest(levels.tobytes() + labels.astype(np.uint8).tobytes(), _CONTENT, "the digits of scikit-learn")
    images = torch.from_numpy(levels * np.uint8(15)).unsqueeze(1)
    order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(len(levels)))
    train, test = order[_TEST_IMAGES:].sort().values, order[:_TEST_IMAGES].sort().values
    targets = torch.from_numpy(labels)
    return ImageSet(
        name="digits",
        train=Labelled(images[train], targets[train]),
        test=Labelled(images[test], targets[test]),
        class_names=tuple("0123456789"),
        mean=(0.28694955,),
        std=(0.35376251,),
    )
