"""Data sets, found on disk or fetched, and batches of them on the device."""

from gossamer.data.batches import Batches, Position
from gossamer.data.files import CorruptData, DataNotFound
from gossamer.data.folder import FolderBatches, FolderSet
from gossamer.data.registry import DataSet, kind_of, load, names, table
from gossamer.data.sets import ImageSet, Labelled, TextSet
from gossamer.data.text import TextBatches

__all__ = [
    "Batches",
    "CorruptData",
    "DataNotFound",
    "DataSet",
    "FolderBatches",
    "FolderSet",
    "ImageSet",
    "Labelled",
    "Position",
    "TextBatches",
    "TextSet",
    "kind_of",
    "load",
    "names",
    "table",
]
