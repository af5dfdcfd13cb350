"""Tiny CIFAR files in all three layouts, whole and broken; the real ones where they are."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.lab.data import CorruptData, DataNotFound, ImageSet
from gossamer.lab.data.cifar import CIFAR10, CIFAR100, CifarSpec, load_cifar
from gossamer.lab.data.files import File

GRID = 2
PER_FILE = GRID * GRID
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (3 * PER_FILE, 3, 32, 32), dtype=np.uint8)
LABELS = RANDOM.integers(0, 3, 3 * PER_FILE, dtype=np.uint8)
COARSE = np.full_like(LABELS, 9)


def described(path: str, content: bytes) -> File:
    return File(path, f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def records(numbers: slice, label_bytes: int) -> bytes:
    columns = [COARSE[numbers, None]] * (label_bytes - 1) + [LABELS[numbers, None]]
    return np.concatenate([*columns, PIXELS[numbers].reshape(PER_FILE, -1)], axis=1).tobytes()


def contents(label_bytes: int = 1) -> dict[str, bytes]:
    """Every file of a tiny set of two training files and one test file, in all layouts."""
    image = pytest.importorskip("PIL.Image")
    files = {}
    for number in range(3):
        part = slice(number * PER_FILE, (number + 1) * PER_FILE)
        files[f"bin/{number}.bin"] = records(part, label_bytes)
        grid = PIXELS[part].reshape(GRID, GRID, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(GRID * 32, GRID * 32, 3)
        stream = io.BytesIO()
        image.fromarray(grid).save(stream, "WEBP", lossless=True, exact=True)
        files[f"{number}.webp"] = stream.getvalue()
    labels = io.BytesIO()
    np.savez(labels, first=LABELS[: 2 * PER_FILE], second=LABELS[2 * PER_FILE :])
    files["labels.npz"] = labels.getvalue()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in ("bin/0.bin", "bin/1.bin", "bin/2.bin"):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))
    files["all.tar.gz"] = archive.getvalue()
    return files


def spec(files: dict[str, bytes], label_bytes: int = 1) -> CifarSpec:
    return CifarSpec(
        name="tiny",
        class_names=("a", "b", "c"),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        label_bytes=label_bytes,
        binary=tuple(described(f"bin/{n}.bin", files[f"bin/{n}.bin"]) for n in range(3)),
        archive=described("all.tar.gz", files["all.tar.gz"]),
        address="https://example.invalid/all.tar.gz",
        python_version=("batches-py",),
        grids=tuple(described(f"{n}.webp", files[f"{n}.webp"]) for n in range(3)),
        packed_label_file=described("labels.npz", files["labels.npz"]),
        packed_labels=("first", "second"),
        grid=GRID,
    )


def write(folder: Path, files: dict[str, bytes], names: tuple[str, ...]) -> None:
    for name, content in files.items():
        if name.startswith(names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def check(dataset: ImageSet) -> None:
    assert torch.equal(dataset.train.images, torch.from_numpy(PIXELS[: 2 * PER_FILE]))
    assert torch.equal(dataset.test.images, torch.from_numpy(PIXELS[2 * PER_FILE :]))
    assert dataset.train.labels.tolist() == LABELS[: 2 * PER_FILE].tolist()
    assert dataset.test.labels.tolist() == LABELS[2 * PER_FILE :].tolist()
    assert (dataset.padding, dataset.flip) == (4, True)


LAYOUTS = [("bin",), ("all.tar.gz",), ("0", "1", "2", "labels")]


@pytest.mark.parametrize("label_bytes", [1, 2])
@pytest.mark.parametrize("names", LAYOUTS)
def test_all_layouts_give_the_same_set(tmp_path: Path, names: tuple[str, ...], label_bytes: int) -> None:
    files = contents(label_bytes)
    write(tmp_path, files, names)
    check(load_cifar(spec(files, label_bytes), tmp_path))


@pytest.mark.parametrize("broken", ["bin/1.bin", "all.tar.gz", "2.webp", "labels.npz"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_named(tmp_path: Path, broken: str, damage: str) -> None:
    files = contents()
    write(tmp_path, files, next(names for names in LAYOUTS if broken.startswith(names)))
    content = files[broken]
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    (tmp_path / broken).write_bytes(content[:-1] if damage == "cut" else changed)
    message = "truncated" if damage == "cut" else "corrupted"
    with pytest.raises(CorruptData, match=message) as raised:
        load_cifar(spec(files), tmp_path)
    assert str(tmp_path / broken) in str(raised.value)


def test_right_checksum_but_wrong_content_is_still_refused(tmp_path: Path) -> None:
    files = contents()
    files["bin/0.bin"] += b"x"
    write(tmp_path, files, ("bin",))
    with pytest.raises(CorruptData, match="records of 3073 bytes"):
        load_cifar(spec(files), tmp_path)
    small = dataclasses.replace(spec(contents()), class_names=("a",))
    write(tmp_path, contents(), ("bin",))
    with pytest.raises(CorruptData, match="labels below 1, got 2"):
        load_cifar(small, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"first": LABELS}, "arrays second"),
        ({"first": LABELS, "second": LABELS}, "12 uint8 labels, got uint8 \\(24,\\)"),
    ],
)
def test_label_files_are_checked(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    files = contents()
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    files["labels.npz"] = stream.getvalue()
    write(tmp_path, files, LAYOUTS[2])
    with pytest.raises(CorruptData, match=message):
        load_cifar(spec(files), tmp_path)


def test_a_pickle_in_the_label_file_is_not_loaded(tmp_path: Path) -> None:
    files = contents()
    stream = io.BytesIO()
    np.savez(stream, first=np.array([{"an": "object"}], dtype=object), second=LABELS)
    files["labels.npz"] = stream.getvalue()
    write(tmp_path, files, LAYOUTS[2])
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_cifar(spec(files), tmp_path)


def test_a_grid_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    files = contents()
    write(tmp_path, files, LAYOUTS[2])
    labels = io.BytesIO()
    np.savez(labels, first=np.zeros(27, np.uint8), second=np.zeros(0, np.uint8))
    files["labels.npz"] = labels.getvalue()
    (tmp_path / "labels.npz").write_bytes(labels.getvalue())
    with pytest.raises(CorruptData, match="expected 96 × 96 pixels, got"):
        load_cifar(dataclasses.replace(spec(files), grid=3), tmp_path)


def test_missing_pillow_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = contents()
    write(tmp_path, files, LAYOUTS[2])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"0\.webp needs Pillow: run pip install 'gossamer\[data\]'"):
        load_cifar(spec(files), tmp_path)


def test_the_python_version_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "batches-py").mkdir()
    with pytest.raises(DataNotFound, match=r"python version, a pickle.*example\.invalid"):
        load_cifar(spec(contents()), tmp_path)


@pytest.mark.parametrize("real", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_real_data(shared_data: Path, real: CifarSpec) -> None:
    dataset = load_cifar(real, shared_data)
    classes = len(real.class_names)
    assert classes == {"cifar10": 10, "cifar100": 100}[real.name]
    assert torch.bincount(dataset.train.labels).tolist() == [50_000 // classes] * classes
    assert torch.bincount(dataset.test.labels).tolist() == [10_000 // classes] * classes
    # Mean and standard deviation from the histogram of each channel: exact, and quick on 154 million bytes.
    levels = torch.arange(256, dtype=torch.double) / 255
    for channel in range(3):
        plane = dataset.train.images[:, channel].flatten().numpy()
        share = torch.from_numpy(np.bincount(plane, minlength=256)).double() / plane.size
        mean = (share * levels).sum()
        std = (share * (levels - mean).square()).sum().sqrt()
        assert mean.item() == pytest.approx(dataset.mean[channel], abs=1e-7)
        assert std.item() == pytest.approx(dataset.std[channel], abs=1e-7)
