"""Training runs from a frozen description: one loop, checkpoints that survive a kill, results one can believe."""

from gossamer.lab.training.loop import train
from gossamer.lab.training.run import Run
from gossamer.lab.training.signals import Interrupted
from gossamer.lab.training.step import LossNotFinite

__all__ = ["Interrupted", "LossNotFinite", "Run", "train"]
