"""Every kernel variant against torch in float64, over drawn shapes, sparsities and batch sizes."""

from __future__ import annotations

import math
import platform
from typing import Any

import pytest
import torch
from drawn import (
    RUNNABLE,
    any_kernel,
    any_sparsity,
    any_variant,
    assert_near,
    drawn,
    graph_of,
    run,
    sparse,
    value_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gossamer.deployment.runtime.native import load_native
from gossamer.deployment.runtime.network import Affine, Pool, Product, Value, dense_taps
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.weights import KERNELS, Kernel


def test_every_kernel_can_be_chosen() -> None:
    """Otherwise the drawn tests below would draw a kernel and run another."""
    weight = torch.rand(20, 30) + 1
    x = torch.rand(2, 30)
    layer = product(weight, torch.zeros(20), largest=1.0)
    graph = graph_of(x, [value_of(x), Value(20, 1, 1)], [layer], (2, 20))
    found = {kernel for lanes in (1, 16) for kernels in choices(graph, lanes).values() for kernel in kernels}
    picture = torch.rand(2, 3, 8, 8)
    window = product(torch.rand(20, 3, 3, 3) + 1, torch.zeros(20), padding=(1, 1))
    graph = graph_of(picture, [value_of(picture), Value(20, 8, 8)], [window], (2, 20, 8, 8))
    assert found | set(choices(graph, 1)[1]) == set(KERNELS)


def product(weight: Tensor, bias: Tensor, **changes: Any) -> Product:
    dense = weight.numpy() if weight.dim() == 4 else weight.numpy()[:, :, None, None]
    parts: dict[str, Any] = {
        "x": 0,
        "y": 1,
        "stride": (1, 1),
        "padding": (0, 0),
        "dense_size": dense.size,
        "name": "w",
    }
    return Product(**{"taps": dense_taps(dense), "bias": bias.numpy(), **parts, **changes})


@drawn
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 90),
    batch=st.sampled_from([1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 300]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32, 48, 64]),
    sparsity=any_sparsity,
    variant=any_variant,
    kernel=any_kernel,
    relu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    rows: int,
    columns: int,
    batch: int,
    lanes: int,
    sparsity: float,
    variant: str,
    kernel: Kernel,
    relu: bool,
    seed: int,
) -> None:
    weight, x = sparse((rows, columns), sparsity, seed), sparse((batch, columns), 0, seed + 1)
    bias = sparse((rows,), 0, seed + 2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    graph = graph_of(x, [value_of(x), Value(rows, 1, 1)], [product(weight, bias, relu=relu)], tuple(expected.shape))
    assert_near(run(graph, x, variant, lanes, kernel), F.relu(expected) if relu else expected, terms)


@settings(deadline=None, max_examples=250)
@given(
    channels=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    groups=st.sampled_from([1, 1, 2, 3]),
    size=st.tuples(st.integers(1, 20), st.sampled_from([1, 2, 3, 4, 7, 8, 13, 16, 32])),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    batch=st.sampled_from([1, 2, 5, 16, 19]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    sparsity=any_sparsity,
    variant=any_variant,
    way=any_kernel,
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
@example((1, 1), 1, (1, 1), (1, 1), (1, 1), (1, 0), (1, 1), 1, 1, 0.0, "portable", "panels", False, 0)  # a lone pixel
def test_convolution(
    channels: tuple[int, int],
    groups: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    batch: int,
    lanes: int,
    sparsity: float,
    variant: str,
    way: Kernel,
    fused: bool,
    seed: int,
) -> None:
    """Two convolutions in a row (what the first leaves in the borders would hurt the second), with a
    residual."""
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if any(s + 2 * p < r for s, p, r in zip(size, padding, reach, strict=True)):
        return
    inputs, rows = channels[0] * groups, channels[1] * groups
    x = sparse((batch, inputs, *size), 0, seed)
    first, bias = sparse((rows, channels[0], *kernel), sparsity, seed + 1), sparse((rows,), 0, seed + 2)
    second = sparse((rows, rows, 3, 3), sparsity, seed + 3)

    def compute(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        middle = F.conv2d(x.double(), first.double(), bias.double(), stride, padding, dilation, groups)
        after = F.conv2d(middle, second.double(), bias.double(), 1, 1)
        return middle, after + middle if fused else after

    middle, expected = compute(x, first, second, bias)
    terms = compute(x.abs(), first.abs(), second.abs(), bias.abs())[1]
    taps = dense_taps(first.numpy())
    group = taps.row // (rows // groups)
    places = taps.channel + group * channels[0], taps.dy * dilation[0], taps.dx * dilation[1]
    taps = type(taps)(rows, taps.row, *places, taps.weight)
    one = product(first, bias, taps=taps, stride=stride, padding=padding)
    two = product(second, bias, x=1, y=2, padding=(1, 1), add=1 if fused else None, relu=fused)
    after = Value(rows, *middle.shape[2:])
    graph = graph_of(x, [value_of(x), after, after], [one, two], tuple(expected.shape))
    assert_near(run(graph, x, variant, lanes, way), F.relu(expected) if fused else expected, terms)


@drawn
@given(
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(1, 12), st.integers(1, 17)),
    batch=st.sampled_from([1, 3, 16, 20]),
    lanes=st.sampled_from([1, 2, 4, 8, 16]),
    variant=any_variant,
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_element_wise(
    channels: int,
    size: tuple[int, int],
    batch: int,
    lanes: int,
    variant: str,
    parts: tuple[bool, ...],
    seed: int,
) -> None:
    x = sparse((batch, channels, *size), 0, seed)
    scale, shift = sparse((channels,), 0, seed + 1), sparse((channels,), 0, seed + 2)
    scaled, added, relu = parts
    expected, terms = x.double(), x.double().abs() * (1 + scale.abs().max()) + shift.abs().max()
    if scaled:
        expected = expected * scale.double()[:, None, None] + shift.double()[:, None, None]
    if added:
        expected = expected + x.double()
    step = Affine(
        *(0, 1, "affine"),
        scale=scale.numpy() if scaled else None,
        shift=shift.numpy() if scaled else None,
        add=0 if added else None,
        relu=relu,
    )
    graph = graph_of(x, [value_of(x)] * 2, [step], tuple(x.shape))
    assert_near(run(graph, x, variant, lanes), F.relu(expected) if relu else expected, terms)


@drawn
@given(
    kind=st.sampled_from(["max", "average"]),
    size=st.tuples(st.integers(1, 11), st.integers(1, 17)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.integers(1, 2),
    count_padding=st.booleans(),
    batch=st.sampled_from([1, 3, 16, 20]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    variant=any_variant,
)
def test_pooling(
    kind: Any,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: int,
    count_padding: bool,
    batch: int,
    lanes: int,
    variant: str,
) -> None:
    dilation = dilation if kind == "max" else 1
    padding = (min(padding[0], kernel[0] // 2), min(padding[1], kernel[1] // 2))
    if any(s + 2 * p < dilation * (k - 1) + 1 for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    x = sparse((batch, 3, *size), 0, 1)
    if kind == "max":
        expected = F.max_pool2d(x.double(), kernel, stride, padding, dilation)
    else:
        expected = F.avg_pool2d(x.double(), kernel, stride, padding, count_include_pad=count_padding)
    step = Pool(0, 1, kind, kernel, stride, padding, (dilation, dilation), count_padding, 0, "pool")
    values = [value_of(x), Value(3, *expected.shape[2:])]
    assert_near(run(graph_of(x, values, [step], tuple(expected.shape)), x, variant, lanes), expected, expected.abs())


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(
    ("lanes", "kernel"), [(1, "gather"), (1, "loads"), (1, "windows"), (4, "panels"), (16, "panels")]
)
def test_non_finite_values_stay_with_their_sample_and_their_connections(
    variant: str, lanes: int, kernel: Kernel
) -> None:
    weight = torch.zeros(20, 6)
    weight[:5, 0], weight[5:, 1] = (
        1,
        1,
    )  # rows of unlike content, filled up to sixteen in the one-sample kernel
    weight[0, 2:] = 1
    x = torch.ones(3, 6)
    x[0, 0], x[1, 1] = math.inf, math.nan
    graph = graph_of(x, [value_of(x), Value(20, 1, 1)], [product(weight, torch.zeros(20), relu=True)], (3, 20))
    out = run(graph, x, variant, lanes, kernel)
    assert bool(torch.isinf(out[0, :5]).all())
    assert bool(torch.isfinite(out[0, 5:]).all())
    assert bool(torch.isfinite(out[1, :5]).all())
    assert bool(torch.isnan(out[1, 5:]).all())
    assert bool(torch.isfinite(out[2]).all())


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("kernel", [2, 3])
def test_maximum_keeps_nan_like_torch(variant: str, lanes: int, kernel: int) -> None:
    x = sparse((2, 3, 6, 36), 0, 0)
    x[0, 1, ::2, ::5], x[1, 2, 1, ::3] = math.nan, -math.inf
    expected = F.max_pool2d(x, kernel)
    step = Pool(0, 1, "max", *[(kernel, kernel)] * 2, (0, 0), (1, 1), True, 0, "pool")
    graph = graph_of(x, [value_of(x), Value(3, *expected.shape[2:])], [step], tuple(expected.shape))
    torch.testing.assert_close(run(graph, x, variant, lanes), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="variants are for x86")
def test_the_portable_variant_is_always_tested_beside_the_best() -> None:
    assert RUNNABLE[-1] == "portable"
    assert load_native().variant == RUNNABLE[0]
