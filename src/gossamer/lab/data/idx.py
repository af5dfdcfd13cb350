"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28 × 28 pixels in the idx format.

The four files are read compressed or plain. Checksums are of the plain content, because distributions compress them
again (Debian's package dataset-fashion-mnist does). An idx file is a magic
number, the length of each dimension as a big-endian number, and then the bytes.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gossamer.lab.data.files import CorruptData, File, check_digest, gunzip
from gossamer.lab.data.locate import Download, Layout, read_first
from gossamer.lab.data.sets import ImageSet, Labelled

__all__ = ["FASHION_MNIST", "MNIST", "IdxPart", "IdxSpec", "idx_layouts", "load_idx", "parse_idx"]

_UNSIGNED_BYTE = 0x08


@dataclasses.dataclass(frozen=True)
class IdxPart:
    """One of the four files: its shape, the digest of its plain content and of the official .gz file."""

    name: str
    shape: tuple[int, ...]
    digest: str
    compressed_digest: str

    @property
    def plain_size(self) -> int:
        return 4 + 4 * len(self.shape) + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class IdxSpec:
    """Parts are training images, training labels, test images, test labels; `folders` are tried in turn."""

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    parts: tuple[IdxPart, IdxPart, IdxPart, IdxPart]
    folders: tuple[str, ...]
    addresses: tuple[str, ...]
    system: Path | None = None


def idx_layouts(spec: IdxSpec) -> tuple[Layout[ImageSet], ...]:
    return tuple(_layout(spec, folder, suffix) for folder in spec.folders for suffix in (".gz", ""))


def load_idx(spec: IdxSpec, root: Path | str | None = None) -> ImageSet:
    """Read the set from the first place that has it (see `gossamer.lab.data.locate`)."""
    downloads = tuple(
        Download(
            File(f"{spec.folders[0]}/{part.name}.gz", part.compressed_digest),
            tuple(f"{address}{part.name}.gz" for address in spec.addresses),
        )
        for part in spec.parts
    )
    return read_first(spec.name, idx_layouts(spec), downloads, root=root, system=spec.system)


def _layout(spec: IdxSpec, folder: str, suffix: str) -> Layout[ImageSet]:
    return Layout(
        f"idx{suffix} files in {folder}",
        tuple(f"{folder}/{part.name}{suffix}" for part in spec.parts),
        lambda root: _read(spec, root / folder, suffix),
    )


def _read(spec: IdxSpec, folder: Path, suffix: str) -> ImageSet:
    arrays = [_read_part(part, folder / f"{part.name}{suffix}") for part in spec.parts]
    for labels in arrays[1::2]:
        if labels.max(initial=0) >= len(spec.class_names):
            raise CorruptData(f"{folder}: expected labels below {len(spec.class_names)}, got {labels.max()}")
    return ImageSet(
        name=spec.name,
        train=_labelled(arrays[0], arrays[1]),
        test=_labelled(arrays[2], arrays[3]),
        class_names=spec.class_names,
        mean=spec.mean,
        std=spec.std,
    )


def _labelled(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Labelled:
    return Labelled(torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


def _read_part(part: IdxPart, path: Path) -> npt.NDArray[np.uint8]:
    if path.suffix == ".gz":
        # Random bytes compress to slightly more than their size; anything longer is not this file.
        _check_size(path, upper=part.plain_size + part.plain_size // 100 + 1024)
        content = gunzip(path.read_bytes(), part.plain_size, str(path))
    else:
        _check_size(path, lower=part.plain_size, upper=part.plain_size)
        content = path.read_bytes()
    check_digest(content, part.digest, str(path))
    return parse_idx(content, part.shape, str(path))


def _check_size(path: Path, *, lower: int = 1, upper: int) -> None:
    size = path.stat().st_size
    if not lower <= size <= upper:
        kind = "truncated" if size < lower else "too long"
        expected = f"{upper}" if lower == upper else f"{lower} to {upper}"
        raise CorruptData(f"{path} is {kind}: expected {expected} bytes, got {size}; delete it and fetch it again")


def parse_idx(content: bytes, shape: tuple[int, ...], name: str) -> npt.NDArray[np.uint8]:
    """The bytes of an idx file as an array; its header must specify unsigned bytes of exactly this shape."""
    header = 4 + 4 * len(shape)
    if len(content) < header:
        raise CorruptData(f"{name}: expected a header of {header} bytes, got {len(content)} bytes in total")
    zeros, kind, dimensions = struct.unpack_from(">HBB", content)
    if (zeros, kind, dimensions) != (0, _UNSIGNED_BYTE, len(shape)):
        raise CorruptData(
            f"{name}: expected an idx header for {len(shape)} dimensions of bytes, got {content[:4].hex()}"
        )
    announced = struct.unpack_from(f">{len(shape)}I", content, 4)
    if announced != shape or len(content) != header + math.prod(shape):
        raise CorruptData(f"{name}: expected the shape {shape}, got {announced} in a file of {len(content)} bytes")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


MNIST = IdxSpec(
    name="mnist",
    class_names=tuple("0123456789"),
    mean=(0.13066048,),
    std=(0.30810780,),
    parts=(
        IdxPart(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        IdxPart(
            "train-labels-idx1-ubyte",
            (60_000,),
            "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "md5:d53e105ee54ea40749a09fcbcd1e9432",
        ),
        IdxPart(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "md5:9fb629c4189551a2d022fa330f9573f3",
        ),
        IdxPart(
            "t10k-labels-idx1-ubyte",
            (10_000,),
            "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "md5:ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    folders=("MNIST/raw", "mnist"),
    addresses=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST = IdxSpec(
    name="fashion_mnist",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=(0.28604060,),
    std=(0.35302424,),
    parts=(
        IdxPart(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        IdxPart(
            "train-labels-idx1-ubyte",
            (60_000,),
            "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
        ),
        IdxPart(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "md5:bef4ecab320f06d8554ea6380940ec79",
        ),
        IdxPart(
            "t10k-labels-idx1-ubyte",
            (10_000,),
            "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    folders=("FashionMNIST/raw", "fashion-mnist", "fashion_mnist"),
    addresses=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    system=Path("/usr/share/datasets"),
)
