"""A rule on any model and any optimizer of torch: the same code as in a race, with one row.

As with `gossamer.Sparsifier` the model is left alone: its parameters hold the weights that the forward pass shall read,
and around each step of the optimizer

    before   the rule learns from the gradients and changes them; the weight variables are put into the parameters
    step     the optimizer updates the weight variables
    after    they are kept aside, and what the rule shows is left in the parameters

For comparisons: it knows plain training and data-parallel training, no closures and no sharded parameters.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gossamer._claims import claim, owned_by, release
from gossamer._hooks import uncompiled, unscaling
from gossamer._resume import check_place, damaged
from gossamer._selectors import Selectors
from gossamer.methods.registry import find, make_options
from gossamer.methods.rule import Layout, Request, Rule, Timeline
from gossamer.methods.slimming import gains_of
from gossamer.prunable import Weight, select
from gossamer.schedule import Phase, Plan, make_plan
from gossamer.settings import Settings
from gossamer.state import common_device

_FORMAT = 1


class Attached:
    """A method that makes a model sparse through the steps of its optimizer, until `finish()`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        method: str,
        *,
        sparsity: float,
        total_steps: int,
        steps_per_epoch: int | None = None,
        phases: Settings | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        include: Selectors = None,
        exclude: Selectors = None,
        rate: Callable[[Plan, int], float] | None = None,
    ) -> None:
        """`phases` has the durations of the phases and the floor; `settings` are those of the method; `rate` is the
        learning rate where the method has one of its own (`rewinds`)."""
        if not 0 <= sparsity < 1:
            raise ValueError(f"expected sparsity to be a share from 0 to below 1, such as 0.95, got {sparsity}")
        phases = phases or Settings()
        self._kind = find(method)
        self._floor, self._rate = phases.floor, rate
        self._request: Request[Any] = Request(sparsity, seed, make_options(self._kind, settings or {}))
        self.weights = select(model, include=include, exclude=exclude)
        sharded = [weight.name for weight in self.weights if isinstance(weight.parameter, DTensor)]
        if sharded:
            raise ValueError(f"method={method} needs whole weights, got {sharded[0]} in shards: use method=scl, or DDP")
        self._parameters = [weight.parameter for weight in self.weights]
        self._device = common_device(self._parameters)
        taken = {id(parameter) for parameter in self._parameters}
        others = [(name, each) for name, each in model.named_parameters() if id(each) not in taken]
        self._others = [parameter for _, parameter in others]
        owned_by([optimizer], self.weights)
        shapes = [_in_order(weight.parameter, weight.feature_axis).shape for weight in self.weights]
        names = tuple(weight.name for weight in self.weights)
        gains = gains_of(model, names, [(name, parameter.numel()) for name, parameter in others])
        self._layout = Layout(names, tuple(tuple(shape) for shape in shapes), gains)
        plan = make_plan(
            total_steps,
            warmup=phases.warmup,
            sparsify=phases.sparsify,
            stabilise=phases.stabilise,
            steps_per_epoch=steps_per_epoch,
        )
        self.plan = self._kind.phases(plan)
        self._epoch = steps_per_epoch or total_steps
        self._optimizer, self.step, self.phase = optimizer, 0, self.plan.at(0).phase
        self._variables = torch.empty(0)
        self._shown = torch.empty(0)
        self._rule: Rule[Any] | None = None
        self._timeline: Timeline | None = None
        self._removed: Tensor | None = None
        self._make_rule()  # what it refuses is refused now, and not where masks begin
        claim(self, self.weights)
        before, after = uncompiled(self._before_step), uncompiled(self._after_step)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        if self.phase.masks_train:
            self._begin()

    @property
    def sparsity(self) -> float:
        """Share of the connections that is gone."""
        if self._removed is not None:
            return int(self._removed.sum()) / self._layout.count
        return 0.0 if self._rule is None else 1.0 - int(self._rule.mask.sum()) / self._layout.count

    def finish(self) -> None:
        """Take the hooks off; the model is plain, and what the final masks have removed is zero."""
        if self.phase is Phase.FINISHED:
            return
        if self.plan.at(self.step).phase is not Phase.FINETUNE:
            warnings.warn(
                f"finish() after {self.step} of {self.plan.total} steps, in the {self.phase} phase: the masks are cut "
                "to the target now, without training afterwards",
                stacklevel=2,
            )
        self._freeze()
        self._let_go()

    # --- the hooks on the optimizer ---

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ValueError(f"method={self._kind.name} needs optimizer.step() without a closure; method=scl takes one")
        if unscaling(optimizer) is not None:
            raise ValueError(
                f"method={self._kind.name} needs unscaled gradients: call scaler.unscale_(optimizer) first"
            )
        self.phase = self.plan.at(self.step).phase
        if self._rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._rate(self.plan, self.step)
        self.step += 1
        if self.phase is Phase.FINETUNE:
            self._freeze()  # of a state that was saved before its masks were final
        if not self.phase.masks_train:
            return
        rule, timeline = self._begin()
        with torch.no_grad():
            timeline.rate.fill_(optimizer.param_groups[0]["lr"])
            gradient = self._row([_gradient(parameter) for parameter in self._parameters])
            if self._kind.penalises:
                self._penalise(rule)
            rule.learn_(gradient, self._variables)
            self._put(gradient, into_gradients=True)
            self._put(self._variables)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            if self._removed is not None:
                self._keep_zeros()
            elif self._rule is not None and self._timeline is not None:
                self._variables.copy_(self._row(self._parameters))
                self._rule.settle_(self._variables)
                self._timeline.clock += 1
                done = self.step - self.plan.warmup
                if self._rule.due(done):
                    self._forget(self._rule.refresh_(self._variables, done))
                self._show(self._rule)
                if self.plan.at(self.step).phase is Phase.FINETUNE:
                    self._freeze()  # so that the next forward pass reads the final weights, as in a race
            elif self.plan.at(self.step).phase.masks_train:
                self._begin()  # so that the next forward pass reads what the rule shows

    def _begin(self) -> tuple[Rule[Any], Timeline]:
        """The rule begins with what the parameters hold, if it has not begun yet."""
        if self._rule is None or self._timeline is None:
            with torch.no_grad():
                self._rule, self._timeline, self._variables = self._make_rule()
                self._shown = self._variables.clone()
                self._rule.settle_(self._variables)  # what is not there from the start
                self._show(self._rule)
        return self._rule, self._timeline

    def _make_rule(self) -> tuple[Rule[Any], Timeline, Tensor]:
        """A rule that begins with what the parameters hold, and its weight variables."""
        variables = self._row(self._parameters)
        timeline = Timeline(self.plan, rows=1, device=self._device, dtype=variables.dtype, epoch=self._epoch)
        return self._kind(self._layout, [self._request], timeline, variables, floor=self._floor), timeline, variables

    def _show(self, rule: Rule[Any]) -> None:
        rule.show_(self._variables, self._shown)
        self._put(self._shown)

    def _freeze(self) -> None:
        if self._removed is not None:
            return
        rule, _ = self._begin()
        with torch.no_grad():
            self._removed = ~rule.freeze_(self._variables)
            self._put(self._variables)
            self._keep_zeros()
        self._rule = self._timeline = None

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        release(self)
        self.phase = Phase.FINISHED

    def _penalise(self, rule: Rule[Any]) -> None:
        gradient = torch.cat([_gradient(each).flatten() for each in self._others])[None]
        others = torch.cat([each.detach().flatten() for each in self._others])[None]
        rule.penalise_(gradient, others)
        sizes = [each.numel() for each in self._others]
        for each, part in zip(self._others, gradient[0].split(sizes), strict=True):  # type: ignore[no-untyped-call]
            if each.grad is not None:  # no gradient, no step: as optimizers do
                each.grad.copy_(part.view(each.shape))

    def _forget(self, fresh: Tensor | None) -> None:
        """Zero what the optimizer remembers of these connections: its momentum, its squares."""
        if fresh is None:
            return
        for weight, part in zip(self.weights, self._layout.split(fresh), strict=True):
            for value in self._optimizer.state.get(weight.parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.parameter.shape:
                    _in_order(value, weight.feature_axis).masked_fill_(self._shaped(part, weight), 0.0)

    # --- between the parameters and the row ---

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            _in_order(tensor.detach(), weight.feature_axis).flatten()
            for tensor, weight in zip(tensors, self.weights, strict=True)
        ]
        return torch.cat(parts).to(torch.promote_types(parts[0].dtype, torch.float32))[None]

    def _put(self, row: Tensor, *, into_gradients: bool = False) -> None:
        for weight, part in zip(self.weights, self._layout.split(row), strict=True):
            if into_gradients and weight.parameter.grad is None:
                continue  # no gradient, no step: as optimizers do
            target = weight.parameter.grad if into_gradients else weight.parameter.detach()
            assert target is not None
            _in_order(target, weight.feature_axis).copy_(self._shaped(part, weight))

    def _shaped(self, part: Tensor, weight: Weight) -> Tensor:
        return part.reshape(_in_order(weight.parameter, weight.feature_axis).shape)

    def _keep_zeros(self) -> None:
        assert self._removed is not None
        for weight, part in zip(self.weights, self._layout.split(self._removed), strict=True):
            held = _in_order(weight.parameter.detach(), weight.feature_axis)
            held.masked_fill_(self._shaped(part, weight), 0.0)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here; the model's and the optimizer's state belong to it."""
        state: dict[str, Any] = {
            "format": _FORMAT,
            "method": self._kind.name,
            "step": self.step,
            "phase": str(self.phase),
            "plan": asdict(self.plan),
            "removed": self._removed,
        }
        if self._rule is not None and self._timeline is not None:
            state["variables"], state["clock"] = self._variables, self._timeline.clock
            state["rule"] = self._rule.state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; load the model's and the optimizer's state too."""
        if not isinstance(state, dict):
            raise damaged("a table of values", type(state).__name__)
        if (state.get("format"), state.get("method")) != (_FORMAT, self._kind.name):
            raise ValueError(
                f"expected the state of method={self._kind.name} in format {_FORMAT}, "
                f"got method={state.get('method')} in format {state.get('format')}: make the run as it was made, "
                "or load it with the version of gossamer that wrote it"
            )
        check_place(state)
        self._check_tensors(state)
        self.step, self.phase, self.plan = state["step"], Phase(state["phase"]), Plan(**state["plan"])
        self._rule, self._timeline, self._removed = None, None, state["removed"]
        if self._removed is not None:
            self._removed = self._removed.to(self._device)
        if "rule" in state:
            rule, timeline = self._begin()
            with torch.no_grad():
                timeline.clock.copy_(state["clock"])
                self._variables.copy_(state["variables"])
                for name, tensor in rule.state().items():
                    tensor.copy_(state["rule"][name])
                self._show(rule)
        if self.phase is Phase.FINISHED:
            self._let_go()

    def _check_tensors(self, state: dict[str, Any]) -> None:
        """The tensors of a state, before anything is changed."""
        total = self._layout.count
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {}
        if state.get("removed") is not None:
            wanted["removed"] = state["removed"], (1, total)
        elif "removed" not in state:
            raise damaged("which connections are removed, or None", "neither")
        if "rule" in state:
            with torch.no_grad():
                rule, timeline, variables = self._make_rule()
            wanted["variables"] = state.get("variables"), tuple(variables.shape)
            wanted["clock"] = state.get("clock"), tuple(timeline.clock.shape)
            if not isinstance(state["rule"], dict):
                raise damaged("the tensors of a rule", type(state["rule"]).__name__)
            for name, tensor in rule.state().items():
                wanted[name] = state["rule"].get(name), tuple(tensor.shape)
        for name, (tensor, shape) in wanted.items():
            if not isinstance(tensor, Tensor) or tensor.is_meta or tuple(tensor.shape) != shape:
                got = f"one of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise damaged(f"a tensor {name} of shape {shape}", got)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _in_order(tensor: Tensor, axis: int) -> Tensor:
    """The axes in the order in which a race lays them out: output features first, input channels of images last."""
    tensor = tensor.movedim(axis, 0)
    return tensor.movedim(1, -1) if tensor.dim() == 4 else tensor
