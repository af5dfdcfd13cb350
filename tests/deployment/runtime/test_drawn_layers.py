"""Activations, gates, softmax, normalisation, recurrent layers and embeddings against float64, over drawn shapes and
variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import any_kernel, any_sparsity, any_variant, assert_near, drawn, graph_of, run, sparse, value_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gossamer.deployment.runtime.network import (
    FUNCTIONS,
    GATES,
    Cell,
    Embed,
    Function,
    Input,
    Network,
    Normalise,
    Pointwise,
    Recurrence,
    Recurrent,
    Softmax,
    Source,
    Spread,
    Value,
    dense_taps,
)
from gossamer.deployment.runtime.weights import Kernel

SLOPE, ALPHA, LOW, HIGH, BETA, THRESHOLD = 0.3, 1.7, -0.4, 0.9, 0.7, 3.0
REFERENCE: dict[Function, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "clamp": lambda x: x.clamp(LOW, HIGH),
    "leaky": lambda x: F.leaky_relu(x, SLOPE),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hard_sigmoid": F.hardsigmoid,
    "hard_swish": F.hardswish,
    "elu": lambda x: F.elu(x, ALPHA),
    "softplus": lambda x: F.softplus(x, BETA, THRESHOLD),
    "reciprocal": lambda x: 1 / x,
    "differs": lambda x: (x.float() != LOW).double(),
    "hides": lambda x: torch.zeros_like(x).masked_fill(x == 0, -torch.inf),
}
PARAMETERS = {"differs": (LOW, 0.0), "clamp": (LOW, HIGH), "elu": (ALPHA, 0.0), "softplus": (BETA, THRESHOLD)}


def test_every_function_has_a_reference() -> None:
    assert set(REFERENCE) == set(FUNCTIONS)


@drawn
@given(
    function=st.sampled_from(FUNCTIONS),
    shape=st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 17)),
    ),
    factor=st.sampled_from(["none", "same", "one pixel", "one channel"]),
    batch=st.sampled_from([1, 3, 16, 20, 300]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_pointwise(
    function: Function, shape: tuple[int, ...], factor: str, batch: int, lanes: int, variant: str, seed: int
) -> None:
    x = 3 * sparse((batch, *shape), 0, seed)
    x[0].view(-1)[0] = 60.0  # far out, where exponentials overflow or vanish
    x[-1].view(-1)[-1] = -60.0
    if function == "reciprocal":
        x = x.abs() + 0.1
    if function == "hides":  # infinity times zero is no number
        factor = "none"
    if function == "differs":
        x.view(-1)[::3] = LOW
    expected, terms = REFERENCE[function](x.double()), x.double().abs() + 1
    channels = shape[0]
    slopes = torch.full((channels,), SLOPE).numpy() if function == "leaky" else None
    parts: dict[str, Any] = {"parameters": PARAMETERS.get(function, (0.0, 0.0)), "slopes": slopes}
    value = value_of(x)
    if factor == "none":
        step = Pointwise(0, 1, function, "f", **parts)
        graph = graph_of(x, [value, value], [step], tuple(x.shape))
        assert_near(run(graph, x, variant, lanes), expected, terms)
        return
    other = sparse((batch, *shape), 0, seed + 1)
    if factor == "one pixel" and len(shape) == 3:
        other = other[:, :, :1, :1].contiguous()
    if factor == "one channel":
        other = other[:, :1].contiguous()
    form = "picture" if len(shape) == 3 else "vector"
    sources = tuple(Source(form, tuple(each.shape)) for each in (x, other))
    values = [value, value_of(other), value]
    operations = [Input(0, 0), Input(1, 1), Pointwise(0, 2, function, "f", by=1, **parts)]
    graph = Network(values, operations, (2,), (form,), (tuple(x.shape),), sources, False)
    assert_near(run(graph, x, variant, lanes, None, other), expected * other.double(), terms * other.abs().max())


@drawn
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(1, 9)),
    ),
    logarithm=st.booleans(),
    batch=st.sampled_from([1, 3, 20]),
    lanes=st.sampled_from([1, 2, 8, 16, 32]),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_softmax(shape: tuple[int, ...], logarithm: bool, batch: int, lanes: int, variant: str, seed: int) -> None:
    x = 20 * sparse((batch, *shape), 0, seed)
    expected = (F.log_softmax if logarithm else F.softmax)(x.double(), 1)
    graph = graph_of(x, [value_of(x)] * 2, [Softmax(0, 1, logarithm, "s")], tuple(x.shape))
    assert_near(run(graph, x, variant, lanes), expected, x.double().abs() + 1 if logarithm else torch.ones(1))


@drawn
@given(
    groups=st.integers(1, 4),
    shape=st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 17)),
        st.just((2, 33, 40)),
    ),
    each_pixel=st.booleans(),
    parts=st.sets(st.sampled_from(["scale", "shift", "add", "relu"])),
    level=st.sampled_from([0.0, 5.0, 300.0]),
    batch=st.sampled_from([1, 3, 16, 20, 70]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_normalise(
    groups: int,
    shape: tuple[int, ...],
    each_pixel: bool,
    parts: set[str],
    level: float,
    batch: int,
    lanes: int,
    variant: str,
    seed: int,
) -> None:
    """Also far from zero, where variances are small differences of large numbers, and where nothing varies."""
    channels = groups * shape[0]
    x, add = (sparse((batch, channels, *shape[1:]), 0, seed + i) for i in range(2))
    x = x * 2 + level
    x[0, : shape[0]] = level + 1 / 3  # the first group of the first sample
    scale, shift = (sparse((channels,), 0, seed + i) for i in (2, 3))
    apart = x.double().view(batch, groups, shape[0], *shape[1:])
    axes = [2] if each_pixel else list(range(2, apart.dim()))
    variance, mean = torch.var_mean(apart, axes, correction=0, keepdim=True)
    expected = ((apart - mean) / (variance + 1e-5).sqrt()).view(x.shape)
    column = (channels, *[1] * (len(shape) - 1))
    expected = expected * scale.double().view(column) if "scale" in parts else expected
    expected = expected + shift.double().view(column) if "shift" in parts else expected
    expected = expected + add.double() if "add" in parts else expected
    step = Normalise(
        *(0, 2, groups, each_pixel, 1e-5, "n"),
        scale=scale.numpy() if "scale" in parts else None,
        shift=shift.numpy() if "shift" in parts else None,
        add=1 if "add" in parts else None,
        relu="relu" in parts,
    )
    form = "picture" if len(shape) == 3 else "vector"
    sources = (Source(form, tuple(x.shape)),) * 2
    operations = [Input(0, 0), Input(1, 1), step]
    graph = Network([value_of(x)] * 3, operations, (2,), (form,), (tuple(x.shape),), sources, False)
    got = run(graph, x, variant, lanes, None, add)
    assert_near(got, expected.relu() if "relu" in parts else expected, 5 * expected.abs().max().clamp_min(1))


@drawn
@given(
    channels=st.integers(1, 4),
    size=st.tuples(st.integers(1, 6), st.integers(1, 17)),
    factor=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    copies=st.booleans(),
    batch=st.sampled_from([1, 3, 20]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_spread(
    channels: int,
    size: tuple[int, int],
    factor: tuple[int, int],
    cut: tuple[int, int],
    copies: bool,
    batch: int,
    lanes: int,
    variant: str,
    seed: int,
) -> None:
    """Pixels repeated, or dealt out of the planes of their phases, without the last rows and columns."""
    phases = factor[0] * factor[1]
    x = sparse((batch, channels * (1 if copies else phases), *size), 0, seed)
    if copies:
        wide = x.repeat_interleave(factor[0], 2).repeat_interleave(factor[1], 3)
    else:
        wide = x.view(batch, channels, *factor, *size).permute(0, 1, 4, 2, 5, 3)
        wide = wide.reshape(batch, channels, size[0] * factor[0], size[1] * factor[1])
    height, width = (wide.shape[2 + i] - min(cut[i], factor[i] - 1) for i in range(2))
    expected = wide[:, :, :height, :width]
    values = [value_of(x), Value(channels, height, width)]
    graph = graph_of(x, values, [Spread(0, 1, factor, copies, "s")], tuple(expected.shape))
    assert torch.equal(run(graph, x, variant, lanes), expected)


def recur(kind: str, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """One direction over (batch, steps, features), written out from the definition of the cells."""
    units = weights[1].shape[1]
    h = c = torch.zeros(x.shape[0], units, dtype=x.dtype)
    out = []
    for step in x.unbind(1):
        a, b = step @ weights[0].T + biases[0], h @ weights[1].T + biases[1]
        if kind == "lstm":
            i, f, g, o = (a + b).split(units, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif kind != "gru":
            h = (a + b).tanh() if kind == "rnn_tanh" else (a + b).relu()
        else:
            (ar, az, an), (br, bz, bn) = a.split(units, 1), b.split(units, 1)
            z = (az + bz).sigmoid()
            h = (1 - z) * (an + (ar + br).sigmoid() * bn).tanh() + z * h
        out.append(h)
    return torch.stack(out, 1)


@drawn
@given(
    kind=st.sampled_from(list(GATES)),
    features=st.integers(1, 20),
    units=st.integers(1, 40),
    steps=st.sampled_from([1, 2, 7, 40, 130]),
    batch=st.sampled_from([1, 3, 17, 40]),
    lanes=st.sampled_from([1, 16, 32]),
    sparsity=any_sparsity,
    reverse=st.booleans(),
    time_major=st.booleans(),
    variant=any_variant,
    kernel=any_kernel,
    seed=st.integers(0, 99),
)
def test_recurrent(
    kind: Cell,
    features: int,
    units: int,
    steps: int,
    batch: int,
    lanes: int,
    sparsity: float,
    reverse: bool,
    time_major: bool,
    variant: str,
    kernel: Kernel,
    seed: int,
) -> None:
    rows = GATES[kind] * units
    weights = [sparse((rows, features), sparsity, seed), sparse((rows, units), sparsity, seed + 1) / units**0.5]
    weights[1] *= 0.5 if kind == "rnn_relu" else 1.0  # nothing else keeps its state from growing
    biases = [sparse((rows,), 0, seed + 2), sparse((rows,), 0, seed + 3)]
    x = sparse((batch, steps, features), 0, seed + 4)
    turned = x.flip(1) if reverse else x
    expected = recur(kind, turned.double(), [w.double() for w in weights], [b.double() for b in biases])
    expected = expected.flip(1) if reverse else expected
    inside, hidden = biases if kind == "gru" else (biases[0] + biases[1], 0 * biases[1])
    taps = [dense_taps(w.numpy()[:, :, None, None]) for w in weights]
    layer = Recurrent(
        *(0, 1, kind, units, taps[0], inside.numpy(), taps[1], hidden.numpy()),
        reverse=reverse,
        channel=0,
        dense_size=weights[0].numel() + weights[1].numel(),
        name="r",
        state=Recurrence(0),
    )
    if time_major:
        x, expected = x.transpose(0, 1).contiguous(), expected.transpose(0, 1)
    values = [Value(features, 1, steps), Value(units, 1, steps)]
    source = Source("sequence", tuple(x.shape))
    shape = tuple(expected.shape)
    graph = Network(values, [Input(0, 0), layer], (1,), ("sequence",), (shape,), (source,), time_major)
    largest = expected.abs().max() if kind == "rnn_relu" else torch.ones(1)
    assert_near(run(graph, x, variant, lanes, kernel), expected, 10 * largest)  # 1e-5


@drawn
@given(
    tokens=st.integers(1, 50),
    features=st.integers(1, 40),
    steps=st.integers(1, 9),
    batch=st.sampled_from([1, 3, 20]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    time_major=st.booleans(),
    variant=any_variant,
    seed=st.integers(0, 99),
)
def test_embedding(
    tokens: int, features: int, steps: int, batch: int, lanes: int, time_major: bool, variant: str, seed: int
) -> None:
    table = sparse((tokens, features), 0.5, seed)
    shape = (steps, batch) if time_major else (batch, steps)
    x = torch.randint(0, tokens, shape, generator=torch.Generator().manual_seed(seed))
    look_up = [Embed(0, 0, table.numpy(), "e")]
    out = (*shape, features)
    graph = Network(
        [Value(features, 1, steps)], look_up, (0,), ("sequence",), (out,), (Source("tokens", shape),), time_major
    )
    assert torch.equal(run(graph, x, variant, lanes), table[x])


@pytest.mark.parametrize("function", [each for each in FUNCTIONS if each not in ("differs", "hides")])
def test_nan_stays_nan(function: Function) -> None:
    x = torch.tensor([[1.0, float("nan"), -1.0] * 7])
    slopes = torch.full((21,), SLOPE).numpy()
    step = Pointwise(0, 1, function, "f", PARAMETERS.get(function, (0.0, 0.0)), slopes)
    graph = graph_of(x, [value_of(x)] * 2, [step], (1, 21))
    assert torch.equal(run(graph, x, "portable", 1).isnan(), x.isnan())
    assert torch.equal(run(graph, x, "portable", 16).isnan(), x.isnan())
