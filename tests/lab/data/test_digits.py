"""The digits that come with scikit-learn."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from gossamer.lab.data import Batches, CorruptData, load

datasets = pytest.importorskip("sklearn.datasets")


def test_digits_are_scikit_learns_split_once() -> None:
    dataset = load("digits")
    assert dataset.train.images.shape == (1437, 1, 8, 8)
    assert dataset.test.images.shape == (360, 1, 8, 8)
    original = datasets.load_digits()
    rows = np.concatenate([dataset.train.images.numpy(), dataset.test.images.numpy()]).reshape(1797, 64)
    labels = np.concatenate([dataset.train.labels.numpy(), dataset.test.labels.numpy()])
    got = np.concatenate([rows // 15, labels[:, None]], axis=1)
    expected = np.concatenate([original.data.astype(np.int64), original.target[:, None]], axis=1)
    assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, expected.tolist()))
    again = load("digits")
    assert torch.equal(again.train.images, dataset.train.images)
    assert torch.bincount(dataset.test.labels, minlength=10).min() > 20


def test_normalised_digits_have_mean_zero_and_deviation_one() -> None:
    dataset = load("digits")
    images, _ = next(iter(Batches.evaluation(dataset, dataset.train, 1437)))
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


def test_other_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = datasets.load_digits()
    original.images[0, 0, 0] += 1
    monkeypatch.setattr(datasets, "load_digits", lambda: original)
    with pytest.raises(CorruptData, match="the digits of scikit-learn is corrupted"):
        load("digits")


def test_missing_scikit_learn_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'gossamer\[demo\]'"):
        load("digits")


def test_a_root_is_refused() -> None:
    with pytest.raises(ValueError, match="come with scikit-learn, got somewhere"):
        load("digits", "somewhere")
