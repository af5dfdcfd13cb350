"""Gossamer makes neural networks sparse while they train."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

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

_PARTS = ("data", "exports", "methods", "models", "recipes", "side_by_side", "speed", "stored", "training")

if not TYPE_CHECKING:  # else every misspelt name would pass for a part

    def __getattr__(name: str) -> ModuleType:
        """`import gossamer` is enough for `gossamer.models.create`; a part is imported when it is first asked for."""
        if name in _PARTS:
            return import_module(f"gossamer.{name}")
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
