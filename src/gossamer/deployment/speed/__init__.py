"""The speed-up of a sparse network on this machine, compared with the usual dense engines."""

from gossamer.deployment.speed.engines import ENGINES
from gossamer.deployment.speed.measure import measure
from gossamer.deployment.speed.report import Case, Row, SpeedReport

__all__ = ["ENGINES", "Case", "Row", "SpeedReport", "measure"]
