"""Exhibits of the paper, each a function that writes its records and returns them."""
