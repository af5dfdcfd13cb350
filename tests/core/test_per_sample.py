"""The sums of squared per-sample mask gradients against a literal loop over single samples."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from gossamer.per_sample import layers
from gossamer.per_sample.capture import SampleGradients, check_layers
from gossamer.prunable import select

CASES = settings(max_examples=30, deadline=None, derandomize=True)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}

Losses = Callable[[nn.Module, list[int]], Tensor]  # the losses of the chosen samples


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Dense weight variables of which the parameters are a masked part, as during sparse training."""
    dense = {}
    for weight in select(model):
        parameter = weight.parameter
        mask = torch.rand_like(parameter) < 0.6
        dense[weight.name] = torch.where(mask, parameter, torch.randn_like(parameter)).detach()
        parameter.data.mul_(mask)
    return dense


def watch(model: nn.Module, dense: Mapping[str, Tensor] | None = None) -> SampleGradients:
    weights = select(model)
    check_layers(weights)
    views = [weight.parameter.detach() if dense is None else dense[weight.name] for weight in weights]
    return SampleGradients(weights, views, None)


def totals_of(watcher: SampleGradients, model: nn.Module) -> dict[str, Tensor]:
    """What was summed since the last call."""
    return dict(zip([weight.name for weight in select(model)], watcher.take().totals, strict=True))


def literal_sums(model: nn.Module, losses: Losses, samples: int, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One backward a sample, everything written out as in the paper."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(weight) for name, weight in dense.items()}
    for sample in range(samples):
        model.zero_grad()
        (losses(model, [sample]).sum() / samples).backward()
        for name, weight in dense.items():
            gradient = parameters[name].grad
            if gradient is not None:
                sums[name] += (gradient * weight) ** 2
    return {name: feature_sums(model, name, values) for name, values in sums.items()}


def feature_sums(model: nn.Module, name: str, values: Tensor) -> Tensor:
    layer = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return torch.stack([row.sum() for row in values])
    inputs = layer.in_channels // layer.groups
    return torch.stack(
        [
            values[group * inputs : (group + 1) * inputs, feature].sum()
            for group in range(layer.groups)
            for feature in range(values.shape[1])
        ]
    )


def check(
    model: nn.Module, losses: Losses, samples: int, *, chunk_bytes: int = 2**20, tolerance: float | None = None
) -> None:
    """The watcher against the loop, over all weights of the model, with temporaries of at most `chunk_bytes`."""
    dense = dense_of(model)
    expected = literal_sums(model, losses, samples, dense)
    watcher = watch(model, dense)
    with patch.object(layers, "CPU_BYTES", chunk_bytes):
        losses(model, list(range(samples))).mean().backward()
    sums = watcher.take()
    watcher.close()
    assert sums.samples == samples
    for total, (name, wanted) in zip(sums.totals, expected.items(), strict=True):
        assert total.dtype == dense[name].dtype
        rtol = tolerance or TOLERANCE[wanted.dtype]
        torch.testing.assert_close(total, wanted, rtol=rtol, atol=rtol * float(wanted.max()))


def losses_of(inputs: Tensor) -> Losses:
    """A loss that is not linear in the output, different for every sample and every output."""

    def losses(model: nn.Module, chosen: list[int]) -> Tensor:
        output = model(inputs[chosen])
        slopes = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).view_as(output[0])
        powers = (output * slopes + 0.5 * output**2).flatten(1).sum(1)
        return powers * torch.tensor([1.0 + sample for sample in chosen], dtype=output.dtype)

    return losses


DTYPES = st.sampled_from([torch.float64, torch.float32])
SMALL = st.sampled_from([1, 2**20])  # one byte forces single samples (and single rows)


