"""Gossamer makes neural networks sparse while they train."""

from gossamer.keep_zeros import keep_zeros
from gossamer.sparsifier import Sparsifier
from gossamer.tune import tune_decay

__version__ = "0.1.0"

__all__ = ["Sparsifier", "keep_zeros", "tune_decay"]
