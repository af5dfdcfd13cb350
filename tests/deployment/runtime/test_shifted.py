"""Convolutions that read shifted copies of planes: against torch, beside ones that do not, and when they are taken."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from drawn import RUNNABLE, any_sparsity, any_variant, assert_near, graph_of, sparse, value_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gossamer.deployment.runtime import layout, memory, plan_shifted, tuning
from gossamer.deployment.runtime.native import load_native
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import Network, Operation, Product, Value, dense_taps
from gossamer.deployment.runtime.plan import choices, make_plan
from gossamer.deployment.runtime.records import PRODUCT_FOUR, SHIFTS
from gossamer.deployment.runtime.weights import Kernel

Weights = list[tuple[Tensor, Tensor, int]]  # weight, bias, dilation


def network(x: Tensor, layers: Weights, residual: bool) -> Network:
    """Convolutions one behind the other that keep the size of a plane; the last adds what the first gave."""
    values, operations = [value_of(x)], list[Operation]()
    for number, (weight, bias, dilation) in enumerate(layers):
        taps = dense_taps(weight.numpy())
        taps = type(taps)(taps.rows, taps.row, taps.channel, taps.dy * dilation, taps.dx * dilation, taps.weight)
        reach = dilation * (weight.shape[2] // 2), dilation * (weight.shape[3] // 2)
        last = number == len(layers) - 1
        operations.append(
            Product(
                *(number, number + 1, taps, bias.numpy(), (1, 1), reach, weight.numel(), f"layer {number}"),
                add=1 if residual and last else None,
                relu=last,
            )
        )
        values.append(Value(weight.shape[0], *x.shape[2:]))
    return graph_of(x, values, operations, (x.shape[0], values[-1].channels, *x.shape[2:]))


def reference(x: Tensor, layers: Weights, residual: bool) -> tuple[Tensor, Tensor]:
    """What the network gives, and the same of absolute values."""
    found = []
    for sign in (lambda t: t.double(), lambda t: t.double().abs()):
        now, outputs = sign(x), list[Tensor]()
        for weight, bias, dilation in layers:
            reach = dilation * (weight.shape[2] // 2), dilation * (weight.shape[3] // 2)
            now = F.conv2d(now, sign(weight), sign(bias), 1, reach, dilation)
            outputs.append(now)
        found.append(now + outputs[0] if residual else now)
    return F.relu(found[0]), found[1]


@settings(deadline=None, max_examples=200)
@given(
    channels=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    size=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 7, 8, 14, 16, 28, 32])),
    kernel=st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 5])),
    dilation=st.integers(1, 2),
    shifted=st.lists(st.booleans(), min_size=3, max_size=3),
    batch=st.sampled_from([1, 2]),
    sparsity=any_sparsity,
    variant=any_variant,
    residual=st.booleans(),
    cache=st.sampled_from([64, 4 << 10, 32 << 10]),
    seed=st.integers(0, 99),
)
@example([3, 5, 5, 7], (2, 2), (3, 3), 1, [True] * 3, 1, 0.5, "portable", True, 64, 0)  # vectors of four, in blocks
@example([3, 5, 5, 7], (4, 1), (3, 1), 1, [True] * 3, 1, 0.5, "portable", True, 64, 0)
@example([4, 9, 9, 9], (8, 8), (3, 3), 1, [True, False, True], 1, 0.5, "portable", True, 64, 0)  # borders in between
def test_shifted_planes(
    channels: list[int],
    size: tuple[int, int],
    kernel: tuple[int, int],
    dilation: int,
    shifted: list[bool],
    batch: int,
    sparsity: float,
    variant: str,
    residual: bool,
    cache: int,
    seed: int,
) -> None:
    channels[3] = channels[1]  # what is added has as many
    x = sparse((batch, channels[0], *size), 0, seed)
    layers = [
        (
            sparse((channels[i + 1], channels[i], *kernel), sparsity, seed + i),
            sparse((channels[i + 1],), 0, i),
            dilation,
        )
        for i in range(3)
    ]
    with (
        mock.patch.object(layout, "WORTH_COPYING", 0),
        mock.patch.multiple(plan_shifted, ENOUGH=1, COPIES_IN_CACHE=cache, COPIES_OF_FOUR=cache),
    ):
        graph = network(x, layers, residual)
        possible = choices(graph, 1)
        chosen = tuple((n, "shifted") for n in possible if shifted[n - 1] and "shifted" in possible[n])
        model = NativeModel(graph, load_native(variant), Setting(1, 1, chosen))  # type: ignore[arg-type]
        model(x)
        actual = model(x)  # the second call finds the arena as the first one left it
    expected, terms = reference(x, layers, residual)
    assert_near(actual, expected, terms)


def one_layer(channels: int, rows: int, side: int, sparsity: float = 0.5) -> Network:
    weight = sparse((rows, channels, 3, 3), sparsity, 1)
    return network(sparse((1, channels, side, side), 0, 0), [(weight, torch.zeros(rows), 1)], False)


@pytest.mark.parametrize(("side", "four"), [(2, True), (4, False), (16, False)])
def test_a_plane_is_copied_once_for_each_block_of_channels(side: int, four: bool) -> None:
    graph = one_layer(512, 64, side)
    codes = make_plan(graph, 1, {1: "shifted"}).records[:, 0].tolist()
    assert codes.count(SHIFTS) > 1
    assert (PRODUCT_FOUR in codes) is four
    assert SHIFTS not in make_plan(graph, 1).records[:, 0]


def test_few_weights_are_not_worth_a_copy() -> None:
    assert choices(one_layer(16, 64, 8, sparsity=0.5), 1)[1] == ("panels", "shifted", "dense")
    assert choices(one_layer(16, 64, 8, sparsity=0.97), 1)[1] == ("panels",)
    assert "shifted" not in choices(one_layer(16, 64, 8), 16)[1]  # sixteen samples fill vectors by themselves


def test_planes_with_borders_for_another_are_not_copied() -> None:
    """Rows of eight pixels with a border between them fill no vector; rows of sixteen do."""
    for side, expected in ((8, 0), (16, 1)):
        x = sparse((1, 9, side, side), 0, 0)
        graph = network(x, [(sparse((9, 9, 3, 3), 0, i), torch.zeros(9), 1) for i in range(2)], False)
        codes = make_plan(graph, 1, {1: "shifted", 2: "panels"}).records[:, 0].tolist()
        assert codes.count(SHIFTS) == expected


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("side", [2, 4, 8, 16])
def test_infinity_stays_with_the_pixels_around_it(variant: str, side: int) -> None:
    x, layers = torch.rand(1, 9, side, side), [(torch.rand(20, 9, 3, 3) + 0.1, torch.zeros(20), 1)]
    x[0, 3, 0, 0] = math.inf
    expected, _ = reference(x, layers, False)
    out = NativeModel(network(x, layers, False), load_native(variant), Setting(1, 1, ((1, "shifted"),)))(x)
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert side == 2 or bool(out.isfinite().any())


def test_narrow_layers_choose_together() -> None:
    """Alone the second layer is as fast with borders, which would take the copies from the first and the third."""
    x = sparse((1, 9, 8, 8), 0, 0)
    graph = network(x, [(sparse((9, 9, 3, 3), 0, i), torch.zeros(9), 1) for i in range(3)], False)
    seconds: dict[int, dict[Kernel, float]] = {
        1: {"panels": 5.0, "shifted": 3.0},
        2: {"panels": 2.0, "shifted": 2.1, "dense": 9.0},
        3: {"panels": 5.0, "shifted": 3.0},
    }
    assert tuning._chosen(graph, seconds) == dict.fromkeys((1, 2, 3), "shifted")
    seconds[2]["shifted"] = 7.0
    assert tuning._chosen(graph, seconds) == dict.fromkeys((1, 2, 3), "panels")
    seconds[2]["dense"] = 1.0
    assert tuning._chosen(graph, seconds) == {1: "panels", 2: "dense", 3: "panels"}


def test_shifted_planes_are_not_timed_where_a_neighbour_needs_borders() -> None:
    """The second layer has too few weights for copies, so the planes between the two have borders."""
    x = sparse((1, 9, 8, 8), 0, 0)
    layers: Weights = [
        (sparse((40, 9, 3, 3), 0, 1), torch.zeros(40), 1),
        (sparse((9, 40, 3, 3), 0.97, 2), torch.zeros(9), 1),
    ]
    graph = network(x, layers, False)
    assert "shifted" in choices(graph, 1)[1]
    found = tuning.tune(NativeModel(graph, load_native(), Setting(1, 1, ())), [x], 1, 0.0)
    assert set(found.seconds[1]) == {"panels", "dense"}


def test_a_decision_is_remembered_by_the_kernels_that_densities_allow() -> None:
    """Both have a density of 4 %, but 25 and 23 weights a plane."""
    keys = []
    for each in (25, 23):
        weight = torch.zeros(64, 64, 3, 3)
        weight[: each - 1, :, 1, 1] = 1.0
        weight[0, :, 0, 0] = 1.0  # so that the window has several places
        layers: Weights = [(weight, torch.zeros(64), 1)]
        graph = network(sparse((1, 64, 8, 8), 0, 0), layers, False)
        keys.append(memory.key_of(graph, load_native(), 1, 1))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("seconds", "wanted", "rounds"), [(0.0, 3, 3), (0.0, 7, 3), (5.0, 7, 7)])
def test_a_timing_has_as_many_rounds_as_are_wanted_if_there_is_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: int, rounds: int
) -> None:
    clock = iter(range(100_000))  # a second whenever it is asked
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(clock))
    found = tuning.time_in_turns({"one": lambda: None}, [], seconds, wanted=wanted)
    assert len(found["one"]) == rounds
