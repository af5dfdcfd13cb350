"""Signals, transposed convolutions, upsampling, scales a channel, gated units, normalisation, shuffled channels and
plain recurrent layers as torch writes them, against torch in float64, over drawn shapes, variants, lanes and batch
sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import any_sparsity, any_variant, assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.deployment.runtime import NativeModel, Setting, UnsupportedError, capture, load_native
from gossamer.deployment.runtime.network import Affine, Normalise, Product, Spread

few, batches = st.integers(1, 3), st.sampled_from([1, 2, 5, 16, 19, 33])
all_lanes, step_lanes = st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 16, 32])
seeds = st.integers(0, 99)
drawn = settings(deadline=None, max_examples=40)  # each is traced anew, which takes most of the time


class Written(nn.Module):
    """A network whose forward pass is a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def thinned(model: nn.Module, sparsity: float, seed: int) -> nn.Module:
    """With this share of zeros, and all other numbers different."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
            if parameter.dim() > 1 and parameter.shape[-1] > 1:
                parameter.mul_(torch.rand_like(parameter) >= sparsity)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return model.eval()


def check(model: nn.Module, x: Tensor, variant: str, lanes: int) -> NativeModel:
    """Outputs as torch has them in float64, to 1e-5 of the largest; for an example of another batch size."""
    graph = capture.capture(model, (torch.cat([x, x])[:2],))
    native = NativeModel(graph, load_native(variant), Setting(lanes))
    got = native(x)
    again = native(x)  # the second call finds the arena as the first one left it
    assert torch.equal(got, again)
    with torch.no_grad():
        expected = model.double()(x.double())
    model.float()
    assert_near(got, expected, 10 * expected.abs().max().clamp_min(1e-3))
    return native


@drawn
@given(
    channels=st.tuples(few, few, few),
    groups=st.sampled_from([1, 1, 2]),
    length=st.sampled_from([4, 7, 16, 33, 70]),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 3), st.just("same"), st.just("valid")),
    dilation=st.integers(1, 3),
    tail=st.sampled_from(["none", "max", "average", "adaptive", "mean", "largest", "last", "flat", "causal"]),
    sparsity=any_sparsity,
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_signals(
    channels: tuple[int, int, int],
    groups: int,
    length: int,
    kernel: int,
    stride: int,
    padding: int | str,
    dilation: int,
    tail: str,
    sparsity: float,
    batch: int,
    lanes: int,
    variant: str,
    seed: int,
) -> None:
    """A convolution over time, normalised, and another that sees the borders of the first."""
    inputs, middle, outputs = (size * groups for size in channels)
    stride = 1 if padding == "same" else stride
    reach = dilation * (kernel - 1)
    after = length if padding == "same" else (length + 2 * (0 if isinstance(padding, str) else padding) - reach - 1)
    if padding != "same" and after < 0:
        return
    tails: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda y: y,
        "max": lambda y: F.max_pool1d(y, 2, 1, 1),
        "average": lambda y: F.avg_pool1d(y, 3, 2, 1),
        "adaptive": lambda y: F.adaptive_max_pool1d(y, 1).squeeze(-1),
        "mean": lambda y: y.mean(-1, keepdim=True),
        "largest": lambda y: y.amax(2) + y.max(2).values,
        "last": lambda y: y[:, :, -1],
        "flat": lambda y: y.flatten(1),
        "causal": lambda y: F.pad(y, (2, 0))[..., 1:-1],
    }
    model = Written(
        lambda m, x: tails[tail](m.second(torch.relu(m.norm(m.first(x))))),
        first=nn.Conv1d(inputs, middle, kernel, stride, padding, dilation, groups),
        norm=nn.BatchNorm1d(middle),
        second=nn.Conv1d(middle, outputs, 3, padding=1, groups=groups),
    )
    x = torch.randn(batch, inputs, length, generator=torch.Generator().manual_seed(seed))
    native = check(thinned(model, sparsity, seed), x, variant, lanes)
    kinds = [line.kind for line in native.plan(lanes).lines if line.name in ("first", "second")]
    assert kinds == ["convolution"] * 2


@drawn
@given(
    flat=st.booleans(),
    channels=st.tuples(few, few),
    groups=st.sampled_from([1, 1, 2]),
    size=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 5, 8, 17])),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    sparsity=any_sparsity,
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_transposed_convolution(
    flat: bool,
    channels: tuple[int, int],
    groups: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    more: tuple[int, int],
    dilation: tuple[int, int],
    sparsity: float,
    batch: int,
    lanes: int,
    variant: str,
    seed: int,
) -> None:
    """Normalised, which is folded through the spreading into the weights, and seen by a padded convolution."""
    more = min(more[0], max(stride[0], dilation[0]) - 1), min(more[1], max(stride[1], dilation[1]) - 1)
    sides = zip(size, kernel, stride, padding, more, dilation, strict=True)
    if any((n - 1) * s - 2 * p + d * (k - 1) + o < 0 for n, k, s, p, o, d in sides):
        return
    inputs, outputs = (each * groups for each in channels)
    options = [each[1] if flat else each for each in (kernel, stride, padding, more)]
    rest = (groups, True, dilation[1] if flat else dilation)
    transposed = nn.ConvTranspose1d if flat else nn.ConvTranspose2d
    model = Written(
        lambda m, x: m.last(torch.relu(m.norm(m.up(x)))),
        up=transposed(inputs, outputs, *options, *rest),
        norm=(nn.BatchNorm1d if flat else nn.BatchNorm2d)(outputs),
        last=(nn.Conv1d if flat else nn.Conv2d)(outputs, 2, 3, padding=1),
    )
    shape = (batch, inputs, size[1]) if flat else (batch, inputs, *size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    native = check(thinned(model, sparsity, seed), x, variant, lanes)
    assert not any(isinstance(operation, Affine) for operation in native.graph.operations)


@drawn
@given(
    size=st.tuples(st.integers(1, 7), st.sampled_from([1, 2, 5, 8, 17])),
    factor=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    way=st.sampled_from(["factor", "size", "exact", "signal", "shuffle"]),
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_upsampling(
    size: tuple[int, int], factor: tuple[int, int], way: str, batch: int, lanes: int, variant: str, seed: int
) -> None:
    larger = size[0] * factor[0], size[1] * factor[1]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "factor": lambda x: F.interpolate(x, scale_factor=factor),
        "size": lambda x: F.interpolate(x, size=larger),
        "exact": lambda x: F.interpolate(x, size=larger, mode="nearest-exact"),
        "signal": lambda x: F.interpolate(x, scale_factor=factor[1]),
        "shuffle": lambda x: F.pixel_shuffle(x, factor[0]),
    }
    channels = 2 * factor[0] ** 2 if way == "shuffle" else 3
    shape = (batch, channels, size[1]) if way == "signal" else (batch, channels, *size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    last = (
        nn.Conv1d(3, 2, 3, padding=1) if way == "signal" else nn.Conv2d(channels if way != "shuffle" else 2, 2, 3, 1, 1)
    )
    model = Written(lambda m, x: m.last(2 - ways[way](x).relu()), last=last)
    native = check(thinned(model, 0.5, seed), x, variant, lanes)
    (spread,) = [place for place, each in enumerate(native.graph.operations) if isinstance(each, Spread)]
    assert not any(isinstance(each, Affine) for each in native.graph.operations[spread:]), "cheaper before"


SCALED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a scale": lambda m, x: m.layer(x) * m.scale,
    "the scale first": lambda m, x: m.scale * m.layer(x),
    "a shift": lambda m, x: m.layer(x) + m.shift,
    "two shifts": lambda m, x: m.shift - (m.layer(x) - 2 * m.shift),
    "a quotient": lambda m, x: m.layer(x) / (m.scale.abs() + 1),
    "computed of parameters": lambda m, x: torch.relu(m.layer(x) * torch.sigmoid(m.scale) - m.shift.exp()),
    "one minus": lambda m, x: 1 - torch.sigmoid(m.layer(x)),
    "a gate and its rest": lambda m, x: (lambda g, y: g * y + (1 - g) * x)(torch.sigmoid(m.layer(x)), m.layer(-x)),
    "before a layer": lambda m, x: m.layer(torch.relu(x) * m.scale),
    "standardised before a layer": lambda m, x: m.layer((x - m.shift) / (m.scale.abs() + 1)),
    "layer scale of a residual": lambda m, x: x + m.scale * m.layer(torch.relu(m.layer(x))),
    "one number of the model": lambda m, x: torch.rsub(m.layer(x), m.shift.sum(), alpha=2) * m.scale.mean(),
}


@drawn
@given(
    form=st.sampled_from(["picture", "signal", "vector", "sequence"]),
    name=st.sampled_from(list(SCALED)),
    channels=st.integers(2, 20),
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_numbers_a_channel(
    form: str, name: str, channels: int, batch: int, lanes: int, variant: str, seed: int
) -> None:
    shapes = {"picture": (channels, 3, 5), "signal": (channels, 9), "vector": (channels,), "sequence": (7, channels)}
    sizes = {"picture": (channels, 1, 1), "signal": (1, channels, 1), "vector": (channels,), "sequence": (channels,)}
    layers: dict[str, Callable[[], nn.Module]] = {
        "picture": lambda: nn.Conv2d(channels, channels, 3, padding=1),
        "signal": lambda: nn.Conv1d(channels, channels, 3, padding=1),
    }
    layer = layers.get(form, lambda: nn.Linear(channels, channels))()
    scale, shift = nn.Parameter(torch.zeros(sizes[form])), nn.Parameter(torch.zeros(sizes[form]))
    model = thinned(Written(SCALED[name], layer=layer, scale=scale, shift=shift), 0.5, seed)
    x = torch.randn(batch, *shapes[form], generator=torch.Generator().manual_seed(seed))
    native = check(model, x, variant, lanes)
    if name in ("a scale", "the scale first", "a shift", "two shifts", "a quotient", "before a layer"):
        kinds = [type(operation) for operation in native.graph.operations if not isinstance(operation, Product)]
        assert kinds.count(Affine) == (name == "before a layer"), "all but the ReLU is folded into the layer"


@drawn
@given(
    form=st.sampled_from(["picture", "signal", "vector", "sequence"]),
    half=st.integers(1, 20),
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_gated_linear_unit(form: str, half: int, batch: int, lanes: int, variant: str, seed: int) -> None:
    shapes = {"picture": (2 * half, 3, 5), "signal": (2 * half, 9), "vector": (2 * half,), "sequence": (7, 2 * half)}
    x = 3 * torch.randn(batch, *shapes[form], generator=torch.Generator().manual_seed(seed))
    layer = nn.Conv1d(2 * half, 2 * half, 1) if form == "signal" else nn.Identity()  # or it would be a sequence
    dim = -1 if form == "sequence" else 1
    model = thinned(Written(lambda m, x: F.glu(m.layer(x), dim), layer=layer), 0.5, seed)
    check(model, x, variant, lanes)


def by_hand(x: Tensor, groups: int) -> Tensor:
    """Channels shuffled as ShuffleNet has it."""
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    return x.transpose(1, 2).contiguous().view(batch, -1, height, width)


NORMALISED: dict[str, tuple[str, Callable[[int, int, bool], nn.Module]]] = {
    "groups of planes": ("picture", lambda groups, channels, affine: nn.GroupNorm(groups, channels, affine=affine)),
    "groups of signals": ("signal", lambda groups, channels, affine: nn.GroupNorm(groups, channels, affine=affine)),
    "groups of features": ("vector", lambda groups, channels, affine: nn.GroupNorm(groups, channels, affine=affine)),
    "planes": ("picture", lambda groups, channels, affine: nn.InstanceNorm2d(channels, affine=affine)),
    "signals": ("signal", lambda groups, channels, affine: nn.InstanceNorm1d(channels, affine=affine)),
    "features": ("vector", lambda groups, channels, affine: nn.LayerNorm(channels, elementwise_affine=affine)),
    "each step": ("sequence", lambda groups, channels, affine: nn.LayerNorm(channels, elementwise_affine=affine)),
    "all steps": ("sequence", lambda groups, channels, affine: nn.LayerNorm([7, channels], elementwise_affine=False)),
    "a picture": ("picture", lambda groups, channels, affine: nn.LayerNorm([channels, 5, 9], elementwise_affine=False)),
    "each pixel": ("turned", lambda groups, channels, affine: nn.LayerNorm(channels, 0.1, affine, bias=False)),
}


@drawn
@given(
    name=st.sampled_from(list(NORMALISED)),
    groups=st.integers(1, 4),
    size=st.integers(1, 5),
    affine=st.booleans(),
    residual=st.booleans(),
    batch=st.integers(1, 70),
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_normalisation(
    name: str, groups: int, size: int, affine: bool, residual: bool, batch: int, lanes: int, variant: str, seed: int
) -> None:
    """Between layers, the second of which sees borders; with an addition and a ReLU, which are folded into it."""
    form, make = NORMALISED[name]
    channels = 2 * groups * size  # not one alone, of which a vector has no variance
    shapes = {"signal": (channels, 19), "vector": (channels,), "sequence": (7, channels)}
    layers: dict[str, Callable[[], nn.Module]] = {
        "signal": lambda: nn.Conv1d(channels, channels, 3, padding=1),
        "vector": lambda: nn.Linear(channels, channels),
        "sequence": lambda: nn.Linear(channels, channels),
    }
    layer = layers.get(form, lambda: nn.Conv2d(channels, channels, 3, padding=1))
    first, second, norm = layer(), layer(), make(groups, channels, affine)

    def normalised(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        y = m.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if form == "turned" else m.norm(y)
        return m.second(torch.relu(y + x if residual else y))  # type: ignore[no-any-return]

    model = thinned(Written(normalised, first=first, norm=norm, second=second), 0.5, seed)
    x = torch.randn(batch, *shapes.get(form, (channels, 5, 9)), generator=torch.Generator().manual_seed(seed))
    native = check(model, x, variant, lanes)
    kinds = [type(operation) for operation in native.graph.operations if not isinstance(operation, Product)][1:]
    assert kinds == [Normalise]


@drawn
@given(
    way=st.sampled_from(["module", "signal", "by hand"]),
    groups=st.integers(2, 4),
    size=st.integers(2, 4),
    batch=batches,
    lanes=all_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_channel_shuffle(way: str, groups: int, size: int, batch: int, lanes: int, variant: str, seed: int) -> None:
    channels = groups * size
    shape = (channels, 9) if way == "signal" else (channels, 3, 5)
    layer = (nn.Conv1d if way == "signal" else nn.Conv2d)(channels, channels, 3, padding=1, groups=groups)
    shuffle = (lambda x: by_hand(x, groups)) if way == "by hand" else nn.ChannelShuffle(groups)
    model = thinned(Written(lambda m, x: m.layer(F.softplus(shuffle(m.layer(x)))), layer=layer), 0.5, seed)
    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))
    check(model, x, variant, lanes)


def test_kept_statistics_of_instances_are_a_scale() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    with torch.no_grad():
        model(2 + torch.randn(2, 3, 6, 6))  # which moves them
    native = check(thinned(model, 0.5, 0), torch.randn(3, 3, 6, 6), load_native().variant, 1)
    assert [type(operation) for operation in native.graph.operations[1:]] == [Product]


class Turned(nn.Module):
    """Embedding, convolution over time, recurrent layer: channels behind the steps, before them, behind again."""

    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(6, 8, 3, padding=1), kind(8, 5, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0)))
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1)
        return self.rnn(y)[0]  # type: ignore[no-any-return]


@drawn
@given(
    kind=st.sampled_from([nn.RNN, nn.GRU]),
    batch_first=st.booleans(),
    steps=st.sampled_from([1, 4, 20]),
    batch=batches,
    lanes=step_lanes,
    variant=any_variant,
    seed=seeds,
)
def test_channels_and_steps_change_places(
    kind: Any, batch_first: bool, steps: int, batch: int, lanes: int, variant: str, seed: int
) -> None:
    shape = (batch, steps, 6) if batch_first else (steps, batch, 6)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    model = thinned(Turned(kind, batch_first), 0.5, seed)
    graph = capture.capture(model, (x.repeat(2, 1, 1) if batch_first else x.repeat(1, 2, 1),))
    native = NativeModel(graph, load_native(variant), Setting(lanes))
    with torch.no_grad():
        expected = model(x)
    assert_near(native(x), expected.double(), torch.full((1,), 10.0))


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("a resize", lambda m, x: F.interpolate(m.conv(x), size=(9, 9))),
        ("a resize", lambda m, x: F.interpolate(m.conv(x), size=(3, 3))),
        ("a number that float32", lambda m, x: m.conv(x) + 1e39),
        ("its own tensor row, which it reads, is changed", lambda m, x: m.conv(x) * m.row.mul_(2).sum()),
        ("random numbers", lambda m, x: m.conv(x) * torch.rand_like(m.row).sum()),
        ("makes torch.float64", lambda m, x: m.conv(x) * m.row.sum(0, keepdim=True).double()),
    ],
)
def test_what_is_left_to_torch(name: str, forward: Callable[[Any, Tensor], Tensor]) -> None:
    model = Written(forward, conv=nn.Conv2d(3, 3, 3, padding=1)).eval()
    model.register_buffer("row", torch.arange(6.0))
    with pytest.raises(UnsupportedError, match=name):
        capture.capture(model, (torch.randn(2, 3, 6, 6),))
    assert torch.equal(model.row, torch.arange(6.0))


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_numbers_for_each_pixel_and_quotients(lanes: int) -> None:
    model = Written(lambda m, x: (m.conv(x) * m.row - m.row) / (m.conv(-x).sigmoid() + m.row), conv=nn.Conv2d(3, 3, 3))
    model.register_buffer("row", torch.arange(1.0, 8.0))
    check(model.eval(), torch.randn(5, 3, 6, 9), load_native().variant, lanes)


def test_cropping_then_padding_does_not_bring_back_what_was_cut() -> None:
    model = Written(lambda m, x: F.pad(x[..., :4], (0, 2)) + m.conv(x), conv=nn.Conv2d(3, 3, 1)).eval()
    x = torch.randn(3, 3, 5, 6)
    for lanes in (1, 16):
        check(model, x, load_native().variant, lanes)


def test_a_wave_of_one_channel() -> None:
    """An input without an axis of channels gets one: it is loaded so."""
    layers = nn.Sequential(nn.Conv1d(1, 4, 5, 2), nn.GLU(1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 3))
    model = thinned(Written(lambda m, x: m.layers(x.unsqueeze(1)), layers=layers), 0.2, 0)
    for lanes in (1, 8, 16):
        check(model, torch.randn(17, 50), load_native().variant, lanes)


def test_weights_computed_of_parameters() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), nn.ReLU(), nn.Linear(5, 3))
    native = check(model.eval(), torch.randn(4, 8), load_native().variant, 1)
    assert [line.name for line in native.plan(1).lines] == ["0", "2"]
