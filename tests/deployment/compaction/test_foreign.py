"""Random masks on architectures that nobody here wrote: outputs stay, and something goes wherever layers are known."""

from __future__ import annotations

import pytest
import torch
from foreign_models import FOREIGN, Foreign
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compaction.networks import sparsify_
from gossamer import compact

# Layers of its own make: a transposed linear layer.
UNKNOWN = ("gpt2",)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.name)
def test_outputs_stay(foreign: Foreign) -> None:
    if foreign.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = foreign.build().eval()
    sparsify_(model, 0.3, torch.Generator().manual_seed(3), features=0.3)
    # A cache of keys and values is no tensor, and cannot be part of a graph's result.
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    found = compact(model, {**foreign.inputs(), **options})
    assert (found.report.parameters_after < found.report.parameters_before) == (foreign.name not in UNKNOWN)
    inputs = {**foreign.inputs(), **options}
    with torch.no_grad():
        ours, theirs = tree_leaves(found.model(**inputs)), tree_leaves(model(**inputs))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor) and other.is_floating_point():
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()
