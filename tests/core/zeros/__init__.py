"""Zeros are never lost: every way a model is trained, copied, saved or exported, over a table of networks."""
