"""What a sparse network gains on this machine, against the engines that people run dense networks with."""

from gossamer.deployment.speed.engines import ENGINES
from gossamer.deployment.speed.measure import measure
from gossamer.deployment.speed.report import Case, Row, SpeedReport

__all__ = ["ENGINES", "Case", "Row", "SpeedReport", "measure"]
