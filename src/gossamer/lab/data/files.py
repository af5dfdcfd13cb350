"""Reading files that may be missing, truncated or corrupted.

Every file of a data set is described in advance by a `File`: its name, its exact size and its checksum.
Nothing is parsed before both match, so the parsers see only the expected bytes, and an error names the file.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

__all__ = [
    "CorruptData",
    "DataNotFound",
    "File",
    "check_digest",
    "gunzip",
    "read_checked",
    "read_tar_members",
    "tar_files",
]


class DataNotFound(FileNotFoundError):
    """A data set is in none of the searched folders and could not be downloaded."""


class CorruptData(ValueError):
    """A file of a data set is corrupted."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a data set. `digest` is "sha256:…" or "md5:…"; `size` is in bytes, None if unknown."""

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
    """The content of a file, after verification of its size and checksum."""
    path = root / file.path
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        kind = "truncated" if size < file.size else "too long"
        raise CorruptData(f"{path} is {kind}: expected {file.size} bytes, got {size}; delete it and fetch it again")
    content = path.read_bytes()
    check_digest(content, file.digest, str(path))
    return content


def gunzip(content: bytes, size: int, name: str) -> bytes:
    """Decompress to exactly `size` bytes, without ever using more memory, whatever the file claims."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            plain = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptData(f"{name} is not a complete gzip file ({error}); delete it and fetch it again") from error
    if len(plain) != size:
        got = f"more than {size}" if len(plain) > size else str(len(plain))
        raise CorruptData(f"{name}: expected {size} bytes after decompression, got {got}; fetch it again")
    return plain


_OF_ARCHIVES = (
    *(tarfile.TarError, zlib.error, lzma.LZMAError),
    *(OSError, EOFError, ValueError, OverflowError, RecursionError),  # of Python's reader, about hostile headers
)


def read_tar_members(content: bytes, sizes: dict[str, int], name: str) -> dict[str, bytes]:
    """The named regular files of a tar archive, read in memory; each must have exactly the given size."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                if archive.offset <= member.offset:  # a negative size, with which older Python versions loop forever
                    raise CorruptData(
                        f"{name}: expected {member.name} to have a size, got {member.size}; fetch it again"
                    )
                key = str(PurePosixPath(member.name))
                if key not in sizes:
                    continue
                if key in found:
                    raise CorruptData(f"{name}: expected {key} once, got it twice; fetch it again")
                if not member.isreg() or member.size != sizes[key]:
                    raise CorruptData(
                        f"{name}: expected {key} to be a file of {sizes[key]} bytes, got {member.size}; fetch it again"
                    )
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file always has a stream
                found[key] = stream.read(sizes[key])
    except CorruptData:
        raise
    except _OF_ARCHIVES as error:
        raise CorruptData(f"{name} is not a complete tar archive ({error}); delete it and fetch it again") from error
    missing = sorted(set(sizes) - set(found))
    if missing:
        raise CorruptData(f"{name}: expected it to hold {', '.join(missing)}, which it does not; fetch it again")
    return found


_BLOCK = 512
_LONGEST_NAME = 1 << 20  # bytes of an extended header, which has the name of the next file


def tar_files(path: Path) -> Iterator[tuple[str, int, int]]:
    """The regular files of an uncompressed tar: the name of each, and the offset and size of its bytes.

    The whole archive is validated: every header matches its checksum, every file is inside the archive, and only zeros
    follow the last one. Python's own reader treats a damaged header as the end. Links are refused, because they would
    be files that are missing.
    """
    length = path.stat().st_size
    with open(path, "rb") as file:
        position, long_name = 0, ""
        while True:
            file.seek(position)
            block = file.read(_BLOCK)
            if len(block) < _BLOCK:
                raise _bad_tar(path, "blocks of zeros at its end", f"the end of the file at byte {position}")
            if not any(block):
                _check_zeros(path, file, position)
                return
            kind, size = _header(path, block, position)
            begin = position + _BLOCK
            holds = kind not in b"123456"  # links, devices and folders have no bytes, whatever their stated size
            end = begin + (size if holds else 0)
            name = long_name or _text(
                block[345:500] + b"/" if block[257:263] == b"ustar\0" and block[345] else b"", block
            )
            if end > length:
                raise CorruptData(
                    f"{path} is truncated inside {name}: expected {end} bytes, got {length}; fetch it again"
                )
            if kind in b"Lx":
                long_name = _extended(path, file, begin, size, kind) or long_name
            elif kind in b"0\x007":
                yield name, begin, size
                long_name = ""
            elif kind in b"gK":  # of the whole archive, and the target of a link
                pass
            elif kind in b"12":
                raise _bad_tar(
                    path,
                    f"{name} to be an ordinary file",
                    "a link (tar writes files instead of links with --dereference --hard-dereference)",
                )
            elif kind in b"3456":
                long_name = ""
            else:
                raise _bad_tar(
                    path, f"{name} to be an ordinary file", f"one of type {chr(kind)!r}, as sparse files have"
                )
            position = end + -end % _BLOCK


def _header(path: Path, block: bytes, position: int) -> tuple[int, int]:
    """Type and size of a member, after validation of its header."""
    try:
        stated = _number(block[148:156])
        size = _number(block[124:136])
    except ValueError:
        stated = size = -1
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])  # the convention of some old programs
    if stated not in (total, signed) or size < 0:
        if position == 0:
            raise CorruptData(f"{path} is not an uncompressed tar archive (no header at its beginning); fetch it again")
        raise _bad_tar(path, f"a header with a right checksum at byte {position}", "other bytes")
    return block[156], size


def _number(field: bytes) -> int:
    """A number in octal digits; from 8 GB on, the byte 0x80 and a binary number. 0xff would start a negative one."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.split(b"\0")[0].strip() or b"0", 8)


def _text(prefix: bytes, block: bytes) -> str:
    name = prefix.replace(b"\0", b"") + block[:100].split(b"\0")[0]
    return name.decode("utf-8", "surrogateescape")


def _extended(path: Path, file: BinaryIO, begin: int, size: int, kind: int) -> str:
    """The name of the next file from an extended header, of GNU or POSIX; empty if it has none."""
    if size > _LONGEST_NAME:
        raise _bad_tar(path, f"extended headers of at most {_LONGEST_NAME} bytes", f"{size}")
    file.seek(begin)
    content = file.read(size)
    if kind == ord("L"):
        return content.split(b"\0")[0].decode("utf-8", "surrogateescape")
    found, at, end = "", 0, len(content.rstrip(b"\0"))
    while at < end:
        digits, _, _ = content[at : at + 20].partition(b" ")
        record = content[at : at + int(digits)] if digits.isdigit() else b""
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n") or len(record) != int(digits):
            raise _bad_tar(path, f"records 'length key=value' in the extended header at byte {begin}", "other bytes")
        if key == b"size" or key.startswith(b"GNU.sparse"):
            raise _bad_tar(
                path,
                "ordinary files of less than 8 GB",
                f"one with {key[:20].decode('utf-8', 'replace')} in an extended header",
            )
        if key == b"path":
            found = value.decode("utf-8", "surrogateescape")
        at += len(record)
    return found


def _check_zeros(path: Path, file: BinaryIO, position: int) -> None:
    """After the end marker there may be padding, but no more files."""
    while piece := file.read(1 << 20):
        if any(piece):
            raise _bad_tar(path, f"zeros alone after the end marker at byte {position}", "other bytes")


def _bad_tar(path: Path, expected: str, got: str) -> CorruptData:
    return CorruptData(
        f"{path}: expected {expected}, got {got}; the archive is damaged: fetch it again, or make it anew with tar"
    )
