"""From a state dict to the entries of a sparse file, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.io.container import (
    DIMENSIONS,
    WIDTHS,
    Entry,
)
from gossamer.io.dtypes import CHUNK, DTYPES, GAPS, NAMES, TABLE, UNSIGNED, VALUES, raw_bytes
from gossamer.io.gap_code import (
    Bytes,
    Codec,
    compressed,
    encode_gaps,
)
from gossamer.io.table import VERSION, Record, dump_table

Values = Literal["float32", "float16", "bfloat16", "int8"]
Compress = Literal["auto", "none", "zlib", "zstd"]
NegativeZeros = Literal["keep", "drop"]

_STORED_AS: Mapping[Values, str] = {"float16": "F16", "bfloat16": "BF16", "int8": "I8"}


_SIGNED_ZEROS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@dataclass(frozen=True)
class Job:
    """The tensors to write, with the storage of each."""

    state: Mapping[str, Tensor]
    records: list[Record]
    drop_negative_zeros: bool
    negative_zeros: int


def describe(checksums: Mapping[str, int], *, codec: Codec, network: str | None = None) -> dict[str, str]:
    sums = {f"crc32 {name}": f"{checksum:08x}" for name, checksum in checksums.items()}
    named = {} if network is None else {"network": network}
    return {"format": "gossamer", "version": str(VERSION), "codec": codec, **named, **sums}


def check_tensors(state: Mapping[str, Any]) -> None:
    problems = []
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: {type(tensor).__name__} is not a tensor")
        elif tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            problems.append(f"{name}: not an ordinary dense tensor (layout {tensor.layout}, device {tensor.device})")
        elif tensor.dtype not in NAMES:
            problems.append(f"{name}: dtype {tensor.dtype} has no name in safetensors")
        elif tensor.dim() > DIMENSIONS:
            problems.append(f"{name}: {tensor.dim()} dimensions, of which a file takes at most {DIMENSIONS}")
    if problems:
        raise ValueError(
            "expected a state dict of dense tensors, got:\n  " + "\n  ".join(problems) + "\nomit these or "
            "convert them (`.to_dense()`, `.to(dtype)`) and pass the state dict instead of the model"
        )


def make_job(state: Mapping[str, Tensor], values: Values, negative_zeros: NegativeZeros) -> Job:
    drop = negative_zeros == "drop"
    minus = 0
    first_seen: dict[tuple[object, ...], str] = {}
    records = []
    for name, tensor in state.items():
        shape, dtype = tuple(tensor.shape), NAMES[tensor.dtype]
        # A conjugate or negative view shares memory, shape and strides with its base, but has other values.
        view = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), shape, tensor.stride(), dtype, view)
        if tensor.numel() and (original := first_seen.setdefault(key, name)) != name:
            records.append(Record(name, shape, dtype, "same", dtype, 0, 0, original))
            continue
        lossy = values != "float32" and tensor.dim() > 1 and tensor.is_floating_point()
        stored = _STORED_AS[values] if lossy and WIDTHS[_STORED_AS[values]] < WIDTHS[dtype] else dtype
        count, gap_bytes, width = 0, 0, WIDTHS[stored]
        for kept, _, stream in _kept(tensor, drop):
            count += kept.numel()
            gap_bytes += stream.size
        minus += sum(_count_minus(chunk) for _, chunk in _chunks(tensor, False))
        if gap_bytes + count * width < tensor.numel() * width:
            records.append(Record(name, shape, dtype, "gap", stored, count, gap_bytes, ""))
        else:
            records.append(Record(name, shape, dtype, "dense", stored, tensor.numel(), 0, ""))
    return Job(state, records, drop, minus)


def stored_bytes(tensor: Tensor) -> int:
    """The bytes of one tensor in a sparse file, before they are entropy-coded."""
    (record,) = make_job({"": tensor}, "float32", "drop").records
    values = record.count if record.kind == "gap" else tensor.numel()
    return record.gap_bytes + values * WIDTHS[record.stored]


def _bits(chunk: Tensor) -> npt.NDArray[Any]:
    return raw_bytes(chunk).view(UNSIGNED[chunk.element_size()])


def _minus_zero(chunk: Tensor) -> int:
    return 1 << (8 * chunk.element_size() - 1)


def _count_minus(kept: Tensor) -> int:
    return int((_bits(kept) == _minus_zero(kept)).sum()) if kept.dtype in _SIGNED_ZEROS else 0


def _chunks(tensor: Tensor, drop: bool) -> Iterator[tuple[int, Tensor]]:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK].cpu().contiguous()
        if drop and chunk.dtype in _SIGNED_ZEROS:
            chunk = chunk.clone()
            bits = _bits(chunk)
            bits[bits == _minus_zero(chunk)] = 0
        yield start, chunk


def _kept(tensor: Tensor, drop: bool) -> Iterator[tuple[Tensor, Tensor, Bytes]]:
    """For each chunk: its stored values, their positions in the tensor, and their gap bytes."""
    previous = -1
    for start, chunk in _chunks(tensor, drop):
        bits = _bits(chunk)
        local = np.flatnonzero(bits)
        positions = local + start
        kept = torch.from_numpy(bits[local]).view(chunk.dtype)
        yield kept, torch.from_numpy(positions), encode_gaps(positions, previous)
        previous = int(positions[-1]) if positions.size else previous


def make_entries(job: Job, codec: Codec) -> list[Entry]:
    """The entries, widest values first, so that uncompressed streams are aligned."""
    entries = []
    pools = dict.fromkeys(sorted({r.stored for r in job.records if r.kind != "same"}, key=_pool_order), 0)
    for record in job.records:
        for pool, items in record.items.items():
            pools[pool] = pools.get(pool, 0) + items
    for pool in sorted(pools, key=_pool_order):
        pieces = partial(_value_pieces, job, pool)
        shape = (pools[pool],) if codec == "none" else None
        stream = partial(_coded, pieces, WIDTHS[pool], codec)
        entries.append(Entry(VALUES + pool, pool if codec == "none" else "U8", shape, stream))
    gaps = partial(_coded, partial(_gap_pieces, job), 1, codec)
    table = partial(_coded, partial(_table_pieces, job), 1, codec, text=True)
    return [*entries, Entry(GAPS, "U8", None, gaps), Entry(TABLE, "U8", None, table)]


def _pool_order(pool: str) -> tuple[int, str]:
    return -WIDTHS[pool], pool


def _coded(pieces: Any, width: int, codec: Codec, *, text: bool = False) -> Iterator[bytes]:
    return compressed(pieces(), width, codec, text=text)


def _table_pieces(job: Job) -> Iterator[Bytes]:
    yield np.frombuffer(dump_table(job.records), np.uint8)


def _gap_pieces(job: Job) -> Iterator[Bytes]:
    for record in job.records:
        if record.kind == "gap":
            yield from (stream for _, _, stream in _kept(job.state[record.name], job.drop_negative_zeros))


def _value_pieces(job: Job, pool: str) -> Iterator[Bytes]:
    for record in job.records:
        if pool not in record.items:
            continue
        tensor = job.state[record.name]
        scales = _row_scales(record.name, tensor) if record.scales else None
        if scales is not None and pool == "F32":
            yield raw_bytes(scales)
        if pool != record.stored:
            continue
        for kept, positions in _stored_chunks(job, record):
            yield raw_bytes(_narrow(record, kept, positions, scales))


def _stored_chunks(job: Job, record: Record) -> Iterator[tuple[Tensor, Tensor]]:
    tensor, drop = job.state[record.name], job.drop_negative_zeros
    if record.kind == "gap":
        yield from ((kept, positions) for kept, positions, _ in _kept(tensor, drop))
    else:
        yield from ((chunk, torch.arange(start, start + chunk.numel())) for start, chunk in _chunks(tensor, drop))


def _row_scales(name: str, tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor.detach().reshape(tensor.shape[0], -1), dim=1)
    scales = (torch.maximum(high, -low).to(torch.float32) / 127).cpu()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"{name}: expected finite values for int8, got infinity or NaN; use values='float32'")
    return scales


def _narrow(record: Record, kept: Tensor, positions: Tensor, scales: Tensor | None) -> Tensor:
    if record.stored == record.dtype:
        return kept
    if scales is not None:
        scale = scales[positions // record.row_length].to(torch.float64)
        return torch.round(kept.to(torch.float64) / scale.clamp_min(1e-300)).clamp(-127, 127).to(torch.int8)
    narrow = kept.to(DTYPES[record.stored])
    if bool((torch.isinf(narrow) & torch.isfinite(kept)).any()):
        largest = kept[torch.isfinite(kept)].abs().max().item()
        raise ValueError(
            f"{record.name}: expected values within {torch.finfo(narrow.dtype).max:g}, got {largest:g}; "
            "use values='bfloat16' or values='float32'"
        )
    return narrow
