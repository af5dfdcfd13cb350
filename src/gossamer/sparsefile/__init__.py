"""The parts of the small sparse file; ``gossamer.checkpoint`` is its front."""
