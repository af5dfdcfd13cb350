"""Whole networks: the native runtime against torch, over variants, lanes and batch sizes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.deployment.runtime import (
    NativeModel,
    NoCompilerError,
    Setting,
    UnsupportedError,
    compile_plan,
    deploy,
    load_native,
)
from gossamer.deployment.runtime.capture import capture
from gossamer.deployment.runtime.network import Affine, Concat, Network, Normalise, Product
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.weights import KERNELS, Kernel
from gossamer.lab.models.minilm import SentenceClassifier
from gossamer.lab.models.transformer import VisionTransformer

try:
    load_native()
except NoCompilerError as error:
    pytest.skip(str(error), allow_module_level=True)


Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.stride, self.grow = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        if self.stride > 1:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride],
                (0, 0, 0, 0, self.grow // 2, self.grow - self.grow // 2),
            )
        return F.relu(x + y)


class ResNet(nn.Module):
    def __init__(self, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), norm(8), nn.ReLU())
        blocks = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 30, 2)]
        self.body = nn.Sequential(*(Block(*sizes, norm) for sizes in blocks))
        self.head = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))  # type: ignore[no-any-return]


class NextBlock(nn.Module):
    """Planes each by itself, then pixels each by itself, with their channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.planes, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.planes(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Pixels(nn.LayerNorm):
    """Layer normalisation of pictures as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    layers = [nn.Conv2d(3, 12, 2, 2), Pixels(12), NextBlock(12), Pixels(12), nn.Conv2d(12, 18, 2, 2), NextBlock(18)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), Pixels(18), nn.Flatten(), nn.Linear(18, 7))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False))
            for i in range(3)
        )
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.avg_pool2d(F.relu(x), 2).mean((2, 3)))  # type: ignore[no-any-return]


def vgg() -> nn.Module:
    features = [nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(True), nn.MaxPool2d(2)]
    features += [nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Dropout(0.4), nn.MaxPool2d(2, ceil_mode=True)]
    classifier = [nn.Flatten(), nn.Linear(24 * 4 * 5, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 7)]
    return nn.Sequential(*features, *classifier)


def lenet() -> nn.Module:
    features = [
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(256, 40), nn.ReLU(), nn.Linear(40, 10))


def mobile() -> nn.Module:
    """Depth-wise, grouped, dilated, 'same' with an even kernel, 1x1, stride 3."""
    layers = [
        nn.Conv2d(4, 12, 1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, 2, 1, groups=12),
        nn.BatchNorm2d(12),
        nn.ReLU(),
    ]
    layers += [nn.Conv2d(12, 8, 3, padding=2, dilation=2, groups=4), nn.Conv2d(8, 8, (4, 2), padding="same")]
    layers += [nn.ReLU(), nn.Conv2d(8, 6, 3, stride=3)]
    return nn.Sequential(*layers)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(50, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 4)
    )


class DenseMlp(nn.Module):
    """Linear, norm, ReLU, then joined with its input, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(20 + 8 * i, 8), nn.BatchNorm1d(8), nn.ReLU()) for i in range(4)
        )
        self.head = nn.Linear(52, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.cat((x, layer(x)), dim=-1)
        return self.head(x)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self, batch_first: bool, flat: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 18)
        self.lstm = nn.LSTM(18, 18, 2, dropout=0.5, batch_first=batch_first)
        self.decoder = nn.Linear(18, 50)
        self.decoder.weight = self.embedding.weight
        self.flat = flat

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.lstm(F.dropout(self.embedding(tokens), 0.5, self.training))
        return self.decoder(h.reshape(-1, 18) if self.flat else h)  # type: ignore[no-any-return]


class Gru(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(9, 21, 2, batch_first=True, bidirectional=True, bias=bias)
        self.head = nn.Linear(42, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0].mean(1))  # type: ignore[no-any-return]


