"""Gate gradients of RNN, LSTM and GRU layers and cells, by replaying them step by step.

The fused recurrent kernels do not tell the gradient δ_t of a gate's pre-activation, and a weight's per-sample
gradient is Σ_t δ_bt ⊗ x_bt. So the layer is computed once more from its saved input and initial state, in
plain steps that autograd follows, and the output gradients that the real backward delivered are sent through.
What comes back are, for every weight matrix, the vectors that went in and the gradients of what came out: a
`Product` with time inside the sample.

Everything here is time-major, (times, samples, …). Sequences of different lengths (packed) are padded, and a
step behind a sequence's end leaves its state alone, which also makes the backward direction start at every
sequence's own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.per_sample.gradients import Product

RecurrentModule = nn.RNNBase | nn.RNNCellBase


@dataclass(frozen=True)
class Replayed:
    """What the module returns (outputs, then final states), and what each weight took and gave by time."""

    outputs: tuple[Tensor, ...]
    products: dict[str, tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class _Matrices:
    """The weights of one layer and direction, detached and in the dtype of the computation."""

    suffix: str
    input_weight: Tensor
    state_weight: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
    projection: Tensor | None


def replay(
    module: RecurrentModule,
    inputs: Tensor,
    states: Sequence[Tensor],
    *,
    active: Tensor | None = None,
    dropout_state: Tensor | None = None,
) -> Replayed:
    """Compute the module step by step under autograd.

    `inputs` is (times, samples, width), `states` the initial h (and c) as (layers × directions, samples,
    width), `active` marks the steps inside each sequence as (times, samples, 1), and `dropout_state` is the
    state of the CPU random generator before the module ran, needed where dropout between its layers was at
    work.
    """
    if isinstance(module, nn.RNNCellBase):
        layers, directions, dropout = 1, [""], 0.0
    else:
        layers, directions = module.num_layers, ["", "_reverse"] if module.bidirectional else [""]
        dropout = module.dropout if module.training else 0.0
    finals: list[tuple[Tensor, ...]] = []
    products: dict[str, tuple[Tensor, Sequence[Tensor]]] = {}
    with torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=dropout_state is not None):
        if dropout_state is not None:
            torch.set_rng_state(dropout_state)
        below = inputs
        for layer in range(layers):
            heads = []
            for direction in directions:
                suffix = "" if isinstance(module, nn.RNNCellBase) else f"_l{layer}{direction}"
                matrices = _matrices(module, suffix, inputs.dtype)
                start = tuple(state[len(finals)] for state in states)
                backward = direction == "_reverse"
                output, final = _run(module, matrices, below, start, active, backward, products)
                heads.append(output)
                finals.append(final)
            below = heads[0] if len(heads) == 1 else torch.cat(heads, dim=-1)
            if dropout and layer < layers - 1:
                below = _dropout(below, active, dropout)
        stacked = tuple(torch.stack(kind) for kind in zip(*finals, strict=True))
    return Replayed(outputs=(below, *stacked), products=products)


def gate_products(replayed: Replayed, deltas: Sequence[Tensor | None]) -> dict[str, Product]:
    """Send the gradients of the outputs through the replay; a product for every weight comes back."""
    reached = [
        (output, delta)
        for output, delta in zip(replayed.outputs, deltas, strict=True)
        if delta is not None and output.requires_grad
    ]
    targets = [step for _, steps in replayed.products.values() for step in steps]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        [output for output, _ in reached], targets, [delta for _, delta in reached], allow_unused=True
    )
    remaining = iter(
        torch.zeros_like(step) if gradient is None else gradient
        for step, gradient in zip(targets, gradients, strict=True)
    )
    uses = {}
    for name, (fed, steps) in replayed.products.items():
        # A matrix applied to all times at once has one gradient (times, …); one applied step by step has one
        # a step.
        parts = [next(remaining) for _ in steps]
        delta = parts[0] if parts[0].dim() == 3 else torch.stack(parts)
        uses[name] = Product(fed.detach().transpose(0, 1), delta.transpose(0, 1))
    return uses


def _matrices(module: RecurrentModule, suffix: str, dtype: torch.dtype) -> _Matrices:
    held = dict(module.named_parameters(recurse=False))

    def fetch(kind: str) -> Tensor | None:
        parameter = held.get(kind + suffix)
        return None if parameter is None else parameter.detach().to(dtype)

    return _Matrices(
        suffix=suffix,
        input_weight=held["weight_ih" + suffix].detach().to(dtype),
        state_weight=held["weight_hh" + suffix].detach().to(dtype),
        input_bias=fetch("bias_ih"),
        state_bias=fetch("bias_hh"),
        projection=fetch("weight_hr"),
    )


def _run(
    module: RecurrentModule,
    matrices: _Matrices,
    inputs: Tensor,
    start: tuple[Tensor, ...],
    active: Tensor | None,
    backward: bool,
    products: dict[str, tuple[Tensor, Sequence[Tensor]]],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction; notes in `products` what every matrix was applied to."""
    times = range(inputs.shape[0])
    from_input = _followed(F.linear(inputs, matrices.input_weight, matrices.input_bias))
    previous: dict[int, Tensor] = {}
    from_state: dict[int, Tensor] = {}
    unprojected: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    state = start
    for time in reversed(times) if backward else times:
        previous[time] = state[0]
        from_state[time] = _followed(F.linear(state[0], matrices.state_weight, matrices.state_bias))
        new = _step(module, from_input[time], from_state[time], state)
        if matrices.projection is not None:
            unprojected[time] = new[0]
            new = (F.linear(new[0], matrices.projection), *new[1:])
        hidden[time] = new[0]
        if active is None:
            outputs[time], state = new[0], new
        else:
            here = active[time]
            outputs[time] = new[0] * here
            state = tuple(torch.where(here, after, before) for after, before in zip(new, state, strict=True))
    products["weight_ih" + matrices.suffix] = (inputs, [from_input])
    products["weight_hh" + matrices.suffix] = (_by_time(previous), [from_state[time] for time in times])
    if matrices.projection is not None:
        products["weight_hr" + matrices.suffix] = (_by_time(unprojected), [hidden[time] for time in times])
    return _by_time(outputs), state


def _step(
    module: RecurrentModule, from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """One time step from the pre-activations, in the order of gates that torch documents."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        entry, forget, candidate, exit_ = (from_input + from_state).chunk(4, dim=-1)
        cell = forget.sigmoid() * state[1] + entry.sigmoid() * candidate.tanh()
        return exit_.sigmoid() * cell.tanh(), cell
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        reset_x, update_x, new_x = from_input.chunk(3, dim=-1)
        reset_h, update_h, new_h = from_state.chunk(3, dim=-1)
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        return (new + (update_x + update_h).sigmoid() * (state[0] - new),)
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    total = from_input + from_state
    return (total.relu() if module.nonlinearity == "relu" else total.tanh(),)


def _dropout(below: Tensor, active: Tensor | None, share: float) -> Tensor:
    """The same draws as inside the module, which draws for the steps that exist and for no others."""
    if active is None:
        return F.dropout(below, share)
    drawn = F.dropout(below.new_ones(int(active.sum()), below.shape[-1]), share)
    return below * torch.zeros_like(below).masked_scatter(active.expand_as(below), drawn)


def _followed(tensor: Tensor) -> Tensor:
    """The first products have only constants behind them; autograd has to be told to follow them."""
    return tensor if tensor.requires_grad else tensor.requires_grad_()


def _by_time(steps: dict[int, Tensor]) -> Tensor:
    return torch.stack([steps[time] for time in sorted(steps)])
