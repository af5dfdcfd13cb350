"""Decoding of an image file, and the two usual crops for ImageNet. Needs Pillow."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gossamer.lab.data.files import CorruptData

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["centre_crop", "crop_box", "decode", "random_crop_flip"]

_Pixels = npt.NDArray[np.uint8]
_ATTEMPTS = 10
# Only these decoders read a file, whatever its name: some decoders of Pillow start other programs (EPS).
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")

# Pixels cost memory, and a small file can have very many: a uniform WebP of 30 bytes has up to 268 million.
MOST_PIXELS = 1 << 26  # 256 MiB once decoded
_FREE_PIXELS = 1 << 22  # limit for any file
_PIXELS_A_BYTE = 1024  # limit per byte of a larger file; photographs have about 10


def decode(content: bytes, name: str) -> Image:
    """Decode to RGB; an unreadable image raises an error with its name."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: run pip install 'gossamer[data]'") from error
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_pixels(image.width, image.height, len(content), name)
            return image.convert("RGB")
    except (CorruptData, MemoryError):
        raise
    except Exception as error:  # any error: decoders raise almost any exception
        reason = f"{error}" or type(error).__name__
        raise CorruptData(
            f"{name} is not a readable image ({reason}); replace it, or remove it from the folder"
        ) from error


def _check_pixels(width: int, height: int, size: int, name: str) -> None:
    """Refuse an image that would take much more memory than its file size suggests, before decoding it."""
    limit = min(MOST_PIXELS, max(_FREE_PIXELS, _PIXELS_A_BYTE * size))
    if not 0 < width * height <= limit:
        raise CorruptData(
            f"{name}: expected an image of 1 to {limit:,} pixels in a file of {size:,} bytes, got {width:,} × "
            f"{height:,}; scale it down, or remove it from the folder"
        )


def crop_box(
    width: int,
    height: int,
    random: np.random.Generator,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """A random (left, top, right, bottom) whose fraction of the area and aspect ratio are in these ranges.

    Fractions are uniform, aspect ratios log-uniform. If ten draws do not fit the image, the largest allowed centre crop
    is used.
    """
    for _ in range(_ATTEMPTS):
        pixels = width * height * random.uniform(*area)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            left = int(random.integers(0, width - w + 1))
            top = int(random.integers(0, height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def random_crop_flip(image: Image, size: int, random: np.random.Generator) -> _Pixels:
    """A random crop scaled to size × size, mirrored with probability one half; as channels × rows × columns."""
    from PIL.Image import Resampling

    box = crop_box(image.width, image.height, random)
    pixels = np.asarray(image.resize((size, size), Resampling.BILINEAR, box=box))
    if random.integers(2):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def centre_crop(image: Image, size: int, resize: int) -> _Pixels:
    """The size × size centre of the image, after its shorter side was scaled to `resize`."""
    from PIL.Image import Resampling

    shorter = min(image.size)
    width, height = (max(resize, round(side * resize / shorter)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # Only the visible part of the image is scaled: scaling all of a 1 × 60,000 image would take gigabytes.
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    pixels = np.asarray(image.resize((size, size), Resampling.BILINEAR, box=box))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
