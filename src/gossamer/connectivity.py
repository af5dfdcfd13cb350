"""The masks of a network while they train: w̃, m̃ and m of its weights, and what a step does to them.

`Sparsifier` decides when; this decides nothing and knows no optimizer. The parameters of the model are shown w = w̃ ⊙ m,
except between `hide` and `keep`, when they hold w̃ for the optimizer to update.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import method
from gossamer.budget import meet_budget_
from gossamer.diagnostics import Health, HealthLog
from gossamer.learning import Moves, damp_removed_, has_kernels, learn_masks_
from gossamer.per_sample.scales import SampleScales
from gossamer.prunable import Weight
from gossamer.settings import Settings
from gossamer.sharding import gathered, local, sharded_like
from gossamer.state import Store
from gossamer.target import Target

_PIECE = 1 << 18  # connections treated together on a CPU


class Connectivity:
    """Weight variables, mask variables and masks of the selected weights of a model."""

    def __init__(
        self,
        weights: Sequence[Weight],
        settings: Settings,
        target: Target,
        *,
        first_step: int,
        mask_steps: int,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """Masks learn for `mask_steps` from `first_step` on; `group` is the processes that share each tensor,
        `replicas` those that hold copies of the model and a part of each batch."""
        self.weights, self._settings, self._target, self._group = weights, settings, target, group
        self._parameters = [weight.parameter for weight in weights]
        self.names = [weight.name for weight in weights]
        self.total = sum(parameter.numel() for parameter in self._parameters)
        self.store = store = Store(self._parameters, momentum=settings.mask_momentum > 0)
        self._floors = floors([parameter.numel() for parameter in self._parameters], settings.floor)
        self._protected: Tensor | None = None
        # Of |w̃|: below this level weights go, as far as their size counts; and its root mean square at the beginning.
        self._level = torch.zeros((), dtype=store.dtype, device=store.device)
        self._usual = torch.zeros_like(self._level)
        self.take_up()
        self._costs = target.costs_on(store.sizes, store.device)
        self.log = HealthLog(len(weights), first_step, mask_steps, store.device)
        self._samples = None
        if settings.scale == "per_sample":
            self._samples = SampleScales(weights, dict(zip(self.names, store.dense_views, strict=True)), replicas)
        # Scalars on the device, so that a captured step reads what was set before its replay.
        self.learning_rate = torch.zeros((), dtype=store.dtype, device=store.device)
        self.budget = torch.zeros((), dtype=torch.int64, device=store.device)
        self._met = torch.full_like(self.budget, target.total)  # the budget that the masks meet now
        self._threshold_size = 0.0  # of the last steps: the next one is seldom much larger

    @property
    def settled(self) -> dict[str, float]:
        """The learning rate of masks and what removed weights follow of their gradient, by the plan they began with."""
        asked = self._settings
        return method.settled(asked.mask_lr, asked.removed_gradient, steps=self.log.mask_steps, left=self._target.left)

    @property
    def _mask_lr(self) -> float:
        return self.settled["mask_lr"]

    @property
    def _removed(self) -> float:
        return self.settled["removed_gradient"]

    def take_up(self) -> None:
        """Begin from what the parameters hold now: w̃ is the weight, m̃ its start."""
        store, settings = self.store, self._settings
        with torch.no_grad():
            torch._foreach_copy_(store.dense_views, [local(parameter) for parameter in self._parameters])
            if settings.start == "magnitude":
                torch.abs(store.dense, out=store.mask_variable)
                store.mask_variable.clamp_min_(torch.finfo(store.dtype).tiny)
            else:
                store.mask_variable.fill_(settings.start_value)
            squares = torch.linalg.vector_norm(store.dense).square()
            self._usual.copy_((self._over_shards(squares) / self.total).sqrt())
            self._level.zero_()
            self._protected = store.strongest(self._floors, self._group) if sum(self._floors) else None

    def set(self, *, anneal: float, budget: int, step: int) -> None:
        """What the next step of mask learning shall use: `anneal` times its learning rate."""
        self._check_device()
        self.learning_rate.fill_(self._mask_lr * anneal)
        self.budget.fill_(budget)
        self.log.set_step(step)

    def choose_floor(self) -> None:
        """Choose again which connections of each tensor the floor keeps: those with the largest mask variables."""
        if self._protected is None:
            return
        strongest = self.store.strongest(self._floors, self._group)
        if self._group is None:
            self._protected.copy_(strongest)  # in place, where a captured step reads it
        else:
            self._protected = strongest  # a process has now more of them, now less

    def count(self) -> int:
        """Connections that are left, over all processes."""
        return int(self._over_shards(torch.count_nonzero(self.store.mask)))

    def masks(self) -> dict[str, Tensor]:
        """The masks as they are now, by name of the weight, sharded like it."""
        return self._named(self.store.mask_views)

    def health(self, step: int, steps_per_epoch: int | None, *, layers: bool) -> Health:
        """How mask learning has gone so far. For the layers it gathers what is sharded, one tensor at a time."""
        if not layers:
            return self.log.read((), (), (), step, steps_per_epoch)
        store = self.store
        masks = map(gathered, store.mask_views, self._parameters)
        margins: Iterable[float | None] = [None] * len(self.weights)
        if not store.frozen:
            variables = map(gathered, store.mask_variable_views, self._parameters)
            margins = (float(variable.abs().median()) for variable in variables)
        return self.log.read(self.weights, masks, margins, step, steps_per_epoch)

    # --- a step ---

    def learn(
        self,
        *,
        unscale: Tensor | None = None,
        found_inf: Tensor | None = None,
        loss_scale: float | None = None,
    ) -> None:
        """Update mask variables from the gradients of the parameters, then the masks. Leaves w̃ in the parameters, as
        `hide` does. `unscale` is what the gradients have still to be multiplied by; `loss_scale`
        what the loss was multiplied by, which only the per-sample scale needs to know."""
        store = self.store
        moves = Moves(
            learning_rate=self.learning_rate,
            decay=self._target.decay or 0.0,
            anchor=self._anchor(),
            caps=self._caps() if self._settings.anchor and self._settings.anchor_cap else None,
            removed=self._removed,
        )
        outcome = learn_masks_(
            store,
            self.weights,
            self._gradients(),
            [local(parameter) for parameter in self._parameters],
            self._settings,
            moves,
            connections=self.total,
            unscale=unscale,
            found_inf=found_inf,
            moments=None if self._samples is None else self._samples.take(loss_scale),
            group=self._group,
        )
        # Masks are sums of gradients and sizes, less this level.
        torch.where(outcome.healthy, self._level * (1.0 - moves.anchor), self._level, out=self._level)
        decay, flips = self.set_masks(outcome.healthy)
        by_count = self._target.decay is None and self._costs is None
        left = self._met if by_count else self._over_shards(torch.count_nonzero(store.mask))
        self.log.write(
            decay=decay,
            connections=left,
            flips=self._over_shards(flips),
            squares=outcome.sums_of_squares,
            healthy=outcome.healthy,
        )

    def _anchor(self) -> Tensor | float:
        """With a fixed λ1 the anchor comes down with the learning rate, as λ1's push does: else all masks return."""
        anchor = self._settings.anchor
        return anchor if self._target.decay is None else self.learning_rate * (anchor / self._mask_lr)

    def _caps(self) -> Tensor:
        """How far the size of a weight counts: where a feature has no connection that varies, batch norm multiplies the
        gradient of what was removed by hundreds, and giants would push out all others."""
        level = self._level.reshape(1)
        if self._costs is not None:
            level = level * self._costs.of_tensors()
        return torch.maximum(level, self._usual) * self._settings.anchor_cap

    def damp(self) -> None:
        """Leave removed weights their share of new gradients, as `learn` does."""
        damp_removed_(self.store, self._gradients(), self._removed)

    def _gradients(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else local(parameter.grad) for parameter in self._parameters]

    def cut_to_target(self) -> None:
        """Meet the final budget now, if no step has done so yet. It takes a look at the host."""
        if self._target.decay is None and not self.store.frozen and int(self._met) != self._target.final:
            self.learning_rate.zero_()
            self.budget.fill_(self._target.final)
            with torch.no_grad():
                self.set_masks()
                self.show()

    def set_masks(self, healthy: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Set the masks by the budget or, with a fixed λ1, by the sign of the mask variables. Returns λ1 and the
        number of masks that changed (in this process).

        After a step that was not healthy the budget stays where it was, and so do the masks.
        """
        store = self.store
        if self._target.decay is None:
            if healthy is None:
                self._met.copy_(self.budget)
            else:
                torch.where(healthy, self.budget, self._met, out=self._met)
            threshold, flips = meet_budget_(
                store.mask_variable,
                store.mask,
                self._met,
                protected=self._protected,
                costs=self._costs,
                group=self._group,
                reach=2 * self._threshold_size,
            )
            self._level.add_(threshold)
            if store.device.type == "cpu":
                self._threshold_size = max(abs(float(threshold)), 0.8 * self._threshold_size)
            if self._settings.anchor:  # such masks are pushed down however small their learning rate is by now
                return threshold / self._mask_lr, flips
            return torch.where(self.learning_rate > 0, threshold / self.learning_rate, 0.0), flips
        self._level.add_(self.learning_rate * self._target.decay)
        if self._protected is not None:
            kept = store.mask_variable.index_select(0, self._protected).clamp_min_(torch.finfo(store.dtype).tiny)
            store.mask_variable.index_copy_(0, self._protected, kept)
        before = store.mask.clone()
        torch.gt(store.mask_variable, 0, out=store.mask)
        decay = torch.full((), self._target.decay, device=store.device)
        return decay, torch.count_nonzero(before.bitwise_xor_(store.mask))

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

    def keep_and_show(self, indices: Sequence[int]) -> None:
        """Keep what the parameters hold as w̃, and leave w = w̃ ⊙ m in them."""
        self._check_device()
        store = self.store
        if self._shown_by_kernels(indices):
            return
        others = []
        for index in indices:
            tensor, dense = local(self._parameters[index]), store.dense_views[index]
            same_memory_order = tensor.dtype == dense.dtype and tensor.stride() == dense.stride()
            if store.device.type == "cpu" and same_memory_order:
                part = slice(store.offsets[index], store.offsets[index] + store.sizes[index])
                _keep_and_mask_(tensor.as_strided((tensor.numel(),), (1,)), store.dense[part], store.mask[part])
            else:
                others.append(index)
        if others:
            self.keep(others)
            self.show(others)

    def show(self, indices: Sequence[int] | None = None) -> None:
        """Leave w = w̃ ⊙ m in the parameters; once frozen, zero what is masked in what they hold."""
        self._check_device()
        store = self.store
        indices = range(len(self.weights)) if indices is None else indices
        if not indices or (store.frozen and self._shown_by_kernels(indices)):
            return
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

    def _shown_by_kernels(self, indices: Sequence[int]) -> bool:
        """Keep what the parameters hold, unless frozen, and mask it, in one pass of a GPU. False where it cannot."""
        if len(indices) < len(self._parameters):
            return False  # another optimizer has the rest
        tensors = [local(parameter) for parameter in self._parameters]
        if not has_kernels(self.store, tensors):
            return False
        from gossamer.learning_triton import show_on_gpu_  # needs Triton

        show_on_gpu_(self.store, tensors)
        return True

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
            state["budget"] = self._met.clone()
            state["sizes"] = torch.stack([self._level, self._usual])
            if store.velocity is not None:
                state["velocity"] = self._named(store.views(store.velocity))
            if self._protected is not None:
                protected = torch.zeros_like(store.mask)
                protected[self._protected] = True
                state["protected"] = self._named(store.views(protected))
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
        self._met.copy_(state["budget"])
        if "sizes" in state:  # not in those from before masks were anchored
            self._level.copy_(state["sizes"][0])
            self._usual.copy_(state["sizes"][1])
        if store.velocity is not None:
            self._fill(store.views(store.velocity), state["velocity"])
        if self._protected is not None:
            protected = torch.zeros_like(store.mask)
            self._fill(store.views(protected), state["protected"])
            self._protected = protected.nonzero().flatten()

    def _check_device(self) -> None:
        now, before = local(self._parameters[0]).device, self.store.mask.device
        if now != before:
            raise RuntimeError(
                f"the weights are on {now} now, but their masks on {before}: move the model before masks begin to "
                "learn, or save the states of model, optimizer and Sparsifier, build all three anew there, and load"
            )

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


def _keep_and_mask_(weights: Tensor, kept: Tensor, mask: Tensor) -> None:
    """Copy the vector `weights` to `kept` and zero what is masked in it, in pieces that stay in the cache.

    The masking multiplies the bits of the numbers, as integers, by 0 or 1: what is masked becomes a positive zero,
    whatever its sign was and even if it was not a number.
    """
    bits = torch.int32 if weights.element_size() == 4 else torch.int64
    for here, there, connected in zip(*(torch.split(vector, _PIECE) for vector in (weights, kept, mask)), strict=True):
        there.copy_(here)
        here.view(bits).mul_(connected)


def floors(sizes: Sequence[int], share: float) -> list[int]:
    """How many connections of each tensor are never removed."""
    return [min(size, max(1, math.ceil(share * size))) if share else 0 for size in sizes]
