"""Training runs from a frozen description: one loop, checkpoints that survive a kill, results one can believe."""

from gossamer.training.loop import Interrupted, train
from gossamer.training.run import Run
from gossamer.training.step import LossNotFinite

__all__ = ["Interrupted", "LossNotFinite", "Run", "train"]
