"""Gossamer makes neural networks sparse while they train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.distillation import distil
from gossamer.io import load, save
from gossamer.prunable import select
from gossamer.report import report
from gossamer.sparsifier import Sparsifier
from gossamer.tune import tune_decay
from gossamer.verify import verify
from gossamer.zeros import impose, keep_zeros, masks

if TYPE_CHECKING:
    from gossamer.deployment import compact, deploy

__version__ = "0.1.0"

__all__ = [
    "Sparsifier",
    "compact",
    "deploy",
    "distil",
    "impose",
    "keep_zeros",
    "load",
    "masks",
    "report",
    "save",
    "select",
    "tune_decay",
    "verify",
]

_PARTS = ("deployment", "io", "lab", "methods")
_DEPLOYMENT = ("compact", "deploy")

if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute name

    def __getattr__(name: str) -> Any:
        """Import deployment and the laboratory on first use, so that `import gossamer` stays light."""
        if name in _PARTS:
            return import_module(f"gossamer.{name}")
        if name in _DEPLOYMENT:
            return getattr(import_module("gossamer.deployment"), name)
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