class Flattened(nn.Module):
    """A flattened picture and a flattened feature map, joined and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm1d(2 * 30 + 3 * 12)
        self.head = nn.Linear(96, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(torch.cat([x.flatten(1), self.conv(x).flatten(1)], 1))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Inverted residuals with squeeze and excitation, unlike activations, a split, explicit padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.ZeroPad2d((1, 0, 0, 2)), nn.Conv2d(3, 12, 3, 2), nn.BatchNorm2d(12), nn.Hardswish()
        )
        self.expand = nn.Sequential(nn.Conv2d(12, 24, 1), nn.ReLU6(), nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.SiLU())
        self.squeeze = nn.Sequential(nn.Conv2d(24, 6, 1), nn.PReLU(6), nn.Conv2d(6, 24, 1), nn.Hardsigmoid())
        self.shrink = nn.Sequential(nn.Conv2d(24, 12, 1), nn.Dropout(inplace=True))
        self.head = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 8), nn.LeakyReLU(0.2, inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.expand(x)
        y = y * self.squeeze(F.adaptive_avg_pool2d(y, 1))
        left, right = (x - 0.5 * self.shrink(y) + 1).chunk(2, 1)
        y = torch.cat([torch.tanh(left), F.elu(right)], 1)
        return F.log_softmax(self.head(y.mean((2, 3))), 1)


class Cells(nn.Module):
    """Two cells on a vector, the first's state read by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(14, 11), nn.GRUCell(11, 13), nn.Linear(13, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.lstm(x)
        h, c = self.lstm(x, (h, c))
        return self.head(self.gru(h, self.gru(c)))  # type: ignore[no-any-return]


class PlainCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tanh, self.relu, self.head = nn.RNNCell(14, 11), nn.RNNCell(11, 13, nonlinearity="relu"), nn.Linear(13, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tanh(x, self.tanh(x))
        return self.head(self.relu(h, self.relu(1 - h)))  # type: ignore[no-any-return]


def waves() -> nn.Module:
    """Convolutions over time: strided, dilated, grouped, gated, pooled."""
    layers = [nn.Conv1d(2, 12, 7, 3, 2), nn.BatchNorm1d(12), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(12, 16, 3, groups=4)]
    layers += [nn.GLU(1), nn.Conv1d(8, 10, 3, padding="same", dilation=2), nn.PReLU(10), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(10, 5))


def generator() -> nn.Module:
    """A vector to a picture, the first layer seeing nothing but the vector and zeros."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Unflatten(1, (8, 1, 1)), nn.Sigmoid()]
    layers += [nn.ConvTranspose2d(8, 6, 4), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 3, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Tanh())


def decoder() -> nn.Module:
    """Small pictures to large ones, in three ways."""
    layers = [nn.ConvTranspose2d(6, 12, 4, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Upsample(scale_factor=2)]
    layers += [nn.Conv2d(12, 12, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.ConvTranspose2d(3, 2, 3, (3, 1), 1)]
    return nn.Sequential(*layers, nn.Sigmoid())


class Bordered(nn.Module):
    """Single pixels, looked up or recurrent steps, and states, all with the zeros around them that a window reads."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.batch_first = nn.Embedding(50, 6), batch_first
        self.first, self.second = nn.Conv1d(6, 7, 3, padding=1), nn.Conv1d(5, 4, 5, padding=2)
        self.lstm, self.cell = nn.LSTM(7, 5, batch_first=batch_first), nn.GRUCell(5, 5)
        self.grow, self.around = nn.ConvTranspose2d(5, 3, 3), nn.Conv2d(5, 3, 3, padding=2)
        self.head = nn.Linear(3 + 3 + 4 + 5, 4)

    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.turned(self.embedding(tokens))
        x = torch.relu(self.first(x) + self.first(x))
        y, (h, c) = self.lstm(x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1))
        y = self.second(self.turned(y))
        state = h.squeeze(0)
        again = self.cell(state, c.squeeze(0))
        pixel = F.softmax(torch.tanh(again) + state, 1)[:, :, None, None]
        grown, around = self.grow(pixel), self.around(state[:, :, None, None] * 2)
        parts = [grown.mean((2, 3)), around.mean((2, 3)), y.amax(2), self.cell(again, pixel.flatten(1))]
        return self.head(torch.cat(parts, 1))  # type: ignore[no-any-return]


