"""Training runs from a frozen description: one loop, checkpoints that survive a kill, results one can believe."""

from gossamer.training.loop import Interrupted, LossNotFinite, train
from gossamer.training.run import Run

__all__ = ["Interrupted", "LossNotFinite", "Run", "train"]
