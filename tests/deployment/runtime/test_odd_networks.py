"""Networks that look like something the kernels know and are something else: torch's outputs, or left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import gossamer
from gossamer.deployment.runtime import (
    NoCompilerError,
    UnsupportedError,
    compile_plan,
    deployed,
    load_native,
    native_model,
)

try:
    load_native()
except NoCompilerError as error:
    pytest.skip(str(error), allow_module_level=True)


class Written(nn.Module):
    """A network whose forward pass is a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def in_place_through_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.flatten(1).relu_()
    return y * 2


def in_place_on_a_part(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    first, _ = y.chunk(2, 1)
    first.add_(1)
    return y * 2


def in_place_on_pixels(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, :, ::2] += 1
    return y * 2


def in_place_behind_dropout(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    F.dropout(y, training=False).relu_()
    return y * 2


def in_place_on_a_result_of_two(m: Any, x: Tensor) -> Tensor:
    y, h = m.gru(x)
    y.relu_()
    return y[:, -1] + h[0]


PICTURE, VECTOR, SEQUENCE = (4, 6, 6), (8,), (5, 8)
PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "narrow": lambda: nn.Linear(5, 8),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
    "deep": lambda: nn.GRU(8, 4, 2, batch_first=True),
    "both": lambda: nn.GRU(8, 4, batch_first=True, bidirectional=True),
    "by_four": lambda: nn.Linear(4, 4),
    "by_three": lambda: nn.Linear(3, 3),
    "one": lambda: nn.Linear(8, 1),
    "one_plane": lambda: nn.Conv2d(4, 1, 3),
    "rows": lambda: nn.LayerNorm(6),
    "values": lambda: nn.LayerNorm([4, 6, 6]),
}
RUNS: dict[str, tuple[tuple[int, ...], Callable[[Any, Tensor], Any]]] = {
    "a tuple of one": (VECTOR, lambda m, x: (m.linear(x),)),
    "a dictionary of one": (VECTOR, lambda m, x: {"logits": m.linear(x)}),
    "a slice from before the start": (VECTOR, lambda m, x: m.narrow(x[:, -100:5])),
    "all samples": (VECTOR, lambda m, x: m.linear(x[:])),
    "adaptive maximum": (PICTURE, lambda m, x: F.adaptive_max_pool2d(m.conv(x), 2)),
    "in place behind dropout": (VECTOR, in_place_behind_dropout),
    "in place through a view": (PICTURE, in_place_through_a_view),
    "in place on a part": (PICTURE, in_place_on_a_part),
    "in place on a result of two": (SEQUENCE, in_place_on_a_result_of_two),
    "a state of one layer": (SEQUENCE, lambda m, x: m.linear(m.gru(x)[1])),
    "a state of one layer, spread": (SEQUENCE, lambda m, x: m.linear(m.gru(x)[1].view(x.shape[0], -1))),
    "steps and samples together and apart": (
        SEQUENCE,
        lambda m, x: m.linear(m.linear(x).reshape(-1, 8)).view(x.shape[0], 5, 8),
    ),
    "one number a sample": (VECTOR, lambda m, x: (m.linear(x), m.one(x).squeeze(1))),
    "one number a sample, changed and turned back": (
        VECTOR,
        lambda m, x: torch.sigmoid(m.one(x).view(-1) * 3 - 1).unsqueeze(-1) + m.one(x),
    ),
    "channels last": (PICTURE, lambda m, x: m.by_four(m.conv(x).permute(0, 2, 3, 1)) + m.by_four.bias),
    "channels last, a mean": (PICTURE, lambda m, x: m.by_four(m.conv(x).permute(0, 2, 3, 1)).mean((1, 2))),
    "one pixel, channels last": (PICTURE, lambda m, x: m.conv(x).mean((2, 3), True).permute(0, 2, 3, 1).flatten(1)),
    "channels in groups": (PICTURE, lambda m, x: m.conv(x).view(x.shape[0], 2, 2, 6, 6).tanh()),
    "one number a pixel": (PICTURE, lambda m, x: m.one_plane(x).squeeze(1).tanh()),
    "one number a step": (SEQUENCE, lambda m, x: m.one(m.gru(x)[0]).squeeze(-1)),
}
LEFT: dict[str, tuple[tuple[int, ...], Callable[[Any, Tensor], Any], str]] = {
    "first samples": (VECTOR, lambda m, x: m.linear(x)[:3], "some samples"),
    "last samples": (VECTOR, lambda m, x: m.linear(x)[-3:], "some samples"),
    "mean over features": (SEQUENCE, lambda m, x: m.linear(x).reshape(-1, 8).mean(1), r"makes \(15,\)"),
    "steps for samples": (SEQUENCE, lambda m, x: m.linear(x).view(5, -1, 8), r"a view from \(3, 5, 8\)"),
    "samples at the end": (VECTOR, lambda m, x: m.linear(x).view(1, 8, -1), "a view from"),
    "layers in one view with samples": (SEQUENCE, lambda m, x: m.both(x)[1].view(x.shape[0], -1), "a view from"),
    "linear on two layers' state": (SEQUENCE, lambda m, x: m.by_four(m.deep(x)[1]), r"makes \(2, 3, 4\)"),
    "linear over samples": (VECTOR, lambda m, x: m.by_three(m.one(x).squeeze(1)), "last dimension of a bare"),
    "one number for each sample of the example": (
        VECTOR,
        lambda m, x: m.one(x).squeeze(1) * torch.tensor([1.0, 2.0, 3.0]),
        "a tensor of shape",
    ),
    "channels last, flattened": (PICTURE, lambda m, x: m.conv(x).permute(0, 2, 3, 1).flatten(1), "in another order"),
    "rows for channels": (PICTURE, lambda m, x: m.conv(x).permute(0, 2, 1, 3), "in another order"),
    "normalised rows": (PICTURE, lambda m, x: m.rows(m.conv(x)), r"layer normalisation of a picture over \(6,\)"),
    "a factor for each value": (PICTURE, lambda m, x: m.values(m.conv(x)), "a factor or shift for each value"),
    "groups of steps": (SEQUENCE, lambda m, x: F.group_norm(m.linear(x), 5), "group_norm.default on sequence"),
    "in place on pixels": (PICTURE, in_place_on_pixels, "slice_scatter"),
    "dropout that stays on": (VECTOR, lambda m, x: F.dropout(m.linear(x)), "stays on"),
    "another precision": (PICTURE, lambda m, x: m.conv(x).mean((2, 3), dtype=torch.float64), "float64"),
    "by zero": (VECTOR, lambda m, x: m.linear(x) / 0, "float32 does not have"),
}


def network(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Written(forward, **{name: make() for name, make in PARTS.items()}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.5)
    return model


@pytest.mark.parametrize("name", RUNS)
def test_outputs_are_those_of_torch(name: str) -> None:
    shape, forward = RUNS[name]
    model = network(forward)
    native = compile_plan(model, torch.randn(3, *shape))
    for batch in (1, 3, 17):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            expected, structure = tree_flatten(model(x))
        got, found = tree_flatten(native(x))
        assert found == structure
        for have, want in zip(got, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_cannot_follow_is_left_to_torch(name: str) -> None:
    shape, forward, reason = LEFT[name]
    with pytest.raises(UnsupportedError, match=reason):
        compile_plan(network(forward), torch.randn(3, *shape))


def test_a_gate_of_fewer_dimensions_is_not_one_a_channel() -> None:
    model = Written(lambda m, x: x * m.linear(x.mean((2, 3))).view(x.shape[0], 6, 1), linear=nn.Linear(6, 6))
    with pytest.raises(UnsupportedError, match="broadcasts"):
        compile_plan(model, torch.randn(1, 6, 6, 6))


@pytest.mark.parametrize("forward", [lambda m, x: m.one(x).squeeze(0), lambda m, x: x.unsqueeze(0) * 2])
def test_what_is_right_for_a_batch_of_one_only_is_left_to_torch(forward: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"a view from|in another order"):
        compile_plan(network(forward), torch.randn(1, 8))


def test_a_branch_by_values_is_left_to_torch_without_a_page_of_the_exporter(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.export can trace, but for Written"):
        compile_plan(network(lambda m, x: m.linear(x) if x.sum() > 0 else -x), torch.randn(3, 8))
    assert capfd.readouterr().err == ""


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_inputs_of_several_batch_sizes_are_left_to_torch() -> None:
    x, y = torch.randn(3, 8), torch.randn(1, 8)
    fast = gossamer.deploy(Sum(), (x, y), seconds=0, remember=False)
    assert "a sum that broadcasts" in fast.explain().reason
    assert torch.equal(fast(x, y), x + y)


def test_an_example_without_dimensions() -> None:
    fast = gossamer.deploy(nn.ReLU(), torch.tensor(-2.0), seconds=0, remember=False)
    assert fast.explain().engine == "torch"
    assert fast(torch.tensor(-2.0)) == 0


def test_native_outputs_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(lambda m, x: m.linear(x))
    x = torch.randn(3, 8)
    right = compile_plan

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        monkeypatch.setattr(native_model.NativeModel, "__call__", lambda _, x: x * 0)
        return found

    monkeypatch.setattr(deployed, "compile_plan", wrong)
    fast = gossamer.deploy(model, x, seconds=0, remember=False)
    assert fast.explain().engine == "torch"
    assert "the native outputs differ" in fast.explain().reason
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))


def test_an_example_with_infinity_is_no_reason_to_refuse() -> None:
    x = torch.randn(3, 8)
    x[1, 2] = torch.inf
    fast = gossamer.deploy(network(lambda m, x: m.linear(x)), x, seconds=0, remember=False)
    assert "differ" not in fast.explain().reason


@pytest.mark.parametrize("given", [None, 3, torch.zeros(3, 8).numpy()])
def test_arguments_that_are_no_tensors_are_named(given: Any) -> None:
    native = compile_plan(network(lambda m, x: m.linear(x)), torch.randn(3, 8))
    native(torch.zeros(3, 8))
    with pytest.raises(TypeError, match=f"expected tensors, got a {type(given).__name__}"):
        native(given)


def test_many_batch_sizes_do_not_fill_the_memory() -> None:
    native = compile_plan(network(lambda m, x: m.linear(x)), torch.randn(3, 8))
    first = native(torch.ones(1, 8))
    for batch in range(1, 300):
        assert torch.allclose(native(torch.ones(batch, 8)), first.expand(batch, -1), atol=1e-5)
    assert len(native._ready) == len(native._alone) == native_model.KEPT
