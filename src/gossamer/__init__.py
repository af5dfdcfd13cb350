"""Gossamer makes neural networks sparse while they train."""

from gossamer.checkpoint import load, save
from gossamer.compaction import compact
from gossamer.distillation import distil
from gossamer.keep_zeros import keep_zeros
from gossamer.report import report
from gossamer.runtime import deploy
from gossamer.select import select
from gossamer.sparsifier import Sparsifier
from gossamer.tune import tune_decay
from gossamer.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Sparsifier",
    "compact",
    "deploy",
    "distil",
    "keep_zeros",
    "load",
    "report",
    "save",
    "select",
    "tune_decay",
    "verify",
]
