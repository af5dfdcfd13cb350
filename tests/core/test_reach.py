"""How far a gradient takes a weight, by taking it there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.reach import reaches

Make = Callable[[Any], torch.optim.Optimizer]
PLAIN: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.5),
}
BY_SIZE: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.999, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def moved(make: Make, more: float, size: float, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where weights are after gradients of ± that size, of which one is a little larger; and the reach just before."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = make([weight])
    reach = torch.zeros(())
    for number in range(before + after):
        if number == before:
            reach = reaches(optimizer, [weight])[0].clone()
        weight.grad = torch.full_like(weight, size * (-1) ** number + (more if number == before else 0.0))
        optimizer.step()
    return weight.detach(), reach


@pytest.mark.parametrize("name", PLAIN)
def test_a_gradient_takes_a_weight_as_far_as_its_reach(name: str) -> None:
    one, reach = moved(PLAIN[name], 0.0, 1.0, 5, 300)
    other, _ = moved(PLAIN[name], 0.1, 1.0, 5, 300)
    assert reach.dim() == 0
    torch.testing.assert_close(other - one, -0.1 * reach.double().expand(3), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", BY_SIZE)
def test_the_size_of_past_gradients_shortens_the_reach(name: str) -> None:
    """Nearly: the gradient itself also changes the mean square by which the next ones are divided."""
    for size in (0.2, 5.0):
        one, reach = moved(BY_SIZE[name], 0.0, size, 200, 300)
        other, _ = moved(BY_SIZE[name], 0.01 * size, size, 200, 300)
        assert reach.shape == (3,)
        torch.testing.assert_close(other - one, -0.01 * size * reach, rtol=0.05, atol=0.0)


def test_groups_have_their_own_rates_and_share_a_number_within() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    groups: list[dict[str, Any]] = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    first, second, other, _ = reaches(optimizer, [weights[0], weights[1], weights[3], weights[2]])
    assert first is second
    assert float(first) == pytest.approx(0.2)
    assert float(other) == pytest.approx(1.0)
