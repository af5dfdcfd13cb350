"""The table of a sparse file: one record per tensor, and the validation of records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, cast, get_args

from gossamer.io.container import SHAPE, WIDTHS, Section, bad_file, element_count, is_count, shown
from gossamer.io.gap_code import Codec

VERSION = 1
Kind = Literal["gap", "dense", "same"]
_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Record:
    """The storage of one tensor.

    ``gap``: ``count`` values at the positions of ``gap_bytes`` gap bytes; ``dense``: all values; ``same``:
    the tensor named by ``same``, to which this one is tied. ``stored`` is the dtype of the stored values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    stored: str
    count: int
    gap_bytes: int
    same: str

    @property
    def scales(self) -> int:
        """Number of float32 row scales before int8 values."""
        quantised = self.kind != "same" and self.stored == "I8" and self.dtype in _FLOATS
        return self.shape[0] if quantised else 0

    @property
    def row_length(self) -> int:
        return max(1, prod(self.shape[1:]))

    @cached_property
    def items(self) -> dict[str, int]:
        """Number of values of this tensor in each value stream."""
        if self.kind == "same":
            return {}
        items = {self.stored: self.count}
        if self.scales:
            items["F32"] = self.scales
        return items


def dump_table(records: list[Record]) -> bytes:
    rows: list[dict[str, object]] = []
    for r in records:
        row: dict[str, object] = {"name": r.name, "shape": list(r.shape), "dtype": r.dtype, "kind": r.kind}
        if r.kind == "same":
            row["same"] = r.same
        else:
            row |= {"stored": r.stored, "count": r.count}
        if r.kind == "gap":
            row["gap_bytes"] = r.gap_bytes
        rows.append(row)
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()


def parse_description(
    path: Path, metadata: Mapping[str, str], sections: Mapping[str, Section]
) -> tuple[Codec, dict[str, int]]:
    """The codec and the checksums from the metadata."""
    if metadata.get("format") != "gossamer":
        raise bad_file(path, "format 'gossamer' in the metadata", repr(metadata.get("format")))
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path}: expected file format version {VERSION}, got {metadata.get('version')!r}; "
            "update gossamer, or save the file again with this version"
        )
    codec = metadata.get("codec")
    if codec not in get_args(Codec):
        raise bad_file(path, f"one of the codecs {get_args(Codec)}", repr(codec))
    checksums = {}
    for name, section in sections.items():
        try:
            checksums[name] = int(metadata[f"crc32 {name}"], 16)
        except (KeyError, ValueError):
            raise bad_file(path, f"a crc32 of entry {name!r} in the metadata", "none") from None
        if codec != "none" and section.dtype != "U8":
            raise bad_file(path, f"entry {name!r} as compressed bytes (U8)", section.dtype)
    return cast(Codec, codec), checksums


def parse_table(path: Path, rows: object) -> list[Record]:
    if not isinstance(rows, list):
        raise bad_file(path, "a table of tensors", type(rows).__name__)
    records: dict[str, Record] = {}
    for row in rows:
        record = _parse_row(path, row)
        if record.name in records:
            raise bad_file(path, "each tensor once", f"{record.name!r} twice")
        if record.kind == "same":
            original = records.get(record.same)
            if original is None or (original.shape, original.dtype) != (record.shape, record.dtype):
                raise bad_file(path, f"{record.name!r} to name an equal tensor before it", repr(record.same))
        records[record.name] = record
    return list(records.values())


def _parse_row(path: Path, row: object) -> Record:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise bad_file(path, "a table row with a name", repr(row)[:80])
    name, kind = row["name"], row.get("kind")
    dtype, stored = row.get("dtype"), row.get("stored", row.get("dtype"))
    count, gap_bytes, same = row.get("count", 0), row.get("gap_bytes", 0), row.get("same", "")
    if not all(isinstance(text, str) for text in (kind, dtype, stored, same)):
        raise bad_file(path, f"{name!r} with kind, dtype, stored and same as strings", repr(row)[:80])
    if kind not in get_args(Kind):
        raise bad_file(path, f"{name!r} with one of the kinds {get_args(Kind)}", repr(kind)[:80])
    if dtype not in WIDTHS or stored not in WIDTHS:
        raise bad_file(path, f"{name!r} with dtypes from {sorted(WIDTHS)}", f"{dtype!r}, {stored!r}"[:80])
    shape = row.get("shape")
    if not isinstance(shape, list) or (size := element_count(shape)) is None:
        raise bad_file(path, f"{name!r} with {SHAPE}", shown(shape))
    if not is_count(count) or not is_count(gap_bytes):
        raise bad_file(path, f"{name!r} with non-negative counts", f"{count!r}, {gap_bytes!r}"[:80])
    narrowed = stored != dtype
    if narrowed and not (dtype in _FLOATS and stored in ("F16", "BF16", "I8") and len(shape) > 1):
        raise bad_file(path, f"{name!r} of dtype {dtype} stored as {dtype}", str(stored))
    record = Record(name, tuple(shape), cast(str, dtype), cast(Kind, kind), cast(str, stored), count, gap_bytes, same)
    if kind == "gap" and not (count <= size and count <= gap_bytes <= count + size // 255):
        raise bad_file(path, f"{name!r} with a count and gap bytes that fit {size} elements", f"{count}, {gap_bytes}")
    if kind == "dense" and (count != size or gap_bytes):
        raise bad_file(path, f"{name!r} with {size} values", f"{count} values, {gap_bytes} gap bytes")
    return record