@CASES
@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=2),
    samples=st.integers(1, 5),
    features=st.integers(1, 5),
    width=st.integers(1, 5),
    dtype=DTYPES,
    chunk_bytes=SMALL,
)
def test_linear(
    shape: list[int], samples: int, features: int, width: int, dtype: torch.dtype, chunk_bytes: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(width, features).to(dtype)
    inputs = torch.randn(samples, *shape, width, dtype=dtype)
    check(model, losses_of(inputs), samples, chunk_bytes=chunk_bytes)


CONVOLUTIONS = [None, nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [None, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # it copies the input, which is no concern here
@settings(CASES, max_examples=100)
@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    torch.manual_seed(0)
    axes, groups, samples = (data.draw(st.integers(1, 3)) for _ in range(3))
    inputs, outputs = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    each = st.lists(st.integers(1, 3), min_size=axes, max_size=axes).map(tuple)
    kernel, dilation = data.draw(each), data.draw(each)
    padding: Any = data.draw(st.sampled_from(["same", "valid", "amount"]))
    if padding == "amount":
        padding = tuple(amount - 1 for amount in data.draw(each))
    stride = (1,) * axes if padding == "same" else data.draw(each)
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    dtype, chunk_bytes = data.draw(DTYPES), data.draw(SMALL)
    size = [gap * (taps - 1) + data.draw(st.integers(2, 4)) for gap, taps in zip(dilation, kernel, strict=True)]
    size = [max(3, length) for length in size]
    layer = CONVOLUTIONS[axes](
        inputs, outputs, kernel, stride, padding, dilation, groups, padding_mode=mode, dtype=dtype
    )
    check(layer, losses_of(torch.randn(samples, inputs, *size, dtype=dtype)), samples, chunk_bytes=chunk_bytes)


@settings(CASES, max_examples=60)
@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    torch.manual_seed(0)
    axes, groups, samples = (data.draw(st.integers(1, 3)) for _ in range(3))
    inputs, outputs = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    each = st.lists(st.integers(1, 3), min_size=axes, max_size=axes).map(tuple)
    kernel, dilation, stride = data.draw(each), data.draw(each), data.draw(each)
    padding = tuple(
        data.draw(st.integers(0, gap * (taps - 1) // 2)) for gap, taps in zip(dilation, kernel, strict=True)
    )
    extra = tuple(data.draw(st.integers(0, max(gap, step) - 1)) for gap, step in zip(dilation, stride, strict=True))
    size = [data.draw(st.integers(1, 4)) for _ in kernel]
    dtype = data.draw(DTYPES)
    layer = TRANSPOSED[axes](inputs, outputs, kernel, stride, padding, extra, groups, dilation=dilation, dtype=dtype)
    inputs_ = torch.randn(samples, inputs, *size, dtype=dtype)
    check(layer, losses_of(inputs_), samples, chunk_bytes=data.draw(SMALL))


def test_unbatched_inputs_are_one_sample() -> None:
    torch.manual_seed(0)
    convolution, linear = nn.Conv2d(2, 3, 3).double(), nn.Linear(4, 3).double()
    picture, vector = torch.randn(2, 5, 5).double(), torch.randn(4).double()
    check(convolution, lambda model, chosen: model(picture).square().sum()[None], 1)
    check(linear, lambda model, chosen: model(vector).square().sum()[None], 1)
    sequence = torch.randn(6, 4).double()
    check(nn.GRU(4, 3).double(), lambda model, chosen: model(sequence)[0].square().sum()[None], 1)
    check(nn.LSTMCell(4, 3).double(), lambda model, chosen: model(vector)[1].square().sum()[None], 1)


@CASES
@given(
    samples=st.integers(1, 4),
    times=st.integers(0, 5),
    padding=st.sampled_from([None, 0]),
    dtype=DTYPES,
)
def test_embedding(samples: int, times: int, padding: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 4, (samples, times) if times else (samples,))  # few tokens: many repeats
    model = nn.Embedding(6, 3, padding_idx=padding).to(dtype)
    check(model, losses_of(tokens), samples)


RECURRENT = [
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {}),
    (nn.GRU, {}),
    (nn.LSTM, {}),
    (nn.LSTM, {"proj_size": 2}),
]


class Sequences(nn.Module):
    """A recurrent layer whose outputs and final states all matter, with the initial state given or not."""

    def __init__(self, layer: nn.RNNBase, states: Sequence[Tensor], parts: str) -> None:
        super().__init__()
        self.layer, self.states, self.parts = layer, states, parts

    def run(self, inputs: Any, states: Any) -> tuple[Any, list[Tensor]]:
        output, final = self.layer(inputs, states)
        return output, list(final) if isinstance(final, tuple) else [final]

    def losses(self, inputs: Tensor, chosen: list[int]) -> Tensor:
        axis = 0 if self.layer.batch_first else 1
        states: Any = [state[:, chosen] for state in self.states]
        states = None if not states else tuple(states) if len(states) > 1 else states[0]
        output, finals = self.run(inputs.index_select(axis, torch.tensor(chosen)), states)
        parts = [output.movedim(axis, 0)] if "o" in self.parts else []
        parts += [final.movedim(1, 0) for final in finals] if "s" in self.parts else []
        slope = torch.linspace(-1, 2, parts[0][0].numel(), dtype=inputs.dtype).view_as(parts[0][0])
        return (parts[0] * slope).flatten(1).sum(1) + sum(part.flatten(1).pow(2).sum(1) for part in parts)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own
@settings(CASES, max_examples=60)
@given(
    kind=st.sampled_from(RECURRENT),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    with_state=st.booleans(),
    parts=st.sampled_from(["o", "s", "os"]),
    samples=st.integers(1, 3),
    times=st.integers(1, 4),
    dtype=DTYPES,
)
def test_recurrent(
    kind: Any,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    bias: bool,
    with_state: bool,
    parts: str,
    samples: int,
    times: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    make, options = kind
    layer = make(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional, dtype=dtype, **options)
    widths = [options.get("proj_size", 4), 4][: 2 if make is nn.LSTM else 1]
    tracks = layers * (2 if bidirectional else 1)
    states = [torch.randn(tracks, samples, width, dtype=dtype) for width in widths] if with_state else []
    model = Sequences(layer, states, parts)
    inputs = torch.randn(*((samples, times) if batch_first else (times, samples)), 3, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4  # a float32 loop through time rounds at every step
    check(
        model,
        lambda one, chosen: one.losses(inputs, chosen),
        samples,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_packed_sequences(make: Any, enforce_sorted: bool) -> None:
    torch.manual_seed(0)
    lengths = [5, 3, 2] if enforce_sorted else [2, 5, 3]
    inputs = [torch.randn(length, 3).double() for length in lengths]
    layer = make(3, 4, 2, bidirectional=True).double()
    states = [torch.randn(4, 3, 4).double() for _ in range(2 if make is nn.LSTM else 1)]
    model = Sequences(layer, [], "os")

    def losses(one: Sequences, chosen: list[int]) -> Tensor:
        start: Any = tuple(state[:, chosen] for state in states)
        packed = pack_sequence([inputs[sample] for sample in chosen], enforce_sorted=enforce_sorted)
        output, finals = one.run(packed, start if len(start) > 1 else start[0])
        padded, _ = pad_packed_sequence(output)
        slopes = torch.linspace(-1, 2, 8).double()
        return (padded * slopes + padded**2).sum((0, 2)) + sum((final**2).sum((0, 2)) for final in finals)

    check(model, losses, 3)


def test_packed_sequences_in_different_orders_stay_with_their_samples() -> None:
    torch.manual_seed(0)
    views = [[torch.randn(length, 3).double() for length in lengths] for lengths in ([2, 5, 3], [4, 1, 6])]

    def losses(layer: nn.Module, chosen: list[int]) -> Tensor:
        total = torch.zeros(len(chosen)).double()
        for view in views:
            packed = pack_sequence([view[sample] for sample in chosen], enforce_sorted=False)
            total = total + layer(packed)[1].square().sum((0, 2))
        return total

    check(nn.GRU(3, 4).double(), losses, 3)


@pytest.mark.parametrize("make", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("given_state", [True, False])
def test_cells_in_a_loop(make: Any, given_state: bool) -> None:
    torch.manual_seed(0)
    model, inputs = make(3, 4).double(), torch.randn(3, 5, 3).double()

    def losses(cell: nn.Module, chosen: list[int]) -> Tensor:
        zeros = torch.full((len(chosen), 4), 0.1).double()
        state: Any = None if not given_state else (zeros, zeros) if make is nn.LSTMCell else zeros
        total = torch.zeros(len(chosen)).double()
        for time in range(5):
            state = cell(inputs[chosen, time], state)
            hidden = state[0] if make is nn.LSTMCell else state
            total = total + (time + 1) * hidden.pow(2).sum(1)
        return total

    check(model, losses, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.recurrent(self.embedding(tokens))[0])
        return decoded


def test_tied_embedding_keeps_the_cross_terms() -> None:
    torch.manual_seed(0)
    model, tokens = Tied().double(), torch.randint(0, 7, (3, 5))
    check(model, losses_of(tokens), 3)
    assert [weight.name for weight in select(model)] == [
        "embedding.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
    ]


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(torch.tanh(self.layer(inputs)))
        self.layer(inputs)  # a call without influence on the loss
        return outputs


def test_module_called_twice() -> None:
    torch.manual_seed(0)
    vectors, pictures = torch.randn(4, 3).double(), torch.randn(4, 2, 5, 5).double()
    check(Twice(nn.Linear(3, 3).double()), losses_of(vectors), 4)
    check(Twice(nn.Conv2d(2, 2, 3, padding=1).double()), losses_of(pictures), 4)


class Network(nn.Module):
    """Convolutions with BatchNorm, an in-place ReLU right behind one, a residual, a depth-wise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.pointwise = nn.Conv2d(4, 6, 1, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        hidden = hidden + self.relu(self.depthwise(hidden))
        outputs: Tensor = self.last(self.relu(self.pointwise(hidden)).mean((2, 3)))
        return outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_network_with_batchnorm_in_eval_mode_equals_the_literal_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Network().to(dtype)
    inputs = torch.randn(6, 3, 6, 6, dtype=dtype)
    model(inputs)  # moves the running statistics
    model.eval()
    check(model, losses_of(inputs), 6)


def test_batchnorm_in_training_mode_splits_the_batch_gradient() -> None:
    """The convention: with full-batch statistics each sample's part is what its own rows of δ and x give."""
    torch.manual_seed(0)
    model, inputs = Network().double(), torch.randn(5, 3, 6, 6).double()
    watcher = watch(model)
    losses_of(inputs)(model, list(range(5))).mean().backward()
    totals = totals_of(watcher, model)
    watcher.close()
    # Independent: the output is computed row by row, each sample with a copy of the weight of its own.
    reference = copy.deepcopy(model)
    for name, layer in [("first", reference.first), ("last", reference.last)]:
        parts: list[Tensor] = []

        def split(module: nn.Module, args: Any, output: Tensor, parts: list[Tensor] = parts) -> Tensor:
            copies = [module.weight.detach().clone().requires_grad_() for _ in range(5)]
            parts.extend(copies)
            function = F.conv2d if isinstance(module, nn.Conv2d) else F.linear
            options = {"padding": 1} if isinstance(module, nn.Conv2d) else {}
            rows = [function(args[0][i : i + 1], copies[i], module.bias, **options) for i in range(5)]
            return torch.cat(rows)

        handle = layer.register_forward_hook(split)
        losses_of(inputs)(reference, list(range(5))).mean().backward()
        handle.remove()
        expected = sum((part.grad * layer.weight).square().flatten(1).sum(1) for part in parts)
        torch.testing.assert_close(totals[f"{name}.weight"], expected, rtol=1e-6, atol=0)
        whole = sum(part.grad for part in parts)
        torch.testing.assert_close(whole, model.get_parameter(f"{name}.weight").grad)


def test_random_signs_estimate_the_same_sums() -> None:
    """E over random signs of (Σ_b r_b g_b)² is Σ_b g_b²; here over all signs of a batch, the exact mean."""
    torch.manual_seed(0)
    model, inputs = Network().double().eval(), torch.randn(4, 3, 6, 6).double()
    watcher = watch(model)
    losses_of(inputs)(model, list(range(4))).mean().backward()
    totals = totals_of(watcher, model)
    watcher.close()
    expected = {name: torch.zeros_like(total) for name, total in totals.items()}
    for code in range(16):
        signs = torch.tensor([1.0 if code >> bit & 1 else -1.0 for bit in range(4)]).double()
        model.zero_grad()
        (signs * losses_of(inputs)(model, list(range(4)))).mean().backward()
        for name in totals:
            weight = model.get_parameter(name)
            assert weight.grad is not None
            expected[name] += (weight.grad * weight.detach()).square().flatten(1).sum(1) / 16
    for name, total in totals.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_bit_identical(training: bool) -> None:
    torch.manual_seed(0)
    plain = Network().train(training)
    watched = copy.deepcopy(plain)
    watch(watched)
    inputs = torch.randn(5, 3, 6, 6)
    left, right = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    outputs = plain(left), watched(right)
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert left.grad is not None
    assert right.grad is not None
    assert torch.equal(left.grad, right.grad)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_recurrent_outputs_and_gradients_are_bit_identical() -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4, 2, bidirectional=True)
    watched = copy.deepcopy(plain)
    watch(watched)
    inputs = pack_padded_sequence(torch.randn(5, 3, 3), torch.tensor([2, 5, 4]), enforce_sorted=False)
    for model in (plain, watched):
        torch.manual_seed(1)
        output, (hidden, _) = model(inputs)
        (output.data.square().sum() + hidden.sum()).backward()
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_gradient_accumulation_adds_up() -> None:
    torch.manual_seed(0)
    model, inputs = Network().double().eval(), torch.randn(6, 3, 6, 6).double()
    watcher, losses = watch(model), losses_of(inputs)
    losses(model, list(range(6))).mean().backward()
    whole = watcher.take()
    assert whole.samples == 6
    for part in ([0, 1], [2, 3, 4], [5]):
        (losses(model, part).sum() / 6).backward()
    parts = watcher.take()
    assert parts.samples == 6
    torch.testing.assert_close(parts.totals, whole.totals, rtol=1e-6, atol=0)


def test_a_loss_scale_is_divided_out() -> None:
    torch.manual_seed(0)
    model, inputs = Network().eval(), torch.randn(4, 3, 6, 6)
    watcher, losses = watch(model), losses_of(inputs)
    losses(model, [0, 1, 2, 3]).mean().backward()
    plain = watcher.take()
    (losses(model, [0, 1, 2, 3]).mean() * 1024).backward()
    torch.testing.assert_close(watcher.take(1024.0).totals, plain.totals)


def test_no_grad_and_close_leave_no_trace() -> None:
    model, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    watcher = watch(model)
    with torch.no_grad():
        assert not model(inputs).requires_grad
    with pytest.raises(RuntimeError, match="saw no backward pass"):
        watcher.take()
    watcher.close()
    model(inputs).sum().backward()
    with pytest.raises(RuntimeError, match="saw no backward pass"):
        watcher.take()
    assert not model._forward_hooks


def test_gradients_of_the_inputs_alone_are_not_counted() -> None:
    """An adversarial step back-propagates through the layers but not into the weights."""
    torch.manual_seed(0)
    model, inputs = Network().double().eval(), torch.randn(3, 3, 6, 6).double().requires_grad_()
    watcher = watch(model)
    model(inputs).square().mean().backward()
    expected = watcher.take()
    torch.autograd.grad(model(inputs).square().sum(), inputs)
    model(inputs).square().mean().backward()
    assert torch.equal(torch.cat(watcher.take().totals), torch.cat(expected.totals))
    loss = model(inputs).square().mean()
    torch.autograd.grad(loss, inputs, retain_graph=True)
    loss.backward()
    found = watcher.take()
    assert found.samples == 3
    assert torch.equal(torch.cat(found.totals), torch.cat(expected.totals))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(5, 3).double().requires_grad_()
    watcher = watch(model)
    model(inputs).square().sum().backward()
    expected = watcher.take()
    checkpoint(model, inputs, use_reentrant=reentrant).square().sum().backward()
    found = watcher.take()
    assert found.samples == 5
    assert torch.equal(torch.cat(found.totals), torch.cat(expected.totals))


def test_tied_weight_across_a_reentrant_checkpoint_is_refused() -> None:
    model, tokens = Tied(), torch.randint(0, 7, (3, 5))
    watch(model)
    start = torch.zeros(1, requires_grad=True)  # a reentrant segment needs an input with a gradient

    def segment(tokens: Tensor, start: Tensor) -> Tensor:
        embedded: Tensor = model.embedding(tokens) + start
        return embedded

    loss = model.decoder(checkpoint(segment, tokens, start, use_reentrant=True)).square().sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()


def test_copies_and_pickles_are_not_watched() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 2)), torch.randn(5, 5, 3)
    watcher = watch(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    model(inputs)[0].sum().backward()
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert torch.equal(other(inputs)[0], model(inputs)[0])
        other(inputs)[0].sum().backward()
    assert watcher.take().samples == 5


def test_empty_batch_adds_nothing() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 2)).double()
    watcher = watch(model)
    model(torch.zeros(0, 2, 4).double()).sum().backward()
    with pytest.raises(RuntimeError, match="saw no backward pass"):
        watcher.take()


def test_activations_are_freed_after_the_backward_although_the_loss_lives_on() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LSTM(2, 2, 2))
    watcher = watch(model)
    inputs = torch.randn(5, 5, 3) * 2
    alive = weakref.ref(inputs.untyped_storage())
    loss = model(inputs)[0].square().sum()
    del inputs
    loss.backward()
    gc.collect()
    assert alive() is None
    assert watcher.take().samples == 5
    assert loss.requires_grad


def test_what_was_not_counted_is_dropped_at_the_next_forward() -> None:
    model, inputs = nn.Linear(3, 2), torch.randn(4, 3).requires_grad_()
    watch(model)
    torch.autograd.grad(model(inputs).square().sum(), inputs)
    alive = weakref.ref(inputs.untyped_storage())
    del inputs
    model(torch.randn(4, 3))
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at all inputs
def test_compiled_model_is_exact_or_refused() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    watcher = watch(model)
    model(inputs).square().sum().backward()
    expected = watcher.take()
    torch.compile(model, backend="eager")(inputs).square().sum().backward()
    torch.testing.assert_close(watcher.take().totals, expected.totals)
    torch.compiler.reset()
    with pytest.raises(Exception, match="per-sample scales need an eager model"):
        torch.compile(model, backend="eager", fullgraph=True)(inputs)


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(3, 4, 2), lambda: nn.Linear(6, 4), lambda: nn.GRU(6, 4)])
def test_autocast_computes_in_float32(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(5, 3, 6)
    watcher = watch(model)

    def totals(enabled: bool) -> Sequence[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = model(inputs)
            output = output[0] if isinstance(output, tuple) else output
            assert isinstance(model, nn.GRU) or output.dtype == (torch.bfloat16 if enabled else torch.float32)
            output.float().square().mean().backward()  # inside: the sums must not be autocast either
        return watcher.take().totals

    exact = totals(False)
    torch.testing.assert_close(totals(True), exact, rtol=5e-2, atol=0)


def test_frozen_weights_and_weights_without_gradient_are_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "frozen": nn.Linear(3, 2)})
    watcher = watch(model)
    model["frozen"].weight.requires_grad_(False)
    (model["used"](torch.randn(4, 3)) + model["frozen"](torch.randn(4, 3))).sum().backward()
    sums = watcher.take()
    assert sums.samples == 4
    assert [bool(total.any()) for total in sums.totals] == [True, False, False]


def test_unsupported_modules_are_all_named_at_once() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight * 2)

    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2),
            "own": Own(3, 2),
            "fine": nn.Linear(3, 2),
            "dropout": nn.GRU(3, 2, 2, dropout=0.1),
            "frequency": nn.Embedding(3, 2, scale_grad_by_freq=True),
        }
    )
    with pytest.raises(ValueError, match='scale="batch"') as caught:
        check_layers(select(model))
    for name in ("attention.in_proj_weight", "attention.out_proj.weight", "own.weight", "frequency.weight"):
        assert name in str(caught.value)
    assert "nn.Dropout" in str(caught.value)
    assert "fine" not in str(caught.value)
    model = nn.Linear(3, 2)
    model.kernel = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="held by Linear as 'kernel'"):
        check_layers(select(model, include=["kernel", "weight"]))


