"""The sparse file: ``save`` and ``load``, bit-identical, validated, and readable without this library.

The file is a safetensors container with a few entries: a table (JSON: name, shape, dtype, count of each tensor), one
stream of gaps and one stream of values for each stored dtype, with the tensors in table order. A tensor that would be
larger in sparse form is stored densely. docs/file-format.md describes
every byte and has a reader that needs only numpy.

Every value is preserved, including infinities and the payloads of NaNs, except that −0.0 becomes 0.0 by default.
Reading validates everything in a file before using it, and before allocating memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import get_args

from torch import Tensor, nn

from gossamer.io.container import (
    WIDTHS,
    parse_json,
    read_header,
    read_section,
    writable,
    write_file,
)
from gossamer.io.dtypes import TABLE
from gossamer.io.gap_code import (
    Codec,
    decompressed,
    require_zstandard,
)
from gossamer.io.reader import (
    ByteStream,
    check_model,
    check_sizes,
    check_total,
    read_plain,
    read_records,
    table_limit,
)
from gossamer.io.table import parse_description, parse_table
from gossamer.io.writer import (
    Compress,
    NegativeZeros,
    Values,
    check_tensors,
    describe,
    make_entries,
    make_job,
)


@dataclass(frozen=True)
class Saved:
    """The result of ``save``."""

    path: str
    file_bytes: int
    dense_bytes: int
    codec: Codec
    sparse_tensors: int
    dense_tensors: int
    tied_tensors: int
    negative_zeros: int

    @property
    def ratio(self) -> float:
        """The compression ratio over the same tensors stored densely in their own dtype."""
        return self.dense_bytes / self.file_bytes


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    values: Values = "float32",
    compress: Compress = "auto",
    negative_zeros: NegativeZeros = "drop",
    network: str | None = None,
) -> Saved:
    """Write the tensors of a model (or state dict) to one small file, atomically.

    ``values="float32"`` preserves every value of every tensor, whatever its dtype. The other formats store
    floating-point tensors of two or more dimensions in fewer bits (``int8`` with one scale per row);
    one-dimensional tensors (biases, norms) remain exact. ``compress="auto"`` entropy-codes with zlib, which is
    part of Python.

    A negative weight that was multiplied by its mask is −0.0. It is stored as an ordinary zero, so its sign is lost;
    ``Saved.negative_zeros`` counts these. ``negative_zeros="keep"`` stores each as a value instead, with five bytes
    before compression, for a bitwise equal file. ``network`` is the name of the architecture in the metadata of the
    file, for `gossamer speed` and `export`. For a symbolic link, its target is written.
    """
    arguments: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("values", values, get_args(Values)),
        ("compress", compress, get_args(Compress)),
        ("negative_zeros", negative_zeros, get_args(NegativeZeros)),
    )
    for name, value, choices in arguments:
        if value not in choices:
            raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
    if compress == "zstd":
        require_zstandard()
    codec: Codec = "zlib" if compress == "auto" else compress
    state = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    check_tensors(state)
    job = make_job(state, values, negative_zeros)
    target = writable(path)
    size = write_file(target, make_entries(job, codec), partial(describe, codec=codec, network=network))
    kinds = [record.kind for record in job.records]
    return Saved(
        path=str(target),
        file_bytes=size,
        dense_bytes=sum(prod(r.shape) * WIDTHS[r.dtype] for r in job.records if r.kind != "same"),
        codec=codec,
        sparse_tensors=kinds.count("gap"),
        dense_tensors=kinds.count("dense"),
        tied_tensors=kinds.count("same"),
        negative_zeros=job.negative_zeros,
    )


def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, max_bytes: int | None = None
) -> dict[str, Tensor]:
    """Read a file of ``save`` (or any plain safetensors file) into dense CPU tensors, and load them into ``model`` if
    given.

    A model is changed only after the whole file has been read and validated. A sparse file can describe far more zeros
    than it has bytes: more than ``max_bytes`` of dense tensors (by default 1024 times the size of the file, at least
    64 MiB) are refused before any allocation. SECURITY.md lists all limits.
    """
    source = Path(path)
    if source.is_dir():
        raise IsADirectoryError(f"expected a file, got the folder {source}: name one in it, such as model.safetensors")
    with source.open("rb") as file:
        sections, metadata = read_header(source, file)
        if any(name.startswith("gossamer.") for name in sections):
            codec, checksums = parse_description(source, metadata, sections)
            streams = {
                name: ByteStream(source, decompressed(read_section(source, file, section, checksums[name]), codec))
                for name, section in sections.items()
            }
            text = streams[TABLE].rest(table_limit(sections[TABLE])) if TABLE in streams else b""
            records = parse_table(source, parse_json(text, source, "a table of tensors"))
            check_sizes(source, records, sections, codec, max_bytes)
            check_model(source, {r.name: r.shape for r in records}, model)
            state = read_records(source, records, sections, streams, codec)
        else:
            file_size = os.fstat(file.fileno()).st_size
            check_total(source, sum(section.size for section in sections.values()), file_size, max_bytes)
            check_model(source, {name: section.shape for name, section in sections.items()}, model)
            state = {name: read_plain(source, file, section) for name, section in sections.items()}
    if model is not None:
        model.load_state_dict(state)
    return state
