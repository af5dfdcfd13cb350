"""Data sets, found on disk or fetched, and batches of them on the device."""

from gossamer.data.batches import Batches, Position
from gossamer.data.registry import load, names
from gossamer.data.sets import ImageSet, Labelled, TextSet

__all__ = ["Batches", "ImageSet", "Labelled", "Position", "TextSet", "load", "names"]