def test_a_gradient_that_came_past_the_layer_is_refused() -> None:
    model, inputs = nn.Linear(3, 3), torch.randn(4, 3)
    watcher = watch(model)
    F.linear(inputs, model.weight).sum().backward()
    with pytest.raises(RuntimeError, match="functional use"):
        watcher.take()
    watcher.close()
    watcher = watch(model)
    model.weight.grad = torch.autograd.grad(model(inputs).square().sum(), model.weight)[0]
    with pytest.raises(RuntimeError, match="assigned by hand"):
        watcher.take()


def test_what_would_not_be_exact_is_refused() -> None:
    model, inputs = nn.Linear(3, 3), torch.randn(4, 3)
    watch(model)
    loss = model(inputs).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="arrives in parts"):
        loss.backward()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(model(inputs).square().sum(), model.weight, create_graph=True)
    with pytest.raises(ValueError, match=r"batches of \[2, 4\]"):
        (model(inputs).sum() + model(inputs[:2]).sum()).backward()


def test_disagreeing_sample_counts_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0, 1), nn.Linear(2, 2))
    watcher = watch(model)
    model(torch.randn(4, 5, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"0\.weight: 4, 2\.weight: 20"):
        watcher.take()


@pytest.mark.parametrize("limit", [3_000, 30_000])
def test_temporaries_stay_within_the_limit(limit: int) -> None:
    """The largest tensor that the formulas allocate, as the profiler of torch sees it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.Linear(20, 50)).double()
    watch(model)
    loss = model(torch.randn(9, 3, 20).double()).square().sum()
    with patch.object(layers, "CPU_BYTES", limit), profile(profile_memory=True, record_shapes=True) as seen:
        loss.backward()
    sizes = [event.input_shapes for event in seen.events() if event.name == "aten::bmm"]
    formed = [8 * left[0] * left[1] * right[2] for left, right in sizes]
    assert len(formed) > 2
    assert max(formed) <= limit
