"""Any mask on any kind of network: the outputs stay, the model gets no larger."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from compaction.networks import (
    Attentive,
    Concatenated,
    Residual,
    ResNeXt,
    convolutions,
    mlp,
    mobile,
    prepare,
    sparsify_,
    tagger,
)
from gossamer import compact
from gossamer.deployment.compaction.compact import shrink
from gossamer.deployment.compaction.lifting import to_layers
from gossamer.deployment.compaction.rows import merge_zero_rows
from gossamer.deployment.compaction.rules import rules_of
from gossamer.deployment.graph import trace_any_size

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "mobile": mobile,
    "resnext": ResNeXt,
    "residual": Residual,
    "concatenated": Concatenated,
    "lstm": partial(tagger, nn.LSTM),
    "gru": partial(tagger, nn.GRU, 1, False),
    "rnn": partial(tagger, nn.RNN, 2, False),
    "attentive": Attentive,
}


def inputs(name: str, batch: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if name in ("lstm", "gru", "rnn", "attentive"):
        return torch.randint(0, 20, (batch, 5), generator=generator)
    size = (6,) if name == "mlp" else (3, 8, 8)
    return torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


@cache
def layers(name: str) -> fx.GraphModule:
    """Traced once: a graph does not depend on masks, except where attention has dead heads."""
    generator = torch.Generator().manual_seed(0)
    model, x = NETWORKS[name]().eval(), inputs(name, 2, generator, torch.float32)
    return to_layers(trace_any_size(model, x), model, x)


any_mask = given(
    seed=st.integers(0, 2**32 - 1),
    sparsity=st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.995, 1.0]),
    features=st.sampled_from([0.0, 0.3, 0.7]),
)


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=25, deadline=None, derandomize=True)
@any_mask
def test_what_is_taken_out_does_not_matter(name: str, seed: int, sparsity: float, features: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    masked = copy.deepcopy(layers(name))
    prepare(masked, generator)
    sparsify_(masked, sparsity, generator, features=features)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        typed = copy.deepcopy(masked).to(dtype)
        smaller = copy.deepcopy(typed)
        shrink(smaller, inputs(name, 2, generator, dtype))
        merge_zero_rows(smaller, rules_of(smaller))
        x = inputs(name, 5, generator, dtype)
        with torch.no_grad():
            assert error(smaller(x), typed(x)) <= tolerance
        before = {key: each.shape for key, each in smaller.named_parameters()}
        shrink(smaller, x)
        assert {key: each.shape for key, each in smaller.named_parameters()} == before


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=2, deadline=None, derandomize=True)
@any_mask
def test_outputs_stay(name: str, seed: int, sparsity: float, features: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = prepare(NETWORKS[name](), generator).double()
    sparsify_(model, sparsity, generator, features=features)
    before = copy.deepcopy(model.state_dict())
    found = compact(model, inputs(name, 2, generator, torch.float64))
    x = inputs(name, 5, generator, torch.float64)
    with torch.no_grad():
        assert error(found.model(x), model(x)) <= 1e-12
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert sum(each.numel() for each in found.model.parameters()) == found.report.parameters_after
    again = compact(found.model, x)
    assert again.report.parameters_after == found.report.parameters_after


@pytest.mark.parametrize("name", NETWORKS)
def test_something_goes(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model = prepare(NETWORKS[name](), generator)
    sparsify_(model, 0.5, generator, features=0.4)
    report = compact(model, inputs(name, 2, generator, torch.float32)).report
    assert report.parameters_after < 0.85 * report.parameters_before
