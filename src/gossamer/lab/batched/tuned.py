"""The best settings of every method: those of its row in the screening of docs/results.md.

Chosen on held-out images for ResNet-20 on CIFAR-10 at 95 % sparsity in 50 epochs, out of the full weight decay, one
that falls with the square root of the density, and the variants of benchmarks/all_methods.py.
"""

from collections.abc import Mapping
from types import MappingProxyType

_FALLING = "weight_decay_power=0.5"
_BETTER = {
    "dpf": _FALLING,
    "gradual": _FALLING,
    "gradual_per_layer": _FALLING,
    "one_shot": _FALLING,
    "surgery": _FALLING,
    "lottery": f"{_FALLING},rewind=weights",
    "str": _FALLING,
    "l0": f"{_FALLING},gate_lr=0.02",
    "autoprune": f"{_FALLING},mask_lr=0.003",
    "hyperflux": f"{_FALLING},pruned_grad_scale=1",
}
TUNED: Mapping[str, str] = MappingProxyType({name: f"{name}:{settings}" for name, settings in _BETTER.items()})


def tuned(method: str) -> str:
    """A method with its best settings, which may be its defaults."""
    return TUNED.get(method, method)
