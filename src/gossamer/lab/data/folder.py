"""An ImageNet-style folder, streamed by worker processes.

The layout is train/<class>/*.JPEG and val/<class>/*.JPEG, in a folder or in an uncompressed tar archive,
which is read in place. Classes are numbered in the order of their sorted names. The images do not fit
the memory of the device, so worker processes decode, crop and mirror them and send them as bytes; only normalisation
happens on the device. Crops and mirrors depend only on (seed, epoch, index of the image), so the number of workers and
interruptions of a run have no effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gossamer.lab.data.augment import normalise, scale_and_shift
from gossamer.lab.data.batches import BatchSource, Position, epoch_plan
from gossamer.lab.data.files import CorruptData, DataNotFound, File, read_checked, tar_files
from gossamer.lab.data.locate import search_folders
from gossamer.lab.data.pixels import centre_crop, decode, random_crop_flip
from gossamer.lab.data.sets import split_indices

__all__ = ["FolderBatches", "FolderPart", "FolderSet", "advice_on_lost_workers", "load_folder"]

_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
_KNOWN = ("imagenet", "imagenette-mini", "imagenette-mini.tar")
_MINI = File(
    "imagenette-mini.tar",
    "sha256:f30d4d6c1f77bbc850a6da3f2b02e45106509071a74eac7d95360647d248c7df",
    15_749_120,
)
_TRAIN, _VALIDATION = "train", "val"


@dataclasses.dataclass(frozen=True, eq=False)
class FolderPart:
    """The images of one part. `source` is their folder, or an archive where image i is at `spans[i]`.

    A span is an offset and a size in bytes.
    """

    source: Path
    names: tuple[str, ...]
    labels: Tensor
    spans: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """The encoded image; an image that disappeared since the folder was listed raises an error with its name."""
        try:
            if self.spans is None:
                return (self.source / self.names[index]).read_bytes()
            offset, size = self.spans[index].tolist()
            with open(self.source, "rb") as archive:
                archive.seek(offset)
                return archive.read(size)
        except OSError as error:
            raise OSError(
                f"{self.describe(index)} was there when the folder was listed, but cannot be read now "
                f"({error.strerror or error}); restore it, check that it is readable, and resume"
            ) from error

    def describe(self, index: int) -> str:
        """The name of an image for a message."""
        return f"{self.source / self.names[index]}" if self.spans is None else f"{self.source}:{self.names[index]}"

    def take(self, indices: Tensor) -> FolderPart:
        """Some of the images."""
        names = tuple(self.names[index] for index in indices.tolist())
        spans = None if self.spans is None else self.spans[indices]
        return FolderPart(self.source, names, self.labels[indices], spans)


@dataclasses.dataclass(frozen=True, eq=False)
class FolderSet:
    """An image folder with its classes; `mean` and `std` are those customary for ImageNet.

    `validation` is the part called val in the folder; `held_out` exists only after `split`.
    """

    name: str
    train: FolderPart
    validation: FolderPart
    class_names: tuple[str, ...]
    held_out: FolderPart | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def digest(self) -> str:
        """A hash of the names and classes of all images, independent of the path. Files have no checksums here."""
        names = (*self.train.names, "", *self.validation.names)
        return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()

    def split(self, held_out: int, seed: int = 0) -> FolderSet:
        """Hold out random training images, drawn by `seed`, as in `ImageSet.split`."""
        train, validation = split_indices(len(self.train), held_out, seed, self.name)
        return dataclasses.replace(self, train=self.train.take(train), held_out=self.train.take(validation))


def load_folder(root: Path | str | None = None) -> FolderSet:
    """Index an image folder or a tar archive of one; without `root`, the first one in the search folders."""
    if root is not None:
        return _index(Path(root).expanduser())
    if (found := locate_folder()) is not None:
        return _index(found)
    raise DataNotFound(
        f"no image folder was found: searched {', '.join(map(str, search_folders()))} for {', '.join(_KNOWN)}; "
        f"give its path as root, data_root of a run (a folder with {_TRAIN}/<class>/ and {_VALIDATION}/<class>/ in it)"
    )


def locate_folder() -> Path | None:
    """The first image folder, or archive of one, in the search folders."""
    places = (folder / name for folder in search_folders() for name in _KNOWN)
    return next((place for place in places if place.exists()), None)


def _index(root: Path) -> FolderSet:
    if root.is_file():
        if root.name == _MINI.path:
            read_checked(root.parent, _MINI)
        files = _files_of_archive(root)
    elif root.is_dir():
        files = {part: _files_of_folder(root / part) for part in (_TRAIN, _VALIDATION)}
    else:
        raise DataNotFound(f"expected root to be an image folder or a tar archive of one, got {root}, which is neither")
    classes = sorted({name.partition("/")[0] for name in files[_TRAIN]})
    strange = sorted({name.partition("/")[0] for name in files[_VALIDATION]} - set(classes))
    if strange:
        raise CorruptData(
            f"{root}: the classes {', '.join(strange[:5])} are in {_VALIDATION} but not in {_TRAIN}: "
            "put images of them there, or remove them"
        )
    parts = {part: _part(root, part, files[part], classes) for part in files}
    return FolderSet(root.name.removesuffix(".tar"), parts[_TRAIN], parts[_VALIDATION], tuple(classes))


def _part(root: Path, part: str, files: dict[str, tuple[int, int]], classes: list[str]) -> FolderPart:
    if not files:
        raise DataNotFound(
            f"expected images under {part}/<class>/ in {root}, found none; put them there "
            f"with names ending in {', '.join(_SUFFIXES)}"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    names = sorted(files)
    labels = torch.tensor([numbers[name.partition("/")[0]] for name in names])
    if root.is_dir():
        return FolderPart(root / part, tuple(names), labels)
    return FolderPart(root, tuple(names), labels, torch.tensor([files[name] for name in names]))


def _files_of_folder(folder: Path) -> dict[str, tuple[int, int]]:
    """The images in the subfolders of `folder`, named relative to it."""
    found: dict[str, tuple[int, int]] = {}
    if not folder.is_dir():
        return found
    for entry in os.scandir(folder):
        if entry.is_dir():
            with os.scandir(entry) as images:
                found.update(
                    (f"{entry.name}/{image.name}", (0, 0))
                    for image in images
                    if image.name.lower().endswith(_SUFFIXES) and image.is_file()  # reading a pipe would block
                )
    return found


def _files_of_archive(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """The images of both parts with their byte ranges in the tar; a leading folder is skipped."""
    found: dict[str, dict[str, tuple[int, int]]] = {_TRAIN: {}, _VALIDATION: {}}
    full_names: dict[str, str] = {}
    for full_name, begin, size in tar_files(path):
        *_, part, label, name = ("", "", *full_name.split("/"))
        if part not in found or not name.lower().endswith(_SUFFIXES):
            continue
        short = f"{part}/{label}/{name}"
        if (other := full_names.setdefault(short, full_name)) != full_name or f"{label}/{name}" in found[part]:
            raise CorruptData(
                f"{path}: expected each image once, got {short} twice ({other} and {full_name}); create the "
                "archive again, with one of them or with different names"
            )
        found[part][f"{label}/{name}"] = (begin, size)
    return found


# Errors of an image, or of the machine that reads it.
_Problem: TypeAlias = CorruptData | OSError | ImportError
_PROBLEMS = (CorruptData, OSError, ImportError)
_Sample: TypeAlias = tuple[Tensor, int] | _Problem


class _Images(Dataset[_Sample]):
    """Decoded crops by (epoch, index), computed in the worker processes.

    The error of a bad file is returned as a value: if it was raised in a worker, its message would be hidden in the
    traceback of the worker.
    """

    def __init__(self, part: FolderPart, *, size: int, resize: int, training: bool, seed: int) -> None:
        self.part, self.size, self.resize, self.training, self.seed = part, size, resize, training, seed

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, key: tuple[int, int]) -> _Sample:
        epoch, index = key
        try:
            image = decode(self.part.read(index), self.part.describe(index))
        except _PROBLEMS as error:
            return error
        if self.training:
            random = np.random.default_rng((self.seed, epoch, index))
            pixels = random_crop_flip(image, self.size, random)
        else:
            pixels = centre_crop(image, self.size, self.resize)
        return torch.from_numpy(pixels), int(self.part.labels[index])


def _collate(samples: list[_Sample]) -> tuple[Tensor, Tensor] | _Problem:
    """One batch, or the first error in it."""
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, _PROBLEMS):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    empty = torch.empty(0, 3, 1, 1, dtype=torch.uint8)  # if other processes have all images of a short batch
    return torch.stack(images) if images else empty, torch.tensor(labels, dtype=torch.int64)


class FolderBatches(BatchSource):
    """Iterate over normalised (images, labels) batches of a part, decoded by `workers` processes.

    Training: a random crop of 8 to 100 % of the area and 3:4 to 4:3 in shape, scaled to `size` and mirrored
    at random; shuffled, a short last batch dropped. Evaluation: the shorter side scaled to `resize`, the
    centre cropped; in order. `state` works like that of `Batches`. If several processes share every batch,
    `slice_of` returns the slice of this process for a number of images, and only that is decoded; it may be empty.
    """

    def __init__(
        self,
        dataset: FolderSet,
        part: FolderPart,
        batch_size: int,
        *,
        training: bool,
        size: int = 224,
        resize: int = 256,
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        slice_of: Callable[[int], slice] = slice,
    ) -> None:
        if batch_size < 1 or workers < 0 or seed < 0:
            raise ValueError(
                f"expected batch_size ≥ 1, workers ≥ 0 and seed ≥ 0, got {batch_size}, {workers} and {seed}"
            )
        if not 0 < size <= resize:
            raise ValueError(f"expected 0 < size ≤ resize, got size {size} and resize {resize}")
        if training and len(part) < batch_size:
            raise ValueError(f"expected at least one batch of {batch_size}, got {len(part)} images; lower batch_size")
        self._images = _Images(part, size=size, resize=resize, training=training, seed=seed)
        self.batch_size, self.training, self.seed, self.workers = batch_size, training, seed, workers
        self.device, self.dtype, self.channels_last = torch.device(device), dtype, channels_last
        self._scale, self._shift = scale_and_shift(dataset.mean, dataset.std, self.device)
        self._slice_of = slice_of
        self._position = Position()

    def __len__(self) -> int:
        """Batches per epoch."""
        count = len(self._images)
        return count // self.batch_size if self.training else math.ceil(count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        position = self._position
        order = epoch_plan(
            len(self._images), seed=self.seed, epoch=position.epoch, shuffle=self.training
        ).order.tolist()
        keys = [(position.epoch, index) for index in order]
        starts = range(position.step * self.batch_size, len(self) * self.batch_size, self.batch_size)
        batches = [keys[start : start + self.batch_size] for start in starts]
        loader = DataLoader(
            self._images,
            batch_sampler=[batch[self._slice_of(len(batch))] for batch in batches],
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            multiprocessing_context=self._start_method(),
            worker_init_fn=_leave_signals_to_the_trainer,
        )
        stream = iter(loader)
        try:
            for loaded in stream:
                if isinstance(loaded, _PROBLEMS):
                    raise loaded
                images, labels = loaded
                batch = normalise(images.to(self.device, non_blocking=True), self._scale, self._shift, dtype=self.dtype)
                if self.channels_last:
                    batch = batch.contiguous(memory_format=torch.channels_last)
                position = position.next(len(self))
                self._position = position
                yield batch, labels.to(self.device, non_blocking=True)
        finally:
            if self.workers:
                _end_workers(stream)

    def _start_method(self) -> str | None:
        """How workers are started. With threads that communicate with other processes, a plain fork can deadlock,
        because it copies a held lock without its holder."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return "forkserver" if self.workers and several else None


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore signals in a worker. A terminal or scheduler signals all processes of a run, but the trainer still needs
    images to finish its step. Workers exit when the trainer stops them or exits."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers(stream: Any) -> None:
    """Stop the workers of a loader now. A traceback may keep the loader alive until Python exits; Python then sends
    SIGTERM, which workers ignore, and waits for them forever."""
    try:
        stream._shutdown_workers()  # they finish their current batch, for which torch waits a few seconds
    finally:
        for worker in stream._workers:
            worker.kill()


@contextmanager
def advice_on_lost_workers() -> Iterator[None]:
    """Explain what to do about a killed worker. Its death may be noticed anywhere in the program."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RuntimeError(
            f"a process that decodes images has died, perhaps because of a lack of memory ({str(error).rstrip('. ')}): "
            "set fewer workers=, allow more memory or more shared memory (/dev/shm), or set workers=0, which needs no "
            "such process, and run the command again"
        ) from error