class Last(nn.Module):
    """The last step of the outputs, and the last state of both layers."""

    def __init__(self, kind: Callable[..., nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 10, 2, batch_first=batch_first), nn.Linear(30, 5)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x)
        h = state[0] if isinstance(state, tuple) else state
        parts = [y[:, -1] if self.batch_first else y[-1], h[0], h[-1]]
        return F.softmax(self.head(torch.cat(parts, 1)), -1)


def pictures(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


ALL_LANES = (1, 2, 4, 8, 16, 32)
STEP_LANES = (1, 16, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], tuple[int, ...]]] = {
    "resnet": (ResNet, pictures(3, 32, 32), ALL_LANES),
    "resnet, odd size": (ResNet, pictures(3, 13, 19), ALL_LANES),
    "resnet of groups": (lambda: ResNet(partial(nn.GroupNorm, 2)), pictures(3, 14, 17), ALL_LANES),
    "resnet of instances": (lambda: ResNet(nn.InstanceNorm2d), pictures(3, 16, 32), ALL_LANES),
    "convnext": (convnext, pictures(3, 14, 17), ALL_LANES),
    "densenet": (DenseNet, pictures(3, 12, 10), ALL_LANES),
    "vgg": (vgg, pictures(3, 16, 18), ALL_LANES),
    "lenet": (lenet, pictures(1, 28, 28), ALL_LANES),
    "mobile": (mobile, pictures(4, 17, 23), ALL_LANES),
    "flattened": (Flattened, pictures(2, 5, 6), ALL_LANES),
    "mlp": (mlp, pictures(50), ALL_LANES),
    "dense mlp": (DenseMlp, pictures(20), ALL_LANES),
    "lstm": (lambda: LanguageModel(False, False), lambda b: torch.randint(0, 50, (11, b)), STEP_LANES),
    "lstm, flat": (lambda: LanguageModel(False, True), lambda b: torch.randint(0, 50, (11, b)), STEP_LANES),
    "lstm, batch first": (
        lambda: LanguageModel(True, False),
        lambda b: torch.randint(0, 50, (b, 11)),
        STEP_LANES,
    ),
    "gru": (lambda: Gru(True), pictures(37, 9), STEP_LANES),
    "gru without bias": (lambda: Gru(False), pictures(4, 9), STEP_LANES),
    "gated": (Gated, pictures(3, 11, 14), ALL_LANES),
    "cells": (Cells, pictures(14), STEP_LANES),
    "last of an lstm": (lambda: Last(nn.LSTM, False), lambda b: torch.randn(9, b, 6), STEP_LANES),
    "borders": (lambda: Bordered(True), lambda b: torch.randint(0, 50, (b, 11)), STEP_LANES),
    "borders, time first": (lambda: Bordered(False), lambda b: torch.randint(0, 50, (11, b)), STEP_LANES),
    "generator": (generator, pictures(6), ALL_LANES),
    "last of a plain one": (lambda: Last(nn.RNN, True), pictures(9, 6), STEP_LANES),
    "plain cells": (PlainCells, pictures(14), STEP_LANES),
    "waves": (waves, pictures(2, 61), ALL_LANES),
    "vision transformer": (lambda: VisionTransformer(5, 20, 4, 24, 1, 2), pictures(3, 20, 20), ALL_LANES),
    "encoder": (lambda: SentenceClassifier(3, 24, 1, 4), lambda b: torch.randint(0, 9, (b, 37)), ALL_LANES),
    "decoder": (decoder, pictures(6, 5, 4), ALL_LANES),
    "last of a gru": (lambda: Last(nn.GRU, True), pictures(9, 6), STEP_LANES),
}


