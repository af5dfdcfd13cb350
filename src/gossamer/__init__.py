"""Gossamer makes neural networks sparse while they train."""

__version__ = "0.1.0"
