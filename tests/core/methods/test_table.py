"""Every method in every kind of training loop. Each row of the table is a method, each test a column.

DDP and FSDP2 are in tests/core/distributed, graph capture on a GPU in tests/core/test_cuda.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer.methods import METHODS, Method, Options

STEPS = 40
PHASES = {"warmup": "0.25run", "sparsify": "0.35run", "stabilise": "0.15run"}  # the same for every method
NAMES = [name for name in METHODS if name != "dense"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-3, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
}
Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6)
    ).double()


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 6, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 6


class Training:
    """A model, an optimizer, and a method."""

    def __init__(self, method: str, optimizer: str = "sgd", **settings: Any) -> None:
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        sparsity = 0.1 if METHODS[method].structured else 0.8
        self.sparsifier = gossamer.Sparsifier(
            self.model, self.optimizer, method=method, sparsity=sparsity, total_steps=STEPS, steps_per_epoch=4, seed=3,
            **{**PHASES, **settings},
        )  # fmt: skip

    def loss(self, step: int) -> Tensor:
        images, labels = batch(step)
        return nn.functional.cross_entropy(self.model(images), labels)

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, first: int = 0, last: int = STEPS) -> "Training":
        for number in range(first, last):
            self.step(number)
        return self

    def finish(self) -> "Training":
        self.sparsifier.finish()
        return self

    def weights(self) -> list[Tensor]:
        return [self.model.get_parameter(name).detach() for name in ("0.weight", "4.weight")]


def assert_same(one: Training, other: Training) -> None:
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", NAMES)
def test_the_budget_is_met_exactly_and_zeros_stay(method: str, optimizer: str) -> None:
    training = Training(method, optimizer).steps(0, 31)
    zeros = [weight == 0 for weight in training.weights()]
    training.steps(31, STEPS).finish()
    total = sum(weight.numel() for weight in training.weights())
    pruned = sum(int((weight == 0).sum()) for weight in training.weights())
    if METHODS[method].structured:
        filters = training.weights()[0].flatten(1)
        empty = (filters == 0).all(1)
        assert pruned == int(empty.sum()) * filters.shape[1] > 0
    else:
        assert pruned == int(0.8 * total + 0.5)
    assert training.sparsifier.sparsity == pytest.approx(pruned / total, abs=1e-12)
    for weight, zero in zip(training.weights(), zeros, strict=True):
        assert torch.equal(weight == 0, zero)


@pytest.mark.parametrize("method", NAMES)
def test_a_closure_takes_the_same_steps(method: str) -> None:
    plain, closed = Training(method).steps().finish(), Training(method)

    def closure(number: int) -> Tensor:
        closed.optimizer.zero_grad()
        loss = closed.loss(number)
        loss.backward()
        return loss

    for number in range(STEPS):
        loss = closed.optimizer.step(lambda number=number: closure(number))  # type: ignore[misc]
        assert loss is not None
    assert_same(closed.finish(), plain)


@pytest.mark.parametrize("method", NAMES)
def test_accumulated_gradients_are_those_of_one_backward_pass(method: str) -> None:
    whole, parts = Training(method), Training(method)
    for number in range(STEPS):
        loss = whole.loss(number) + whole.loss(1000 + number)
        loss.backward()
        for part in (number, 1000 + number):
            parts.loss(part).backward()
        for each in (whole, parts):
            each.optimizer.step()
            each.optimizer.zero_grad()
    for ours, theirs in zip(whole.finish().weights(), parts.finish().weights(), strict=True):
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", NAMES)
def test_steps_that_a_gradient_scaler_skips_are_no_steps(method: str) -> None:
    """A scaler halves its scale at each of them: by powers of two, so that nothing else changes."""
    plain, scaled = Training(method).steps().finish(), Training(method)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    for number in range(STEPS):
        for bad in (True, False) if number in (0, 12, 20, 38) else (False,):
            buffers = copy.deepcopy(dict(scaled.model.named_buffers()))
            scaler.scale(scaled.loss(number)).backward()
            if bad:
                scaled.model.get_parameter("4.weight").grad[0] = torch.inf  # type: ignore[index]
                for name, buffer in scaled.model.named_buffers():
                    buffer.copy_(buffers[name])
            scaler.unscale_(scaled.optimizer)
            scaler.step(scaled.optimizer)
            scaler.update()
            scaled.optimizer.zero_grad()
    assert_same(scaled.finish(), plain)


@pytest.mark.parametrize("method", NAMES)
def test_gradients_that_a_fused_optimizer_unscales_itself(method: str) -> None:
    """As a GradScaler leaves them to it: multiplied by a power of two, with `grad_scale` and `found_inf` set."""
    plain, scaled = Training(method, "fused").steps().finish(), Training(method, "fused")
    scale = torch.tensor(1024.0)
    scaled.optimizer.grad_scale, scaled.optimizer.found_inf = scale, torch.zeros(())  # type: ignore[attr-defined]
    for number in range(STEPS):
        (scaled.loss(number) * scale).backward()
        scaled.optimizer.step()
        scaled.optimizer.zero_grad()
    assert_same(scaled.finish(), plain)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("at", [0, 5, 10, 17, 24, 30, 35])
def test_a_loaded_state_goes_on_bit_for_bit(method: str, at: int) -> None:
    whole = Training(method).steps(0, at)
    saved = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict(), whole.sparsifier.state_dict()])
    whole.steps(at, STEPS).finish()
    other = Training(method)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.sparsifier.load_state_dict(saved[2])
    assert_same(other.steps(at, STEPS).finish(), whole)


@pytest.mark.parametrize("method", NAMES)
def test_two_optimizers_that_step_in_turn(method: str) -> None:
    if METHODS[method].penalizes:
        pytest.skip("its penalty belongs to the parameters of one optimizer")
    one, several = Training(method).steps().finish(), Training(method)
    several.sparsifier._remove_hooks()
    layers = [several.model[0], several.model[1], several.model[4]]
    optimizers = [OPTIMIZERS["sgd"](layer.parameters()) for layer in layers]  # the second has nothing to prune
    several.sparsifier = gossamer.Sparsifier(
        several.model, optimizers, method=method, sparsity=0.1 if METHODS[method].structured else 0.8,
        total_steps=STEPS, steps_per_epoch=4, seed=3, **PHASES,
    )  # fmt: skip
    for number in range(STEPS):
        several.loss(number).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(several.finish(), one)


def test_finishing_early_cuts_and_warns() -> None:
    training = Training("dpf").steps(0, 15)
    with pytest.warns(UserWarning, match="after 15 of 40 steps, in the sparsify phase"):
        training.finish()
    total = sum(weight.numel() for weight in training.weights())
    assert sum(int((weight == 0).sum()) for weight in training.weights()) == int(0.8 * total + 0.5)


def test_what_is_not_known_is_refused() -> None:
    training = Training("gradual")
    with pytest.raises(ValueError, match="expected the state of method='gradual', got 'dpf'"):
        training.sparsifier.load_state_dict(Training("dpf").sparsifier.state_dict())
    for asked, message in (
        ({"sparsity": 1}, r"at least 0 and below 1, such as 0\.95, got 1"),
        ({"decay": 0.1}, "method='dpf' supports only sparsity="),
        ({"sparsity": 0.5, "preset": "paper"}, "preset='paper' is for method='scl', got method='dpf'"),
        ({"sparsity": 0.5, "mask_lr": 0.1}, "unknown setting 'mask_lr' of method='dpf'"),
    ):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises((ValueError, TypeError), match=message):
            gossamer.Sparsifier(model, optimizer, method="dpf", total_steps=4, **asked)  # type: ignore[arg-type]


def test_what_a_method_refuses_is_refused_at_once() -> None:
    """And not after the warm-up, where masks begin."""
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method, sparsity, message in (
        ("slimming", 0.01, "slimming needs a batch norm after every convolution, got none after 0.weight"),
        ("soft_filter", 0.9, "sparsity=0.9 cannot be met by whole filters"),
        ("l1_filter", 0.9, "sparsity=0.9 cannot be met by whole filters"),
        ("dpf", 0.999, "sparsity=0.999 keeps 1 of .* weights, but min_density requires 2"),
    ):
        with pytest.raises(ValueError, match=message):
            gossamer.Sparsifier(model, optimizer, method=method, sparsity=sparsity, total_steps=STEPS)
    gossamer.Sparsifier(model, optimizer, method="dpf", sparsity=0.5, total_steps=STEPS)  # nothing has claimed them


def test_parameters_without_gradient_stay_as_they_are() -> None:
    """Also with a method that has a penalty on parameters that are not prunable."""
    training = Training("slimming")
    bias = training.model.get_parameter("4.bias").requires_grad_(False)
    before = bias.clone()
    training.steps(0, 30)
    assert torch.equal(bias, before)
    assert bias.grad is None


def test_a_class_is_a_method_too() -> None:
    class Mine(METHODS["dpf"]):  # type: ignore[misc, name-defined]
        name = "mine"

    assert issubclass(Mine, Method)
    assert Mine.options is Options
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = gossamer.Sparsifier(model, optimizer, method=Mine, sparsity=0.8, total_steps=4)
    for number in range(4):
        nn.functional.cross_entropy(model(batch(number)[0]), batch(number)[1]).backward()
        optimizer.step()
    sparsifier.finish()
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)
