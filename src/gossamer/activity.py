"""How often each filter of a network is active: the share of its outputs that are positive, as ReLU would pass them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gossamer.methods.filters import norms_after


def outputs_of(model: nn.Module, names: Sequence[str]) -> tuple[tuple[nn.Module, int] | None, ...]:
    """For each weight of a convolution, the module whose output precedes its ReLU, and the axis of its channels counted
    from the last: the following batch norm or, if there is none, the convolution itself."""
    norms, found = norms_after(model), {}
    for name, module in model.named_modules():
        if isinstance(module, _ConvNd):
            followed = norms[name][1] if name in norms else module
            found[f"{name}.weight"] = followed, -1 - len(module.kernel_size)
    return tuple(found.get(name) for name in names)


class Activity:
    """Watches forward passes with hooks, and takes the mean over those since the last step."""

    def __init__(
        self,
        outputs: Sequence[tuple[nn.Module, int] | None],
        features: Sequence[int],
        like: Tensor,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """`features` are those of each weight, and the processes of `replicas` train copies of the model."""
        self._replicas, self._seen = replicas, False
        watched = [(*each, count) for each, count in zip(outputs, features, strict=True) if each is not None]
        self._shares = [like.new_zeros(count) for *_, count in watched]
        self._passes = [like.new_zeros(1) for _ in watched]
        self._handles = [
            module.register_forward_hook(_Hook(partial(self._count, index, axis)))
            for index, (module, axis, _) in enumerate(watched)
        ]

    def _count(self, index: int, axis: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return  # an evaluation
        self._seen = True
        shares = self._shares[index]
        positive = (output.detach() > 0).to(shares.dtype).movedim(axis, 0).flatten(1)
        shares.add_(positive.mean(1))
        self._passes[index].add_(1)

    def take(self) -> Tensor:
        """The share of positive outputs of each filter since the last call, over all processes: (1, filters)."""
        if not self._seen:
            raise RuntimeError(
                "the method counts active channels, but saw no forward pass of the model before this step: train the "
                "model that was given to the Sparsifier, not a copy"
            )
        shares = torch.cat(
            [share / passes.clamp_min(1) for share, passes in zip(self._shares, self._passes, strict=True)]
        )
        torch._foreach_zero_([*self._shares, *self._passes])
        if self._replicas is not None:
            dist.all_reduce(shares, group=self._replicas)
            shares /= dist.get_world_size(self._replicas)
        return shares[None]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that does nothing on a copied or pickled module: only the one that trains is watched."""

    def __init__(self, watch: Callable[..., None] | None = None) -> None:
        self._watch = None if watch is None else torch.compiler.disable(watch)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()

    def __call__(self, *call: Any) -> None:
        if self._watch is not None:
            self._watch(*call)
