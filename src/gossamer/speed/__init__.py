"""What a sparse network gains on this machine, against the engines that people run dense networks with."""

from gossamer.speed.engines import ENGINES
from gossamer.speed.measure import measure
from gossamer.speed.report import Case, Row, SpeedReport

__all__ = ["ENGINES", "Case", "Row", "SpeedReport", "measure"]
