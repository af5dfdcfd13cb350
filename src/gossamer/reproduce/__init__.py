"""Exhibits of the paper that need no trained network: each a function that writes its runs and returns them."""
