"""Int8 products: the kernels against exact sums of codes, calibration, and what ``deploy`` says and chooses."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from drawn import RUNNABLE, any_sparsity, any_variant, assert_near, drawn, graph_of, sparse, value_of
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import product
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.deployment.runtime import compile_plan, deploy, deployed, tuning
from gossamer.deployment.runtime.native import load_native
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import Network, Product, Value
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.quantise import calibrated
from gossamer.deployment.runtime.weights_int8 import quantised


def codes(x: Tensor, largest: float) -> Tensor:
    """The codes of values, as doubles."""
    inverse = torch.tensor(127 / largest, dtype=torch.float32)
    return (x * inverse).clamp(-128, 127).round().double()


def weight_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of weights and the scale of each row, as doubles."""
    largest = weight.flatten(1).abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, torch.ones(()))
    return (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().double(), scale.double()


def run_int8(graph: Network, x: Tensor, variant: str, lanes: int) -> Tensor:
    """What the graph makes of x, with every product that can in int8."""
    given = tuple((number, "int8") for number, kernels in choices(graph, lanes).items() if "int8" in kernels)
    assert given
    model = NativeModel(graph, load_native(variant), Setting(lanes, 1, given))  # type: ignore[arg-type]
    model(x)
    out = model(x)  # the second call finds the arena as the first one left it
    assert isinstance(out, Tensor)
    return out


@drawn
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 150),
    batch=st.sampled_from([1, 3, 16, 17, 65, 130]),
    lanes=st.sampled_from([1, 2, 8, 16, 48, 64]),
    sparsity=any_sparsity,
    variant=any_variant,
    relu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    rows: int, columns: int, batch: int, lanes: int, sparsity: float, variant: str, relu: bool, seed: int
) -> None:
    """Some inputs are larger than the calibrated range: their codes are limited."""
    weight, x, bias = (
        sparse((rows, columns), sparsity, seed),
        sparse((batch, columns), 0, seed + 1),
        sparse((rows,), 0, seed + 2),
    )
    largest = 0.8 * float(x.abs().max())
    graph = graph_of(
        x, [value_of(x), Value(rows, 1, 1)], [product(weight, bias, relu=relu, largest=largest)], (batch, rows)
    )
    coded, scale = weight_codes(weight)
    expected = F.linear(codes(x, largest), coded) * scale * largest / 127 + bias.double()
    terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert_near(run_int8(graph, x, variant, lanes), F.relu(expected) if relu else expected, terms)


@drawn
@given(
    channels=st.integers(1, 10),
    rows=st.integers(1, 9),
    size=st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 4, 8, 13, 16])),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    batch=st.sampled_from([1, 5, 19]),
    lanes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    sparsity=any_sparsity,
    variant=any_variant,
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
def test_convolution(
    channels: int,
    rows: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    batch: int,
    lanes: int,
    sparsity: float,
    variant: str,
    fused: bool,
    seed: int,
) -> None:
    """Two in a row, the second on the exact result of the first, with a residual."""
    x = sparse((batch, channels, *size), 0, seed)
    first, bias = sparse((rows, channels, *kernel), sparsity, seed + 1), sparse((rows,), 0, seed + 2)
    padding = (kernel[0] // 2, kernel[1] // 2)
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    largest = float(x.abs().max())
    coded, scale = weight_codes(first)
    middle = F.conv2d(codes(x, largest), coded, None, stride, padding) * (scale * largest / 127)[:, None, None]
    middle = middle + bias.double()[:, None, None]
    shape = Value(rows, *middle.shape[2:])
    one = product(first, bias, stride=stride, padding=padding, largest=largest)
    second, values = sparse((rows, rows, 1, 1), sparsity, seed + 3), [value_of(x), shape, shape]
    two = product(second, bias, x=1, y=2, add=1 if fused else None, relu=fused)
    expected = F.conv2d(middle, second.double(), bias.double()) + (middle if fused else 0)
    terms = F.conv2d(middle.abs(), second.double().abs(), bias.double().abs()) + middle.abs().max()
    graph = graph_of(x, values, [one, two], tuple(expected.shape))
    if not any("int8" in kernels for kernels in choices(graph, lanes).values()):
        return  # one sample and one output pixel of several input pixels
    assert_near(run_int8(graph, x, variant, lanes), F.relu(expected) if fused else expected, terms)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_values_that_are_not_finite_stay_with_their_sample(variant: str) -> None:
    weight, x = torch.ones(20, 8), torch.ones(3, 8)
    x[1, 2], x[1, 3] = float("nan"), float("inf")
    graph = graph_of(x, [value_of(x), Value(20, 1, 1)], [product(weight, torch.zeros(20), largest=1.0)], (3, 20))
    for lanes in (1, 16):
        torch.testing.assert_close(run_int8(graph, x, variant, lanes)[::2], torch.full((2, 20), 8.0))


def test_words_of_zeros_are_not_stored() -> None:
    """Blocks of 1x4 quarter the stored words; other zeros leave most of them."""
    kept = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) < 0.25
    blocks = kept.repeat_interleave(4, 1)
    weight = sparse((64, 128), 0, 1).clone()
    weight[1] = 1
    words = quantised(product(weight * blocks, torch.zeros(64)).taps, 1.0).taps
    assert words.count == int(kept.sum())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, 2, 1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


