"""A sparse model made smaller: whatever the zeros have cut off is taken out of the tensors."""

from gossamer.deployment.compaction.compact import CompactionError, compact
from gossamer.deployment.compaction.summary import Compaction, CompactionReport, Layer, Stayed
from gossamer.deployment.graph import UntraceableError

__all__ = ["Compaction", "CompactionError", "CompactionReport", "Layer", "Stayed", "UntraceableError", "compact"]
