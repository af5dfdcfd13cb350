"""Reading files that may be missing, truncated or corrupted.

Every file of a data set is described in advance by a `File`: its name, its exact size and its checksum.
Nothing is parsed before both agree, so the parsers see only the bytes they were written for, and an error
names the file.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from pathlib import Path, PurePosixPath

__all__ = [
    "CorruptData",
    "DataNotFound",
    "File",
    "check_digest",
    "gunzip",
    "read_checked",
    "read_tar_members",
]


class DataNotFound(FileNotFoundError):
    """A data set is in none of the places searched and could not be downloaded."""


class CorruptData(ValueError):
    """A file of a data set is not what it should be."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a data set. `digest` is "sha256:…" or "md5:…"; `size` is in bytes, None where unknown."""

    path: str
    digest: str
    size: int | None = None


def check_digest(content: bytes, digest: str, name: str) -> None:
    algorithm, _, expected = digest.partition(":")
    got = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if got != expected:
        raise CorruptData(
            f"{name} is corrupted: expected {algorithm} {expected}, got {got}; delete it and fetch it again"
        )


def read_checked(root: Path, file: File) -> bytes:
    """The content of a file, after its size and its checksum were found right."""
    path = root / file.path
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        kind = "truncated" if size < file.size else "too long"
        raise CorruptData(f"{path} is {kind}: expected {file.size} bytes, got {size}; delete it and fetch it again")
    content = path.read_bytes()
    check_digest(content, file.digest, str(path))
    return content


def gunzip(content: bytes, size: int, name: str) -> bytes:
    """Decompress to exactly `size` bytes, never holding more than that, whatever the file claims."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            plain = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptData(f"{name} is not a complete gzip file ({error}); delete it and fetch it again") from error
    if len(plain) != size:
        got = f"more than {size}" if len(plain) > size else str(len(plain))
        raise CorruptData(f"{name}: expected {size} bytes after decompression, got {got}; fetch it again")
    return plain


def read_tar_members(content: bytes, sizes: dict[str, int], name: str) -> dict[str, bytes]:
    """The named regular files of a tar archive, read in memory; each must have exactly the given size."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                key = str(PurePosixPath(member.name))
                if key not in sizes:
                    continue
                if not member.isreg() or member.size != sizes[key]:
                    raise CorruptData(
                        f"{name}: expected {key} to be a file of {sizes[key]} bytes, got {member.size}; fetch it again"
                    )
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file always has a stream
                found[key] = stream.read(sizes[key])
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CorruptData(f"{name} is not a complete tar archive ({error}); delete it and fetch it again") from error
    missing = sorted(set(sizes) - set(found))
    if missing:
        raise CorruptData(f"{name}: expected it to hold {', '.join(missing)}, which it does not; fetch it again")
    return found
