"""The laboratory: models, data sets, recipes, training, batched training of many runs, comparisons, results pages."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

_PARTS = ("batched", "data", "models", "recipes", "reproduce", "results", "model_files", "training")

if not TYPE_CHECKING:  # otherwise type checkers would accept every misspelt name

    def __getattr__(name: str) -> ModuleType:
        """`gossamer.lab.models.create` works after `import gossamer`: parts are imported when they are first used."""
        if name in _PARTS:
            return import_module(f"gossamer.lab.{name}")
        raise AttributeError(f"module 'gossamer.lab' has no attribute {name!r}")
