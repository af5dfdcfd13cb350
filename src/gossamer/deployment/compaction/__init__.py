"""Compaction: removing features that zero weights have disconnected, which makes a sparse model smaller."""

from gossamer.deployment.compaction.compact import CompactionError, compact
from gossamer.deployment.compaction.summary import Compaction, CompactionReport, Layer, Stayed
from gossamer.deployment.graph import UntraceableError

__all__ = ["Compaction", "CompactionError", "CompactionReport", "Layer", "Stayed", "UntraceableError", "compact"]
