"""Data sets, read from disk or downloaded, and their batches on the device."""

from gossamer.lab.data.batches import Batches, Position
from gossamer.lab.data.files import CorruptData, DataNotFound
from gossamer.lab.data.folder import FolderBatches, FolderSet
from gossamer.lab.data.registry import DataSet, kind_of, load, names, table, training_images
from gossamer.lab.data.sentences import SentenceBatches
from gossamer.lab.data.sets import ImageSet, Labelled, Sentences, SentenceSet, TextSet
from gossamer.lab.data.text import TextBatches

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
    "SentenceBatches",
    "SentenceSet",
    "Sentences",
    "TextBatches",
    "TextSet",
    "kind_of",
    "load",
    "names",
    "table",
    "training_images",
]
