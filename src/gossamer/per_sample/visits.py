"""What to keep when a layer runs, so that its per-sample weight gradients can be formed when the gradient
returns.

One function a kind of layer. It is called after the layer's forward and answers with a `Visit`: the output
tensors whose gradients are wanted, the tensors to save until then, how to turn both into one `Use` a weight,
and how to put the output together again. `kind_of` says which kind a module is, or None where its weight
gradients are not known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gossamer.per_sample.gradients import Convolution, Lookup, Product, Use
from gossamer.per_sample.recurrent import gate_products, replay

Deltas = Sequence[Tensor | None]


@dataclass(frozen=True)
class Visit:
    """One call of a module, seen from outside.

    `uses` lives as long as the graph, so it holds on to no activation: those are in `saved`, which autograd
    frees after the backward.
    """

    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    uses: Callable[[Sequence[Tensor], Deltas], Mapping[str, Use]]
    rebuild: Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Call:
    """A module, what went in, what came out, where the samples are, and the random state where it matters."""

    module: Any  # of the type that the visiting function is registered for
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    batch_axis: int
    random_state: Tensor | None

    def argument(self, position: int, name: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


@dataclass(frozen=True)
class Kind:
    """How one family of layers is handled."""

    layers: tuple[type[nn.Module], ...]
    visit: Callable[[Call], Visit]
    free_batch_axis: bool  # whether the caller may say which axis of the input holds the samples


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module, None for other layers and for subclasses with a forward of their own."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # attention uses its weight without calling it
        return None
    for kind in KINDS:
        for layer in kind.layers:
            if isinstance(module, layer) and type(module).forward is layer.forward:
                return kind
    return None


def weight_names(module: nn.Module) -> set[str]:
    """The parameters of a known layer that hold connections: its matrices and kernels."""
    return {name for name, held in module.named_parameters(recurse=False) if "weight" in name and held.dim() > 1}


def default_batch_axis(module: nn.Module) -> int:
    return int(isinstance(module, nn.RNNBase) and not module.batch_first)


def needs_random_state(module: nn.Module) -> bool:
    """Dropout between the layers of one recurrent module has to be replayed with the same draws."""
    return isinstance(module, nn.RNNBase) and module.training and module.dropout > 0 and module.num_layers > 1


def transposed_groups(module: nn.Module) -> int | None:
    """The groups of a transposed convolution, None for everything that has its features on axis 0."""
    return module.groups if isinstance(module, _ConvTransposeNd) else None


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Squares of small gradients need float32 at least."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _given(deltas: Deltas) -> Tensor:
    """The gradient of a layer with one output, which is there or the layer would not have been reached."""
    delta = deltas[0]
    assert delta is not None
    return delta


def _samples_first(tensor: Tensor, axis: int, *, inner: int, layer: nn.Module) -> Tensor:
    """(samples, times, …): the batch axis in front, all other outer axes joined into one of times."""
    outer = tensor.dim() - inner
    if outer == 0:
        return tensor[None, None]
    if not 0 <= axis < outer:
        raise ValueError(
            f"per-sample scales: expected the samples of {layer} on axis {axis} of its input, got an input "
            f"with {outer} axes for samples and times. Pass the right batch_axis for this module."
        )
    moved = tensor.movedim(axis, 0)
    return moved.unsqueeze(1) if outer == 1 else moved.flatten(1, outer - 1)


def _visit_linear(call: Call) -> Visit:
    layer, axis = call.module, call.batch_axis

    def uses(saved: Sequence[Tensor], deltas: Deltas) -> dict[str, Use]:
        inputs, delta = (_samples_first(tensor, axis, inner=1, layer=layer) for tensor in (saved[0], _given(deltas)))
        return {"weight": Product(inputs, delta)}

    return Visit((call.output,), (call.argument(0, "input"),), uses, _first)


def _visit_embedding(call: Call) -> Visit:
    layer: nn.Embedding = call.module
    axis = call.batch_axis

    def uses(saved: Sequence[Tensor], deltas: Deltas) -> dict[str, Use]:
        tokens = _samples_first(saved[0], axis, inner=0, layer=layer)
        delta = _samples_first(_given(deltas), axis, inner=1, layer=layer)
        if layer.padding_idx is not None:
            delta = delta * (tokens != layer.padding_idx).unsqueeze(-1)
        if layer.scale_grad_by_freq:
            ones = torch.ones(tokens.numel(), dtype=delta.dtype, device=delta.device)
            counts = ones.new_zeros(layer.num_embeddings).index_add_(0, tokens.flatten(), ones)
            delta = delta / counts[tokens].unsqueeze(-1)
        return {"weight": Lookup(tokens, delta)}

    return Visit((call.output,), (call.argument(0, "input"),), uses, _first)


def _visit_convolution(call: Call) -> Visit:
    layer: _ConvNd = call.module
    transposed = isinstance(layer, _ConvTransposeNd)

    def uses(saved: Sequence[Tensor], deltas: Deltas) -> dict[str, Use]:
        inputs, delta = saved[0], _given(deltas)
        if inputs.dim() == len(layer.kernel_size) + 1:
            inputs, delta = inputs.unsqueeze(0), delta.unsqueeze(0)
        use = Convolution(
            field=delta if transposed else inputs,
            probe=inputs if transposed else delta,
            kernel=layer.kernel_size,
            stride=layer.stride,
            dilation=layer.dilation,
            padding=_padding(layer),
            padding_mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode,
            groups=layer.groups,
            transposed=transposed,
        )
        return {"weight": use}

    return Visit((call.output,), (call.argument(0, "input"),), uses, _first)


def _padding(layer: _ConvNd) -> tuple[tuple[int, int], ...]:
    if layer.padding == "valid":
        return tuple((0, 0) for _ in layer.kernel_size)
    if layer.padding == "same":  # an odd amount puts the extra one behind
        totals = [gap * (size - 1) for gap, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(amount), int(amount)) for amount in layer.padding)


def _visit_cell(call: Call) -> Visit:
    cell: nn.RNNCellBase = call.module
    hx = call.argument(1, "hx")
    outputs = call.output if isinstance(call.output, tuple) else (call.output,)
    given = () if hx is None else tuple(hx) if isinstance(hx, tuple) else (hx,)
    states_count = len(outputs)

    def uses(saved: Sequence[Tensor], deltas: Deltas) -> Mapping[str, Use]:
        dtype = compute_dtype(cell.weight_ih)
        inputs = saved[0].to(dtype).reshape(1, -1, cell.input_size)

        def one_layer(state: Tensor) -> Tensor:
            return state.to(dtype).reshape(1, -1, cell.hidden_size)

        states = [one_layer(state) for state in saved[1:]] or [
            inputs.new_zeros(1, inputs.shape[1], cell.hidden_size) for _ in range(states_count)
        ]
        replayed = replay(cell, inputs, states)
        return gate_products(replayed, [None, *(None if delta is None else one_layer(delta) for delta in deltas)])

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        return tuple(tensors) if isinstance(call.output, tuple) else tensors[0]

    return Visit(outputs, (call.argument(0, "input"), *given), uses, rebuild)


def _visit_recurrent(call: Call) -> Visit:
    layer: nn.RNNBase = call.module
    fed, hx = call.argument(0, "input"), call.argument(1, "hx")
    sequence, final = call.output
    packed = isinstance(sequence, PackedSequence)
    finals = final if isinstance(final, tuple) else (final,)
    given = () if hx is None else tuple(hx) if isinstance(hx, tuple) else (hx,)
    data, outputs = (fed.data, (sequence.data, *finals)) if packed else (fed, (sequence, *finals))
    random_state = call.random_state
    if random_state is not None and data.device.type != "cpu":
        raise RuntimeError(
            f"per-sample scales: {layer} draws its dropout inside the accelerator's recurrent kernel, where "
            f"it cannot be repeated. Expected dropout=0, got {layer.dropout}: use one module a layer with "
            'nn.Dropout between them, or scale="batch".'
        )
    layout = _Layout(
        batch_first=layer.batch_first,
        unbatched=not packed and fed.dim() == 2,
        batch_sizes=sequence.batch_sizes if packed else None,
        sorted_indices=sequence.sorted_indices if packed else None,
        unsorted_indices=sequence.unsorted_indices if packed else None,
    )
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: len(finals)]
    tracks, given_count = finals[0].shape[0], len(given)

    def uses(saved: Sequence[Tensor], deltas: Deltas) -> Mapping[str, Use]:
        dtype = compute_dtype(layer.get_parameter("weight_ih_l0"))
        inputs = layout.sequence(saved[0].to(dtype))
        states = [layout.state(state.to(dtype)) for state in saved[1 : 1 + given_count]] or [
            inputs.new_zeros(tracks, inputs.shape[1], width) for width in widths
        ]
        replayed = replay(layer, inputs, states, active=layout.active(inputs), dropout_state=random_state)
        if random_state is not None:
            _check_replay(layer, layout.sequence(saved[-1].to(dtype)), replayed.outputs[0])
        arranged = [
            None if delta is None else (layout.sequence if index == 0 else layout.state)(delta.to(dtype))
            for index, delta in enumerate(deltas)
        ]
        products = gate_products(replayed, arranged)
        return {name: layout.in_given_order(product) for name, product in products.items()}

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        first = PackedSequence(tensors[0], *sequence[1:]) if packed else tensors[0]
        return first, (tuple(tensors[1:]) if isinstance(final, tuple) else tensors[1])

    check = () if random_state is None else (outputs[0],)
    return Visit(outputs, (data, *given, *check), uses, rebuild)


@dataclass(frozen=True)
class _Layout:
    """Brings what a recurrent module takes and gives into (times, samples, …)."""

    batch_first: bool
    unbatched: bool
    batch_sizes: Tensor | None  # of a packed sequence: how many sequences have not ended, for each time
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None

    def sequence(self, tensor: Tensor) -> Tensor:
        if self.batch_sizes is not None:
            # Without its indices the sequence is unpacked in packed order, longest first.
            return pad_packed_sequence(PackedSequence(tensor, self.batch_sizes))[0]
        if self.unbatched:
            return tensor.unsqueeze(1)
        return tensor.transpose(0, 1) if self.batch_first else tensor

    def state(self, tensor: Tensor) -> Tensor:
        if self.unbatched:
            return tensor.unsqueeze(1)
        return tensor if self.sorted_indices is None else tensor.index_select(1, self.sorted_indices)

    def active(self, inputs: Tensor) -> Tensor | None:
        if self.batch_sizes is None:
            return None
        running = self.batch_sizes.to(inputs.device).unsqueeze(1)
        return (torch.arange(inputs.shape[1], device=inputs.device) < running).unsqueeze(-1)

    def in_given_order(self, product: Product) -> Product:
        if self.unsorted_indices is None:
            return product
        inputs, deltas = (part.index_select(0, self.unsorted_indices) for part in (product.inputs, product.deltas))
        return Product(inputs, deltas)


def _check_replay(layer: nn.RNNBase, expected: Tensor, got: Tensor) -> None:
    """Another dropout mask would be a gross difference; rounding, also that of autocast, is a small one."""
    if (got.detach() - expected).norm() > 0.05 * expected.norm():
        raise RuntimeError(
            f"per-sample scales: the dropout inside {layer} could not be repeated (expected the outputs of "
            'its forward, got others). Use one module a layer with nn.Dropout between them, or scale="batch".'
        )


KINDS = (
    Kind((nn.Linear,), _visit_linear, free_batch_axis=True),
    Kind((nn.Embedding,), _visit_embedding, free_batch_axis=True),
    Kind(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        _visit_convolution,
        free_batch_axis=False,
    ),
    Kind((nn.RNN, nn.LSTM, nn.GRU), _visit_recurrent, free_batch_axis=False),
    Kind((nn.RNNCell, nn.LSTMCell, nn.GRUCell), _visit_cell, free_batch_axis=False),
)
