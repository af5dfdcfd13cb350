"""Applies a method to the weights of one model, around each step of the model's optimizer.

Between steps, the parameters hold the weights of the forward pass: w = w̃ ⊙ m, unless the method defines another form.
Around a step:

    update_masks     the method updates its masks from the gradients; the parameters get w̃ for the optimizer
                     (methods that follow the optimizer update their masks in read_back)
    restore_dense    the parameters of a further optimizer, which steps later, get w̃
    read_back        w̃ is read back from the parameters, which then get the weights of the next forward pass

`Sparsifier` decides when; the driver knows neither optimizers nor the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.activity import Activity
from gossamer.diagnostics import Counters, Health, HealthLog
from gossamer.methods import Context, Method, Outcome, Request, Timeline
from gossamer.methods.base import Norm
from gossamer.patterns import Shape, canonical, group_size
from gossamer.per_sample.capture import SampleGradients
from gossamer.prunable import Weight
from gossamer.schedule import Plan
from gossamer.sharding import gathered, is_sharded, local, sharded_like
from gossamer.state import ParameterStep, State

_BY_POSITION = "protected"  # the only method tensor that holds weight positions, which depend on the sharding


class Driver:
    """The state of a method for the selected weights of a model, from the first mask step on."""

    def __init__(
        self,
        weights: Sequence[Weight],
        kind: type[Method[Any]],
        request: Request[Any],
        plan: Plan,
        *,
        epoch: int,
        min_density: float,
        others: Sequence[nn.Parameter] = (),
        norms: tuple[Norm | None, ...] = (),
        outputs: Sequence[tuple[nn.Module, int] | None] = (),
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        resume: bool = False,
    ) -> None:
        """`others` are the parameters that are not prunable, `norms` the batch norm after each weight, and `outputs`
        where the output of each filter is seen. The processes of `group` share each tensor; those of `replicas` hold
        copies of the model. With `resume`, the parameters are not changed, and `load_state_dict` follows."""
        self.weights, self.kind, self._request, self._group = weights, kind, request, group
        self._parameters = [weight.parameter for weight in weights]
        self.names, self._others = [weight.name for weight in weights], others
        self.state = State(weights, any_order=kind.any_order, norms=norms)
        self.state.take()
        self._epoch = epoch
        self.timeline = self._make_timeline(plan)
        self._context: Context[Any] | None = Context(
            self.state.layout, [request], self.timeline, self.state.dense, min_density=min_density, group=group
        )
        self.method: Method[Any] | None = kind(self._context)
        self.final_mask: Tensor | None = None
        self._final_count = 0  # nonzeros of the final mask, over all processes
        self._forward = None if self.method.masked_forward or self.method.elementwise else self.state.matrix()
        # A method that changes w̃ after the step needs a pass of its own before the masks are applied.
        self._projects = kind.project is not Method.project
        self._projects_others = kind.project_others is not Method.project_others
        self.log = HealthLog(len(weights), plan.warmup, plan.sparsify + plan.stabilise, self.state.device)
        self.samples: SampleGradients | None = None
        if kind.needs_samples(request.options):
            self.samples = SampleGradients(weights, self.state.dense_views, replicas)
        self.activity: Activity | None = None
        if kind.observes:
            features = [shape[0] for shape in self.state.layout.shapes]
            self.activity = Activity(outputs, features, self.state.dense, replicas)
        if not resume:
            self._apply_first()

    @property
    def mask(self) -> Tensor:
        """True where a weight is kept, (1, weights)."""
        if self.method is None:
            assert self.final_mask is not None
            return self.final_mask
        return self.method.mask

    @property
    def training(self) -> Method[Any]:
        """The method, while masks train."""
        assert self.method is not None
        return self.method

    def restart_if_moved(self) -> None:
        """Start over if the parameters were changed since, by another optimizer, a loaded checkpoint or the user."""
        self._check_device()
        if not self._agreed(not self._differing()):
            assert self._context is not None
            self.state.take()
            self.method = self.kind(self._context)
            self._apply_first()

    def changed_since_last_step(self, *, together: bool = True) -> str:
        """The names of weights that were changed since the last step, outside the Sparsifier; empty if none was.

        With `together`, all the processes that share the tensors have to call this, and get the same answer.
        """
        names = [self.names[index] for index in self._differing()]
        return "" if (self._agreed(not names) if together else not names) else _listed(names)

    def _differing(self) -> list[int]:
        """The weights whose parameters do not hold what the last step left in them."""
        if self.method is None or self.method.masked_forward:
            return self.state.differing(self.mask)
        if self.method.elementwise:
            return self.state.differing_from(self.method.apply_to)
        views = self.state.views(self._weights_of_forward())
        pairs = zip(self.state.tensors(), views, strict=True)
        return [index for index, (each, view) in enumerate(pairs) if not torch.equal(each, view.to(each.dtype))]

    def prune(self, indices: Sequence[int] | None = None) -> None:
        """Pruned weights become zero in the parameters, whatever these hold."""
        self.state.mask_parameters(self.mask, indices)

    def check_finite(self, *, together: bool = True) -> None:
        """Raise if a weight is NaN or infinite, as masks cannot learn from it. Synchronizes with the device.

        With `together` all the processes that share the tensors have to call this, and all raise.
        """
        wrong = not_finite(zip(self.names, self.state.dense_views, strict=True))
        if not (self._agreed(not wrong) if together else not wrong):
            raise RuntimeError(
                f"prunable weights are not finite (infinite or NaN): {_listed(wrong)}. The run has diverged: "
                "train again with a smaller learning rate or with gradient clipping"
            )

    def _check_budget(self, mask: Tensor) -> None:
        """Raise if final masks do not keep as many weights as was asked for."""
        target = self._request.target
        assert target is not None
        if not self.kind.exact or target.decay is not None:
            return
        kept = self._over_shards(torch.stack([torch.count_nonzero(view) for view in self.state.views(mask)]))
        if target.costs is None:
            found, unit = int(kept.sum()), "weights"
            met = target.final - self._largest_group() < found <= target.final
        else:
            found, unit = int((kept.cpu() * torch.tensor(target.costs, device="cpu")).sum()), "multiply-adds"
            met = found <= target.final
        if not met:
            raise ValueError(
                f"the final masks keep {found:,} {unit} where {target.final:,} were asked for: the mask state is "
                f"damaged, or method={self.kind.name!r} does not meet its budget (then it says so by exact = False)"
            )

    def _check_pattern(self, mask: Tensor) -> None:
        """Raise if final masks do not have the patterns that were asked for."""
        if self._request.patterns is None:
            return
        rows = zip(self.weights, self._request.patterns, self.state.views(mask), strict=True)
        for weight, pattern, view in rows:
            broken = 0 if pattern is None else pattern.broken(canonical(view, weight.feature_axis, weight.groups))
            if broken:
                raise ValueError(
                    f"{broken:,} groups of the final mask of {weight.name} do not have the pattern {pattern}: the mask "
                    "state is damaged"
                )

    def _largest_group(self) -> int:
        """The most weights that are pruned together."""
        if self._request.patterns is None:
            return 1
        pairs = zip(self._request.patterns, self.weights, strict=True)
        return max(group_size(pattern, Shape.of_weight(weight)) for pattern, weight in pairs)

    def prepare(self, step: int) -> None:
        """Prepare for a step of the run."""
        self._check_device()
        self.timeline.set(step - self.timeline.plan.warmup)
        self.log.set_step(step)

    def count(self) -> int:
        """The number of kept weights over all processes."""
        if self.method is None:
            return self._final_count
        return int(self._over_shards(torch.count_nonzero(self.mask)))

    def counters(self) -> Counters:
        """The latest figures of the log and the number of nonzeros. Synchronizes with an accelerator only if the method
        does not log its nonzeros."""
        latest = self.log.counters()
        nonzeros = self.count() if self.method is None or not latest.nonzeros else latest.nonzeros
        return replace(latest, nonzeros=nonzeros)

    def masks(self) -> dict[str, Tensor]:
        """The masks by weight name, sharded like the weights."""
        return self._named(self.mask)

    def health(self, step: int, steps_per_epoch: int | None, *, layers: bool) -> Health:
        """The progress of mask learning so far. For `layers`, sharded tensors are gathered one at a time."""
        if not layers:
            return self.log.read((), (), (), step, steps_per_epoch)
        masks = map(gathered, self.state.views(self.mask), self._parameters)
        margins: Iterable[float | None] = [None] * len(self.weights)
        variable = None if self.method is None else self.method.state().get("mask_variable")
        if variable is not None:
            variables = map(gathered, self.state.views(variable), self._parameters)
            margins = (float(variable.abs().median()) for variable in variables)
        return self.log.read(self.weights, masks, margins, step, steps_per_epoch)

    # --- a step ---

    def update_masks(
        self,
        rate: float | Tensor,
        *,
        unscale: Tensor | None = None,
        found_inf: Tensor | None = None,
        loss_scale: float | None = None,
    ) -> None:
        """Update the method from the gradients of the parameters, and put w̃ into the parameters.

        `rate` is the learning rate of the weights. `unscale` is the factor that unscales the gradients, if they are
        still scaled. `loss_scale` is the scale of the loss, which only per-sample sums need.
        """
        self.timeline.rate.fill_(rate)
        step = ParameterStep(
            self.state,
            self._gradients(),
            unscale=unscale,
            found_inf=found_inf,
            samples=None if self.samples is None else self.samples.take(loss_scale),
            active=None if self.activity is None else self.activity.take(),
        )
        if self.kind.penalizes:
            self._add_penalty(unscale)
        outcome = self.training.update_masks(step)
        step.write_back()
        if outcome is not None:
            self._log(outcome)

    def _log(self, outcome: Outcome) -> None:
        self.log.write(
            decay=outcome.decay[0],
            nonzeros=outcome.nonzeros[0],
            flips=outcome.flips[0],
            squares=outcome.squares[0],
            healthy=outcome.finite[0],
        )

    def change_gradients(self) -> None:
        """Transform new gradients into the gradients of w̃, as `update_masks` does."""
        step = ParameterStep(self.state, self._gradients(), unscale=None, found_inf=None)
        self.training.weight_gradient(step.gradient, self.state.dense)
        step.write_back_gradients()

    def restore_dense(self, indices: Sequence[int]) -> None:
        """Put w̃ into the parameters for the optimizer to update."""
        self.state.put(indices=indices)

    def read_back(self, indices: Sequence[int], *, last: bool) -> None:
        """Read w̃ back from the parameters, and put the weights of the forward pass into them.

        `last`: all optimizers have taken their step.
        """
        self._check_device()
        method = self.training
        if last and self._projects_others:
            self._project_others()
        if method.masked_forward and not self._projects and not method.follows:
            self.state.take_and_mask(self.mask, indices)
            return
        self.state.take(indices, method.follow if method.follows else None)
        if last and method.follows:
            self._log(method.settle())
        if last:
            method.project(self.state.dense)
        self.apply_masks(None if last else indices)

    def apply_masks(self, indices: Sequence[int] | None = None) -> None:
        """Put the weights of the forward pass into the parameters. Final masks are applied to the current values."""
        self._check_device()
        if self.method is None:
            self.state.mask_parameters(self.mask, indices)
        elif self.method.masked_forward:
            self.state.put_masked(self.mask, indices)
        elif self.method.elementwise:
            self.state.put_written(self.method.apply_to, indices)
        else:
            self.state.put(self._weights_of_forward(), indices)

    def update_topology(self, done: int) -> Tensor | None:
        """Let the method change its topology after `done` steps of the mask phases.

        Returns the weights, as (1, weights), whose optimizer state must be reset.
        """
        if not self.training.topology_due(done):
            return None
        fresh = self.training.update_topology(self.state.dense, done)
        self.apply_masks()
        return fresh

    def finalize(self) -> None:
        """Meet the target, if no step has done so yet, and make the masks final."""
        if self.method is None:
            return
        self.check_finite()
        final_mask = self.method.finalize(self.state.dense)
        self._check_budget(final_mask)
        self._check_pattern(final_mask)
        self.final_mask = final_mask
        self.state.put_masked(self.final_mask)
        self._final_count = self._count_final(self.final_mask)
        self.log.counters(wait=True)
        self.freeze()

    def freeze(self) -> None:
        """Release everything but the masks."""
        if self.method is not None:
            self.final_mask = self.method.mask if self.final_mask is None else self.final_mask
            self.method, self._forward, self._context = None, None, None
            self.timeline = self._make_timeline(self.timeline.plan)  # drops the reference to the method
            self.state.release()
        for watching in (self.samples, self.activity):
            if watching is not None:
                watching.close()
        self.samples = self.activity = None

    def _make_timeline(self, plan: Plan) -> Timeline:
        state = self.state
        return Timeline(plan, rows=1, device=state.device, dtype=state.dtype, epoch=self._epoch, tabulated=False)

    def _apply_first(self) -> None:
        self.training.project(self.state.dense)  # for methods that prune from their first step on
        self.apply_masks()

    def _weights_of_forward(self) -> Tensor:
        forward = self.state.matrix() if self._forward is None else self._forward
        self.training.apply_masks(self.state.dense, forward)
        return forward

    def _gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._parameters]
        if not self.state.sharded:
            return gradients
        return [local(each) if each is not None and is_sharded(each) else each for each in gradients]

    def _add_penalty(self, unscale: Tensor | None) -> None:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._others]
        gradient = torch.cat([each.flatten() for each in gradients])[None]
        others = torch.cat([each.detach().flatten() for each in self._others])[None]
        if unscale is not None:
            gradient.mul_(unscale)
        self.training.add_penalty(gradient, others)
        if unscale is not None:
            gradient.div_(unscale)
        parts = torch.split(gradient[0], [each.numel() for each in self._others])
        for each, part in zip(self._others, parts, strict=True):
            if each.grad is not None:  # optimizers skip parameters without gradients
                each.grad.copy_(part.view(each.shape))

    def _project_others(self) -> None:
        others = torch.cat([each.detach().flatten() for each in self._others])[None]
        self.training.project_others(others)
        parts = torch.split(others[0], [each.numel() for each in self._others])
        for each, part in zip(self._others, parts, strict=True):
            if each.requires_grad:
                each.copy_(part.view(each.shape))

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Tensors per weight by name, and tensors of the whole network by their own names."""
        found: dict[str, Any] = {"mask": self.masks(), "log": self.log.state()}
        if self.method is None:
            return found
        found["dense"] = self._named(self.state.dense)
        network: dict[str, Tensor] = {}
        for name, tensor in self.method.state().items():
            if name == _BY_POSITION:
                tensor = torch.zeros_like(self.mask).scatter_(1, tensor, True)
            if tensor.shape == self.mask.shape:
                found[name] = self._named(tensor)
            else:
                network[name] = tensor.clone()
        return {**found, "network": network}

    def entries(self) -> tuple[dict[str, torch.dtype], dict[str, tuple[torch.dtype, torch.Size]]]:
        """The layout of `state_dict` while masks train: entries with a tensor per weight, and the tensors of the whole
        network."""
        by_weight, network = {"mask": torch.bool, "dense": self.state.dtype}, {}
        for name, tensor in self.training.state().items():
            if name == _BY_POSITION:
                by_weight[name] = torch.bool
            elif tensor.shape == self.mask.shape:
                by_weight[name] = tensor.dtype
            else:
                network[name] = tensor.dtype, tensor.shape
        return by_weight, network

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a validated `state_dict()`."""
        self.log.load(state["log"])
        self.log.set_step(state["step"] - 1)  # the latest entry is from the previous step
        self.timeline.set(max(0, state["step"] - self.timeline.plan.warmup))
        if "dense" not in state:
            self.final_mask = torch.zeros_like(self.mask)
            self._fill(self.final_mask, state["mask"])
            self._check_budget(self.final_mask)
            self._check_pattern(self.final_mask)
            self._final_count = self._count_final(self.final_mask)
            self.freeze()
            return
        self._fill(self.state.dense, state["dense"])
        saved: dict[str, Tensor] = {}
        for name, tensor in self.training.state().items():
            if name == _BY_POSITION:
                protected = torch.zeros_like(self.mask)
                self._fill(protected, state[name])
                saved[name] = protected[0].nonzero().T
            elif tensor.shape == self.mask.shape:
                saved[name] = torch.zeros_like(tensor)
                self._fill(saved[name], state[name])
            else:
                saved[name] = state["network"][name].to(tensor.device)
        self.training.load_state(saved)

    def _check_device(self) -> None:
        now, before = local(self._parameters[0]).device, self.mask.device
        if now != before:
            raise RuntimeError(
                f"the weights are on {now} now, but their masks on {before}: move the model before masks begin to "
                "learn, or save the states of model, optimizer and Sparsifier, rebuild all three there, and load them"
            )

    def _named(self, matrix: Tensor) -> dict[str, Tensor]:
        triples = zip(self.names, self._parameters, self.state.views(matrix), strict=True)
        return {name: sharded_like(view.clone(), parameter) for name, parameter, view in triples}

    def _fill(self, matrix: Tensor, named: Mapping[str, Tensor]) -> None:
        for name, view in zip(self.names, self.state.views(matrix), strict=True):
            view.copy_(local(named[name]))

    def _count_final(self, mask: Tensor) -> int:
        return int(self._over_shards(torch.count_nonzero(mask)))

    def _over_shards(self, counts: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        return counts

    def _agreed(self, answer: bool) -> bool:
        """Whether the answer is yes in all processes that share the tensors."""
        if self._group is None:
            return answer
        return not int(self._over_shards(torch.tensor(int(not answer), device=self.state.device)))


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors with NaN or infinite entries. Synchronizes with the device."""
    # The largest size, as this needs no memory; it is NaN where any entry is.
    return [
        name
        for name, tensor in tensors
        if tensor.numel() and not bool(torch.isfinite(torch.linalg.vector_norm(tensor, torch.inf)))
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" or "in another process"
