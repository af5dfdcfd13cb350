"""Training runs from a frozen description: one loop, checkpoints that survive a kill, results one can believe."""

from gossamer.training.loop import train
from gossamer.training.run import Run
from gossamer.training.step import LossNotFinite
from gossamer.training.stopping import Interrupted

__all__ = ["Interrupted", "LossNotFinite", "Run", "train"]
