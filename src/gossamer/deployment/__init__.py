"""From a sparse model to a fast one: compaction, a CPU runtime that skips zeros, exporters and speed measurements."""

from gossamer.deployment.compaction import compact
from gossamer.deployment.runtime import deploy

__all__ = ["compact", "deploy"]
