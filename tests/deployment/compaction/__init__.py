"""Compaction: networks whose features were killed, by hand and at random."""
