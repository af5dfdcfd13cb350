"""The compression of sparse weights: gap coding, byte planes and an entropy coder, as small pure functions.

*Gaps.* The positions of the kept values, in row-major order, are written as the number of zeros before each
of them, one byte each: 0 to 254 is "skip that many, then a value"; 255 is "skip 255, no value yet". At 95 %
sparsity the mean gap is 19, so nearly every nonzero costs one byte, and the bytes are close to
geometrically distributed.

*Byte planes.* The low mantissa bytes of a weight are noise and its sign-and-exponent byte is not. Blocks of
values are therefore transposed to planes (all first bytes, all second bytes, ...), and every plane gets its
own code table.

*Entropy coder.* Neither stream has repetitions, so searching for matches, the main work of a general compressor, gains
nothing and makes the code lengths less accurate. Plain Huffman coding is enough: zlib offers it as a strategy, is part
of Python, and comes within about 1 % of the entropy. zstd is optional.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Codec = Literal["none", "zlib", "zstd"]

ESCAPE = 255
PLANE_BLOCK = 1 << 16  # values per block of byte planes: one code table per plane, little memory
READ_CHUNK = 1 << 20
_ZSTD_WINDOW = (
    1 << 23
)  # limit on the memory that a few bytes can request from a reader; files written here need half of it


def encode_gaps(positions: Positions, previous: int) -> Bytes:
    """The gap bytes of ascending ``positions``; ``previous`` is the last position already written, -1 at the start."""
    if positions.size == 0:
        return np.empty(0, np.uint8)
    gaps = np.diff(positions, prepend=previous) - 1
    escapes = gaps // ESCAPE
    stream = np.full(int(positions.size + escapes.sum()), ESCAPE, np.uint8)
    stream[np.cumsum(escapes + 1) - 1] = gaps % ESCAPE
    return stream


def decode_gaps(stream: Bytes, previous: int) -> tuple[Positions, int]:
    """The positions in a piece of a gap stream, and the start of the next piece."""
    escape = stream == ESCAPE
    walk = previous + np.cumsum(stream.astype(np.int64) + ~escape)
    return walk[~escape], int(walk[-1]) if walk.size else previous


def to_planes(block: Bytes, width: int) -> Iterator[bytes]:
    """The byte planes of a block of values that are ``width`` bytes each."""
    for plane in block.reshape(-1, width).T:
        yield plane.tobytes()


def from_planes(block: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(block.reshape(width, -1).T).reshape(-1)


# --------------------------------------------------------------------------------------------- entropy coders


class _Compressor(Protocol):
    def compress(self, data: bytes) -> bytes: ...
    def end_block(self) -> bytes: ...
    def finish(self) -> bytes: ...


class _Zlib:
    """One Huffman table per block; searches for repetitions only in text."""

    def __init__(self, text: bool) -> None:
        strategy = zlib.Z_DEFAULT_STRATEGY if text else zlib.Z_HUFFMAN_ONLY
        self._stream = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)

    def compress(self, data: bytes) -> bytes:
        return self._stream.compress(data)

    def end_block(self) -> bytes:
        return self._stream.flush(zlib.Z_FULL_FLUSH)

    def finish(self) -> bytes:
        return self._stream.flush(zlib.Z_FINISH)


class _Zstd:
    def __init__(self) -> None:
        module = require_zstandard()
        self._flush_block = module.COMPRESSOBJ_FLUSH_BLOCK
        self._stream = module.ZstdCompressor(level=9).compressobj()

    def compress(self, data: bytes) -> bytes:
        return cast(bytes, self._stream.compress(data))

    def end_block(self) -> bytes:
        return cast(bytes, self._stream.flush(self._flush_block))

    def finish(self) -> bytes:
        return cast(bytes, self._stream.flush())


def require_zstandard() -> Any:
    if importlib.util.find_spec("zstandard") is None:
        raise ValueError(
            "expected the package 'zstandard' for zstd compression, but it is not installed; "
            "do `pip install zstandard`, or save with compress='auto', which needs no package and is as small"
        )
    return importlib.import_module("zstandard")


def compressed(pieces: Iterable[Bytes], width: int, codec: Codec, *, text: bool = False) -> Iterator[bytes]:
    """The stored bytes of a stream of values: regrouped into blocks, transposed to byte planes, entropy-coded."""
    if codec == "none":
        yield from (piece.tobytes() for piece in pieces)
        return
    compressor: _Compressor = _Zlib(text) if codec == "zlib" else _Zstd()
    for block in _blocks(pieces, PLANE_BLOCK * width):
        for plane in to_planes(block, width):
            yield compressor.compress(plane)
            yield compressor.end_block()
    yield compressor.finish()


def _blocks(pieces: Iterable[Bytes], size: int) -> Iterator[Bytes]:
    pending = np.empty(0, np.uint8)
    for piece in pieces:
        pending = np.concatenate([pending, piece]) if pending.size else piece
        whole = pending.size - pending.size % size
        for start in range(0, whole, size):
            yield pending[start : start + size]
        pending = pending[whole:]
    if pending.size:
        yield pending


def decompressed(stored: Iterable[bytes], codec: Codec) -> Iterator[bytes]:
    """Raw pieces of an entropy-coded stream, none larger than a megabyte, whatever the input claims."""
    if codec == "none":
        yield from stored
    elif codec == "zlib":
        yield from _inflate(stored)
    else:
        yield from _unzstd(stored)


def _inflate(stored: Iterable[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj()
    for piece in stored:
        pending = piece
        while pending and not stream.eof:
            try:
                yield stream.decompress(pending, READ_CHUNK)
            except zlib.error as error:
                raise ValueError(f"expected a zlib stream, got bytes that do not decode ({error})") from None
            pending = stream.unconsumed_tail
    # After the end of its input, the decompressor holds at most one window.
    yield from (rest for rest in (stream.flush(),) if rest)
    if not stream.eof:
        raise ValueError("expected a complete zlib stream, got one that stops early")


def _unzstd(stored: Iterable[bytes]) -> Iterator[bytes]:
    module = require_zstandard()
    source = _Source(stored)
    reader = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(source, read_size=1 << 16)
    while True:
        try:
            raw: bytes = reader.read(READ_CHUNK)
        except module.ZstdError as error:
            raise ValueError(f"expected a zstd stream, got bytes that do not decode ({error})") from None
        if not raw:
            return
        yield raw


class _Source:
    """A file-like view of an iterator of bytes, for the zstd reader."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._pending = b""

    def read(self, size: int = -1) -> bytes:
        if not self._pending:
            self._pending = next(self._pieces, b"")
        taken = self._pending if size < 0 else self._pending[:size]
        self._pending = self._pending[len(taken) :]
        return taken
