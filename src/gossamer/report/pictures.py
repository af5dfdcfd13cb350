"""Small pictures of the nonzeros of a tensor, as PNG files of a few hundred bytes.

A pixel is a weight, or a block of weights in tensors with more than 96 rows or columns. Its opacity, in 16 steps, is
the square root of the density of the block relative to the densest block; the root makes sparse blocks visible. The
background is transparent, so that a picture fits light and dark pages.
"""

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 96  # maximum number of pixels per side
_COLOR = (18, 148, 134)  # seen on white and on black
_LEVELS = 15


@dataclass(frozen=True)
class Picture:
    """A picture of one tensor, output features from top to bottom."""

    png: bytes
    width: int
    height: int
    densest: float
    """The density of the densest pixel."""


def picture_of(tensor: Tensor, side: int = SIDE) -> Picture:
    """A picture of the nonzeros: a row of pixels per output feature, or per group of them."""
    density = block_density(tensor.detach().flatten(1), side)
    densest = float(density.max())
    level = torch.ceil((density / densest).sqrt() * _LEVELS) if densest else density
    height, width = level.shape
    return Picture(_png(level.to(torch.uint8)), width, height, densest)


def block_density(matrix: Tensor, side: int) -> Tensor:
    """The density of each block of a matrix divided into at most `side` × `side` blocks."""
    rows, columns = matrix.shape
    height, width = min(rows, side), min(columns, side)
    column_edges, row_edges = _edges(columns, width), _edges(rows, height)
    found = torch.empty(height, width, dtype=torch.float64)
    for row in range(height):  # a slice at a time: a mask of the whole matrix would take much memory
        block = matrix[row_edges[row] : row_edges[row + 1]]
        counts = (block != 0).sum(dim=0).to("cpu", torch.float64)
        sums = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        found[row] = sums[column_edges].diff() / (len(block) * column_edges.diff())
    return found


def _edges(length: int, parts: int) -> Tensor:
    return torch.arange(parts + 1) * length // parts


def _png(levels: Tensor) -> bytes:
    """A palette image of four bits per pixel, one color in 16 opacities."""
    height, width = levels.shape
    pairs = torch.zeros(height, width + width % 2, dtype=torch.uint8)
    pairs[:, :width] = levels
    packed = (pairs[:, 0::2] << 4 | pairs[:, 1::2]).numpy()
    lines = b"".join(b"\x00" + line.tobytes() for line in packed)
    opacity = bytes(255 * level // _LEVELS for level in range(_LEVELS + 1))
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 4, 3, 0, 0, 0)),
            _chunk(b"PLTE", bytes(_COLOR) * (_LEVELS + 1)),
            _chunk(b"tRNS", opacity),
            _chunk(b"IDAT", zlib.compress(lines, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
