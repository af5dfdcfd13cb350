"""The jobs of all tests here, by name."""

from typing import Any

from distributed.jobs import checkpointed, data_parallel, kept, refusals, resumed, sharded, shared_optimizer
from distributed.processes import Job
from gossamer.methods import METHODS

DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "sparsity": {"sparsity": 0.7},
    "flops": {"flops": 0.4},
    "decay": {"decay": 0.3},
    "per_sample": {"sparsity": 0.7, "scale": "per_sample"},
    "pattern": {"sparsity": 0.7, "pattern": "row"},
    "following": {"sparsity": 0.7, "mask_travel": 1.0, "fade": 3.0},
}
WHOLE = [name for name, method in METHODS.items() if not method.shardable]  # methods that need whole weights
# Every other method; those of filters on a network that has some.
DATA_PARALLEL |= {
    f"method {name}": {"method": name, "sparsity": 0.05 if method.structured else 0.7, "seed": 3}
    for name, method in METHODS.items()
    if name != "scl"
}
NETWORK = {f"method {name}": "filters" for name, method in METHODS.items() if method.structured}
SHARDED: dict[str, tuple[Any, ...]] = {
    "sparsity": ("mlp", {"sparsity": 0.7}),
    "floor": ("mlp", {"sparsity": 0.7, "min_density": 0.2}),
    "flops": ("conv", {"flops": 0.3}),
    "decay": ("mlp", {"decay": 0.3}),
    "features": ("conv", {"preset": "paper", "sparsity": 0.7, "warmup": "3it", "sparsify": "7it", "stabilise": "3it"}),
    "hybrid, two shards": ("mlp", {"sparsity": 0.7}, (1, 2)),
    "hybrid, two replicas": ("mlp", {"sparsity": 0.7}, (2, 1)),
    "momentum": ("mlp", {"sparsity": 0.7, "mask_momentum": 0.9}),
    "following": ("mlp", {"sparsity": 0.7, "mask_travel": 1.0, "fade": 3.0}),
    **{
        f"method {name}": ("mlp", {"method": name, "sparsity": 0.7})
        for name, method in METHODS.items()
        if method.shardable and name != "scl"
    },
}
RESUMED = {"sparsity": 0.7, "mask_momentum": 0.5}
CUTS = (2, 4, 7, 13)  # in all phases, and between two

JOBS: dict[str, Job] = {
    **{
        f"data parallel, {case}": (data_parallel, (NETWORK.get(case, "mlp"), options))
        for case, options in DATA_PARALLEL.items()
    },
    "shared optimizer": (shared_optimizer, ("mlp", {"sparsity": 0.7})),
    **{f"sharded, {case}": (sharded, arguments) for case, arguments in SHARDED.items()},
    "straight": (sharded, ("mlp", RESUMED)),
    **{f"resumed at {cut}": (resumed, ("mlp", cut, RESUMED)) for cut in CUTS},
    "checkpointed": (checkpointed, ("mlp", 7, RESUMED)),
    "kept": (kept, ("mlp",)),
    "refusals": (refusals, (WHOLE,)),
}