def prefer_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer whose choices include int8 gets it, whatever the times."""
    monkeypatch.setattr(tuning, "_fastest", lambda seconds: "int8" if "int8" in seconds else next(iter(seconds)))
    monkeypatch.setattr(deployed, "WORTH_IT", 0.0)


def test_calibration_finds_the_ranges_of_the_float_network() -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(5, 3, 9, 7)
    graph = calibrated(compile_plan(model, x[:1]), [x])
    found = [op.largest for op in graph.operations if isinstance(op, Product) and op.kind in ("linear", "convolution")]
    with torch.no_grad():
        first = F.relu(model.first(x))
        second = F.relu(model.second(first)).mean((2, 3))
    assert found == pytest.approx([float(each.abs().max()) for each in (x, first, second)], rel=1e-5)


def test_deploy_in_int8_says_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_int8(monkeypatch)
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(40, 3, 8, 8)
    fast = deploy(model, x[:2], precision="int8", calibration=x, seconds=0, remember=False)
    said = str(fast.explain())
    assert re.search(r"int8 in 3 layers: outputs change by [0-3]\.\d% in root mean square", said)
    assert re.search(r"the largest stays the same for (100|9\d)\.\d% of samples \(calibration data\)", said)
    with torch.no_grad():
        want = model(x)
    difference = (fast(x) - want).abs().max() / want.abs().max()
    assert 1e-5 < difference < 0.05
    copied = pickle.loads(pickle.dumps(fast.native))
    assert torch.equal(copied(x[:2]), fast(x[:2]))


def test_deploy_needs_calibration_for_int8_and_for_nothing_else() -> None:
    model, x = Small(), torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"expected calibration data for int8 .* got none"):
        deploy(model, x, precision="int8")
    with pytest.raises(ValueError, match="got some for float32"):
        deploy(model, x, calibration=x)
    with pytest.raises(ValueError, match="expected a precision from float32, int8, got 'int4'"):
        deploy(model, x, precision="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_int8(kind: type[nn.Module]) -> None:
    """Near the float32 layer, and the same by every variant for any number of samples together."""
    torch.manual_seed(0)
    model, x = kind(7, 13, batch_first=True).eval(), torch.randn(19, 9, 7)
    graph = calibrated(compile_plan(model, x), [x])
    with torch.no_grad():
        want = model(x)[0]
    found = []
    for variant in RUNNABLE:
        for lanes in (1, 16, 32):
            given = tuple((number, "int8") for number, kernels in choices(graph, lanes).items() if "int8" in kernels)
            assert given
            fast = NativeModel(graph, load_native(variant), Setting(lanes, 1, given))  # type: ignore[arg-type]
            fast(x)
            found.append(fast(x)[0])
    assert 1e-4 < (found[0] - want).norm() / want.norm() < 0.02
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=2e-3)  # a sum may round to the next code
