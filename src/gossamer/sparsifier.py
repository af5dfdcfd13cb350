"""The main object of the library: it makes a model sparse through the steps of the model's own optimizer.

The modules of the model are not changed. Between steps, the parameters hold w = w̃ ⊙ m, so they are exactly sparse.
Around each step of the optimizer:

    before   the method updates the masks from the gradients; the parameters get w̃
    step     the optimizer updates w̃ with the gradient, which the method may have changed
    after    w̃ is saved, and the parameters get w = w̃ ⊙ m

The hooks run inside `optimizer.step()`, so gradients have already been accumulated, all-reduced, unscaled and clipped.
This file decides when; driver.py does the work, with any method of gossamer.methods.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from itertools import repeat
from numbers import Integral
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.activity import outputs_of
from gossamer.deprecation import renamed
from gossamer.diagnostics import Counters, Health, HealthLog
from gossamer.driver import Driver, not_finite
from gossamer.flops import positions
from gossamer.methods import METHODS, Method, Request, load
from gossamer.methods.base import min_nonzeros
from gossamer.methods.budgets import BudgetedMethod
from gossamer.methods.filters import norms_of
from gossamer.optimizers import (
    capturing,
    differentiates_gradients,
    evaluates,
    follow_modes,
    is_adaptive,
    is_nested,
    learning_rate,
    owned_by,
    uncompiled,
    unscaling,
    unwrapped,
)
from gossamer.patterns import Patterns, Shape, assign, described, target_of
from gossamer.per_sample.capture import check_layers
from gossamer.prunable import Use, Weight, select
from gossamer.schedule import Phase, Plan, leave_interval, make_plan
from gossamer.selectors import Selectors, clean_name, some
from gossamer.settings import choose
from gossamer.sharding import is_sharded, local, shard_group
from gossamer.state import common_device, make_layout
from gossamer.state_dict import FORMAT, check_state, check_tensors
from gossamer.target import make_target
from gossamer.watch import watch, watch_zeros
from gossamer.zeros import impose, share_of_zeros

_SPARSE_ALREADY = 0.05  # sparsity from which on the start of a plan looks like a run that should have been resumed
_WARN_EVERY = 64  # steps between two reads of the number of steps with non-finite gradients, on an accelerator
# Each weight has at most one Sparsifier: two would overwrite each other's masks.
_CLAIMS: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()  # Sparsifier -> ids of its parameters


class Sparsifier:
    """Makes a model sparse while its optimizer trains the weights.

    `method` is the name of a method (`gossamer.methods`), "my_module:MyMethod", or a class. The default, "scl", learns
    its masks. The target is one of `sparsity` (fraction of zeros, met exactly), `flops` (fraction of the multiply-adds
    to keep, met exactly; needs `example_input`) and `decay` (the paper's fixed λ1; `leave_at` ends the sparsify phase
    as soon as that sparsity is reached). `total_steps` is the number of optimizer steps of the whole run; the phases
    divide it. `pattern` groups weights: "2:4" (any N:M), "block:1x4" (any size), "row" or "filter", for all tensors it
    fits, or a mapping from name patterns to patterns. N:M fixes the sparsity of its tensors, so `sparsity` may be
    omitted. Durations in epochs need `steps_per_epoch`. `include` and `exclude` select tensors by name pattern,
    module class or module. `seed` is for methods that draw random numbers. `loss_scale=scaler.get_scale` is needed if
    a scaled loss is combined with scale="per_sample". `learning_rate(plan, step)` is for methods that rewind the
    learning rate after pruning. Phases and settings of the method are keyword arguments that override the `preset`.

    If a step is captured in a CUDA graph, call `advance()` before each replay, and capture again when `phase` changes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        total_steps: int,
        method: str | type[Method[Any]] = "scl",
        sparsity: float | None = None,
        flops: float | None = None,
        decay: float | None = None,
        leave_at: float | None = None,
        pattern: Patterns = None,
        steps_per_epoch: int | None = None,
        preset: str = "default",
        seed: int = 0,
        include: Selectors = None,
        exclude: Selectors = None,
        example_input: Any = None,
        loss_scale: Callable[[], float] | None = None,
        learning_rate: Callable[[Plan, int], float] | None = None,
        **settings: Any,
    ) -> None:
        self._kind = load(method) if isinstance(method, str) else method
        if not (isinstance(cast(object, self._kind), type) and issubclass(self._kind, Method)):
            raise TypeError(
                f"expected method to be a name, such as 'scl', or a subclass of gossamer.methods.Method, got {method!r}"
            )
        if not isinstance(cast(object, seed), Integral) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"expected seed to be a whole number of at most 64 bits, got {seed!r}")
        # Names lack the prefixes of wrappers, so that masks and states fit the model however it is wrapped.
        selected = select(model, include=include, exclude=exclude)
        self.weights: tuple[Weight, ...] = tuple(
            replace(weight, name=clean_name(weight.name, model)) for weight in selected
        )
        if include is None and exclude is None:
            _warn_of_frozen(model, self.weights)
        optimizers = [unwrapped(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
        # An optimizer that updates none of the weights (AdamW next to Muon, say) is ignored.
        self._owned = [(owner, indices) for owner, indices in owned_by(optimizers, self.weights) if indices]
        adaptive = any(is_adaptive(owner) for owner, _ in self._owned) and (flops, decay, pattern) == (None, None, None)
        self.phases, self.settings = choose(self._kind, preset, settings, adaptive=adaptive)
        self._group = shard_group([weight.parameter for weight in self.weights])
        self._replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
        _check_weights(
            self.weights,
            needs_samples=self._kind.needs_samples(self.settings),
            sharded=self._group is not None,
            replicated=self._replicas is not None,
        )
        shapes = [Shape.of_weight(weight) for weight in self.weights]
        self._patterns = assign(pattern, shapes)
        self._check_kind(flops, decay)
        plan = make_plan(
            total_steps,
            warmup=self.phases.warmup,
            sparsify=self.phases.sparsify,
            stabilise=self.phases.stabilise,
            steps_per_epoch=steps_per_epoch,
        )
        self.plan = self._kind.phases(plan)
        sizes = [weight.parameter.numel() for weight in self.weights]
        costs = None
        if flops is not None and example_input is not None:
            found = positions(model, self.weights, example_input)
            costs = [found[weight.name] for weight in self.weights]
        floor = self.phases.min_density if issubclass(self._kind, BudgetedMethod) else 0.0
        asked: dict[str, Any] = {"sparsity": sparsity, "flops": flops, "decay": decay, "positions": costs}
        if self._patterns is None:
            self._target = make_target(sizes, floors=min_nonzeros(sizes, floor), **asked)
        else:
            self._target = target_of(self._patterns, shapes, min_density=floor, **asked)
        if leave_at is not None and decay is None:
            raise ValueError(
                "leave_at= requires decay=: a sparsity= or flops= budget is met at the end of the sparsify phase"
            )
        if leave_at is not None and not 0 < leave_at < 1:
            raise ValueError(f"expected leave_at to be a sparsity between 0 and 1, such as 0.94, got {leave_at}")
        self._leave_at, self._loss_scale, self._steps_per_epoch = leave_at, loss_scale, steps_per_epoch
        self._learning_rate = learning_rate if self._kind.rewinds else None
        self._total, self._epoch = sum(sizes), steps_per_epoch or total_steps
        self._request: Request[Any] = Request(sparsity or 0.0, int(seed), self.settings, self._target, self._patterns)
        taken = {id(weight.parameter) for weight in self.weights}
        others = [(name, each) for name, each in model.named_parameters() if id(each) not in taken]
        self._model: nn.Module | None = model
        self._others = others
        sizes_of_others = [(name, parameter.numel()) for name, parameter in others]
        self._norms = norms_of(model, [weight.name for weight in selected], sizes_of_others)
        self._outputs = outputs_of(model, [weight.name for weight in selected]) if self._kind.observes else ()
        self._kind.check(make_layout(self.weights, any_order=self._kind.any_order, norms=self._norms), self._request)
        self._driver: Driver | None = None  # created when masks begin to train
        self._warned_of_skipped = 0
        self._topology_done = 0  # the step of the last topology update
        self._started = False  # whether this object has taken its first step
        self._left: list[int] | None = None  # version counters of the weights after the last mask step
        self._ahead: list[int] = []  # weights whose optimizer stepped before the first one did
        self.step, self.in_step = 0, False
        self.phase = self.plan.at(0).phase
        _claim(self, self.weights)
        watch(self, self.weights)
        before, after = uncompiled(self._before_step), uncompiled(self._after_step)
        self._handles = [each.register_step_pre_hook(before) for each, _ in self._owned]
        self._handles += [each.register_step_post_hook(after) for each, _ in self._owned]
        self._modes = [follow_modes(each, uncompiled(self._after_change_of_mode)) for each, _ in self._owned]
        if self.phase.masks_train and not self._on_meta:
            self._begin()

    def _check_kind(self, flops: float | None, decay: float | None) -> None:
        name = self._kind.name
        if self._group is not None and not self._kind.shardable:
            raise ValueError(
                f"method={name!r} needs whole weights in every process, got {self.weights[0].name} in shards: use DDP, "
                "or a method that supports shards, such as method='scl'"
            )
        if self._patterns is not None and not self._kind.patterned:
            able = ", ".join(each for each, method in METHODS.items() if method.patterned)
            raise ValueError(f"method={name!r} does not support pattern=: the methods that do are {able}")
        if self._patterns is not None and self._group is not None:
            raise ValueError(
                f"pattern= needs whole weights in every process, got {self.weights[0].name} in shards: use DDP, or "
                "omit pattern="
            )
        if not self._kind.solves_targets and (flops is not None or decay is not None):
            raise ValueError(f"method={name!r} supports only sparsity=: flops= and decay= need method='scl'")

    @property
    def _on_meta(self) -> bool:
        return self.weights[0].parameter.is_meta  # like all of them

    def _check_values(self) -> None:
        if self._on_meta:
            raise RuntimeError(
                f"expected weights with values, but {self.weights[0].name} is on the meta device, where a network can "
                "be planned but not trained: give the model values (model.to_empty and load_state_dict), then build "
                "the optimizer and the Sparsifier"
            )

    # --- properties and diagnostics ---

    @property
    def nonzeros(self) -> int:
        """The number of kept weights. With sharded weights, all processes have to call it."""
        return self._total if self._driver is None else self._driver.count()

    connections = renamed("connections", "nonzeros")

    @property
    def sparsity(self) -> float:
        """The fraction of the weights that is pruned."""
        return 1.0 - self.nonzeros / self._total

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks by weight name: True for kept weights. Sharded like the weights."""
        if self._driver is not None:
            return self._driver.masks()
        return {weight.name: torch.ones_like(weight.parameter, dtype=torch.bool) for weight in self.weights}

    @property
    def resolved_settings(self) -> dict[str, float]:
        """The values of settings that default to None and are derived, such as the learning rate of the masks."""
        steps = self.plan.sparsify + self.plan.stabilise
        if self._driver is not None:
            steps = self._driver.log.mask_steps  # of the plan at the time when masks began to train
        chosen = self._kind.resolve(self.settings, mask_steps=steps, density=self._target.density)
        derived = [field.name for field in fields(chosen) if field.default is None]
        return {name: getattr(chosen, name) for name in derived if getattr(chosen, name) is not None}

    settled = renamed("settled", "resolved_settings")

    def health(self, *, layers: bool = True) -> Health:
        """The progress of mask learning; cheap without `layers`. With sharded weights, call it in all processes."""
        if self._driver is None:
            log = HealthLog(len(self.weights), self.plan.warmup, 1, torch.device("cpu"))
            weights = self.weights if layers else ()
            masks = (torch.ones(weight.parameter.shape, dtype=torch.bool) for weight in weights)
            return log.read(weights, masks, [None] * len(weights), self.step, self._steps_per_epoch)
        return self._driver.health(self.step, self._steps_per_epoch, layers=layers)

    def metrics(self) -> dict[str, float]:
        """A flat dict of floats to log in every step, in any phase. It is cheap to compute.

        The keys are `step`, `phase` (0 warm-up, 1 sparsify, 2 stabilise, 3 fine-tune, 4 finished), `sparsity`,
        `density`, the target (`target_sparsity`, or `target_flops`, the fraction to keep), `decay` (λ1), `flips` (the
        number of mask changes so far) and `skipped_steps` (steps in which masks did not learn because gradients were
        not finite). `decay`, `flips` and `skipped_steps` are 0 for methods that do not report them.

        It does not wait for an accelerator: while masks train, the figures are those of the previous call. If a method
        does not report its nonzeros, they are counted, which waits for the device; with sharded weights, all processes
        then have to call it.
        """
        latest = Counters(0.0, self._total, 0, 0) if self._driver is None else self._driver.counters()
        current = latest.nonzeros / self._total
        found = {
            "step": float(self.step),
            "phase": float(list(Phase).index(self.phase)),
            "sparsity": 1.0 - current,
            "density": current,
            "decay": latest.decay,
            "flips": float(latest.flips),
            "skipped_steps": float(latest.skipped),
        }
        density = self._target.density
        if density is not None:
            found |= {"target_flops": density} if self._target.costs else {"target_sparsity": 1.0 - density}
        return found

    def __repr__(self) -> str:
        """A summary in several lines: target, phases, progress and tensors."""
        lengths = {
            Phase.WARMUP: self.plan.warmup,
            Phase.SPARSIFY: self.plan.sparsify,
            Phase.STABILISE: self.plan.stabilise,
            Phase.FINETUNE: self.plan.finetune,
        }
        progress = f"step {self.step:,} of {self.plan.total:,}, {self.phase}"
        if self._group is None:  # otherwise, the count needs all processes
            progress += f", {self.sparsity:.2%} zeros"
        tensors = [f"{weight.name} {'×'.join(map(str, weight.parameter.shape))}" for weight in self.weights]
        lines = [
            f"Sparsifier(method={self._kind.name!r})",
            f"target    {self._target}",
            f"phases    {', '.join(f'{phase} {steps:,}' for phase, steps in lengths.items())} steps",
            f"progress  {progress}",
            f"tensors   {some(tensors)}",
        ]
        if self._patterns is not None:
            lines.append(f"pattern   {described(self._patterns, [weight.name for weight in self.weights])}")
        return "\n  ".join(lines)

    # --- the steps ---

    def __enter__(self) -> "Sparsifier":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Finish, unless an exception leaves the block; the run can then still be saved or resumed."""
        if kind is None:
            self.finish()

    def advance(self) -> Phase:
        """Advance the plan by a step. `optimizer.step()` does this itself, unless it is replayed from a CUDA graph."""
        if self.phase is Phase.FINISHED:
            raise RuntimeError("finish() was called: create a new Sparsifier to continue, or use keep_zeros()")
        self._check_values()
        if self._leave_at is not None:
            self._leave_if_reached(self._leave_at)
        moment = self.plan.at(self.step)
        if not self._started:
            self._check_finite("the run begins with")
            self._check_gradients()
        if not self._started or moment.phase is not self.phase:
            self._check_model()
            self._started = True
        self._warn_of_unplanned_steps()
        self._warn_of_skipped_steps(at_last=not moment.phase.masks_train)
        with torch.no_grad():
            self._update_topology()  # after a replayed step
            if moment.phase.masks_train:
                driver = self._begin()
                if self.step == self.plan.warmup:
                    driver.restart_if_moved()
                    driver.check_finite()
                driver.prepare(self.step)
            elif self._driver is not None:
                self._driver.finalize()
        self.phase, self.step = moment.phase, self.step + 1
        return self.phase

    def finish(self) -> None:
        """Remove the hooks. The model is then plain and exactly as sparse as requested.

        If the run ends before its plan, a warning is given, and the masks are cut to the target at once (with a fixed
        `decay`, they stay as they are). Raises an error, before anything else, if the model no longer holds the
        parameters that were made sparse.
        """
        if self.phase is Phase.FINISHED:
            return
        self._check_values()
        self._check_model()
        self._check_weights_of_last_step()
        early = self.plan.at(self.step).phase is not Phase.FINETUNE
        if early:
            budget = self._target.decay is None
            warnings.warn(
                f"finish() after {self.step} of {self.plan.total} steps, in the {self.phase} phase: the masks "
                + ("are cut to the target now, without further training. " if budget else "stay as they are now. ")
                + "Pass the true total_steps to run all phases",
                stacklevel=2,
            )
            if budget:
                self._begin()
        self._warn_of_skipped_steps(at_last=True)
        if self._driver is not None:
            with torch.no_grad():
                self._driver.finalize()
                self._driver.apply_masks()  # in case a step was interrupted
        self._forget_pruned(~self._driver.mask if self._driver is not None else None)
        watch_zeros(self.weights)
        try:
            self._check_finite("the run ended with")
        finally:
            self._remove_hooks()

    def detach(self) -> None:
        """Remove the hooks and discard the masks, so that the run can start again with a new Sparsifier.

        The weights stay as they are. Does nothing after `finish()`.
        """
        if self.phase is Phase.FINISHED:
            return
        if self._driver is not None:
            self._driver.freeze()
            self._driver = None
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        for modes in self._modes:
            modes.remove()
        _CLAIMS.pop(self, None)
        self.phase = Phase.FINISHED
        # Release training state, so that a finished object can be copied and pickled.
        self._handles, self._modes, self._owned, self._others, self._model = [], [], [], [], None
        self._outputs = ()
        self._loss_scale = self._learning_rate = self._replicas = None

    def _check_model(self) -> None:
        """Raise if parameters were replaced, as their zeros are no longer in the model."""
        held = {id(parameter) for parameter in self._model.parameters()} if self._model is not None else set()
        lost = [
            weight.name
            for weight in self.weights
            if not is_sharded(weight.parameter)  # FSDP2 temporarily replaces them with gathered weights
            and (id(weight.parameter) not in held or any(map(_is_replaced, weight.uses, repeat(weight.parameter))))
        ]
        if lost:
            raise RuntimeError(
                f"the parameter {', '.join(lost[:3])} of the model is not the one that was made sparse, so its zeros "
                "are lost: replace layers before creating the Sparsifier, or use impose(model) to apply the masks to "
                "the new ones"
            )

    def _check_weights_of_last_step(self) -> None:
        """Raise if the model holds other weights than the last step left, such as those of an earlier checkpoint."""
        if wrong := self._changed_weights():
            raise RuntimeError(
                f"{wrong} changed since the last step: an earlier checkpoint was loaded (load_best_model_at_end), or "
                "averaged weights were put in. The final masks do not fit such weights. Load the weights of the last "
                "step, and choose the best checkpoint among those of the fine-tune phase alone; or, to prune these "
                "weights by the masks of now, call sparsifier.impose(model) before finish()"
            )

    def _changed_weights(self) -> str:
        if self._driver is None or self.in_step or any(evaluates(owner) for owner, _ in self._owned):
            return ""  # a step that was interrupted is repaired
        return self._driver.changed_since_last_step()

    def weights_changed(self) -> bool:
        """Whether the model holds other weights than the last step left, such as averages or an earlier checkpoint."""
        return bool(self._changed_weights())

    def restore_weights(self) -> None:
        """Put the weights of the last step back, under the masks. Once masks are final, only the zeros come back."""
        if self._driver is not None and self.phase is not Phase.WARMUP:
            with torch.no_grad():
                self._driver.apply_masks()

    def _check_finite(self, when: str) -> None:
        """Raise if a parameter in training is NaN or infinite. Synchronizes with the device."""
        named = [(weight.name, weight.parameter) for weight in self.weights]
        named += [(name, parameter) for name, parameter in self._others if _is_plain(parameter)]
        wrong = not_finite((name, local(parameter)) for name, parameter in named)
        if wrong:
            raise RuntimeError(
                f"{when} parameters that are not finite (infinite or NaN): {some(wrong)}. If it has diverged, train "
                "again with a smaller learning rate or with gradient clipping"
            )

    def _check_gradients(self) -> None:
        """Raise for optimizers that differentiate gradients in their step, when the masks have changed the weights."""
        for optimizer, _ in self._owned:
            if differentiates_gradients(optimizer):
                raise RuntimeError(
                    f"the gradients for {type(optimizer).__name__} have a graph (backward(create_graph=True)), but "
                    "optimizers that differentiate them in step(), such as AdaHessian, are not supported: use a "
                    "first-order optimizer, without create_graph=True"
                )

    def _check_order(self) -> None:
        """Raise if optimizers stepped before the first one, and their gradients were cleared."""
        cleared = [self.weights[index].name for index in self._ahead if self.weights[index].parameter.grad is None]
        self._ahead.clear()
        if cleared:
            raise RuntimeError(
                f"the gradients of {some(cleared)} are gone, as their optimizer stepped before the first one of the "
                "list, when masks learn from all gradients: take all steps after the backward pass, in the order of "
                "the list, and clear the gradients after them. Optimizers that step inside the backward pass are not "
                "supported"
            )

    def impose(self, other: nn.Module) -> None:
        """Apply the masks to another model with the same names, such as an average of the weights."""
        impose(other, self.masks)

    def _begin(self) -> Driver:
        """Start training the masks, if they do not train yet."""
        if self._driver is None:
            with torch.no_grad():
                self._driver = self._make_driver(self.plan)
        return self._driver

    def _make_driver(self, plan: Plan, *, resume: bool = False) -> Driver:
        return Driver(
            self.weights,
            self._kind,
            self._request,
            plan,
            epoch=self._epoch,
            min_density=self.phases.min_density,
            others=[parameter for _, parameter in self._others],
            norms=self._norms,
            outputs=self._outputs,
            group=self._group,
            replicas=self._replicas,
            resume=resume,
        )

    def _leave_if_reached(self, sparsity: float) -> None:
        """The rule of the paper: end the sparsify phase when the target is almost reached."""
        in_phase = self._driver is not None and self.plan.at(self.step).phase is Phase.SPARSIFY
        due = (self.step - self.plan.warmup) % leave_interval(self.plan) == 0
        if in_phase and due and self.sparsity >= sparsity:
            self.plan = self.plan.leave_sparsify(self.step)
            self._begin().timeline.follow(0, self.plan)

    def _warn_of_skipped_steps(self, *, at_last: bool) -> None:
        """Warn about non-finite gradients: the first time, whenever their number has doubled, and at the end.

        On an accelerator, the count is some steps old, so that the step does not wait for it.
        """
        driver = self._driver
        if driver is None or driver.method is None:
            return
        if self.step % _WARN_EVERY and driver.state.device.type != "cpu":
            return
        skipped = driver.log.skipped_so_far()
        if skipped >= max(1, self._warned_of_skipped + 1 if at_last else 2 * self._warned_of_skipped):
            self._warned_of_skipped = skipped
            driver.check_finite(together=False)  # otherwise masks would never learn again
            warnings.warn(
                f"gradients that are not finite (infinite or NaN): masks did not learn in {skipped} steps so far",
                stacklevel=5,
            )

    def _warn_of_unplanned_steps(self) -> None:
        """Warn where the first step begins with a sparse model, and where there are more steps than planned."""
        if self.step == self.plan.total:
            warnings.warn(
                f"more optimizer steps than total_steps={self.plan.total}: masks stay as they are, and the fine-tune "
                "phase continues. To spread the phases over the whole run, pass the true number of optimizer steps "
                "(batches times epochs, divided by gradient accumulation)",
                stacklevel=5,
            )
        if self.step > 0 or self._driver is not None or not self.plan.warmup or capturing():
            return
        found = share_of_zeros(self.weights)
        if found > _SPARSE_ALREADY:
            warnings.warn(
                f"the model is {found:.1%} sparse already, and this Sparsifier starts at step 0 of its plan, with "
                "dense training, in which these zeros are lost. To resume a run, load its state too "
                "(sparsifier.load_state_dict). To train a sparse model without losing its zeros, use "
                "gossamer.keep_zeros(model, optimizer)",
                stacklevel=5,
            )

    def _warn_of_changes(self, driver: Driver) -> None:
        """Warn where weights were changed since the last step, while masks train."""
        before, self._left = self._left, None
        if before is None or before == self._weight_versions():
            return
        if changed := driver.changed_since_last_step(together=False):
            warnings.warn(
                f"{changed} changed since the last step, and while masks train, the next step overwrites such changes. "
                "If a wrapper of the optimizer changes the weights after its step, as Lookahead does, pass that "
                "wrapper to the Sparsifier. Change weights yourself before masks train, or in the fine-tune phase",
                stacklevel=5,
            )

    def _after_change_of_mode(self, optimizer: Optimizer) -> None:
        """A schedule-free optimizer has exchanged the weights of training and of evaluation."""
        if self._driver is None or self.phase is Phase.WARMUP:
            return
        with torch.no_grad():
            if evaluates(optimizer) or not self.phase.masks_train:
                self._driver.prune(self._indices(optimizer))
            else:
                self._driver.apply_masks(self._indices(optimizer))

    # --- the hooks on the optimizer ---

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_nested(optimizer):
            return None
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "expected optimizer.step() outside torch.inference_mode(), as later steps cannot change the tensors "
                "that are created in it: use torch.no_grad()"
            )
        leads = optimizer is self._owned[0][0]  # with several optimizers, the first one advances the plan
        if not leads and not self.in_step:
            self._ahead += self._indices(optimizer)
        if leads and self._ahead:
            self._check_order()
        if leads and not capturing():
            self.advance()
            self._set_learning_rate(optimizer)
        self.in_step = True
        if self._driver is None or self.phase is Phase.WARMUP:
            return None
        owned = self._indices(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            # The closure computes forward and backward of this step: run it first, on the sparse weights.
            closure = self._closure_on_sparse_weights(closure, self._driver, owned)
            changed = args[:1], {**kwargs, "closure": closure}
        if self.phase.masks_train:
            with torch.no_grad():
                if leads:
                    self._warn_of_changes(self._driver)
                    self._learn(optimizer, self._driver)
                    others = [index for _, indices in self._owned[1:] for index in indices]
                    if others:
                        self._driver.apply_masks(others)
                else:
                    self._driver.restore_dense(owned)
        self._versions = self._versions_of(owned) if closure is not None else []
        return changed

    def _learn(self, optimizer: Optimizer, driver: Driver) -> None:
        rate = learning_rate(optimizer.param_groups[0])
        if rate is None and self._kind.needs_rate:
            raise ValueError(
                f"method={self._kind.name!r} needs the learning rate of the weights, which {type(optimizer).__name__} "
                "does not have: give it one (lr=), or use another method"
            )
        try:
            driver.update_masks(
                0.0 if rate is None else rate,
                unscale=unscaling(optimizer),
                found_inf=getattr(optimizer, "found_inf", None),
                loss_scale=None if self._loss_scale is None else self._loss_scale(),
            )
        except BaseException:
            driver.apply_masks()
            raise

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_nested(optimizer):
            return
        last = optimizer is self._owned[-1][0]
        self.in_step = self.in_step and not last
        if self._driver is None:
            if last and self.plan.at(self.step).phase.masks_train and not capturing():
                self._begin()  # so that the next forward pass uses the masked weights, and its samples are recorded
            return
        if self.phase is Phase.WARMUP:
            return
        owned = self._indices(optimizer)
        with torch.no_grad():
            if not self.phase.masks_train:
                self._driver.apply_masks(owned)
                return
            if last:
                self._driver.timeline.clock += 1
            self._driver.read_back(owned, last=last)
            if last and not capturing():
                self._update_topology()
                self._left = self._weight_versions()
                if self.plan.at(self.step).phase is Phase.FINETUNE:
                    self._warn_of_skipped_steps(at_last=True)
                    self._driver.finalize()  # so that the next forward pass uses the final weights

    def _update_topology(self) -> None:
        if self._driver is None or self._driver.method is None or self._topology_done == self.step:
            return
        self._topology_done = self.step
        done = self.step - self.plan.warmup
        self._forget_pruned(self._driver.update_topology(done) if done > 0 else None)

    def _forget_pruned(self, chosen: Tensor | None) -> None:
        """Reset the state of the optimizers, such as their momentum, for the chosen weights."""
        if chosen is None or self._driver is None:
            return
        views = self._driver.state.views(chosen)
        for optimizer, indices in self._owned:
            for index in indices:
                parameter = self.weights[index].parameter
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        local(value).masked_fill_(views[index], 0.0)

    def _set_learning_rate(self, optimizer: Optimizer) -> None:
        if self._learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate(self.plan, self.step - 1)

    def _indices(self, optimizer: Optimizer) -> Sequence[int]:
        return next(indices for owner, indices in self._owned if owner is optimizer)

    def _closure_on_sparse_weights(
        self, closure: Callable[[], Any], driver: Driver, owned: Sequence[int]
    ) -> Callable[[], Any]:
        trains = self.phase.masks_train
        with torch.enable_grad():
            first = [closure()]

        def evaluate() -> Any:
            if first:
                loss = first.pop()
                if self._versions == self._versions_of(owned):
                    return loss
            # An optimizer that evaluates again (LBFGS), or that moves the weights or clears the gradients before its
            # first evaluation (SAM), needs the loss at its trial weights.
            with torch.no_grad():
                if trains:
                    driver.read_back(owned, last=False)
                else:
                    driver.apply_masks(owned)
            with torch.enable_grad():
                loss = closure()
            if trains:
                with torch.no_grad():
                    driver.restore_dense(owned)
                    driver.change_gradients()
            return loss

        return evaluate

    def _weight_versions(self) -> list[int]:
        """Version counters that change with every write to the weights."""
        if self._group is None:  # without a view of each, as there may be thousands
            return [weight.parameter._version for weight in self.weights]
        return [local(weight.parameter)._version for weight in self.weights]

    def _versions_of(self, owned: Sequence[int]) -> list[tuple[int, int, int]]:
        """Version counters that change with every write to the weights or to their gradients."""
        parameters = [self.weights[index].parameter for index in owned]
        return [(each._version, id(each.grad), 0 if each.grad is None else each.grad._version) for each in parameters]

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """The state for resuming, as plain values and tensors by weight name."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "method": self._kind.name,
            "target": str(self._target),
            "step": self.step,
            "phase": str(self.phase),
            "plan": asdict(self.plan),
            "topology_done": self._topology_done,
        }
        if self._patterns is not None:
            state["pattern"] = self._pattern_names()
        return state if self._driver is None else {**state, **self._driver.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict()`; load the states of the model and the optimizer too.

        A state that does not fit raises a ValueError and changes nothing.
        """
        if self.phase is Phase.FINISHED:
            raise RuntimeError(
                "finish() was called, so this Sparsifier has no hooks: create a new one to load the state"
            )
        self._check_values()
        check_state(state, self.weights, method=self._kind.name, target=self._target, pattern=self._pattern_names())
        plan, phase, driver = Plan(**state["plan"]), Phase(state["phase"]), None
        with torch.no_grad():
            if "mask" in state:
                driver = self._make_driver(plan, resume=True)
                try:
                    check_tensors(state, driver, self.weights)
                    driver.load_state_dict(state)
                except BaseException:
                    driver.freeze()
                    raise
            if self._driver is not None:
                self._driver.freeze()  # removes its hooks from the model
            self._driver, self.plan, self.phase, self.step = driver, plan, phase, state["step"]
            self._left = None
            self._topology_done = state["topology_done"]
            if driver is not None:
                if phase is not Phase.WARMUP:
                    driver.apply_masks()
                self._warned_of_skipped = int(driver.log.skipped)
        if self.phase is Phase.FINISHED:
            self._remove_hooks()

    def _pattern_names(self) -> dict[str, str]:
        """The pattern of each tensor that has one."""
        pairs = zip(self.weights, self._patterns or (), strict=False)
        return {weight.name: str(pattern) for weight, pattern in pairs if pattern is not None}

    def __del__(self) -> None:
        """Warn if masks never became final. An unused object is no problem."""
        phase = getattr(self, "phase", Phase.FINISHED)
        if phase in (Phase.FINETUNE, Phase.FINISHED) or not self.step:
            return
        warnings.warn(
            f"a Sparsifier was discarded without finish() after {self.step} of {self.plan.total} optimizer steps, in "
            f"the {phase} phase, so the model does not have the requested sparsity. Call finish(), and pass "
            "the true number of optimizer steps as total_steps (batches × epochs, divided by gradient accumulation)",
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.phase is not Phase.FINISHED or self._group is not None:
            raise TypeError(
                "a Sparsifier cannot be copied or pickled before finish(), because its hooks cannot be copied, nor "
                "with sharded weights: save its state_dict(), create a new Sparsifier for the copied model and "
                "optimizer, and load the state there"
            )
        return self.__dict__


def _is_replaced(use: Use, parameter: nn.Parameter) -> bool:
    return use.module._parameters.get(use.attribute, parameter) is not parameter


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether this is a trained parameter of numbers that torch can check, not those of a quantization library."""
    plain = type(parameter) is nn.Parameter or is_sharded(parameter)
    return plain and parameter.requires_grad and parameter.dtype.itemsize > 1


def _warn_of_frozen(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Warn if most of the prunable weights are frozen, as under LoRA, where the target would hold for the adapters."""
    every = select(model, for_training=False)
    frozen = [weight for weight in every if not weight.parameter.requires_grad]
    left, taken = (sum(weight.parameter.numel() for weight in each) for each in (frozen, weights))
    if left > taken:
        warnings.warn(
            f"the target holds for the {taken:,} weights in training, such as {weights[0].name}, while {left:,} others "
            f"are frozen (requires_grad=False) and stay as they are, such as {clean_name(frozen[0].name, model)}. To "
            "prune those, unfreeze them before creating the Sparsifier. If this is what you want, say so with include=",
            stacklevel=3,
        )


def _check_weights(weights: Sequence[Weight], *, needs_samples: bool, sharded: bool, replicated: bool) -> None:
    """Raise if masks of these weights cannot train.

    `needs_samples`: the method needs per-sample gradients; `sharded`: each process has a shard of every weight;
    `replicated`: the model is wrapped in DistributedDataParallel.
    """
    common_device([weight.parameter for weight in weights])
    if not needs_samples:
        return
    if sharded:
        raise ValueError('scale="per_sample" needs whole weights in every process: use DDP, or scale="global"')
    check_layers(weights)
    if not replicated and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            'scale="per_sample" sums over the samples of all processes: pass the Sparsifier the model that is '
            'wrapped in DistributedDataParallel, or use scale="batch"'
        )


def _claim(owner: object, weights: Sequence[Weight]) -> None:
    """Register `owner` as the one Sparsifier of these weights, until it finishes or is deleted."""
    taken = frozenset().union(*_CLAIMS.values())
    twice = [weight.name for weight in weights if id(weight.parameter) in taken]
    if twice:
        raise ValueError(
            f"{', '.join(twice[:3])}{' and others' if len(twice) > 3 else ''}: these weights already have a "
            "Sparsifier. Use that one, call its finish(), or rebuild the model and the optimizer"
        )
    _CLAIMS[owner] = frozenset(id(weight.parameter) for weight in weights)
