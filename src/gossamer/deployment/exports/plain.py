"""Formats without any use of zeros: torch.export and plain safetensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.exports.checks import batches, difference, drawn, dynamic, inputs_of, unique, zeros
from gossamer.deployment.exports.record import Exported
from gossamer.deployment.graph import quiet_export, trace
from gossamer.io.container import writable


def to_torch(
    model: nn.Module, example_input: Tensor | Sequence[Any], path: str | Path, *, batch_axis: int | None = 0
) -> Exported:
    """Write a file of ``torch.export`` (usually ``.pt2``), read it back and run it on random inputs."""
    inputs, target = inputs_of(example_input), writable(path)
    frozen = copy.deepcopy(model).eval()
    program = trace(frozen, inputs, dynamic_shapes=dynamic(inputs, batch_axis)).program
    with quiet_export():
        torch.export.save(program, target)
        again = torch.export.load(target)
    kept = zeros(unique(frozen.state_dict()))
    found = zeros(unique(again.state_dict))
    if found < kept:
        raise RuntimeError(f"expected {kept} zeros in {target}, got {found}: the exporter changed the weights")
    worst, run = 0.0, again.module()
    for batch in batches(inputs, batch_axis):
        random = drawn(inputs, batch_axis, batch)
        with torch.no_grad():
            worst = max(worst, difference(target, tree_leaves(run(*random)), frozen(*random)))
    return Exported(target, target.stat().st_size, kept, worst, f"torch.export differs by {worst:.1e}")


def to_dense(model: nn.Module | Mapping[str, Tensor], path: str | Path) -> Exported:
    """Write plain safetensors with every name of the state dict; tied weights are written twice."""
    given = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    state = {name: tensor.detach().cpu().resolve_conj().resolve_neg() for name, tensor in given.items()}
    target = writable(path)
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, target)
    again = load_file(target)
    for name, tensor in state.items():
        if again[name].dtype != tensor.dtype or not torch.equal(_bits(again[name]), _bits(tensor)):
            raise RuntimeError(f"expected {name} back from {target} as it was written, got something else")
    return Exported(target, target.stat().st_size, zeros(unique(given)), 0.0, "read back, bitwise equal")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
