"""Tiny idx files written here, whole and broken; the real ones where they are."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.lab.data import CorruptData, DataNotFound
from gossamer.lab.data.idx import FASHION_MNIST, MNIST, IdxPart, IdxSpec, load_idx, parse_idx

RANDOM = np.random.default_rng(0)
ARRAYS = [
    RANDOM.integers(0, 256, (5, 4, 3), dtype=np.uint8),
    np.array([0, 1, 2, 0, 1], np.uint8),
    RANDOM.integers(0, 256, (2, 4, 3), dtype=np.uint8),
    np.array([2, 1], np.uint8),
]
NAMES = ["train-images", "train-labels", "test-images", "test-labels"]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def spec(arrays: list[np.ndarray] = ARRAYS) -> IdxSpec:
    parts = [
        IdxPart(name, array.shape, f"sha256:{hashlib.sha256(idx(array)).hexdigest()}", "md5:0")
        for name, array in zip(NAMES, arrays, strict=True)
    ]
    return IdxSpec(
        "tiny", ("a", "b", "c"), (0.5,), (0.5,), (parts[0], parts[1], parts[2], parts[3]), ("T/raw", "t"), ()
    )


def write(folder: Path, *, compressed: bool, arrays: list[np.ndarray] = ARRAYS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(NAMES, arrays, strict=True):
        content = idx(array)
        (folder / (f"{name}.gz" if compressed else name)).write_bytes(
            gzip.compress(content, 1) if compressed else content
        )


@pytest.mark.parametrize("folder", ["T/raw", "t"])
@pytest.mark.parametrize("compressed", [True, False])
def test_all_layouts_give_the_same_set(tmp_path: Path, folder: str, compressed: bool) -> None:
    write(tmp_path / folder, compressed=compressed)
    dataset = load_idx(spec(), tmp_path)
    assert torch.equal(dataset.train.images[:, 0], torch.from_numpy(ARRAYS[0]))
    assert torch.equal(dataset.test.images[:, 0], torch.from_numpy(ARRAYS[2]))
    assert dataset.train.labels.tolist() == [0, 1, 2, 0, 1]
    assert dataset.test.labels.tolist() == [2, 1]
    assert dataset.input_shape == (1, 4, 3)
    assert dataset.padding == 0


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("damage", ["cut", "changed", "longer"])
def test_a_damaged_file_is_named(tmp_path: Path, compressed: bool, damage: str) -> None:
    write(tmp_path / "t", compressed=compressed)
    path = tmp_path / "t" / ("train-images.gz" if compressed else "train-images")
    content = path.read_bytes()
    damaged = {
        "cut": content[:-9],
        "changed": content[:40] + bytes([content[40] ^ 1]) + content[41:],
        "longer": content + bytes(5000),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CorruptData, match="train-images") as raised:
        load_idx(spec(), tmp_path)
    assert "fetch it again" in str(raised.value)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    arrays = [*ARRAYS[:3], np.array([2, 3], np.uint8)]
    write(tmp_path / "t", compressed=False, arrays=arrays)
    with pytest.raises(CorruptData, match="expected labels below 3, got 3"):
        load_idx(spec(arrays), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08", "a header of 8 bytes, got 3"),
        (b"\0\0\x0d\x01\0\0\0\x02ab", "got 00000d01"),
        (b"\0\0\x08\x02\0\0\0\x02ab", "got 00000802"),
        (b"\0\0\x08\x01\xff\xff\xff\xffab", "got \\(4294967295,\\)"),
        (b"\0\0\x08\x01\0\0\0\x02a", "in a file of 9 bytes"),
    ],
)
def test_a_header_is_checked_before_anything_is_allocated(content: bytes, message: str) -> None:
    with pytest.raises(CorruptData, match=message):
        parse_idx(content, (2,), "x")
    assert parse_idx(b"\0\0\x08\x01\0\0\0\x02ab", (2,), "x").tolist() == [97, 98]


def test_official_sizes_follow_from_the_shapes() -> None:
    assert [part.plain_size for part in MNIST.parts] == [47_040_016, 60_008, 7_840_016, 10_008]
    assert [part.plain_size for part in FASHION_MNIST.parts] == [47_040_016, 60_008, 7_840_016, 10_008]


def test_a_missing_set_names_its_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"'tiny'.*T/raw/train-images\.gz"):
        load_idx(dataclasses.replace(spec()), tmp_path)


def test_real_mnist(shared_data: Path) -> None:
    dataset = load_idx(MNIST, shared_data)
    assert dataset.train.images.shape == (60_000, 1, 28, 28)
    assert dataset.test.images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(dataset.train.labels).tolist()[:3] == [5923, 6742, 5958]
    pixels = dataset.train.images.float() / 255
    assert pixels.mean().item() == pytest.approx(dataset.mean[0], abs=1e-5)
    assert pixels.std().item() == pytest.approx(dataset.std[0], abs=1e-5)


def test_real_fashion_mnist() -> None:
    folder = FASHION_MNIST.system
    assert folder is not None
    if not (folder / "fashion-mnist").is_dir():
        pytest.skip("the system package dataset-fashion-mnist is not installed")
    dataset = load_idx(FASHION_MNIST)
    assert torch.bincount(dataset.train.labels).tolist() == [6000] * 10
    pixels = dataset.train.images.float() / 255
    assert pixels.mean().item() == pytest.approx(dataset.mean[0], abs=1e-5)
    assert pixels.std().item() == pytest.approx(dataset.std[0], abs=1e-5)
