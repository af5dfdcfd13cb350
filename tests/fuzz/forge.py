"""Valid files with a part changed, and lengths and checksums made right again: what is read behind these is reached.

Each function takes a file and returns another one; what it cannot take apart it damages anywhere.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import zstandard

from fuzz.mutate import INTEGERS, json_text, mutated_bytes, mutated_json

Forge = Callable[[bytes, random.Random], bytes]

_MOST = 1 << 20  # bytes that are unpacked to be changed


def or_anywhere(forge: Forge) -> Forge:
    """Where a file is beyond taking apart, or now and then, it is damaged at random places."""

    @wraps(forge)
    def forged(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return mutated_bytes(content, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return forge(content, rng)
        except Exception:  # whatever a library says of a file that is damaged already
            return mutated_bytes(content, rng)

    return forged


def json_file(content: bytes, rng: random.Random) -> bytes:
    return json_text(mutated_json(json.loads(content), rng), rng)


# ------------------------------------------------------------------------------------------------- sparse files


def split_container(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header of a safetensors file, and the bytes of each entry."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    body = content[8 + length :]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return header, {name: body[slice(*entry["data_offsets"])] for name, entry in entries.items()}


def join_container(header: dict[str, Any], contents: dict[str, bytes]) -> bytes:
    """With offsets, lengths and checksums that fit the contents."""
    position, metadata = 0, dict(header.get("__metadata__") or {})
    joined: dict[str, Any] = {"__metadata__": metadata}
    for name, content in contents.items():
        entry = dict(header[name])
        entry["data_offsets"] = [position, position + len(content)]
        if entry.get("dtype") == "U8":
            entry["shape"] = [len(content)]
        joined[name] = entry
        position += len(content)
        if f"crc32 {name}" in metadata:
            metadata[f"crc32 {name}"] = f"{zlib.crc32(content):08x}"
    text = json.dumps(joined).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + b"".join(contents.values())


def _unpacked(content: bytes, codec: str) -> bytes:
    if codec == "zlib":
        return zlib.decompressobj().decompress(content, _MOST)
    if codec == "zstd":
        return zstandard.ZstdDecompressor().stream_reader(content).read(_MOST)
    return content


def _packed(content: bytes, codec: str) -> bytes:
    if codec == "zlib":
        return zlib.compress(content, 1)
    return zstandard.ZstdCompressor(level=1).compress(content) if codec == "zstd" else content


@or_anywhere
def sparse_file(content: bytes, rng: random.Random) -> bytes:
    """The table, a stream or the header is changed; of streams what they unpack to, or the packed bytes."""
    header, contents = split_container(content)
    codec = (header.get("__metadata__") or {}).get("codec", "")
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.randrange(5)
        if kind <= 1 and "gossamer.table" in contents:
            table = json.loads(_unpacked(contents["gossamer.table"], codec))
            contents["gossamer.table"] = _packed(json_text(_changed_table(table, rng), rng), codec)
        elif kind == 2 and contents:
            name = rng.choice([*contents])
            contents[name] = _packed(mutated_bytes(_unpacked(contents[name], codec), rng), codec)
        elif kind == 3 and contents:
            name = rng.choice([*contents])
            contents[name] = mutated_bytes(contents[name], rng)
        else:
            mutated = mutated_json(header, rng)
            if isinstance(mutated, dict) and mutated.keys() >= contents.keys():
                header = mutated
    return join_container(header, contents)


def _changed_table(table: Any, rng: random.Random) -> Any:
    """Mostly counts and shapes, which have to agree with each other; sometimes anything."""
    if not isinstance(table, list) or not table or rng.random() < 0.5:
        return mutated_json(table, rng)
    row = dict(rng.choice(table))
    shape = row.get("shape")
    for name in rng.sample(("count", "gap_bytes", "shape", "dtype", "stored", "kind"), rng.choice((1, 2))):
        if name == "shape" and isinstance(shape, list):
            row["shape"] = [rng.choice((each, each + 1, rng.choice(INTEGERS), 0)) for each in shape] + rng.choice(
                ([], [1], [rng.choice(INTEGERS)], [1] * 64)
            )
        elif name in ("count", "gap_bytes") and isinstance(row.get(name), int):
            row[name] = rng.choice((row[name] + 1, row[name] - 1, rng.choice(INTEGERS)))
        elif name in ("dtype", "stored"):
            row[name] = rng.choice(("F32", "F16", "BF16", "I8", "U8", "BOOL", "I64", "C64", "F8_E4M3", "F64"))
        elif name == "kind":
            row["kind"] = rng.choice(("gap", "dense", "same"))
    return [row if each is not row and each.get("name") == row["name"] else each for each in table]


# --------------------------------------------------------------------------------------------------- checkpoints

_PICKLED = (
    *(b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.", b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R."),
    *(b"ctorch\nzeros\n\x8a\x05\x00\x00\x00\x00\x10\x85R.", b"ccollections\nOrderedDict\n)R.", b"((((((((((((((t"),
    *(b"K\x01K\x02\x86R", b"\x8a\xff" + b"\xff" * 255, b"h\x00h\x00h\x00", b"}q\x00(X\x01\x00\x00\x00aK\x01u."),
)


@or_anywhere
def torch_file(content: bytes, rng: random.Random) -> bytes:
    """Another tree of values, written by torch; or its archive with a member changed, packed or doubled."""
    if rng.random() < 0.6 and b"bytearray" not in content:  # which torch would allocate
        stream = io.BytesIO()
        torch.save(mutated_json(torch.load(io.BytesIO(content), weights_only=True), rng), stream)
        return stream.getvalue()
    return _changed_zip(content, rng, _PICKLED)


def _changed_zip(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(each.filename, archive.read(each)) for each in archive.infolist()]
    at = next((i for i, (name, _) in enumerate(members) if name.endswith("data.pkl")), 0)
    at = at if rng.random() < 0.7 else rng.randrange(len(members))
    kind, (name, held) = rng.random(), members[at]
    if kind < 0.8:
        members[at] = (name, mutated_bytes(held, rng, others))
    elif kind < 0.9:
        del members[at]
    else:
        members.append((rng.choice((name, name + "x", "../" + name, "archive/.data/serialization_id")), held))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED) as archive:
        for name, held in members:
            archive.writestr(name, held)
    return stream.getvalue()


# ------------------------------------------------------------------------------------------------- data and images


@or_anywhere
def packed_idx(content: bytes, rng: random.Random) -> bytes:
    """Plain or compressed, with header and content changed."""
    plain = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST) if content[:2] == b"\x1f\x8b" else content
    changed = mutated_bytes(plain, rng) if rng.random() < 0.8 else plain + bytes(rng.choice((0, 1, _MOST)))
    return gzip.compress(changed, 1) if rng.random() < 0.5 else changed


@or_anywhere
def cifar_file(content: bytes, rng: random.Random) -> bytes:
    """A packed tar of records, a zip of labels, or a grid of images."""
    if content[:2] == b"\x1f\x8b":
        plain = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST)
        return gzip.compress(tar_archive(plain, rng), 1)
    if content[:2] == b"PK":
        return _labels(content, rng) if rng.random() < 0.5 else _changed_zip(content, rng, ())
    return riff(content, rng)


def _labels(content: bytes, rng: random.Random) -> bytes:
    with np.load(io.BytesIO(content)) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    name = rng.choice([*held])
    held[name] = rng.choice(
        (held[name][:-1], held[name].astype(np.int64), held[name] + 200, held[name].reshape(1, -1), np.zeros(0))
    )
    stream = io.BytesIO()
    rng.choice((np.savez, np.savez_compressed))(stream, **held)
    return stream.getvalue()


@or_anywhere
def tar_archive(content: bytes, rng: random.Random) -> bytes:
    """A header changed, with its checksum; or blocks left out, doubled and moved."""
    blocks = [content[at : at + 512] for at in range(0, len(content), 512)]
    headers = [at for at, block in enumerate(blocks) if block[257:262] == b"ustar"]
    at = rng.choice(headers) if headers else 0
    kind = rng.randrange(6)
    if kind == 0:
        del blocks[rng.randrange(len(blocks))]
    elif kind == 1:
        blocks.insert(rng.randrange(len(blocks) + 1), rng.choice(blocks))
    elif kind == 2:
        one, other = rng.randrange(len(blocks)), rng.randrange(len(blocks))
        blocks[one], blocks[other] = blocks[other], blocks[one]
    else:
        block = bytearray(blocks[at])
        if kind == 3:
            block[124:136] = rng.choice(
                (
                    *(
                        b"%011o\0" % rng.randrange(1 << rng.choice((4, 12, 33))),
                        b"-0000002000\0",
                        b"\x80" + b"\xff" * 11,
                    ),
                    *((-1024).to_bytes(12, "big", signed=True), b" " * 12, b"\x80" + bytes(10) + b"\x01"),
                )
            )
        elif kind == 4:
            block[156:157] = rng.choice([*b"0123456LKSxg7DVNMA\0"]).to_bytes(1, "big")
        else:
            name = rng.choice((b"train/a/1.png", b"val/b/2.png", b"../x.png", b"train/c/\xff.png", b"a" * 100))
            block[:100] = name.ljust(100, b"\0")
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        blocks[at] = bytes(block)
    return b"".join(blocks)


def plain_tar(names: Sequence[str], contents: Sequence[bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive of these files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, content in zip(names, contents, strict=True):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        end = archive.offset
    return stream.getvalue()[: end + 1024]  # without the padding that follows the two blocks of zeros


@or_anywhere
def image_file(content: bytes, rng: random.Random) -> bytes:
    """A PNG with a chunk changed, with its checksum; another format with its lengths made right where it has any."""
    if content[:8] == b"\x89PNG\r\n\x1a\n":
        return png(content, rng)
    return riff(content, rng)


def png(content: bytes, rng: random.Random) -> bytes:
    chunks, at = [], 8
    while at + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    place = rng.randrange(len(chunks))
    kind, data = chunks[place]
    if kind == b"IHDR" and rng.random() < 0.7:
        sides = [rng.choice((0, 1, 7, 2000, 60_000, 1 << 20, 2**31 - 1, 2**32 - 1)) for _ in range(2)]
        data = struct.pack(">II", *sides) + data[8:]
    elif kind == b"IDAT" and rng.random() < 0.5:
        data = zlib.compress(mutated_bytes(zlib.decompressobj().decompress(data, _MOST), rng))
    else:
        data = mutated_bytes(data, rng)
    changed = rng.choice((kind, kind, kind, b"iCCP", b"tRNS", b"PLTE", b"zTXt", b"iTXt", b"acTL", b"fdAT", b"eXIf"))
    chunks[place] = (changed, data)
    if rng.random() < 0.2:
        chunks.insert(rng.randrange(len(chunks) + 1), rng.choice(chunks))
    joined = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return content[:8] + b"".join(joined)


def riff(content: bytes, rng: random.Random) -> bytes:
    """WebP states the size of the whole, which is made right; others come as they are."""
    changed = mutated_bytes(content, rng)
    if changed[:4] == b"RIFF" and len(changed) >= 12:
        changed = changed[:4] + struct.pack("<I", len(changed) - 8) + changed[8:]
    return changed


def text(content: bytes, rng: random.Random) -> bytes:
    pieces = (b"\n", b" ", b"\r\n", b"\xff", "é\u2028\x85\u3000".encode(), b"\0", b"<eos>", b"a " * 500)
    return mutated_bytes(content, rng, pieces)
