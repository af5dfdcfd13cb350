"""Exact per-sample scales: squared mask gradients of single samples, summed during the ordinary backward.

The paper scales the mask gradient of output feature j by s_j, the root mean square over samples b and
connections k of ∂L(x_b)/∂w_k · w̃_k. A backward pass delivers only the sum over the samples. `SampleMoments`
watches the layers that hold the weights and sums on the way

    Q_j = Σ_b Σ_{k∈j} (g_{b,k} · w̃_k)²,

from which s_j = √(|B| · Q_j / |w_j|), because with a mean-reduced loss the g_b that autograd delivers
contains 1/|B|. The sums also carry the square of a loss scale, if there is one.

What counts as a sample's gradient:
- g_b is the part of the weight's gradient that flows through sample b's activations, δ_b times x_b. Where
  samples do not interact that is the literal ∂L(x_b)/∂w / |B|. Under BatchNorm in training mode they do, and
  this is the gradient with the statistics of the full batch: the only reading under which the samples add up
  to the batch gradient.
- A sample of a sequence layer is a sequence: gradients are summed over time before they are squared.
- All calls of a weight whose gradients arrive in one backward belong to the same samples, in the same order:
  they are summed before they are squared (tied weights, modules called in a loop, two views of one sample).
  Separate backwards are separate samples: gradient accumulation adds up.
- A penalty on the weights themselves is no sample's gradient and is left out.

How it works: a forward hook sends each layer's outputs through an identity node (`_Tap`) whose backward sees
the gradients of all outputs at once. The sums are taken when the weight's own gradient is complete, which
autograd announces once a backward; so a backward that stops before the weights (`torch.autograd.grad` for the
inputs) leaves no trace. Values and gradients of the network are bit for bit those without the watcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.per_sample.gradients import Use, by_feature, squared_sums
from gossamer.per_sample.visits import (
    Call,
    Kind,
    Visit,
    compute_dtype,
    default_batch_axis,
    kind_of,
    needs_random_state,
    transposed_groups,
    weight_names,
)

Uses = Mapping[str, Sequence[tuple[nn.Module, str]]]


@dataclass(eq=False)
class _Pass:
    """One call of one module; remembers which weights have had its gradient.

    `during` is the backward inside which the call was made (reentrant checkpointing), negative for none.
    """

    during: int
    counted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Capture:
    """What one call adds to the gradient of one weight in one backward (autograd numbers its backwards)."""

    backward: int
    origin: _Pass
    use: Use


@dataclass(eq=False)
class _Watched:
    """One weight: what it is, and what has been summed for it since the last reset."""

    name: str
    parameter: Tensor
    transposed_groups: int | None
    sums: Tensor | None = None
    samples: int = 0
    captured: list[_Capture] = field(default_factory=list)
    last_root: int = -1  # the outermost backward that was counted last
    bypassed: bool = False  # a gradient arrived, but through no call of a watched module
    differentiable: bool = False  # a backward was itself recorded (create_graph)

    @property
    def features(self) -> int:
        groups = self.transposed_groups
        return self.parameter.shape[0] if groups is None else groups * self.parameter.shape[1]

    def add(self, sums: Tensor, samples: int) -> None:
        if self.sums is None or self.sums.device != sums.device or self.sums.dtype != sums.dtype:
            self.sums = sums
        else:
            self.sums += sums
        self.samples += samples

    def clear(self) -> None:
        if self.sums is not None:
            self.sums.zero_()
        self.samples = 0
        self.captured.clear()
        self.bypassed = self.differentiable = False


class SampleMoments:
    """Watches the modules that hold some weights and sums, during every backward, the squared per-sample mask
    gradients.

    `uses` names every weight and lists all (module, attribute) that hold it, several when it is tied.
    `dense(name)` gives w̃, a tensor like the parameter (which itself holds w̃ ⊙ m). `batch_axis` says where
    the samples are in the input of a Linear or Embedding when that is not axis 0. Temporaries stay within
    `chunk_bytes`, or what a single sample needs.

    Takes models that run eagerly and one backward a forward; refuses what would not be exact.
    """

    def __init__(
        self,
        uses: Uses,
        dense: Callable[[str], Tensor],
        *,
        batch_axis: Mapping[nn.Module, int] | None = None,
        chunk_bytes: int = 256 * 2**20,
    ) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"expected chunk_bytes of at least 1, got {chunk_bytes}")
        axes = dict(batch_axis or {})
        refuse_unknown(uses, axes)
        self._dense = dense
        self._chunk_bytes = chunk_bytes
        self._weights: dict[str, _Watched] = {}
        self._random_states: dict[nn.Module, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        holders: dict[nn.Module, dict[str, _Watched]] = {}
        for name, places in uses.items():
            module, attribute = places[0]
            parameter = module.get_parameter(attribute)
            watched = _Watched(name, parameter, transposed_groups(module))
            self._weights[name] = watched
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, watched=watched: self._count(watched)
                )
            )
            for module, attribute in places:
                holders.setdefault(module, {})[attribute] = watched
        for module, held in holders.items():
            self._watch(module, held, axes.get(module, default_batch_axis(module)))

    def totals(self) -> dict[str, Tensor]:
        """Q_j of every weight since the last reset: one float32 a feature, zero where nothing was seen."""
        self._refuse_unseen()
        return {
            name: torch.zeros(watched.features, dtype=torch.float32, device=watched.parameter.device)
            if watched.sums is None
            else watched.sums.to(torch.float32, copy=True)
            for name, watched in self._weights.items()
        }

    def counts(self) -> dict[str, int]:
        """The samples that each weight has had a gradient from since the last reset."""
        return {name: watched.samples for name, watched in self._weights.items()}

    @property
    def samples(self) -> int:
        """The samples seen since the last reset, over all micro-batches."""
        seen = {name: count for name, count in self.counts().items() if count}
        if len(set(seen.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in seen.items())
            raise ValueError(
                "per-sample scales: expected every weight to see the same number of samples, got "
                f"{listed}. Tell where the samples are by batch_axis, do not fold other axes into the batch "
                'axis, or use scale="batch".'
            )
        return next(iter(seen.values()), 0)

    def reset(self) -> None:
        """Forget the sums and the samples; the next backward starts from zero."""
        for watched in self._weights.values():
            watched.clear()

    def close(self) -> None:
        """Remove all hooks. The sums can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._random_states.clear()

    def _watch(self, module: nn.Module, held: Mapping[str, _Watched], axis: int) -> None:
        kind = cast(Kind, kind_of(module))

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._random_states.pop(module, None)
            if torch.is_grad_enabled() and needs_random_state(module):
                self._random_states[module] = torch.get_rng_state()

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not torch.is_grad_enabled() or not any(one.parameter.requires_grad for one in held.values()):
                return output
            call = Call(module, args, kwargs, output, axis, self._random_states.pop(module, None))
            return self._tap(kind.visit(call), held)

        if isinstance(module, nn.RNNBase):
            self._handles.append(module.register_forward_pre_hook(_Hook(before)))
        # Before all other hooks: they may change the output, and the gradient of the layer's own is wanted.
        self._handles.append(module.register_forward_hook(_Hook(after), with_kwargs=True, prepend=True))

    def _tap(self, visit: Visit, held: Mapping[str, _Watched]) -> Any:
        origin, uses_of = _Pass(during=_current_backward()), visit.uses
        if origin.during < 0:
            # Outside all backwards, what was captured and not counted was for a gradient of something else.
            for watched in held.values():
                watched.captured.clear()

        def arrived(saved: Sequence[Tensor], deltas: Sequence[Tensor | None], recorded: bool) -> None:
            backward = _current_backward()
            for attribute, use in uses_of(saved, deltas).items():
                watched = held.get(attribute)
                if watched is not None and watched.parameter.requires_grad:
                    watched.captured.append(_Capture(backward, origin, use))
                    watched.differentiable |= recorded

        saved = [tensor.detach() for tensor in visit.saved]
        tapped = _Tap.apply(arrived, len(visit.outputs), *visit.outputs, *saved)  # type: ignore[no-untyped-call]
        return visit.rebuild(tapped)

    @torch.no_grad()
    def _count(self, watched: _Watched) -> None:
        """The weight's gradient is complete: square and sum what this backward captured for it."""
        backward = _current_backward()
        captured = [one for one in watched.captured if one.backward == backward]
        origins = {one.origin for one in captured}
        watched.captured = [one for one in watched.captured if one.backward != backward]
        if watched.differentiable:
            raise RuntimeError(
                f"per-sample scales: the gradient of {watched.name} came through a backward that was "
                "itself differentiated (create_graph=True). Expected plain backwards; use "
                'scale="batch" with such a loss.'
            )
        if not captured:
            watched.bypassed = True
            return
        if any(watched.name in origin.counted for origin in origins):
            raise RuntimeError(
                f"per-sample scales: one forward of {watched.name} was followed by two backwards "
                "(retain_graph=True), whose gradients would have to be added before they are squared. Add "
                "the losses and call backward once."
            )
        root = max(backward if origin.during < 0 else origin.during for origin in origins)
        if root == watched.last_root:
            raise RuntimeError(
                f"per-sample scales: the gradient of {watched.name} arrives in parts, from several "
                "checkpointed segments, which would have to be added before they are squared. Pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        watched.last_root = root
        sizes = sorted({one.use.samples for one in captured})
        if len(sizes) > 1:
            raise ValueError(
                f"per-sample scales: expected all calls that use {watched.name} in one backward to have the "
                f"same samples, got batches of {sizes}. Tell where the samples are by batch_axis, call "
                'backward after each batch, or use scale="batch".'
            )
        for origin in origins:
            origin.counted.add(watched.name)
        if sizes[0] == 0:
            return
        dense = by_feature(self._dense(watched.name).detach(), transposed_groups=watched.transposed_groups)
        dense = dense.to(compute_dtype(dense))
        with torch.autocast(dense.device.type, enabled=False):
            sums = squared_sums([one.use for one in captured], dense, chunk_bytes=self._chunk_bytes)
        watched.add(sums, sizes[0])

    def _refuse_unseen(self) -> None:
        missed = [
            watched.name
            for watched in self._weights.values()
            if watched.samples == 0 and (watched.bypassed or (watched.captured and watched.parameter.grad is not None))
        ]
        if missed:
            raise RuntimeError(
                f"per-sample scales: {', '.join(missed)} got a gradient that did not come by loss.backward() "
                "through a call of the module that holds it (functional use, a compiled model, or gradients "
                'assigned by hand). Call the module, exclude these tensors, or use scale="batch".'
            )


class _Tap(torch.autograd.Function):
    """The identity on the outputs of a layer; hands their gradients and what was saved to `arrived`."""

    @staticmethod
    def forward(ctx: Any, arrived: Callable[..., None], outputs: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        ctx.saved_count = len(tensors) - outputs
        # Saved by autograd and not in a closure: freed after the backward, checked against changes in place,
        # and left to activation checkpointing like any other saved tensor.
        ctx.save_for_backward(*tensors[outputs:])
        # Detached and not viewed: autograd forbids changing views of this kind in place, as
        # ReLU(inplace=True) does.
        return tuple(tensor.detach() for tensor in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> Any:
        if any(delta is not None for delta in deltas):
            recorded = torch.is_grad_enabled()
            detached = [None if delta is None else delta.detach() for delta in deltas]
            with torch.no_grad(), torch.autocast(_device_type(detached), enabled=False):
                ctx.arrived(ctx.saved_tensors, detached, recorded)
        return None, None, *deltas, *(None for _ in range(ctx.saved_count))


class _Hook:
    """A hook that does nothing on a copied or pickled module: only the module that trains is watched.

    A compiled model leaves its graph for it; with fullgraph=True that is an error which gives the reason.
    """

    def __init__(self, action: Callable[..., Any]) -> None:
        reason = 'per-sample scales need an eager model; use scale="batch" with torch.compile(fullgraph=True)'
        self._action = torch.compiler.disable(action, reason=reason)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._action(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_no_action,)


def _no_action(*args: Any) -> None:
    """What is left of a hook on a copy."""


def _device_type(tensors: Sequence[Tensor | None]) -> str:
    return next(tensor.device.type for tensor in tensors if tensor is not None)


def _current_backward() -> int:
    """Autograd's number of the running backward pass."""
    return int(torch._C._current_graph_task_id())


def refuse_unknown(uses: Uses, axes: Mapping[nn.Module, int]) -> None:
    """Report all weights whose per-sample gradients are not known exactly, before anything is hooked."""
    problems = []
    for name, places in uses.items():
        if not places:
            problems.append(f"{name}: held by no module")
            continue
        holders = []
        for module, attribute in places:
            parameter = dict(module.named_parameters(recurse=False)).get(attribute)
            if kind_of(module) is None:
                problems.append(f"{name}: held by {type(module).__name__}, whose gradients are not known by sample")
            elif parameter is None or attribute not in weight_names(module):
                problems.append(f"{name}: {attribute!r} is no weight parameter of its {type(module).__name__}")
            elif not parameter.is_floating_point():
                problems.append(f"{name}: expected real floating-point weights, got {parameter.dtype}")
            else:
                holders.append((parameter, transposed_groups(module)))
        if any(parameter is not holders[0][0] for parameter, _ in holders):
            problems.append(f"{name}: its modules hold different parameters, expected one tied parameter")
        elif len({groups for _, groups in holders}) > 1:
            problems.append(f"{name}: tied between layers that have their output features on different axes")
    for module, axis in axes.items():
        kind = kind_of(module)
        if kind is not None and not kind.free_batch_axis and axis != default_batch_axis(module):
            problems.append(
                f"batch_axis={axis} given for {type(module).__name__}, whose samples are on axis "
                f"{default_batch_axis(module)}"
            )
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(
            "per-sample scales: expected weights of Linear, Conv1d-3d, ConvTranspose1d-3d, Embedding, RNN, "
            "LSTM, GRU or their "
            f'cells, got\n  {listed}\nExclude these tensors from sparsification, or use scale="batch".'
        )
