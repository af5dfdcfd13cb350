"""The networks of the paper and its field: plain modules without masks."""

from gossamer.lab.models.registry import MODELS, ModelEntry, at_most, create, entry, example_input, names, table

__all__ = ["MODELS", "ModelEntry", "at_most", "create", "entry", "example_input", "names", "table"]