def make_sparse(model: nn.Module, sparsity: float = 0.8) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.where(torch.rand_like(p) < sparsity, 0, p))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm):
                module.weight.normal_()
                module.bias.normal_()
    return model.eval()


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def kernel_choices(graph: Network, lanes: int) -> list[tuple[tuple[int, Kernel], ...]]:
    """The untimed choice, and every kernel for all operations that it can run."""
    possible = choices(graph, lanes)
    found: list[tuple[tuple[int, Kernel], ...]] = [()]
    for kernel in KERNELS:
        given = tuple((number, kernel) for number, kernels in possible.items() if kernel in kernels[1:])
        found += [given] if given else []
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_network(case: tuple[Any, ...]) -> None:
    make, draw, lane_choices = case
    torch.manual_seed(0)
    model = make_sparse(make())
    graph = capture(model, (draw(2),))
    for variant in ("portable", None):
        for lanes in lane_choices:
            for kernels in kernel_choices(graph, lanes):
                native = NativeModel(graph, load_native(variant), Setting(lanes, 1, kernels))
                for batch in (1, 20) if kernels else (1, 3, 20, 33):
                    x = draw(batch)
                    assert_near(native(x), model(x))  # type: ignore[arg-type]


class Stateful(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], both: bool) -> None:
        super().__init__()
        self.rnn = kind(7, 12, 2, bidirectional=both)
        self.head = nn.Linear(24 if both else 12, 5)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.head(y), state


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("lanes", STEP_LANES)
@torch.no_grad()
def test_state_goes_in_and_comes_out(kind: Any, both: bool, lanes: int) -> None:
    torch.manual_seed(0)
    model = make_sparse(Stateful(kind, both), 0.6)

    def draw(batch: int) -> Any:
        states = [torch.randn(4 if both else 2, batch, 12) for _ in range(2)]
        return tuple(states) if kind is nn.LSTM else states[0]

    fresh = compile_plan(model, torch.randn(9, 3, 7), lanes=lanes)
    going_on = compile_plan(model, (torch.randn(9, 3, 7), draw(3)), lanes=lanes)
    for batch in (1, 5, 20):
        x, state = torch.randn(9, batch, 7), draw(batch)
        for ours, theirs in ((fresh(x), model(x)), (going_on(x, state), model(x, state))):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # compares the nesting, too


def test_an_example_of_batch_one_is_enough() -> None:
    torch.manual_seed(0)
    model = make_sparse(vgg())
    native = compile_plan(model, torch.randn(1, 3, 16, 18))
    x = torch.randn(65, 3, 16, 18)
    with torch.no_grad():
        assert_near(native(x), model(x))  # type: ignore[arg-type]


def test_everything_that_can_be_folded_is_folded() -> None:
    torch.manual_seed(0)
    resnet = capture(make_sparse(ResNet()), (torch.randn(1, 3, 32, 32),))
    assert not any(isinstance(operation, Affine) for operation in resnet.operations)
    assert sum(isinstance(operation, Product) for operation in resnet.operations) == 1 + 8 + 2 + 1
    densenet = compile_plan(make_sparse(DenseNet()), torch.randn(1, 3, 12, 12))
    kinds = {line.name: line.kernel for line in densenet.plan(1).lines if line.kind == "concatenation"}
    assert set(kinds.values()) == {"in place"}
    assert sum(isinstance(operation, Concat) for operation in densenet.graph.operations) == len(kinds) == 3


def test_additions_and_relu_are_folded_into_the_normalisation_before() -> None:
    graph = capture(make_sparse(ResNet(partial(nn.GroupNorm, 2))), (torch.randn(1, 3, 32, 32),))
    assert not any(isinstance(operation, Affine) for operation in graph.operations)
    assert sum(isinstance(operation, Normalise) for operation in graph.operations) == 9


def test_values_take_turns_in_the_arena() -> None:
    """Three values of eight large planes, half of that again for each stage after; what was fused away needs no
    place."""
    torch.manual_seed(0)
    plan = compile_plan(make_sparse(ResNet()), torch.randn(1, 3, 32, 32)).plan(16)
    assert 3 * 8 * 32 * 32 * 16 < plan.arena < 2 * 3 * 8 * 34 * 33 * 16


def test_plan_counts_connections_and_work() -> None:
    torch.manual_seed(0)
    model = make_sparse(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 36, 4)))
    lines = {line.name: line for line in compile_plan(model, torch.randn(1, 3, 6, 6)).plan(1).lines}
    for name, pixels in (("0", 36), ("2", 1)):
        weight = model.get_parameter(f"{name}.weight")
        assert lines[name].weights == weight.numel()
        assert lines[name].nonzeros == int(torch.count_nonzero(weight))
        assert lines[name].multiplications == lines[name].nonzeros * pixels


