"""How sparse a model is: nonzeros, density and FLOPs of every tensor, on the terminal, as data, and as a page."""

from gossamer.report.counts import Report, report
from gossamer.report.rows import Row

__all__ = ["Report", "Row", "report"]
