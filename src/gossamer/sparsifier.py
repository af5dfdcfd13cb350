"""The one object a user touches: it makes a model sparse through the steps of the model's own optimizer.

The model is left alone. Outside the optimizer's step its parameters hold w = w̃ ⊙ m, so they are exactly sparse. Around
each step:

    before   the method learns from the gradients and sets the masks; w̃ is put into the parameters
    step     the user's optimizer, whichever it is, updates w̃ with the gradient that the method has left
    after    w̃ is kept aside, and w = w̃ ⊙ m is left in the parameters

Everything that has to be done to gradients first (accumulation, all-reduce, un-scaling, clipping) is done by then.
This file decides when; driver.py does it, with any method of gossamer.methods.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from itertools import repeat
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer._claims import claim, owned_by, release
from gossamer._hooks import capturing, is_nested, uncompiled, unscaling
from gossamer._preconditions import check_weights
from gossamer._resume import FORMAT, check_state, check_tensors
from gossamer._selectors import Selectors, clean_name, some
from gossamer.diagnostics import Counters, Health
from gossamer.driver import Driver, not_finite
from gossamer.flops import positions
from gossamer.methods import Method, Request, load
from gossamer.methods.base import min_nonzeros
from gossamer.methods.budgets import BudgetedMethod
from gossamer.methods.slimming import gains_of
from gossamer.prunable import Use, Weight, select
from gossamer.schedule import Phase, Plan, make_plan
from gossamer.settings import choose
from gossamer.sharding import is_sharded, local, shard_group
from gossamer.state import make_layout
from gossamer.target import make_target
from gossamer.zeros import impose

_LEAVE_EVERY = 20  # at most this many mask steps between two checks whether the sparsify phase can be left
_WARN_EVERY = 64  # steps between two readings of the count of steps with non-finite gradients, on an accelerator


class Sparsifier:
    """Makes a model sparse while its optimizer trains the weights.

    `method` is the name of a method (`gossamer.methods`), "my_module:MyMethod", or a class; "scl", the default, learns
    its masks. Ask for one of `sparsity` (share of zeros, met exactly), `flops` (share of the multiply-adds that is
    left, met exactly; needs `example_input`) and `decay` (the paper's fixed λ1; `leave_at` ends the sparsify phase
    early once that sparsity is reached). `total_steps` is the number of optimizer steps of the whole run, over which
    the phases are laid out; durations in epochs need `steps_per_epoch`. `include` and `exclude` choose tensors by name
    pattern, module class or module. `seed` is for methods that draw random numbers. `loss_scale=scaler.get_scale` is
    needed where a scaled loss meets scale="per_sample". `learning_rate(plan, step)` is for methods that train a second
    time from an earlier learning rate. Phases and settings of the method can be given by name on top of a `preset`.

    For a step captured in a CUDA graph call `advance()` before each replay, and capture again when `phase` changes.
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
        self.phases, self.settings = choose(self._kind, preset, settings)
        # Without the prefixes of wrappers, so that masks and states fit the model however it is wrapped.
        selected = select(model, include=include, exclude=exclude)
        self.weights: tuple[Weight, ...] = tuple(
            replace(weight, name=clean_name(weight.name, model)) for weight in selected
        )
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        # An optimizer that updates none of the weights (Muon beside AdamW) has no part in this.
        self._owned = [(owner, indices) for owner, indices in owned_by(optimizers, self.weights) if indices]
        self._group = shard_group([weight.parameter for weight in self.weights])
        self._replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
        check_weights(
            self.weights,
            needs_samples=self._kind.needs_samples(self.settings),
            sharded=self._group is not None,
            replicated=self._replicas is not None,
        )
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
        self._target = make_target(
            sizes,
            sparsity=sparsity,
            flops=flops,
            decay=decay,
            positions=costs,
            floors=min_nonzeros(sizes, floor),
        )
        if leave_at is not None and decay is None:
            raise ValueError("leave_at= goes with decay=: a sparsity= or flops= budget is met at the end of its phase")
        if leave_at is not None and not 0 < leave_at < 1:
            raise ValueError(f"expected leave_at to be a sparsity between 0 and 1, such as 0.94, got {leave_at}")
        self._leave_at, self._loss_scale, self._steps_per_epoch = leave_at, loss_scale, steps_per_epoch
        self._learning_rate = learning_rate if self._kind.rewinds else None
        self._total, self._epoch = sum(sizes), steps_per_epoch or total_steps
        self._request: Request[Any] = Request(sparsity or 0.0, int(seed), self.settings, self._target)
        taken = {id(weight.parameter) for weight in self.weights}
        others = [(name, each) for name, each in model.named_parameters() if id(each) not in taken]
        self._model: nn.Module | None = model
        self._others = others
        sizes_of_others = [(name, parameter.numel()) for name, parameter in others]
        self._gains = gains_of(model, [weight.name for weight in selected], sizes_of_others)
        self._kind.check(make_layout(self.weights, any_order=self._kind.any_order, gains=self._gains), self._request)
        self._driver: Driver | None = None  # made where masks begin
        self._warned_of_skipped = 0
        self._topology_done = 0  # the step after which the method has been asked to update its topology
        self._started = False  # whether the first step has been taken by this object
        self.step = 0
        self.phase = self.plan.at(0).phase
        claim(self, self.weights)
        before, after = uncompiled(self._before_step), uncompiled(self._after_step)
        self._handles = [each.register_step_pre_hook(before) for each, _ in self._owned]
        self._handles += [each.register_step_post_hook(after) for each, _ in self._owned]
        if self.phase.masks_train:
            self._begin()

    def _check_kind(self, flops: float | None, decay: float | None) -> None:
        name = self._kind.name
        if self._group is not None and not self._kind.shardable:
            raise ValueError(
                f"method={name!r} needs whole weights in every process, got {self.weights[0].name} in shards: use DDP, "
                "or a method that works on shards, such as method='scl'"
            )
        if not self._kind.solves_targets and (flops is not None or decay is not None):
            raise ValueError(f"method={name!r} meets sparsity= alone: flops= and decay= need method='scl'")

    # --- what a user reads ---

    @property
    def connections(self) -> int:
        """Weights that are kept. With sharded weights all processes have to ask."""
        return self._total if self._driver is None else self._driver.count()

    @property
    def sparsity(self) -> float:
        """Share of the weights that is pruned."""
        return 1.0 - self.connections / self._total

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks by name of the weight: True where it is kept. Sharded where the weights are."""
        if self._driver is not None:
            return self._driver.masks()
        return {weight.name: torch.ones_like(weight.parameter, dtype=torch.bool) for weight in self.weights}

    @property
    def settled(self) -> dict[str, float]:
        """The values in use of settings that may be left open, such as the learning rate of the mask variables."""
        steps = self.plan.sparsify + self.plan.stabilise
        if self._driver is not None:
            steps = self._driver.log.mask_steps  # of the plan with which masks began
        chosen = self._kind.resolve(self.settings, mask_steps=steps, left=self._target.left)
        open_ones = [field.name for field in fields(chosen) if field.default is None]
        return {name: getattr(chosen, name) for name in open_ones if getattr(chosen, name) is not None}

    def health(self, *, layers: bool = True) -> Health:
        """How mask learning has gone so far; without its layers it is cheap. With sharded weights all have to ask."""
        if self._driver is None:
            raise RuntimeError(f"masks have not begun to learn: step {self.step} of {self.plan.warmup} of the warm-up")
        return self._driver.health(self.step, self._steps_per_epoch, layers=layers)

    def metrics(self) -> dict[str, float]:
        """What to log in every step, in every phase: flat, and cheap.

        `step`, `phase` (0 warm-up, 1 sparsify, 2 stabilise, 3 fine-tune, 4 finished), `sparsity`, `density`, the
        target (`target_sparsity`, or `target_flops`, the share that is left), `decay` (λ1), `flips` (masks that have
        changed so far) and `skipped_steps` (steps in which masks did not learn because gradients were not finite).
        `decay`, `flips` and `skipped_steps` are those of method="scl", and 0 with methods that do not report them.

        An accelerator is not waited for: while masks train, its figures are those of the previous call. Only methods
        that do not report their nonzeros count them, which waits, and with sharded weights all processes have to call.
        """
        latest = Counters(0.0, self._total, 0, 0) if self._driver is None else self._driver.counters()
        density = latest.nonzeros / self._total
        found = {
            "step": float(self.step),
            "phase": float(list(Phase).index(self.phase)),
            "sparsity": 1.0 - density,
            "density": density,
            "decay": latest.decay,
            "flips": float(latest.flips),
            "skipped_steps": float(latest.skipped),
        }
        left = self._target.left
        if left is not None:
            found |= {"target_flops": left} if self._target.costs else {"target_sparsity": 1.0 - left}
        return found

    def __repr__(self) -> str:
        """Several lines for people: target, phases, progress and tensors."""
        lengths = {
            Phase.WARMUP: self.plan.warmup,
            Phase.SPARSIFY: self.plan.sparsify,
            Phase.STABILISE: self.plan.stabilise,
            Phase.FINETUNE: self.plan.finetune,
        }
        progress = f"step {self.step:,} of {self.plan.total:,}, {self.phase}"
        if self._group is None:  # otherwise the count needs all processes
            progress += f", {self.sparsity:.2%} zeros"
        tensors = [f"{weight.name} {'×'.join(map(str, weight.parameter.shape))}" for weight in self.weights]
        lines = (
            f"Sparsifier(method={self._kind.name!r})",
            f"target    {self._target}",
            f"phases    {', '.join(f'{phase} {steps:,}' for phase, steps in lengths.items())} steps",
            f"progress  {progress}",
            f"tensors   {some(tensors)}",
        )
        return "\n  ".join(lines)

    # --- the steps ---

    def __enter__(self) -> "Sparsifier":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Finish, unless an error leaves the block: then all stays as it is, to be saved or continued."""
        if kind is None:
            self.finish()

    def advance(self) -> Phase:
        """Go to the next step of the plan. The optimizer's step does so by itself, unless replayed from a graph."""
        if self.phase is Phase.FINISHED:
            raise RuntimeError("finish() was called: make a new Sparsifier to train on, or use keep_zeros()")
        if self._leave_at is not None:
            self._leave_if_reached(self._leave_at)
        moment = self.plan.at(self.step)
        if not self._started:
            self._check_finite("the run begins with")
        if not self._started or moment.phase is not self.phase:
            self._check_model()
            self._started = True
        self._warn_of_skipped_steps(at_last=not moment.phase.masks_train)
        with torch.no_grad():
            self._update_topology()  # after a step that was replayed
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
        """Take the hooks off; the model is plain and exactly as sparse as was asked.

        When the run ended before its plan, a warning says so, and the masks are cut to the target at once (with a
        fixed `decay` they stay as they are). Raises an error, before anything else, if the model no longer holds the
        weights that were made sparse.
        """
        if self.phase is Phase.FINISHED:
            return
        self._check_model()
        early = self.plan.at(self.step).phase is not Phase.FINETUNE
        if early:
            budget = self._target.decay is None
            warnings.warn(
                f"finish() after {self.step} of {self.plan.total} steps, in the {self.phase} phase: the masks "
                + ("are cut to the target now, without training afterwards. " if budget else "stay as they are now. ")
                + "Give the true total_steps to have all the phases in the run",
                stacklevel=2,
            )
            if budget:
                self._begin()
        self._warn_of_skipped_steps(at_last=True)
        if self._driver is not None:
            with torch.no_grad():
                self._driver.finalize()
                self._driver.show()  # where a step was interrupted
        try:
            self._check_finite("the run has ended with")
        finally:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        release(self)
        self.phase = Phase.FINISHED
        # What belongs to the training is let go, so that a finished object can be copied and pickled.
        self._handles, self._owned, self._others, self._model = [], [], [], None
        self._loss_scale = self._learning_rate = self._replicas = None

    def _check_model(self) -> None:
        """Raise if parameters were replaced: their zeros are not in the model any more."""
        held = {id(parameter) for parameter in self._model.parameters()} if self._model is not None else set()
        lost = [
            weight.name
            for weight in self.weights
            if not is_sharded(weight.parameter)  # FSDP2 puts whole weights in their place for a while
            and (id(weight.parameter) not in held or any(map(_is_replaced, weight.uses, repeat(weight.parameter))))
        ]
        if lost:
            raise RuntimeError(
                f"the model holds another parameter as {', '.join(lost[:3])} than the one that was made sparse, so its "
                "zeros are lost: replace layers before the Sparsifier is made, or use impose(model) to prune the new "
                "ones by the masks"
            )

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

    def impose(self, other: nn.Module) -> None:
        """Put the zeros of the masks into another model with the same names, such as an average of the weights."""
        impose(other, self.masks)

    def _begin(self) -> Driver:
        """The masks begin to train, if they have not begun yet."""
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
            gains=self._gains,
            group=self._group,
            replicas=self._replicas,
            resume=resume,
        )

    def _leave_if_reached(self, sparsity: float) -> None:
        """The paper's rule: leave the sparsify phase when the target is almost reached."""
        in_phase = self._driver is not None and self.plan.at(self.step).phase is Phase.SPARSIFY
        every = min(_LEAVE_EVERY, max(1, self.plan.sparsify // 10))
        if in_phase and (self.step - self.plan.warmup) % every == 0 and self.sparsity >= sparsity:
            self.plan = self.plan.leave_sparsify(self.step)
            self._begin().timeline.plan = self.plan

    def _warn_of_skipped_steps(self, *, at_last: bool) -> None:
        """Warn when gradients were not finite: at first, when the count has doubled, and at last.

        On an accelerator the count is some steps old, so that the step does not wait for it.
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

    # --- the hooks on the optimizer ---

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_nested(optimizer):
            return None
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "expected optimizer.step() outside of torch.inference_mode(), whose tensors no later step can change: "
                "use torch.no_grad()"
            )
        leads = optimizer is self._owned[0][0]  # of several optimizers the first one is the clock
        if leads and not capturing():
            self.advance()
            self._set_learning_rate(optimizer)
        if self._driver is None or self.phase is Phase.WARMUP:
            return None
        owned = self._indices(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            # The forward and backward of this step happen in the closure: do them first, on the sparse weights.
            closure = self._closure_on_sparse_weights(closure, self._driver, owned)
            changed = args[:1], {**kwargs, "closure": closure}
        if self.phase.masks_train:
            with torch.no_grad():
                if leads:
                    self._learn(optimizer, self._driver)
                    others = [index for _, indices in self._owned[1:] for index in indices]
                    if others:
                        self._driver.show(others)
                else:
                    self._driver.hide(owned)
        return changed

    def _learn(self, optimizer: Optimizer, driver: Driver) -> None:
        try:
            driver.learn(
                optimizer.param_groups[0].get("lr", 0.0),
                unscale=unscaling(optimizer),
                found_inf=getattr(optimizer, "found_inf", None),
                loss_scale=None if self._loss_scale is None else self._loss_scale(),
            )
        except BaseException:
            driver.show()
            raise

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_nested(optimizer):
            return
        last = optimizer is self._owned[-1][0]
        if self._driver is None:
            if last and self.plan.at(self.step).phase.masks_train and not capturing():
                self._begin()  # so that the next forward pass uses its weights, and its samples are seen
            return
        if self.phase is Phase.WARMUP:
            return
        owned = self._indices(optimizer)
        with torch.no_grad():
            if not self.phase.masks_train:
                self._driver.show(owned)
                return
            if last:
                self._driver.timeline.clock += 1
            self._driver.keep(owned, last=last)
            if last and not capturing():
                self._update_topology()
                if self.plan.at(self.step).phase is Phase.FINETUNE:
                    self._warn_of_skipped_steps(at_last=True)
                    self._driver.finalize()  # so that the next forward pass uses the final weights

    def _update_topology(self) -> None:
        if self._driver is None or self._driver.method is None or self._topology_done == self.step:
            return
        self._topology_done = self.step
        done = self.step - self.plan.warmup
        fresh = self._driver.update_topology(done) if done > 0 else None
        if fresh is None:
            return
        views = self._driver.state.views(fresh)
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
                return first.pop()
            # An optimizer that evaluates again (LBFGS) asks for the loss at the weights it has just tried.
            with torch.no_grad():
                if trains:
                    driver.keep(owned, last=False)
                else:
                    driver.show(owned)
            with torch.enable_grad():
                loss = closure()
            if trains:
                with torch.no_grad():
                    driver.hide(owned)
                    driver.change_gradients()
            return loss

        return evaluate

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as plain values and tensors by the name of the weight."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "method": self._kind.name,
            "target": str(self._target),
            "step": self.step,
            "phase": str(self.phase),
            "plan": asdict(self.plan),
            "topology_done": self._topology_done,
        }
        return state if self._driver is None else {**state, **self._driver.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; load the model's and the optimizer's state too.

        A state that does not fit raises a ValueError, and nothing has changed then.
        """
        if self.phase is Phase.FINISHED:
            raise RuntimeError("finish() was called, so this Sparsifier has no hooks: make a new one to load the state")
        check_state(state, self.weights, method=self._kind.name, target=self._target)
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
                self._driver.freeze()  # stops watching the model
            self._driver, self.plan, self.phase, self.step = driver, plan, phase, state["step"]
            self._topology_done = state["topology_done"]
            if driver is not None:
                if phase is not Phase.WARMUP:
                    driver.show()
                self._warned_of_skipped = int(driver.log.skipped)
        if self.phase is Phase.FINISHED:
            self._remove_hooks()

    def __getstate__(self) -> dict[str, Any]:
        if self.phase is not Phase.FINISHED or self._group is not None:
            raise TypeError(
                "a Sparsifier cannot be copied or pickled before finish(), as its hooks would stay behind, nor with "
                "sharded weights: save its state_dict(), make a new one for the copied model and optimizer, and load "
                "it there"
            )
        return self.__dict__


def _is_replaced(use: Use, parameter: nn.Parameter) -> bool:
    return use.module._parameters.get(use.attribute, parameter) is not parameter


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether this is a trained parameter of numbers that torch can check, not those of a quantization library."""
    plain = type(parameter) is nn.Parameter or is_sharded(parameter)
    return plain and parameter.requires_grad and parameter.dtype.itemsize > 1
