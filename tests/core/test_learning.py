"""Mask learning has one form for CPUs and one for accelerators: in double precision they take the same steps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gossamer
from gossamer.state import State


def trained(**settings: object) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 20, dtype=torch.float64)
    y = x[:, :4].argmax(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = gossamer.Sparsifier(model, optimizer, total_steps=60, sparsity=0.8, **settings)  # type: ignore[arg-type]
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    sparsifier.finish()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [{}, {"scale": "batch"}, {"mask_momentum": 0.5}, {"pruned_grad_scale": 0.3, "mask_decay": 0.01}],
    ids=str,
)
def test_the_form_for_accelerators_takes_the_steps_of_the_one_for_cpus(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces = trained(**settings)
    monkeypatch.setattr(State, "on_cpu", False)
    for ours, theirs in zip(trained(**settings), in_pieces, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
