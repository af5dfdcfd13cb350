"""The one object a user touches: it makes a model sparse through the steps of the model's own optimizer.

The model is left alone. Its parameters always hold w = w̃ ⊙ m, so they are exactly sparse whenever anybody looks. Around
each step of the optimizer:

    before   the mask variables learn from the gradients; λ1 or the budget sets the masks; w̃ is put into the parameters
    step     the user's optimizer, whichever it is, updates w̃; what is removed gets `removed_gradient` of its gradient
    after    w̃ is kept aside, and w = w̃ ⊙ m is left in the parameters

Everything that has to be done to gradients first (accumulation, all-reduce, un-scaling, clipping) is done by then.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer import method
from gossamer._claims import claim, owned_by, release
from gossamer._hooks import capturing, uncompiled, unscaling
from gossamer._preconditions import check_weights
from gossamer._resume import FORMAT, check_state
from gossamer._selectors import Selectors, clean_name
from gossamer.connectivity import Connectivity, floors
from gossamer.diagnostics import Health
from gossamer.flops import positions
from gossamer.prunable import Weight, select
from gossamer.schedule import Phase, Plan, make_plan
from gossamer.settings import choose
from gossamer.sharding import local, shard_group
from gossamer.target import make_target

_FLOOR_EVERY = 100  # mask steps between two choices of the connections that the floor keeps
_LEAVE_EVERY = 20  # at most so many mask steps between two looks at whether the sparsify phase can be left
_TELL_EVERY = 64  # steps between two looks at the count of steps with non-finite gradients, on an accelerator


class Sparsifier:
    """Learns which connections of a model to keep, while its optimizer trains the weights.

    Ask for one of `sparsity` (share of zeros, met exactly), `flops` (share of the multiply-adds that is left, met
    exactly; needs `example_input`) and `decay` (the paper's fixed λ1; `leave_at` ends the sparsify phase early once
    that sparsity is reached). `total_steps` is the number of optimizer steps of the whole run, over which the phases
    are laid out; durations in epochs need `steps_per_epoch`. `include` and `exclude` choose tensors by name pattern,
    module class or module. `loss_scale=scaler.get_scale` is needed where a scaled loss meets scale="per_sample". Any
    field of `Settings` can be given by name on top of a `preset`.

    For a step captured in a CUDA graph call `advance()` before each replay, and capture again when `phase` changes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        total_steps: int,
        sparsity: float | None = None,
        flops: float | None = None,
        decay: float | None = None,
        leave_at: float | None = None,
        steps_per_epoch: int | None = None,
        preset: str = "default",
        include: Selectors = None,
        exclude: Selectors = None,
        example_input: Any = None,
        loss_scale: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = choose(preset, settings)
        # Without what wrappers put into names, so that masks and states fit the model however it is wrapped.
        self.weights: tuple[Weight, ...] = tuple(
            replace(weight, name=clean_name(weight.name, model))
            for weight in select(model, include=include, exclude=exclude)
        )
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._owned = owned_by(optimizers, self.weights)
        self._group = shard_group([weight.parameter for weight in self.weights])
        self._replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
        check_weights(
            self.weights, self.settings, sharded=self._group is not None, replicated=self._replicas is not None
        )
        self.plan = make_plan(
            total_steps,
            warmup=self.settings.warmup,
            sparsify=self.settings.sparsify,
            stabilise=self.settings.stabilise,
            steps_per_epoch=steps_per_epoch,
        )
        sizes = [weight.parameter.numel() for weight in self.weights]
        costs = None
        if flops is not None and example_input is not None:
            found = positions(model, self.weights, example_input)
            costs = [found[weight.name] for weight in self.weights]
        self._target = make_target(
            sizes,
            sparsity=sparsity,
            flops=flops,
            decay=decay,
            positions=costs,
            floors=floors(sizes, self.settings.floor),
        )
        if leave_at is not None and decay is None:
            raise ValueError("leave_at= goes with decay=: a sparsity= or flops= budget is met at the end of its phase")
        if leave_at is not None and not 0 < leave_at < 1:
            raise ValueError(f"expected leave_at to be a sparsity between 0 and 1, such as 0.94, got {leave_at}")
        self._leave_at, self._loss_scale, self._steps_per_epoch = leave_at, loss_scale, steps_per_epoch
        self._total = sum(sizes)
        self._connectivity: Connectivity | None = None  # comes into being with the sparsify phase
        self._told_of_skipped = 0
        self.step = 0
        self.phase = self.plan.at(0).phase
        claim(self, self.weights)
        before, after = uncompiled(self._before_step), uncompiled(self._after_step)
        self._handles = [each.register_step_pre_hook(before) for each in optimizers]
        self._handles += [each.register_step_post_hook(after) for each in optimizers]
        if self.phase.masks_train:
            self._begin()

    # --- what a user reads ---

    @property
    def connections(self) -> int:
        """Connections that are left. With sharded weights all processes have to ask."""
        return self._total if self._connectivity is None else self._connectivity.count()

    @property
    def sparsity(self) -> float:
        """Share of the connections that is gone."""
        return 1.0 - self.connections / self._total

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks by name of the weight: True where there is a connection. Sharded where the weights are."""
        if self._connectivity is not None:
            return self._connectivity.masks()
        return {weight.name: torch.ones_like(weight.parameter, dtype=torch.bool) for weight in self.weights}

    @property
    def settled(self) -> dict[str, float]:
        """The mask rate and the share of gradient for removed weights in use, which settings may leave open."""
        if self._connectivity is not None:
            return self._connectivity.settled
        asked, steps = self.settings, self.plan.sparsify + self.plan.stabilise
        return method.settled(asked.mask_lr, asked.removed_gradient, steps=steps, left=self._target.left)

    def health(self, *, layers: bool = True) -> Health:
        """How mask learning has gone so far; without its layers it is cheap. With sharded weights all have to ask."""
        if self._connectivity is None:
            raise RuntimeError(f"masks have not begun to learn: step {self.step} of {self.plan.warmup} of the warm-up")
        return self._connectivity.health(self.step, self._steps_per_epoch, layers=layers)

    # --- the steps ---

    def advance(self) -> Phase:
        """Go to the next step of the plan. The optimizer's step does so by itself, unless replayed from a graph."""
        if self.phase is Phase.FINISHED:
            raise RuntimeError("finish() was called: make a new Sparsifier to train on, or use keep_zeros()")
        if self._leave_at is not None:
            self._leave_if_reached(self._leave_at)
        moment = self.plan.at(self.step)
        self._tell_of_skipped_steps(at_last=not moment.phase.masks_train)
        if moment.phase.masks_train:
            connectivity = self._begin()
            if self.step == self.plan.warmup:
                connectivity.take_up()  # another optimizer, or the user, may have moved weights since
            connectivity.set(
                anneal=self._anneal(moment.settling, moment.phase),
                budget=self._target.budget(moment.ramp),
                step=self.step,
            )
            if (self.step - self.plan.warmup) % _FLOOR_EVERY == 0:
                connectivity.choose_floor()
        elif self._connectivity is not None and not self._connectivity.store.frozen:
            self._connectivity.cut_to_target()  # where gradients were not finite in the last steps
            self._connectivity.freeze()
        self.phase = moment.phase
        self.step += 1
        return self.phase

    def finish(self) -> None:
        """Take the hooks off; the model is plain and exactly as sparse as was asked.

        When the run ended before its plan, a warning says so, and the masks are cut to the target at once (with a
        fixed `decay` they stay as they are).
        """
        if self.phase is Phase.FINISHED:
            return
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
        self._tell_of_skipped_steps(at_last=True)
        if self._connectivity is not None:
            self._connectivity.cut_to_target()
            with torch.no_grad():
                self._connectivity.show()  # should a step have been interrupted
            self._connectivity.freeze()
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        release(self)
        self.phase = Phase.FINISHED

    def impose(self, other: nn.Module) -> None:
        """Put the zeros of the masks into another model with the same names, such as an average of the weights."""
        parameters = {clean_name(name, other): parameter for name, parameter in other.named_parameters()}
        masks = self.masks
        missing = [name for name in masks if name not in parameters]
        if missing:
            raise KeyError(
                f"expected a model with the weights {', '.join(missing[:3])}, got one without them: "
                "of a wrapper such as AveragedModel give the model inside, its .module"
            )
        with torch.no_grad():
            for name, mask in masks.items():
                tensor = local(parameters[name])
                tensor.copy_(method.masked_weight(tensor, local(mask).to(tensor.device)))

    def _begin(self) -> Connectivity:
        """The masks begin to train, if they have not begun yet."""
        if self._connectivity is None:
            self._connectivity = Connectivity(
                self.weights,
                self.settings,
                self._target,
                first_step=self.plan.warmup,
                mask_steps=self.plan.sparsify + self.plan.stabilise,
                group=self._group,
                replicas=self._replicas,
            )
        return self._connectivity

    def _anneal(self, settling: float, phase: Phase) -> float:
        if self.settings.anneal == "cosine":
            return method.cosine(settling)
        return 0.1 if self.settings.anneal == "step" and phase is Phase.STABILISE else 1.0

    def _leave_if_reached(self, sparsity: float) -> None:
        """The paper's rule: leave the sparsify phase when the target is almost reached."""
        in_phase = self._connectivity is not None and self.plan.at(self.step).phase is Phase.SPARSIFY
        every = min(_LEAVE_EVERY, max(1, self.plan.sparsify // 10))
        if in_phase and (self.step - self.plan.warmup) % every == 0 and self.sparsity >= sparsity:
            self.plan = self.plan.leave_sparsify(self.step)

    def _tell_of_skipped_steps(self, *, at_last: bool) -> None:
        """Say so when gradients were not finite: at first, when the count has doubled, and at last.

        On an accelerator the news is some steps old: nobody waits for it.
        """
        if self._connectivity is None or self._connectivity.store.frozen:
            return
        if self.step % _TELL_EVERY and self._connectivity.store.device.type != "cpu":
            return
        skipped = self._connectivity.log.skipped_so_far()
        if skipped >= max(1, self._told_of_skipped + 1 if at_last else 2 * self._told_of_skipped):
            self._told_of_skipped = skipped
            warnings.warn(
                f"gradients that are not finite (infinite or NaN): masks did not learn in {skipped} steps so far",
                stacklevel=5,
            )

    # --- the hooks on the optimizer ---

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leads = optimizer is self._owned[0][0]  # of several optimizers the first one is the clock
        if leads and not capturing():
            self.advance()
        if self._connectivity is None or self.phase is Phase.WARMUP:
            return None
        owned = self._indices(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            # The forward and backward of this step happen in the closure: do them first, on the sparse weights.
            closure = self._closure_on_sparse_weights(closure, self._connectivity, owned)
            changed = args[:1], {**kwargs, "closure": closure}
        if self.phase.masks_train:
            with torch.no_grad():
                if leads:
                    self._learn(optimizer, self._connectivity)
                    self._connectivity.show([index for _, others in self._owned[1:] for index in others])
                else:
                    self._connectivity.hide(owned)
        return changed

    def _learn(self, optimizer: Optimizer, connectivity: Connectivity) -> None:
        try:
            connectivity.learn(
                unscale=unscaling(optimizer),
                found_inf=getattr(optimizer, "found_inf", None),
                loss_scale=None if self._loss_scale is None else self._loss_scale(),
            )
        except BaseException:
            connectivity.show()
            raise

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._connectivity is None:
            if self.plan.at(self.step).phase.masks_train and not capturing():
                self._begin()  # so that whatever watches the forward pass is in place for the next one
            return
        if self.phase is Phase.WARMUP:
            return
        owned = self._indices(optimizer)
        with torch.no_grad():
            if self.phase.masks_train:
                self._connectivity.keep_and_show(owned)
            else:
                self._connectivity.show(owned)

    def _indices(self, optimizer: Optimizer) -> Sequence[int]:
        return next(indices for owner, indices in self._owned if owner is optimizer)

    def _closure_on_sparse_weights(
        self, closure: Callable[[], Any], connectivity: Connectivity, owned: Sequence[int]
    ) -> Callable[[], Any]:
        learns = self.phase.masks_train
        with torch.enable_grad():
            first = [closure()]

        def evaluate() -> Any:
            if first:
                return first.pop()
            # An optimizer that evaluates again (LBFGS) asks for the loss at the weights it has just tried.
            with torch.no_grad():
                if learns:
                    connectivity.keep_and_show(owned)
                else:
                    connectivity.show(owned)
            with torch.enable_grad():
                loss = closure()
            if learns:
                with torch.no_grad():
                    connectivity.hide(owned)
                    connectivity.damp()
            return loss

        return evaluate

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as plain values and tensors by the name of the weight."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "target": str(self._target),
            "step": self.step,
            "phase": str(self.phase),
            "plan": asdict(self.plan),
        }
        return state if self._connectivity is None else {**state, **self._connectivity.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; load the model's and the optimizer's state too."""
        if self.phase is Phase.FINISHED:
            raise RuntimeError("finish() was called, so this Sparsifier has no hooks: make a new one to load the state")
        check_state(state, self.weights, self.settings, self._target)
        self.step, self.phase, self.plan = state["step"], Phase(state["phase"]), Plan(**state["plan"])
        if self._connectivity is not None:
            self._connectivity.freeze()  # lets go of what watches the model
        self._connectivity = None
        if "mask" in state:
            connectivity = self._begin()
            with torch.no_grad():
                connectivity.load_state_dict(state)
                if self.phase is not Phase.WARMUP:
                    connectivity.show()
            self._told_of_skipped = int(connectivity.log.skipped)
        if self.phase is Phase.FINISHED:
            self._let_go()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sparsifier cannot be copied or pickled, as its hooks would stay behind: "
            "save its state_dict(), make a new one for the copied model and optimizer, and load it there"
        )
