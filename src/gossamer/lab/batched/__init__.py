"""Many runs of one network trained at the same time on one device, as one stacked network.

Small networks do not fill a GPU: most of a step is the launching of kernels. Here the parameters of all runs are
stacked along a new first axis and the network is mapped over it (`torch.func.vmap`): a convolution of sixteen runs is
one grouped convolution, a batch norm one batch norm over sixteen times the channels, and the arithmetic of the
optimizer and of the methods is done on one matrix with a row for each run. The runs stay independent: each has its own
seed, method, target and settings, and gives what it would give alone, up to the rounding of the convolutions.
"""

from gossamer.lab.batched.grid import runs_of
from gossamer.lab.batched.sweeps import sweep

__all__ = ["runs_of", "sweep"]
