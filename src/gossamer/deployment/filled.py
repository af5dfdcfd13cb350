"""The same network with fewer zeros, to compare a sparse one with."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gossamer.prunable import select


def filled(model: nn.Module, density: float) -> nn.Module:
    """A copy with at least this density in every weight tensor: zeros at random positions become nonzero."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in select(copied):
            tensor = weight.parameter
            kept = tensor != 0
            wanted = int(density * tensor.numel()) - int(kept.sum())
            if wanted <= 0:
                continue
            order = torch.rand(tensor.shape, generator=generator).masked_fill_(kept, 2.0).flatten()
            place = order.argsort()[:wanted]
            spread = float(tensor[kept].std()) if int(kept.sum()) > 1 else 0.01
            tensor.view(-1)[place] = spread * torch.randn(wanted, generator=generator) + 1e-6
    return copied
