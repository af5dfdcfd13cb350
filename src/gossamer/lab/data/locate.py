"""The search folders for data sets, and the download of missing sets.

The order is: the folder in the environment variable GOSSAMER_DATA, a folder shared/data next to a checkout of this
repository, and the user's cache, into which missing sets are downloaded. A download goes to a temporary file, is
verified, and only then renamed, so a file with the final name is complete.

A data set can be stored in several layouts (official archive, unpacked archive, …). Each is a `Layout`: its files, and
a reader for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from gossamer.io.atomic import replacing
from gossamer.lab.data.files import CorruptData, DataNotFound, File

__all__ = ["Download", "Layout", "cache_folder", "fetch", "locate", "read_first", "search_folders"]

T = TypeVar("T")

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Layout(Generic[T]):
    """One storage layout of a set: the required paths, and a reader for a folder."""

    title: str
    paths: tuple[str, ...]
    read: Callable[[Path], T]


@dataclasses.dataclass(frozen=True)
class Download:
    """A file to download: each address is tried in turn until the checksum matches."""

    file: File
    addresses: tuple[str, ...]


def cache_folder() -> Path:
    """The cache folder of this library."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gossamer" / "data"


def search_folders(root: Path | str | None = None) -> tuple[Path, ...]:
    """The folders to search, in order. An explicit `root` is the only one."""
    if root is not None:
        return (_existing(Path(root).expanduser(), "root (data_root of a run)"),)
    folders = []
    if named := os.environ.get("GOSSAMER_DATA"):
        folders.append(_existing(Path(named).expanduser(), "GOSSAMER_DATA"))
    repository = Path(__file__).resolve().parents[4]
    if (repository / "pyproject.toml").is_file():
        folders.append(repository.parent / "shared" / "data")
    return (*folders, cache_folder())


def _existing(folder: Path, source: str) -> Path:
    if not folder.is_dir():
        raise DataNotFound(f"expected {source} to name a folder with data sets, got {folder}, which is not a folder")
    return folder


def read_first(
    name: str,
    layouts: Iterable[Layout[T]],
    downloads: Iterable[Download],
    *,
    root: Path | str | None = None,
    system: Path | None = None,
    hint: Callable[[Path], str | None] = lambda folder: None,
) -> T:
    """Read a set from the first folder that holds one of its layouts completely, or download it.

    `system` is a folder where the operating system's packages put the set, searched before the cache. `hint`
    may describe a folder that has the set in an unsupported form. With an explicit `root`,
    nothing is downloaded.
    """
    layouts, folders = tuple(layouts), search_folders(root)
    if root is None and system is not None:
        folders = (*folders[:-1], system, folders[-1])
    remarks: list[str] = []
    for folder in folders:
        for layout in layouts:
            missing = [path for path in layout.paths if not (folder / path).is_file()]
            if not missing:
                return layout.read(folder)
            if len(missing) < len(layout.paths):
                remarks.append(f"{folder} has {layout.title} without {', '.join(missing)}")
        if remark := hint(folder):
            remarks.append(remark)
    if root is None:
        try:
            fetched = [fetch(download, cache_folder()) for download in downloads]
        except OSError as error:
            remarks.append(f"the download failed: {error}")
        else:
            if fetched:
                return read_first(name, layouts, (), root=cache_folder(), hint=hint)
    others = "".join(f", or {layout.title}" for layout in layouts[1:])
    wanted = f"{layouts[0].title} ({', '.join(layouts[0].paths)}){others}"
    raise DataNotFound(
        f"the data set {name!r} was not found: searched {', '.join(map(str, folders))} for {wanted}. "
        + "".join(f"Note: {remark}. " for remark in remarks)
        + (
            "Put the files into one of these folders, or set GOSSAMER_DATA to the folder that has them"
            if root is None
            else "Put the files there, or name the folder that has them as root (data_root of a run)"
        )
    )


def locate(layouts: Iterable[Layout[T]], *, system: Path | None = None) -> Path | None:
    """The first folder that has all files of a layout. Nothing is read or downloaded."""
    layouts, folders = tuple(layouts), search_folders()
    folders = folders if system is None else (*folders[:-1], system, folders[-1])
    places = (
        folder for folder in folders for layout in layouts if all((folder / path).is_file() for path in layout.paths)
    )
    return next(places, None)


def fetch(download: Download, folder: Path, *, timeout: float = 60.0) -> Path:
    """Download a file into `folder`, unless it exists. It gets its name only when it is complete and verified."""
    target = folder / download.file.path
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for address in download.addresses:
        try:
            with replacing(target) as sink:
                _copy(address, sink.write, download.file, timeout)
            return target
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            CorruptData,
        ) as error:
            problems.append(f"{address}: {error}")
    raise ConnectionError("; ".join(problems))


def _copy(address: str, write: Callable[[bytes], object], file: File, timeout: float) -> None:
    """Stream an address through a checksum; data beyond the expected size is not stored."""
    algorithm, _, expected = file.digest.partition(":")
    digest, size = hashlib.new(algorithm, usedforsecurity=False), 0
    with urllib.request.urlopen(address, timeout=timeout) as response:
        while chunk := response.read(_CHUNK):
            size += len(chunk)
            if file.size is not None and size > file.size:
                raise CorruptData(f"expected {file.size} bytes, got more")
            digest.update(chunk)
            write(chunk)
    if digest.hexdigest() != expected or (file.size is not None and size != file.size):
        raise CorruptData(f"expected {algorithm} {expected}, got {digest.hexdigest()} after {size} bytes")
