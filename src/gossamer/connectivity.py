"""The masks of a network while they train: w̃, m̃ and m of its weights, and what a step does to them.

`Sparsifier` decides when; this decides nothing and knows no optimizer. The parameters of the model are shown w = w̃ ⊙ m,
except between `hide` and `keep`, when they hold w̃ for the optimizer to update.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import method
from gossamer.budget import meet_budget_
from gossamer.health import HealthLog
from gossamer.learning import learn_masks_
from gossamer.sample_scales import SampleScales
from gossamer.select import Weight
from gossamer.settings import Settings
from gossamer.sharding import local, sharded_like
from gossamer.store import Store
from gossamer.target import Target


class Connectivity:
    """Weight variables, mask variables and masks of the selected weights of a model."""

    def __init__(
        self,
        weights: Sequence[Weight],
        settings: Settings,
        target: Target,
        *,
        log: tuple[int, int],
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """`log` is the first step of the mask phases and their number; `group` the processes that share each tensor,
        `replicas` those that hold copies of the model and a part of each batch."""
        self.weights, self._settings, self._target, self._group = weights, settings, target, group
        self._parameters = [weight.parameter for weight in weights]
        self.names = [weight.name for weight in weights]
        self.total = sum(parameter.numel() for parameter in self._parameters)
        with torch.no_grad():
            self.store = store = Store(self._parameters, momentum=settings.mask_momentum > 0)
            torch._foreach_copy_(store.dense_views, [local(parameter) for parameter in self._parameters])
            if settings.start == "magnitude":
                torch.abs(store.dense, out=store.mask_variable)
                store.mask_variable.clamp_min_(torch.finfo(store.dtype).tiny)
            else:
                store.mask_variable.fill_(settings.start_value)
            self._floors = floors(store.sizes, settings.floor)
            self._protected = store.strongest(self._floors) if sum(self._floors) else None
        self._costs = target.costs_on(store.sizes, store.device)
        self.log = HealthLog(len(weights), *log, store.device)
        self._samples = None
        if settings.scale == "per_sample":
            self._samples = SampleScales(weights, dict(zip(self.names, store.dense_views, strict=True)), replicas)
        # Scalars on the device, so that a captured step reads what was set before its replay.
        self.learning_rate = torch.zeros((), dtype=store.dtype, device=store.device)
        self.budget = torch.zeros((), dtype=torch.int64, device=store.device)

    def set(self, *, learning_rate: float, budget: int, step: int) -> None:
        """What the next step of mask learning shall use."""
        self.learning_rate.fill_(learning_rate)
        self.budget.fill_(budget)
        self.log.set_step(step)

    def choose_floor(self) -> None:
        """Choose again which connections of each tensor the floor keeps: those with the largest mask variables."""
        if self._protected is not None:
            self._protected.copy_(self.store.strongest(self._floors))

    def count(self) -> int:
        """Connections that are left, over all processes."""
        return int(self._over_shards(torch.count_nonzero(self.store.mask)))

    # --- a step ---

    def learn(
        self, *, unscale: Tensor | None = None, found_inf: Tensor | None = None, loss_scale: float | None = None
    ) -> None:
        """Update mask variables from the gradients of the parameters, then the masks. Parameters are left undefined:
        `hide` or `show` has to follow. `unscale` is what the gradients have still to be multiplied by; `loss_scale`
        what the loss was multiplied by, which only the per-sample scale needs to know."""
        store = self.store
        outcome = learn_masks_(
            store,
            self.weights,
            [None if parameter.grad is None else local(parameter.grad) for parameter in self._parameters],
            [local(parameter) for parameter in self._parameters],
            self._settings,
            decay=self._target.decay or 0.0,
            learning_rate=self.learning_rate,
            connections=self.total,
            unscale=unscale,
            found_inf=found_inf,
            moments=None if self._samples is None else self._samples.take(loss_scale),
            group=self._group,
        )
        store.previous.copy_(store.mask)
        decay = self.set_masks()
        counts = torch.stack([torch.count_nonzero(store.mask), torch.count_nonzero(store.mask != store.previous)])
        counts = self._over_shards(counts)
        self.log.write(
            decay=decay,
            connections=counts[0],
            flips=counts[1],
            squares=outcome.sums_of_squares,
            healthy=outcome.healthy,
        )

    def set_masks(self) -> Tensor:
        """Set the masks by the budget or, with a fixed λ1, by the sign of the mask variables. Returns λ1."""
        store = self.store
        if self._target.decay is None:
            threshold = meet_budget_(
                store.mask_variable,
                store.mask,
                self.budget,
                protected=self._protected,
                costs=self._costs,
                group=self._group,
            )
            return torch.where(self.learning_rate > 0, threshold / self.learning_rate, 0.0)
        if self._protected is not None:
            kept = store.mask_variable.index_select(0, self._protected).clamp_min_(torch.finfo(store.dtype).tiny)
            store.mask_variable.index_copy_(0, self._protected, kept)
        torch.gt(store.mask_variable, 0, out=store.mask)
        return torch.full((), self._target.decay, device=store.device)

    def hide(self, indices: Sequence[int]) -> None:
        """Put w̃ into the parameters, for the optimizer to update."""
        torch._foreach_copy_(
            [local(self._parameters[index]) for index in indices], [self.store.dense_views[index] for index in indices]
        )

    def keep(self, indices: Sequence[int]) -> None:
        """Keep what the parameters hold as w̃."""
        torch._foreach_copy_(
            [self.store.dense_views[index] for index in indices], [local(self._parameters[index]) for index in indices]
        )

    def show(self, indices: Sequence[int] | None = None) -> None:
        """Leave w = w̃ ⊙ m in the parameters; once frozen, zero what is masked in what they hold."""
        store = self.store
        indices = range(len(self.weights)) if indices is None else indices
        tensors = [local(self._parameters[index]) for index in indices]
        if store.device.type == "cpu":
            for index, tensor in zip(indices, tensors, strict=True):
                source = tensor if store.frozen else store.dense_views[index].to(tensor.dtype)
                torch.where(store.mask_views[index], source, tensor.new_zeros(()), out=tensor)
            return
        dense = store.dense
        if store.frozen:
            dense = store.vector()
            views = store.views(dense)
            torch._foreach_copy_([views[index] for index in indices], tensors)
        shown = store.views(method.masked_weight(dense, store.mask))
        torch._foreach_copy_(tensors, [shown[index] for index in indices])

    def freeze(self) -> None:
        """Masks stay as they are from now on."""
        if not self.store.frozen:
            self.store.freeze()
        if self._samples is not None:
            self._samples.close()

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        store = self.store
        state: dict[str, Any] = {"mask": self._named(store.mask_views), "log": self.log.state()}
        if not store.frozen:
            state["dense"] = self._named(store.dense_views)
            state["mask_variable"] = self._named(store.mask_variable_views)
            if store.velocity is not None:
                state["velocity"] = self._named(store.views(store.velocity))
            if self._protected is not None:
                state["protected"] = self._protected.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        store = self.store
        self._fill(store.mask_views, state["mask"])
        self.log.load(state["log"])
        if "mask_variable" not in state:
            self.freeze()
            return
        self._fill(store.dense_views, state["dense"])
        self._fill(store.mask_variable_views, state["mask_variable"])
        if store.velocity is not None:
            self._fill(store.views(store.velocity), state["velocity"])
        if self._protected is not None:
            self._protected.copy_(state["protected"])

    def _named(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        triples = zip(self.names, self._parameters, views, strict=True)
        return {name: sharded_like(view.clone(), parameter) for name, parameter, view in triples}

    def _fill(self, views: Sequence[Tensor], named: dict[str, Tensor]) -> None:
        for name, view in zip(self.names, views, strict=True):
            view.copy_(local(named[name]))

    def _over_shards(self, counts: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        return counts


def floors(sizes: Sequence[int], share: float) -> list[int]:
    """How many connections of each tensor are never removed."""
    return [min(size, max(1, math.ceil(share * size))) if share else 0 for size in sizes]
