"""Exact per-sample scales: squared mask gradients of single samples, summed during the ordinary backward pass.

The paper scales the mask gradient of output feature j by s_j, the root mean square over samples b and weights k of
∂L(x_b)/∂w_k · w̃_k. `SampleGradients` sums Q_j = Σ_b Σ_{k∈j} (g_{b,k} · w̃_k)², from which s_j = √(|B| · Q_j / |w_j|),
because with a mean-reduced loss the g_b of autograd contains 1/|B|. What counts as the gradient of a sample:

- g_b is the part of the weight's gradient that flows through the activations of sample b. Where samples do not
  interact, that is the literal ∂L(x_b)/∂w / |B|. Under batch norm in training mode they do, and this is the gradient
  with the statistics of the full batch: the only reading in which the samples add up to the batch gradient.
- The gradients of a sample are added before they are squared: over the times of a sequence, and over all calls of a
  weight in one backward pass (tied weights, loops), which have the same samples in the same order.
- Separate backward passes have separate samples. A penalty on the weights is no sample's gradient and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from gossamer.methods.base import SampleSums
from gossamer.per_sample.layers import Call, problem_of, second_moments
from gossamer.prunable import Weight, by_feature

_ELSE = 'or use scale="batch"'
_FIRST = "Put the samples on axis 0 of every layer (batch_first=True in recurrent ones)"


def check_layers(weights: Sequence[Weight]) -> None:
    """Raise a ValueError that names all weights whose per-sample gradients are not known exactly."""
    found = [(weight.name, problem_of(use.module, use.attribute)) for weight in weights for use in weight.uses]
    problems = [f"{name}: {problem}" for name, problem in found if problem is not None]
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(
            'scale="per_sample" needs weights of Linear, Conv1d-3d, ConvTranspose1d-3d, Embedding, RNN, LSTM, GRU or '
            f"their cells, got\n  {listed}\nExclude these tensors, {_ELSE}"
        )


class SampleGradients:
    """Watches the layers of some weights: hooks keep their inputs and wait for the gradients of their outputs. Sums are
    taken when autograd announces that a weight's own gradient is complete, so that a backward pass that stops before
    the weights leaves no trace. `dense` has w̃ for each weight; `replicas` train copies of the model."""

    def __init__(self, weights: Sequence[Weight], dense: Sequence[Tensor], replicas: dist.ProcessGroup | None) -> None:
        self._watched = [_Watched(weight, view) for weight, view in zip(weights, dense, strict=True)]
        self._replicas = replicas
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        holders: dict[nn.Module, set[_Watched]] = {}
        for watched in self._watched:
            on_gradient = watched.weight.parameter.register_post_accumulate_grad_hook
            self._handles.append(on_gradient(watched.count))  # type: ignore[no-untyped-call]
            for use in watched.weight.uses:
                holders.setdefault(use.module, set()).add(watched)
        for module, held in holders.items():
            # Before all other hooks: they may change the output, and the gradient of the layer's own is wanted.
            self._handles.append(module.register_forward_hook(_Hook(held), with_kwargs=True, prepend=True))

    def take(self, loss_scale: float | None = None) -> SampleSums:
        """The sums since the last call, over all processes. `loss_scale` is what the loss was multiplied by."""
        missed = [watched.weight.name for watched in self._watched if watched.is_missed()]
        if missed:
            raise RuntimeError(
                f"per-sample scales: {', '.join(missed)} got a gradient that did not come by loss.backward() through a "
                "call of the module that holds it (functional use, a compiled model, or gradients assigned by hand). "
                f"Call the module, exclude these tensors, {_ELSE}"
            )
        counts = {watched.weight.name: watched.samples for watched in self._watched if watched.samples}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(
                f"per-sample scales: expected one number of samples for all weights, got {listed}. {_FIRST}, {_ELSE}"
            )
        if not counts:
            raise RuntimeError(
                'scale="per_sample" saw no backward pass of the model before this step: train the model that was given '
                f"to the Sparsifier, not a copy or a compiled one, {_ELSE}"
            )
        samples = next(iter(counts.values()))
        factor = 1.0 if loss_scale is None else loss_scale**-2
        totals = [watched.take() for watched in self._watched]
        if self._replicas is not None:
            # Each process takes the mean over its own samples; the joint mean divides by the number of processes again.
            processes = dist.get_world_size(self._replicas)
            joint = torch.cat(totals)
            dist.all_reduce(joint, group=self._replicas)
            totals = list(torch.split(joint, [len(total) for total in totals]))
            samples, factor = samples * processes, factor / processes**2
        return SampleSums([total * factor for total in totals], samples)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(eq=False)
class _Visit(Call):
    """A watched call; its gradients are those of the latest backward pass."""

    held: set["_Watched"]
    during: int  # the backward pass in which the call was made (reentrant checkpointing), negative for none
    arrived: int = -1  # the backward pass of the gradients
    counted: set["_Watched"] = field(default_factory=set)
    moments: dict[tuple[int, ...], dict[nn.Parameter, Tensor]] = field(default_factory=dict)  # by the calls they sum

    def arrive(self, place: int, delta: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "per-sample scales: a backward pass through a watched layer is itself differentiated "
                f"(create_graph=True). Use plain backward passes, {_ELSE}"
            )
        if self.arrived != _current_pass():
            self.arrived, self.deltas = _current_pass(), [None] * len(self.deltas)
            for watched in self.held:
                watched.captured[self] = None
        self.deltas[place] = delta


@dataclass(eq=False)
class _Watched:
    """One weight, and what has been summed for it since the last step."""

    weight: Weight
    dense: Tensor
    sums: Tensor | None = None
    samples: int = 0
    captured: dict[_Visit, None] = field(default_factory=dict)  # whose gradients have arrived and are not counted
    last_pass: int = -1  # the outermost backward pass that was counted last
    bypassed: bool = False  # a gradient arrived, but through no call of a watched layer

    def is_missed(self) -> bool:
        by_hand = bool(self.captured) and self.weight.parameter.grad is not None
        return not self.samples and (self.bypassed or by_hand)

    def take(self) -> Tensor:
        sums = self._by_feature(torch.zeros_like(self.dense)) if self.sums is None else self.sums
        self.sums, self.samples, self.captured, self.bypassed = None, 0, {}, False
        return sums

    def _by_feature(self, squares: Tensor) -> Tensor:
        return by_feature(squares, self.weight.feature_axis, self.weight.groups).sum(1)

    @torch.no_grad()
    def count(self, parameter: nn.Parameter) -> None:
        """The gradient of the weight is complete: square and sum what this backward pass captured for it."""
        now = _current_pass()
        calls = [call for call in self.captured if call.arrived == now]
        if not calls:
            self.bypassed = True
            return
        outermost = max(now if call.during < 0 else call.during for call in calls)
        if outermost == self.last_pass or any(self in call.counted for call in calls):
            raise RuntimeError(
                f"per-sample scales: the gradient of {self.weight.name} arrives in parts, which would have to be added "
                "before they are squared: call backward once per forward, with use_reentrant=False in checkpoint"
            )
        sizes = sorted({call.samples for call in calls})
        if len(sizes) > 1:
            raise ValueError(
                f"per-sample scales: {self.weight.name} has batches of {sizes} in one backward pass. {_FIRST}, call "
                f"backward after each batch, {_ELSE}"
            )
        self.last_pass = outermost
        if sizes[0]:
            key = tuple(map(id, calls))
            if key not in calls[0].moments:
                with torch.autocast(parameter.device.type, enabled=False):
                    calls[0].moments[key] = second_moments(calls, parameter)
            moment = calls[0].moments[key].pop(parameter)
            sums = self._by_feature(moment.mul_(self.dense.to(moment.dtype).square()))
            self.sums = sums if self.sums is None else self.sums + sums
            self.samples += sizes[0]
        for call in calls:
            del self.captured[call]
            call.counted.add(self)
            if call.counted == call.held:  # memory is freed though the loss may live on
                call.inputs, call.deltas, call.moments = [], [None] * len(call.deltas), {}


class _Hook:
    """The forward hook of a layer. It does nothing on a copied or pickled module: only the one that trains is watched.
    A compiled model leaves its graph for it; with fullgraph=True that is an error which gives the reason."""

    def __init__(self, held: set[_Watched]) -> None:
        reason = 'per-sample scales need an eager model; use scale="batch" with torch.compile(fullgraph=True)'
        self._held = held
        self._watch = torch.compiler.disable(self._note, reason=reason)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (set(),)

    def __call__(self, *call: Any) -> Any:
        return self._watch(*call)

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        held = {watched for watched in self._held if watched.weight.parameter.requires_grad}
        if not held:
            return output
        if isinstance(layer, nn.LSTMCell):  # h is computed from c: only the gradient from outside is wanted
            output = output[0], output[1].clone()
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        packed = given["input"] if isinstance(given["input"], PackedSequence) else None
        inputs = [given["input"] if packed is None else packed.data]
        if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            inputs += [state for state in tree_leaves(given.get("hx")) if state is not None]
        outputs = tree_leaves(output if packed is None else (output[0].data, output[1]))
        call = _Visit(layer, [each.detach() for each in inputs], packed, [None] * len(outputs), held, _current_pass())
        if call.during < 0:  # what was captured and not counted belongs to a gradient of something else
            for watched in held:
                watched.captured.clear()
        for place, each in enumerate(outputs):
            if each.requires_grad:
                each.register_hook(partial(call.arrive, place))
        return output


_current_pass = torch._C._current_graph_task_id  # autograd's number of the running backward pass, negative outside
