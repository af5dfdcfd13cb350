"""Every method on an ordinary model and optimizer: exact counts, checkpoints, refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gossamer.methods import METHODS
from gossamer.methods.attach import Attached

STEPS = 40
NAMES = [name for name in METHODS if name != "dense"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6)
    )


class Training:
    """A model, Adam or SGD, and a method."""

    def __init__(self, method: str) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        sparsity = 0.1 if METHODS[method].structured else 0.8
        self.attached = Attached(
            self.model, self.optimizer, method, sparsity=sparsity, total_steps=STEPS, steps_per_epoch=4, seed=3
        )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            images, labels = torch.randn(8, 2, 6, 6, generator=generator), torch.arange(8) % 6
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [self.model.get_parameter(name).detach() for name in ("0.weight", "4.weight")]


@pytest.mark.parametrize("method", NAMES)
def test_the_budget_is_met_exactly_and_zeros_stay(method: str) -> None:
    training = Training(method)
    training.steps(0, 31)
    zeros = [weight == 0 for weight in training.weights()]
    training.steps(31, STEPS)
    training.attached.finish()
    total = sum(weight.numel() for weight in training.weights())
    removed = sum(int((weight == 0).sum()) for weight in training.weights())
    if METHODS[method].structured:
        filters = training.weights()[0].flatten(1)
        empty = (filters == 0).all(1)
        assert removed == int(empty.sum()) * filters.shape[1] > 0
    else:
        assert removed == int(0.8 * total + 0.5)
    assert training.attached.sparsity == removed / total
    for weight, zero in zip(training.weights(), zeros, strict=True):
        assert torch.equal(weight == 0, zero)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("at", [5, 17, 30, 35])
def test_a_loaded_state_goes_on_bit_for_bit(method: str, at: int) -> None:
    whole = Training(method)
    whole.steps(0, at)
    saved = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict(), whole.attached.state_dict()])
    whole.steps(at, STEPS)
    whole.attached.finish()
    other = Training(method)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.attached.load_state_dict(saved[2])
    other.steps(at, STEPS)
    other.attached.finish()
    for ours, theirs in zip(other.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_finishing_early_cuts_and_warns() -> None:
    training = Training("dpf")
    training.steps(0, 15)
    with pytest.warns(UserWarning, match="after 15 of 40 steps, in the sparsify phase"):
        training.attached.finish()
    total = sum(weight.numel() for weight in training.weights())
    assert sum(int((weight == 0).sum()) for weight in training.weights()) == int(0.8 * total + 0.5)


def test_what_is_not_known_is_refused() -> None:
    training = Training("gradual")
    with pytest.raises(ValueError, match="without a closure"):
        training.optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="expected the state of method=gradual in format 1, got method=dpf"):
        training.attached.load_state_dict(Training("dpf").attached.state_dict())
    with pytest.raises(ValueError, match=r"share from 0 to below 1, such as 0\.95, got 1"):
        Attached(network(), training.optimizer, "dpf", sparsity=1, total_steps=4)


def test_what_a_rule_refuses_is_refused_at_once() -> None:
    """And not after the warm-up, where masks begin."""
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method, sparsity, message in (
        ("slimming", 0.01, "slimming needs a batch norm behind every convolution, got none behind 0.weight"),
        ("soft_filter", 0.9, "sparsity=0.9 cannot be met by whole filters"),
        ("dpf", 0.999, "sparsity=0.999 leaves 1 connections, but the floor keeps 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Attached(model, optimizer, method, sparsity=sparsity, total_steps=STEPS)
    Attached(model, optimizer, "dpf", sparsity=0.5, total_steps=STEPS)  # nobody has claimed the weights


def test_parameters_without_gradient_stay_as_they_are() -> None:
    """Also with a method that presses on parameters that are no connections."""
    training = Training("slimming")
    bias = training.model.get_parameter("4.bias").requires_grad_(False)
    before = bias.clone()
    training.steps(0, 30)
    assert torch.equal(bias, before)
    assert bias.grad is None
