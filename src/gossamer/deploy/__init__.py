"""Sparse networks made small and fast."""
