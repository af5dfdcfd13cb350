"""Old names of public attributes still work, and say what replaces them."""

from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.lab import models


def aliases() -> list[tuple[Any, str, str]]:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = gossamer.Sparsifier(
        model, optimizer, sparsity=0.5, total_steps=4, warmup="1it", sparsify="2it", stabilise="0it", min_density=0.0
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
    found = gossamer.report(model)
    health = sparsifier.health()
    return [
        (sparsifier, "connections", "nonzeros"),
        (sparsifier, "settled", "resolved_settings"),
        (found, "connections", "nonzeros"),
        (found.total, "connections", "nonzeros"),
        (health, "connections", "nonzeros"),
        (health.layers[0], "connections", "nonzeros"),
        (models.entry("lenet300"), "connections", "weights"),
    ]


def test_old_names_read_the_new_attribute_with_a_warning() -> None:
    for value, old, new in aliases():
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
            assert getattr(value, old) == getattr(value, new)
