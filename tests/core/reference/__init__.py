"""A second implementation of the method, in NumPy alone, that the library is compared with.

It is written from the paper's equations and imports nothing of the library, so that one mistake cannot be
made in both places at once. `scl` holds the equations, `mlp` a small network trained whole with them.
"""
