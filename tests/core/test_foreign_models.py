"""Selection and report on architectures that nobody here wrote."""

import numpy as np
import pytest
import torch
from foreign_models import FOREIGN, Foreign, total
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gossamer.prunable import select
from gossamer.report import report
from gossamer.verify import verify

# Weights that are used as look-up tables only multiply nothing.
TABLES = ("wpe", "embeddings", "embed_positions", "embed_tokens", "relative_attention_bias")
# The counter of torch does not know grouped products: two layers, twelve tokens, two experts for each token.
UNCOUNTED = {"mixtral": 2 * 2 * 12 * 2 * (16 * 2 * 32 + 32 * 16)}


@pytest.fixture(params=FOREIGN, ids=lambda foreign: foreign.name)
def foreign(request: pytest.FixtureRequest) -> Foreign:
    chosen: Foreign = request.param
    if chosen.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    return chosen


def test_selected_tensors_are_trained_matrices(foreign: Foreign) -> None:
    model = foreign.build().train()
    weights = select(model, include=foreign.include)
    chosen = {weight.name for weight in weights}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "norm" in name.lower() or name.endswith("bias"):
            assert name not in chosen
    # Whatever has two or more dimensions and was left out is no matrix of connections of a known layer.
    left_out = {name for name, each in model.named_parameters() if each.ndim > 1} - chosen
    known = (
        "relative_position_bias_table",
        "cls_token",
        "position_embeddings",
        "A_log",
        "original0",
        "masked_spec_embed",
    )
    assert all(name.endswith(known) or not model.get_parameter(name).requires_grad for name in left_out), left_out
    total(model(**foreign.inputs())).backward()
    without = [weight.name for weight in weights if weight.parameter.grad is None]
    assert without == []


def test_flops_agree_with_the_counter_of_torch(foreign: Foreign) -> None:
    """Weights multiply in mm, addmm and convolution; attention between activations does in bmm."""
    model, inputs = foreign.build().eval(), foreign.inputs()
    result = report(model, inputs, include=foreign.include)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as reference:
            model(**inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    counted = reference.get_flop_counts()["Global"]
    by_weights = [
        value
        for operation, value in counted.items()
        if not any(part in str(operation) for part in ("bmm", "scaled_dot_product"))
    ]
    samples = 2
    assert samples * (result.total.flops_dense or 0) == sum(by_weights) + UNCOUNTED.get(foreign.name, 0)
    idle = [row.name for row in result.rows if row.flops_dense == 0]
    assert all(any(part in name for part in TABLES) for name in idle), idle


def test_zeros_are_counted_and_verified(foreign: Foreign) -> None:
    model, inputs = foreign.build(), foreign.inputs()
    with torch.no_grad():
        for weight in select(model, include=foreign.include):
            weight.parameter.view(-1)[::2] = 0
    result = report(model, inputs, include=foreign.include)
    by_name = {row.name: np.count_nonzero(model.get_parameter(row.name).detach().numpy()) for row in result.rows}
    assert {row.name: row.nonzeros for row in result.rows} == by_name
    assert 0.5 <= result.sparsity < 0.55 or foreign.name == "whisper"  # which has frozen, dense positions
    same = foreign.build()
    same.load_state_dict(model.state_dict())
    verification = verify(model, same, inputs, include=foreign.include)
    assert verification, str(verification)
    first = next(iter(select(same, include=foreign.include)))
    nn.init.ones_(first.parameter)
    assert f"{first.name}: " in str(verify(model, same, include=foreign.include))
