"""Exact per-sample scales of the mask gradient, without storing per-sample gradients."""

from gossamer.per_sample.watcher import SampleMoments, refuse_unknown

__all__ = ["SampleMoments", "refuse_unknown"]
