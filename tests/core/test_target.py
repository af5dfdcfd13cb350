"""What a FLOPs budget and a fixed decay leave, counted from outside."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer.target import make_target


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(24, 7),
    )


INPUTS = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
# Output pixels of each layer: what one connection costs, in multiply-adds.
COSTS = {"0.weight": 36, "2.weight": 4, "5.weight": 1}


def train(model: nn.Module, steps: int = 20, **options: Any) -> dict[str, Tensor]:
    """Zeros of the weights after a short run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sparsifier = gossamer.Sparsifier(model, optimizer, total_steps=steps, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    sparsifier.finish()
    return {name: model.get_parameter(name) == 0 for name in COSTS}


@given(st.floats(0.03, 1.0), st.integers(0, 99), st.sampled_from([0.0, 0.001, 0.02]))
@settings(max_examples=15, deadline=None)
def test_a_share_of_the_flops_is_met_to_one_connection(flops: float, seed: int, floor: float) -> None:
    zeros = train(network(seed), flops=flops, min_density=floor, example_input=INPUTS)
    total = sum(zeros[name].numel() * cost for name, cost in COSTS.items())
    left = sum(int((~zeros[name]).sum()) * cost for name, cost in COSTS.items())
    assert 0 <= flops * total - left < max(COSTS.values()) + 1
    for zero in zeros.values():
        assert int((~zero).sum()) >= floor * zero.numel()


def test_what_costs_nothing_is_kept() -> None:
    """A look-up multiplies nothing, so a FLOPs budget has no reason to remove any of it."""
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 20, (3, 4))
    sparsifier = gossamer.Sparsifier(model, optimizer, flops=0.3, total_steps=20, example_input=tokens)
    for _ in range(20):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
    sparsifier.finish()
    table, linear = gossamer.report(model).rows
    assert (table.nonzeros, linear.nonzeros) == (120, 9)


def test_a_decay_of_nothing_removes_only_what_the_loss_does() -> None:
    zeros = train(network(0), decay=0.0, start="constant", start_value=100.0)
    assert not any(bool(zero.any()) for zero in zeros.values())


def test_all_problems_of_a_request_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"scale: expected one of none, .*; alpha: expected a number above 0, got -2"):
        train(network(0), sparsity=0.9, scale="both", alpha=-2)
    with pytest.raises(ValueError, match=r"such as 0\.95, got nan"):
        train(network(0), sparsity=float("nan"))


@pytest.mark.parametrize("request_", [{"sparsity": "0.9"}, {"flops": True}, {"decay": [0.03]}], ids=str)
def test_a_request_that_is_no_number_is_refused(request_: dict[str, object]) -> None:
    name, value = next(iter(request_.items()))
    wanted = {"sparsity": None, "flops": None, "decay": None, **request_}
    with pytest.raises(
        TypeError, match=rf"expected {name} to be a number, such as 0\.\d+, got {re.escape(repr(value))}"
    ):
        make_target([10], positions=[1], floors=[0], **wanted)  # type: ignore[arg-type]


def test_density_of_a_target() -> None:
    def target(**request: float) -> float | None:
        asked: dict[str, Any] = {"sparsity": None, "flops": None, "decay": None, **request}
        return make_target([30, 10], positions=[2, 4], floors=[0, 0], **asked).density

    assert target(sparsity=0.75) == 0.25
    assert target(flops=0.5) == 0.5
    assert target(decay=0.1) is None


def test_a_flops_budget_of_weights_that_multiply_nothing_is_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no selected weight takes part in a multiplication of this input"):
        gossamer.Sparsifier(
            model, optimizer, flops=0.5, total_steps=4, include="unused", example_input=torch.zeros(1, 3)
        )
