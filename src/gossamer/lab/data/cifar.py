"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32 × 32 pixels.

Three layouts are read: the official binary version, unpacked or still in its archive (records of one or two
label bytes and 3,072 pixel bytes), and lossless WebP grids of 100 × 100 images with separate labels,
which take half the space and need Pillow. The official python version is a pickle, which can run code when it is read,
so it is refused; it has the same images.
"""

from __future__ import annotations

import dataclasses
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gossamer.lab.data.files import CorruptData, File, read_checked, read_tar_members
from gossamer.lab.data.locate import Download, Layout, read_first
from gossamer.lab.data.sets import ImageSet, Labelled

__all__ = ["CIFAR10", "CIFAR100", "CifarSpec", "cifar_layouts", "load_cifar"]

_PIXELS = 3 * 32 * 32
_Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class CifarSpec:
    """The differences between the two sets. The last file of `binary` and the last grid are the test set.

    `label_bytes` are the label bytes of a record, of which the last counts (CIFAR-100: coarse, then fine).
    `packed_labels` name the arrays of the label file that, one after the other, are the labels of all images.
    `grid` is the number of images along one side of a WebP grid.
    """

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_bytes: int
    binary: tuple[File, ...]
    archive: File
    address: str
    python_version: tuple[str, ...]
    grids: tuple[File, ...]
    packed_label_file: File
    packed_labels: tuple[str, ...]
    grid: int = 100

    @property
    def record(self) -> int:
        return self.label_bytes + _PIXELS


def cifar_layouts(spec: CifarSpec) -> tuple[Layout[ImageSet], ...]:
    return (
        Layout("the unpacked binary version", _paths(spec.binary), lambda folder: _read_binary(spec, folder)),
        Layout("the binary version's archive", (spec.archive.path,), lambda folder: _read_archive(spec, folder)),
        Layout(
            "WebP grids",
            _paths((*spec.grids, spec.packed_label_file)),
            lambda folder: _read_grids(spec, folder),
        ),
    )


def load_cifar(spec: CifarSpec, root: Path | str | None = None) -> ImageSet:
    """Read the set from the first place that has it (see `gossamer.lab.data.locate`)."""
    layouts, downloads = cifar_layouts(spec), (Download(spec.archive, (spec.address,)),)
    return read_first(spec.name, layouts, downloads, root=root, hint=lambda folder: _python_version(spec, folder))


def _paths(files: tuple[File, ...]) -> tuple[str, ...]:
    return tuple(file.path for file in files)


def _python_version(spec: CifarSpec, folder: Path) -> str | None:
    found = next((name for name in spec.python_version if (folder / name).exists()), None)
    if found is None:
        return None
    return (
        f"{folder / found} is the python version, a pickle that could run any code when read and "
        f"is therefore not opened; fetch the binary version, {spec.address}"
    )


def _read_binary(spec: CifarSpec, folder: Path) -> ImageSet:
    return _from_records(spec, [read_checked(folder, file) for file in spec.binary])


def _read_archive(spec: CifarSpec, folder: Path) -> ImageSet:
    sizes = {file.path: _known_size(file) for file in spec.binary}
    name = str(folder / spec.archive.path)
    members = read_tar_members(read_checked(folder, spec.archive), sizes, name)
    return _from_records(spec, [members[file.path] for file in spec.binary])


def _known_size(file: File) -> int:
    assert file.size is not None  # every binary file's size is part of its specification
    return file.size


def _from_records(spec: CifarSpec, contents: list[bytes]) -> ImageSet:
    parts = []
    for content, file in zip(contents, spec.binary, strict=True):
        if len(content) % spec.record:
            raise CorruptData(f"{file.path}: expected records of {spec.record} bytes, got {len(content)} bytes")
        records = np.frombuffer(content, np.uint8).reshape(-1, spec.record)
        parts.append((records[:, spec.label_bytes :], records[:, spec.label_bytes - 1]))
    return _assemble(spec, parts)


def _read_grids(spec: CifarSpec, folder: Path) -> ImageSet:
    labels = _packed_labels(spec, folder)
    # Decoding takes most of the time and releases the GIL.
    with ThreadPoolExecutor() as pool:
        grids = list(pool.map(lambda file: _read_grid(spec, folder, file), spec.grids))
    return _assemble(spec, list(zip(grids, np.split(labels, len(grids)), strict=True)))


def _packed_labels(spec: CifarSpec, folder: Path) -> _Bytes:
    """The labels of all images; the file must contain exactly one byte per image."""
    label_file, count = folder / spec.packed_label_file.path, len(spec.grids) * spec.grid * spec.grid
    content = read_checked(folder, spec.packed_label_file)
    try:
        # allow_pickle=False: a label file cannot run code, whatever it holds.
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            missing = [key for key in spec.packed_labels if key not in arrays]
            if missing:
                raise CorruptData(f"{label_file}: expected the arrays {', '.join(missing)}, which it does not hold")
            labels = np.concatenate([arrays[key] for key in spec.packed_labels])
    except CorruptData:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise almost any exception, and a stated size may be absurd
        raise CorruptData(
            f"{label_file}: expected arrays as numpy.savez writes them, got something else ({error}); fetch it again"
        ) from error
    if labels.shape != (count,) or labels.dtype != np.uint8:
        raise CorruptData(f"{label_file}: expected {count} uint8 labels, got {labels.dtype} {labels.shape}")
    return labels


def _read_grid(spec: CifarSpec, folder: Path, file: File) -> _Bytes:
    content, grid, name = read_checked(folder, file), spec.grid, str(folder / file.path)
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"reading {name} needs Pillow: run pip install 'gossamer[data]', or put the official binary version there"
        ) from error
    try:
        with Image.open(io.BytesIO(content), formats=["WEBP"]) as image:
            if image.size != (grid * 32, grid * 32):
                raise CorruptData(f"{name}: expected {grid * 32} × {grid * 32} pixels, got {image.size}")
            pixels = np.asarray(image.convert("RGB"))
    except CorruptData:
        raise
    except Exception as error:  # decoders raise almost any exception, also for an absurd stated size
        raise CorruptData(f"{name}: expected a WebP image, got something else ({error}); fetch it again") from error
    return pixels.reshape(grid, 32, grid, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, _PIXELS)


def _assemble(spec: CifarSpec, parts: list[tuple[_Bytes, _Bytes]]) -> ImageSet:
    return ImageSet(
        name=spec.name,
        train=_labelled(spec, parts[:-1]),
        test=_labelled(spec, parts[-1:]),
        class_names=spec.class_names,
        mean=spec.mean,
        std=spec.std,
        padding=4,
        flip=True,
    )


def _labelled(spec: CifarSpec, parts: list[tuple[_Bytes, _Bytes]]) -> Labelled:
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    if labels.max(initial=0) >= len(spec.class_names):
        raise CorruptData(f"{spec.name}: expected labels below {len(spec.class_names)}, got {labels.max()}")
    return Labelled(torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels))


def _files(folder: str, size: int, digests: dict[str, str]) -> tuple[File, ...]:
    return tuple(File(f"{folder}{name}", f"sha256:{digest}", size) for name, digest in digests.items())


_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
    orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum
    rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
    trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = CifarSpec(
    name="cifar10",
    class_names=tuple(_CIFAR10_CLASSES.split()),
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
    label_bytes=1,
    binary=_files(
        "cifar-10-batches-bin/",
        30_730_000,
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    archive=File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    python_version=("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    grids=(
        File(
            "cifar10_0.webp",
            "sha256:7862ba6f532eb26481636723b49a74914d0a8186dde88a2afa9047668b1214b8",
            17107164,
        ),
        File(
            "cifar10_1.webp",
            "sha256:223eb5388d46cd9050b630ada011bb521e9e66e56f8922c4e3c90068bfb4de74",
            17149322,
        ),
        File(
            "cifar10_2.webp",
            "sha256:72340f10fb016c6a6f645cbf5e19c99d4d83b500574b3838a6850d00fc20b354",
            17159702,
        ),
        File(
            "cifar10_3.webp",
            "sha256:b5646e97fe600f24a0e4662426280aa23704f9e04033e7beab0808a51212f814",
            17131960,
        ),
        File(
            "cifar10_4.webp",
            "sha256:20fd741c090103a8703cd393ed42c0b9bb55c84a099564b3a290171531a473f9",
            17112624,
        ),
        File(
            "cifar10_5.webp",
            "sha256:5fb7e1221ce9526ce00d6f53ad5e520f96044b42580400979c573f910e687a8e",
            17141804,
        ),
    ),
    packed_label_file=File(
        "cifar10_labels.npz",
        "sha256:af4b89a0499065857609588f6196098dfd4d6ea9c31167040f09933cb062f63c",
        29_730,
    ),
    packed_labels=("labels",),
)

CIFAR100 = CifarSpec(
    name="cifar100",
    class_names=tuple(_CIFAR100_CLASSES.split()),
    mean=(0.50707516, 0.48654887, 0.44091784),
    std=(0.26733429, 0.25643846, 0.27615047),
    label_bytes=2,
    binary=(
        File(
            "cifar-100-binary/train.bin",
            "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            153_700_000,
        ),
        File(
            "cifar-100-binary/test.bin",
            "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            30_740_000,
        ),
    ),
    archive=File("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
    address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    python_version=("cifar-100-python", "cifar-100-python.tar.gz"),
    grids=(
        File(
            "cifar100_0.webp",
            "sha256:2cc398b3fb8ca153b7e677846fb1ada2a81af1dd2f467ab3e34d25344c1926a3",
            17186328,
        ),
        File(
            "cifar100_1.webp",
            "sha256:2c80930c167080ea31109c6e565a804cdb0f59902763fafd872604d7a3341f0d",
            17230778,
        ),
        File(
            "cifar100_2.webp",
            "sha256:c938b4a526a95852082c44c6ef74da0ed594eca6a49bf7d8bd305360ef5555d3",
            17148252,
        ),
        File(
            "cifar100_3.webp",
            "sha256:e486bedb9c9f485317428d493b095946ce63e7928dd101830b61bd58420fec0c",
            17198592,
        ),
        File(
            "cifar100_4.webp",
            "sha256:003e8b14ae8c8acbe383d00764ec7183fca85637e6339ebd6692542599d166d3",
            17184804,
        ),
        File(
            "cifar100_5.webp",
            "sha256:5103545e67ac0fed17b680f566114a386ad8d5d8aa4b41c188d235a3962f8360",
            17237256,
        ),
    ),
    packed_label_file=File(
        "cifar100_labels.npz",
        "sha256:a42b4fcb4a1c5f405c08a801f8b92b4b055d60440f5dc97f9c681b50dd9f7f46",
        89_241,
    ),
    packed_labels=("train_fine", "test_fine"),
)
