"""Decoding one image file, and the two crops customary for ImageNet. Needs Pillow."""

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
# Whatever a file is called, nothing but these decoders reads it: Pillow has some that start other programs (EPS).
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")


def decode(content: bytes, name: str) -> Image:
    """Decode to RGB; an unreadable image is an error that names it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: run pip install 'gossamer[data]'") from error
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptData(
            f"{name} is not a readable image ({error}); replace it, or take it out of the folder"
        ) from error


def crop_box(
    width: int,
    height: int,
    random: np.random.Generator,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """A random (left, top, right, bottom) whose share of the area and width : height are in these ranges.

    Shares are uniform, shapes log-uniform. Where ten draws do not fit the image, the largest allowed centre
    is taken.
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
    """A random crop scaled to size × size, mirrored every second time; as channels × rows × columns."""
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
    scaled = image.resize((width, height), Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(scaled.crop((left, top, left + size, top + size)))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
