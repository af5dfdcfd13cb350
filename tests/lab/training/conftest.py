"""Whatever data set a run names, it gets a tiny one."""

import pytest
from tiny_data import tiny_images, tiny_text

from gossamer.lab.data import ImageSet, TextSet
from gossamer.lab.training import task


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
