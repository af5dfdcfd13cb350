"""A whole run on architectures that nobody here wrote: exact sparsity, zeros everywhere, a plain model afterwards."""

import math

import pytest
import torch
from foreign_models import FOREIGN, Foreign, total
from torch.optim import AdamW

from gossamer.schedule import Phase
from gossamer.sparsifier import Sparsifier
from zeros.running import assert_zeros, differences, through_file, zeros

STEPS, SPARSITY = 12, 0.9


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.name)
def test_a_run_ends_exactly_as_sparse_as_asked(foreign: Foreign) -> None:
    if foreign.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = foreign.build().train(), foreign.inputs()
    optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    sparsifier = Sparsifier(model, optimizer, sparsity=SPARSITY, total_steps=STEPS, include=foreign.include)
    for _ in range(STEPS):
        optimizer.zero_grad()
        total(model(**inputs)).backward()
        optimizer.step()
        parameters = dict(model.named_parameters())
        assert all(not parameters[name][~mask].any() for name, mask in sparsifier.masks.items())
    assert sparsifier.phase is Phase.FINETUNE
    sparsifier.finish()
    assert_zeros(model, sparsifier)
    size = sum(weight.parameter.numel() for weight in sparsifier.weights)
    assert sum(int(mask.sum()) for mask in sparsifier.masks.values()) == size - math.floor(size * SPARSITY + 0.5)
    assert all(int(mask.sum()) >= 1 for mask in sparsifier.masks.values())  # the floor: no tensor dies
    plain = foreign.build()
    plain.load_state_dict(through_file(model.state_dict()), strict=True)
    assert not differences(zeros(plain), zeros(model))
