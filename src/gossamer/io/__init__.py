"""The small sparse file: `save` and `load`."""

from gossamer.io.sparse_file import load, save

__all__ = ["load", "save"]
