"""From the streams of a sparse file to dense tensors, chunk by chunk; everything is validated before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.io.container import (
    HEADER_LIMIT,
    WIDTHS,
    Section,
    bad_file,
    read_section,
)
from gossamer.io.dtypes import CHUNK, DTYPES, GAPS, TABLE, UNSIGNED, VALUES, raw_bytes
from gossamer.io.gap_code import (
    PLANE_BLOCK,
    Bytes,
    Codec,
    decode_gaps,
    from_planes,
)
from gossamer.io.table import Record


class ByteStream:
    """Exact reads from an iterator of byte pieces."""

    def __init__(self, path: Path, pieces: Iterator[bytes]) -> None:
        self._path = path
        self._pieces = pieces
        self._pending = np.empty(0, np.uint8)

    def read(self, size: int) -> Bytes:
        """Exactly ``size`` bytes; callers request bounded chunks."""
        parts, missing = [self._pending], size - self._pending.size
        while missing > 0:
            piece = next(self._pieces, None)
            if piece is None:
                raise bad_file(self._path, f"{missing} more bytes of data", "the end of the stream")
            parts.append(np.frombuffer(piece, np.uint8))
            missing -= len(piece)
        joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self._pending = joined[size:]
        return joined[:size]

    def finish(self) -> None:
        """Check that no data remains; reading to the end also verifies the checksum."""
        if self._pending.size or any(len(piece) for piece in self._pieces):
            raise bad_file(self._path, "no data after the last tensor", "more bytes")

    def rest(self, limit: int) -> bytes:
        """The remaining data, which must be a table of at most ``limit`` bytes."""
        parts, total = [self._pending.tobytes()], self._pending.size
        for piece in self._pieces:
            parts.append(piece)
            total += len(piece)
            if total > limit:
                raise bad_file(self._path, f"a table of at most {limit} bytes", "more")
        return b"".join(parts)


def table_limit(section: Section) -> int:
    """The limit on the unpacked bytes of the table in a section. Parsing takes up to 25 times as much memory, and
    tables of real networks are compressed about tenfold."""
    return min(HEADER_LIMIT, max(1 << 20, 64 * section.size))


def default_limit(file_size: int) -> int:
    """The default limit on the bytes of dense tensors for a file of this size. A network with 99.9 % zeros has 800
    times the size of its file."""
    return max(64 << 20, 1024 * file_size)


class _ValueStream:
    """The values of one dtype in order, with byte planes of compressed streams undone."""

    def __init__(self, stream: ByteStream, pool: str, items: int, codec: Codec) -> None:
        self._stream, self._width, self._left, self._codec = stream, WIDTHS[pool], items, codec
        self._pending = np.empty(0, np.uint8)

    def read(self, count: int) -> Bytes:
        if self._codec == "none":
            return self._stream.read(count * self._width)
        parts, missing = [self._pending], count * self._width - self._pending.size
        while missing > 0:
            block = min(PLANE_BLOCK, self._left)
            self._left -= block
            parts.append(from_planes(self._stream.read(block * self._width), self._width))
            missing -= block * self._width
        joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self._pending = joined[count * self._width :]
        return joined[: count * self._width]


def check_sizes(
    path: Path, records: list[Record], sections: Mapping[str, Section], codec: Codec, max_bytes: int | None
) -> None:
    expected: dict[str, int] = {TABLE: sections[TABLE].size, GAPS: sum(r.gap_bytes for r in records)}
    for record in records:
        for pool, items in record.items.items():
            expected[VALUES + pool] = expected.get(VALUES + pool, 0) + items * WIDTHS[pool]
    if unknown := sorted(set(sections) ^ set(expected)):
        raise bad_file(path, f"the entries {sorted(expected)}", f"{sorted(sections)} (differing in {unknown})")
    for name, size in expected.items():
        stored = sections[name].size
        # zlib expands at most by a factor of 1032; zstd is bounded by max_bytes alone.
        if (codec == "none" and size != stored) or (codec == "zlib" and size > 1032 * stored):
            raise bad_file(path, f"entry {name!r} to hold {size} bytes", f"{stored} stored bytes")
    file_size = max(section.end for section in sections.values())
    dense = sum(prod(r.shape) * WIDTHS[r.dtype] for r in records if r.kind != "same")
    check_total(path, max(dense, *expected.values()), file_size, max_bytes)


def check_total(path: Path, total: int, file_size: int, max_bytes: int | None) -> None:
    """Refuse more bytes of tensors than allowed, before allocating any."""
    limit = default_limit(file_size) if max_bytes is None else max_bytes
    if total > limit:
        raise ValueError(
            f"{path}: expected at most {limit} bytes of tensors in a file of {file_size} bytes, got {total}; "
            f"if you trust the file, load it with max_bytes={total}"
        )


def check_model(path: Path, shapes: Mapping[str, tuple[int, ...]], model: nn.Module | None) -> None:
    if model is None:
        return
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    problems = [f"{name}: missing in the file" for name in wanted if name not in shapes]
    problems += [f"{name}: not in the model" for name in shapes if name not in wanted]
    problems += [
        f"{name}: the model has shape {wanted[name]}, the file {shape}"
        for name, shape in shapes.items()
        if name in wanted and wanted[name] != shape
    ]
    if problems:
        raise ValueError(
            f"{path}: expected the tensors of {type(model).__name__}, got:\n  " + "\n  ".join(problems) + "\nbuild "
            "the model that was saved, or load without model= and select the tensors yourself"
        )


def read_records(
    path: Path,
    records: list[Record],
    sections: Mapping[str, Section],
    streams: Mapping[str, ByteStream],
    codec: Codec,
) -> dict[str, Tensor]:
    totals: dict[str, int] = {}
    for record in records:
        for pool, items in record.items.items():
            totals[pool] = totals.get(pool, 0) + items
    pools = {pool: _ValueStream(streams[VALUES + pool], pool, total, codec) for pool, total in totals.items()}
    state: dict[str, Tensor] = {}
    for record in records:
        if record.kind == "same":
            state[record.name] = state[record.same]
        else:
            state[record.name] = _read_tensor(path, record, streams[GAPS], pools)
    for name in sections:
        if name != TABLE:
            streams[name].finish()
    return state


def _read_tensor(path: Path, record: Record, gaps: ByteStream, pools: Mapping[str, _ValueStream]) -> Tensor:
    size = prod(record.shape)
    dense = torch.zeros(size, dtype=DTYPES[record.dtype])
    scales = None
    if record.scales:
        parts = [
            _typed(pools["F32"].read(min(CHUNK, record.scales - i)), "F32") for i in range(0, record.scales, CHUNK)
        ]
        scales = torch.cat(parts)
    raw = dense.view(torch.uint8).numpy().view(UNSIGNED[WIDTHS[record.dtype]])
    for positions in _positions(path, record, gaps):
        stored = _typed(pools[record.stored].read(positions.size), record.stored)
        widened = _widen(record, stored, torch.from_numpy(positions), scales)
        raw[positions] = raw_bytes(widened).view(raw.dtype)
    return dense.reshape(record.shape)


def _positions(path: Path, record: Record, gaps: ByteStream) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    size, previous, seen = prod(record.shape), -1, 0
    if record.kind == "dense":
        yield from (np.arange(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))
        return
    for start in range(0, record.gap_bytes, CHUNK):
        positions, previous = decode_gaps(gaps.read(min(CHUNK, record.gap_bytes - start)), previous)
        seen += positions.size
        if previous >= size or seen > record.count:
            raise bad_file(
                path, f"{record.count} positions below {size} in {record.name!r}", f"{seen} up to {previous}"
            )
        yield positions
    if seen != record.count:
        raise bad_file(path, f"{record.count} positions in {record.name!r}", f"{seen}")


def _typed(raw: Bytes, dtype: str) -> Tensor:
    return torch.from_numpy(raw.copy()).view(DTYPES[dtype])


def _widen(record: Record, stored: Tensor, positions: Tensor, scales: Tensor | None) -> Tensor:
    if scales is not None:
        return (stored.to(torch.float32) * scales[positions // record.row_length]).to(DTYPES[record.dtype])
    return stored if record.stored == record.dtype else stored.to(DTYPES[record.dtype])


def read_plain(path: Path, file: BinaryIO, section: Section) -> Tensor:
    dense = torch.empty(prod(section.shape), dtype=DTYPES[section.dtype])
    raw, position = dense.view(torch.uint8).numpy(), 0
    for piece in read_section(path, file, section, None):
        raw[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)
    return dense.reshape(section.shape)