def test_calls_from_many_threads_do_not_mix() -> None:
    torch.manual_seed(0)
    model = make_sparse(ResNet())
    native = compile_plan(model, torch.randn(1, 3, 32, 32))
    inputs = [torch.randn(1 + i % 3, 3, 32, 32) for i in range(24)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        for out, wanted in zip(pool.map(native, inputs), expected, strict=True):
            assert_near(out, wanted)


def test_threads_share_a_batch() -> None:
    torch.manual_seed(0)
    model = make_sparse(lenet())
    graph = capture(model, (torch.randn(1, 1, 28, 28),))
    x = torch.randn(37, 1, 28, 28)
    alone = NativeModel(graph, load_native(), Setting(8))(x)
    together = NativeModel(graph, load_native(), Setting(8, threads=3))(x)
    assert isinstance(alone, Tensor)
    assert isinstance(together, Tensor)
    assert torch.equal(alone, together)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_threads_are_started_anew_in_a_forked_process() -> None:
    """A data loader's workers, for instance: the parent's threads do not come along."""
    torch.manual_seed(0)
    native = NativeModel(capture(make_sparse(mlp()), (torch.randn(1, 50),)), load_native(), Setting(16, threads=2))
    x = torch.randn(40, 50)
    expected = native(x)
    context = multiprocessing.get_context("fork")
    same = context.Value("i", 0)

    def work() -> None:
        same.value = int(torch.equal(native(x), expected))

    child = context.Process(target=work)
    child.start()
    child.join(30)
    if child.is_alive():
        child.kill()
    assert same.value == 1


def test_at_most_the_threads_asked_for_run_at_once() -> None:
    """Counted inside the native call, over calls that share the batch in every possible way."""
    torch.manual_seed(0)
    library = load_native()
    lock, running, most = threading.Lock(), [0], [0]

    def run(address: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        failed = int(library.run(address))
        with lock:
            running[0] -= 1
        return failed

    graph = capture(make_sparse(mlp()), (torch.randn(1, 50),))
    native = NativeModel(graph, replace(library, run=run), Setting(16, threads=3))
    for batch in (1, 16, 17, 33, 49, 100, 300):
        native(torch.randn(batch, 50))
        assert most[0] <= min(3, -(-batch // 16))
    assert most[0] == 3


def test_inputs_that_do_not_fit_are_refused() -> None:
    native = compile_plan(make_sparse(LanguageModel(False, False)), torch.zeros(11, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected an input of shape \(11, -1\).*got \(12, 2\)"):
        native(torch.zeros(12, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected torch.int64 on the CPU, got torch.int32"):
        native(torch.zeros(11, 2, dtype=torch.int32))
    with pytest.raises(IndexError, match="expected tokens within the embedding table"):
        native(torch.full((11, 2), 50))
    with pytest.raises(ValueError, match="expected 1 inputs, got 2"):
        native(torch.zeros(11, 2, dtype=torch.long), torch.zeros(1))
    with pytest.raises(UnsupportedError, match="recurrent layers with 4 lanes"):
        native.plan(4)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def test_a_network_without_native_form_is_left_alone() -> None:
    fast = deploy(Sine(), torch.randn(2, 3), seconds=0, remember=False)
    assert fast.explain().engine == "torch"
    assert "no native kernel for aten.sin" in str(fast.explain())
    x = torch.randn(5, 3)
    assert torch.equal(fast(x), torch.sin(x))


def test_deploy_chooses_explains_and_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = make_sparse(ResNet(), 0.95).train()
    x = torch.randn(4, 3, 32, 32)
    fast = deploy(model, x, threads=2, seconds=0.2, remember=False)
    assert model.training
    explanation = fast.explain()
    assert explanation.engine == "native"
    assert set(explanation.milliseconds) >= {"torch"}
    assert "body.0.conv1" in str(explanation)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        for p in model.parameters():
            p.zero_()
    assert_near(fast(x), expected)
