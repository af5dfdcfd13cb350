"""Training of a run from its frozen description: one loop, crash-safe checkpoints, reproducible results."""

from gossamer.lab.training.loop import train
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted
from gossamer.lab.training.step import LossNotFinite

__all__ = ["Interrupted", "LossNotFinite", "Run", "train"]
