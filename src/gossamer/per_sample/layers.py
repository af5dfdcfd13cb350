"""Second moments Σ_b g_b² of the per-sample gradients of a weight, from the calls of the layers that hold it.

One rule is the definition: run the layers again for each sample alone, add the gradients of all calls, square. Where a
weight of a linear layer, a convolution or an embedding is used once, a formula does the same for many samples at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from gossamer.prunable import layer_attributes

# On a CPU temporaries that stay in the cache are several times faster than large ones, whose memory is always new.
CPU_BYTES, GPU_BYTES = 4 * 2**20, 256 * 2**20

# The layers whose gradients are known, and how many axes the input of one sample has.
_LAYERS: dict[type[nn.Module], int] = {
    **{nn.Linear: 1, nn.Embedding: 0, nn.Conv1d: 2, nn.Conv2d: 3, nn.Conv3d: 4},
    **{nn.ConvTranspose1d: 2, nn.ConvTranspose2d: 3, nn.ConvTranspose3d: 4},
    **{nn.RNN: 2, nn.LSTM: 2, nn.GRU: 2, nn.RNNCell: 1, nn.LSTMCell: 1, nn.GRUCell: 1},
}


def problem_of(module: nn.Module, attribute: str) -> str | None:
    """Why the gradients of single samples are not known exactly for this weight of a module."""
    known = any(isinstance(module, layer) and type(module).forward is layer.forward for layer in _LAYERS)
    called = not isinstance(module, NonDynamicallyQuantizableLinear)  # which attention does not do with its own
    if not (known and called and attribute in layer_attributes(module)):
        return f"held by {type(module).__name__} as {attribute!r}, whose gradients are not known by sample"
    if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
        return "dropout inside a recurrent module cannot be repeated: put nn.Dropout between modules of one layer"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return "scale_grad_by_freq counts tokens over the whole batch"
    return None


@dataclass(eq=False)
class Call:
    """One call of a layer, and the gradients of its outputs."""

    layer: Any
    inputs: Sequence[Tensor]  # the input and, where they were given, the initial states of a recurrent layer
    packed: PackedSequence | None
    deltas: list[Tensor | None]

    @property
    def is_single(self) -> bool:
        """Whether the input is that of one sample, without an axis for samples."""
        axes = next(axes for kind, axes in _LAYERS.items() if isinstance(self.layer, kind))
        return self.packed is None and self.inputs[0].dim() == axes

    @property
    def samples(self) -> int:
        if self.packed is not None:
            return int(self.packed.batch_sizes[0])
        return 1 if self.is_single else self.inputs[0].shape[self._batch_axis(0)]

    def by_sample(self, tensors: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """The parts of each sample in the inputs or in the gradients of the outputs."""
        missing = [None] * self.samples
        parts = [missing if each is None else self._split(each, place) for place, each in enumerate(tensors)]
        return list(zip(*parts, strict=True))

    def _split(self, tensor: Tensor, place: int) -> Sequence[Tensor]:
        if self.packed is not None and place == 0:
            padded, lengths = pad_packed_sequence(PackedSequence(tensor, *self.packed[1:]))
            parts = [padded[:length, sample : sample + 1] for sample, length in enumerate(lengths.tolist())]
            return [part.transpose(0, 1) for part in parts] if self.layer.batch_first else parts
        return [tensor] if self.is_single else torch.split(tensor, 1, self._batch_axis(place))

    def _batch_axis(self, place: int) -> int:
        return int(isinstance(self.layer, nn.RNNBase) and not (place == 0 and self.layer.batch_first))


def second_moments(calls: Sequence[Call], weight: nn.Parameter) -> dict[nn.Parameter, Tensor]:
    """Σ_b g_b² in the shape of the weight; the literal rule has it for all weights of the layers at once."""
    call, inputs, delta = calls[0], calls[0].inputs[0], calls[0].deltas[0]
    if len(calls) > 1 or delta is None or isinstance(call.layer, nn.RNNBase | nn.RNNCellBase):
        return _literal(calls)
    if call.is_single:
        inputs, delta = inputs[None], delta[None]
    precision = torch.promote_types(weight.dtype, torch.float32)  # squares of small gradients need that at least
    total = torch.zeros(weight.shape, dtype=precision, device=weight.device)
    if isinstance(call.layer, nn.Linear):
        _add_linear(inputs.to(total.dtype), delta.to(total.dtype), total)
    elif isinstance(call.layer, nn.Embedding):
        _add_embedding(call.layer, inputs, delta.to(total.dtype), total)
    else:
        _add_convolution(call.layer, inputs, delta, total)
    return {weight: total}


def _literal(calls: Sequence[Call]) -> dict[nn.Parameter, Tensor]:
    totals: dict[nn.Parameter, Tensor] = {}
    parts = [(call.layer, call.by_sample(call.inputs), call.by_sample(call.deltas)) for call in calls]
    for sample in range(calls[0].samples):
        gradients: dict[nn.Parameter, Tensor] = {}
        for layer, inputs, deltas in parts:
            for parameter, gradient in _run_again(layer, inputs[sample], deltas[sample]):
                gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient
        for parameter, gradient in gradients.items():
            totals.setdefault(parameter, torch.zeros_like(gradient)).addcmul_(gradient, gradient)
    return totals


def _run_again(layer: Any, inputs: Sequence[Any], deltas: Sequence[Tensor | None]) -> Iterable[tuple[Any, Tensor]]:
    """The parameters of a layer and their gradients from one sample."""
    parameters = [each for each in layer.parameters() if each.requires_grad]
    dtype = parameters[0].dtype
    first, *states = (each.to(dtype) if each.is_floating_point() else each for each in inputs)
    hx = [tuple(states) if isinstance(layer, nn.LSTM | nn.LSTMCell) else states[0]] if states else []
    with torch.enable_grad():
        outputs = tree_leaves(layer.forward(first, *hx))  # not a call of the module, which would be watched
    reached = [(output, delta.to(dtype)) for output, delta in zip(outputs, deltas, strict=True) if delta is not None]
    ends, slopes = zip(*reached, strict=True)
    found = torch.autograd.grad(ends, parameters, slopes, materialize_grads=True)
    return zip(parameters, [each.to(torch.promote_types(dtype, torch.float32)) for each in found], strict=True)


def _add_linear(inputs: Tensor, deltas: Tensor, total: Tensor) -> None:
    """g_b = Σ_t δ_bt x_btᵀ, where all axes between the first and the last one are times."""
    if inputs.dim() == 2:  # (δ_j x_i)² = δ_j² x_i², so that no gradient has to be formed
        torch.mm(deltas.square().T, inputs.square(), out=total)
        return
    inputs, deltas = inputs.flatten(1, -2), deltas.flatten(1, -2)
    rows = max(1, min(len(total), _limit(total) // total.shape[1]))
    for top in range(0, len(total), rows):
        block = slice(top, top + rows)
        for some in _chunks(len(inputs), rows * total.shape[1], total):
            total[block] += torch.bmm(deltas[some, :, block].mT, inputs[some]).square_().sum(0)


def _add_convolution(layer: Any, inputs: Tensor, deltas: Tensor, total: Tensor) -> None:
    """g_b correlates windows of the padded input with δ_b; in a transposed convolution the two have changed places."""
    field, probe = (deltas, inputs) if layer.transposed else (inputs, deltas)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    axes, places = len(layer.kernel_size), prod(probe.shape[2:])
    for some in _chunks(len(inputs), field.shape[1] * prod(layer.kernel_size) * places + total.numel(), total):
        windows = F.pad(field[some].to(total.dtype), layer._reversed_padding_repeated_twice, mode=mode)
        for axis, (size, step, gap) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), 2):
            # With output padding a transposed convolution has room for windows that no input belongs to.
            windows = windows.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap].narrow(axis, 0, probe.shape[axis])
        batch = len(windows) * layer.groups
        patches = windows.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes)).reshape(batch, -1, places)
        gradients = torch.bmm(probe[some].to(total.dtype).reshape(batch, -1, places), patches.mT)
        total += gradients.square_().view(-1, *total.shape).sum(0)


def _add_embedding(layer: nn.Embedding, tokens: Tensor, deltas: Tensor, total: Tensor) -> None:
    """Only pairs of sample and token that occur: the gradients of equal ones are added, then squared."""
    if layer.padding_idx is not None:
        deltas = deltas * (tokens != layer.padding_idx)[..., None]
    sample = torch.arange(len(tokens), device=tokens.device).view(-1, *(1 for _ in tokens.shape[1:]))
    pairs, place = torch.unique(tokens + len(total) * sample, return_inverse=True)
    gradients = total.new_zeros(len(pairs), total.shape[1])
    gradients.index_add_(0, place.flatten(), deltas.reshape(-1, total.shape[1]))
    total.index_add_(0, pairs % len(total), gradients.square_())


def _limit(like: Tensor) -> int:
    """How many numbers a temporary may have."""
    return (CPU_BYTES if like.device.type == "cpu" else GPU_BYTES) // like.element_size()


def _chunks(samples: int, each: int, like: Tensor) -> list[slice]:
    """Samples that are treated together, if one of them takes `each` numbers."""
    size = max(1, _limit(like) // each)
    return [slice(start, start + size) for start in range(0, samples, size)]
