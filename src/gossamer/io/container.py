"""The safetensors container, streamed: validation of the header before use, and an atomic writer.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each entry a dtype, a
shape and a byte range, and the bytes. The usual library needs all tensors in memory at once. Here entries
are written from iterators and read in pieces, so a file of any size takes a few megabytes. The header precedes data
whose length is known only afterwards, so space is reserved for it and padded with blanks, which the format allows.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gossamer.io.atomic import replacing, through_links
from gossamer.io.kinds import IN_WORDS, kind_of

HEADER_LIMIT = 100_000_000  # the limit of the safetensors library itself
DIMENSIONS = 64  # the limit of numpy and of torch's iterators
PIECE = 1 << 20

#: bytes of one element, by the dtype names of safetensors
WIDTHS: Mapping[str, int] = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4},
    **{"U64": 8, "I64": 8, "F64": 8, "C64": 8},
}


@dataclass(frozen=True)
class Section:
    """One entry of a file: its dtype, shape and byte range."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Entry:
    """One entry to write; ``shape`` is None if it is known only after writing (compressed entries, U8)."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    pieces: Callable[[], Iterable[bytes]]


def bad_file(path: str | os.PathLike[str], expected: str, got: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)}: expected {expected}, got {got}; the file is damaged or not a safetensors file: "
        "save it again or fetch a fresh copy"
    )


def is_count(value: object) -> bool:
    """A non-negative integer that fits 63 bits; True and 1.0 are not counts."""
    return type(value) is int and 0 <= value < 1 << 63


def element_count(shape: Sequence[object]) -> int | None:
    """The number of elements of a shape from a file; None if it is not a valid shape.

    A shape has at most ``DIMENSIONS`` counts whose product, without zeros, fits 63 bits. The product stops at that
    limit, because that of 400,000 large numbers would take minutes.
    """
    if len(shape) > DIMENSIONS:
        return None
    product = 1
    for length in shape:
        if type(length) is not int or not is_count(length):
            return None
        product *= length or 1
        if product >= 1 << 63:
            return None
    return 0 if 0 in shape else product


SHAPE = f"a shape of at most {DIMENSIONS} non-negative integers with a product below 2**63"


def parse_json(text: bytes, path: Path, what: str) -> object:
    try:
        parsed: object = json.loads(text.decode("utf-8"))
        if b"\\ud" in text or b"\\uD" in text:  # half a surrogate pair is not text: it could not be printed or hashed
            json.dumps(parsed, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        raise bad_file(path, f"{what} in JSON", f"{type(error).__name__}: {str(error)[:80]}") from None
    return parsed


def shown(value: object) -> str:
    """A value from a file for a message: its beginning, and the length of a list."""
    text = repr(value[:16] if isinstance(value, list | str) else value)[:80]
    return f"{text} … ({len(value)} in total)" if isinstance(value, list | str) and len(value) > 16 else text


# ---------------------------------------------------------------------------------------------------- reading


def read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Section], dict[str, str]]:
    """The sections and metadata of an open file. Every offset is inside the file and matches dtype and shape."""
    file_size = os.fstat(file.fileno()).st_size
    if file_size < 8:
        raise bad_file(path, "at least 8 bytes", f"{file_size}")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(HEADER_LIMIT, file_size - 8):
        if (kind := kind_of(path)) in ("torch", "pickle", "json"):
            raise ValueError(
                f"expected a safetensors file, got {path}, which is {IN_WORDS[kind]}: "
                "gossamer.save(model, 'model.safetensors') writes one, also of a state dict"
            )
        raise bad_file(path, f"a header of at most {min(HEADER_LIMIT, file_size - 8)} bytes", f"{length}")
    header = parse_json(file.read(length), path, "a header")
    if not isinstance(header, dict):
        raise bad_file(path, "a header that maps names to entries", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad_file(path, "metadata that maps strings to strings", repr(metadata)[:80])
    room = file_size - 8 - length
    sections = {name: _section(path, name, entry, room, 8 + length) for name, entry in header.items()}
    covered = 0
    for name, section in sorted(sections.items(), key=lambda item: (item[1].begin, item[1].end)):
        if section.begin != 8 + length + covered:
            raise bad_file(path, f"entry {name!r} to begin at {covered}", f"{section.begin - 8 - length}")
        covered += section.size
    if covered != room:
        raise bad_file(path, f"{covered} bytes of data after the header", f"{room}")
    return sections, metadata


def _section(path: Path, name: str, entry: object, room: int, start: int) -> Section:
    if not isinstance(entry, dict):
        raise bad_file(path, f"entry {name!r} with dtype, shape and data_offsets", repr(entry)[:80])
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise bad_file(path, f"entry {name!r} with one of the dtypes {sorted(WIDTHS)}", repr(dtype)[:80])
    if not isinstance(shape, list) or (count := element_count(shape)) is None:
        raise bad_file(path, f"entry {name!r} with {SHAPE}", shown(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(n) for n in offsets):
        raise bad_file(path, f"entry {name!r} with two data_offsets", repr(offsets)[:80])
    begin, end = offsets
    if not begin <= end <= room:
        raise bad_file(path, f"entry {name!r} inside the {room} bytes of data", f"{begin} to {end}")
    if count * WIDTHS[dtype] != end - begin:
        raise bad_file(path, f"{count * WIDTHS[dtype]} bytes for entry {name!r}", f"{end - begin}")
    return Section(dtype, tuple(shape), start + begin, start + end)


def read_section(path: Path, file: BinaryIO, section: Section, checksum: int | None) -> Iterator[bytes]:
    """The bytes of a section in pieces; a wrong CRC-32 raises an error after the last piece."""
    running = 0
    for begin in range(section.begin, section.end, PIECE):
        file.seek(begin)
        piece = file.read(min(PIECE, section.end - begin))
        if len(piece) != min(PIECE, section.end - begin):
            raise bad_file(path, f"{section.end} bytes", f"a file that ends at {begin + len(piece)}")
        running = zlib.crc32(piece, running)
        yield piece
    if checksum is not None and running != checksum:
        raise bad_file(path, f"data with checksum {checksum:08x}", f"{running:08x}")


# ---------------------------------------------------------------------------------------------------- writing


def writable(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, after a check that its folder exists, so that no work is lost."""
    target = through_links(Path(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"expected a folder to write {target.name} to, got {target.parent}: create it first")
    if target.is_dir():
        raise IsADirectoryError(f"expected a file to write to, got {target}, which is a folder")
    return target


def write_file(path: Path, entries: Sequence[Entry], describe: Callable[[Mapping[str, int]], dict[str, str]]) -> int:
    """Write entries in the given order, atomically. ``describe`` creates the metadata from the CRC-32 of the entries.

    Returns the size of the file.
    """
    bound = 1 << 62  # no offset has more digits
    draft = {entry.name: Section(entry.dtype, entry.shape or (bound,), bound, bound) for entry in entries}
    reserved = len(_header(draft, describe({entry.name: 0 for entry in entries})))
    reserved += -reserved % 8
    with replacing(path) as file:
        file.write(b" " * (8 + reserved))
        sections: dict[str, Section] = {}
        checksums: dict[str, int] = {}
        position = 0
        for entry in entries:
            begin, running = position, 0
            for piece in entry.pieces():
                file.write(piece)
                running = zlib.crc32(piece, running)
                position += len(piece)
            sections[entry.name] = Section(entry.dtype, entry.shape or (position - begin,), begin, position)
            checksums[entry.name] = running
        header = _header(sections, describe(checksums))
        file.seek(0)
        file.write(struct.pack("<Q", reserved) + header.ljust(reserved))
    return 8 + reserved + position


def _header(sections: Mapping[str, Section], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    for name, section in sections.items():
        offsets = [section.begin, section.end]
        header[name] = {"dtype": section.dtype, "shape": list(section.shape), "data_offsets": offsets}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
