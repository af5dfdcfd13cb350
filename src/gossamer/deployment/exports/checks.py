"""Checks that the exporters share: installed packages, inputs, zeros and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

TOLERANCE = 1e-4  # relative to the largest output: other engines sum in another order


def require(*packages: str, install: str | None = None) -> None:
    """Raise an error that names all missing packages. ``install`` is what pip installs, if it has another name."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        wanted = install or " ".join(missing)
        raise ImportError(f"expected {' and '.join(packages)}, got no {' and no '.join(missing)}: pip install {wanted}")


def single_line(error: BaseException) -> str:
    """The cause of an exporter's error as one short line."""
    cause = error.__cause__ or error
    return " ".join((str(cause) or repr(cause)).split())[:200]


def inputs_of(example: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError("expected a tensor or a sequence of tensors as example input, got something else")
    return inputs


def dynamic(inputs: tuple[Any, ...], axis: int | None) -> tuple[Any, ...] | None:
    if axis is None:
        return None
    batch = torch.export.Dim("batch", min=1)
    return tuple({axis: batch} if isinstance(x, Tensor) else tuple({axis: batch} for _ in x) for x in inputs)


def batches(inputs: tuple[Any, ...], axis: int | None) -> list[int]:
    size = tree_leaves(inputs)[0].shape[axis or 0]
    return [size] if axis is None else [size, size + 3]


def drawn(inputs: tuple[Any, ...], axis: int | None, batch: int) -> tuple[Any, ...]:
    """Random inputs like the example, with a given batch size."""

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(draw(each) for each in x)
        shape = [batch if i == axis else size for i, size in enumerate(x.shape)]
        if x.is_floating_point():
            return torch.randn(shape, dtype=x.dtype)
        return torch.randint(0, int(x.max()) + 1, shape, dtype=x.dtype)

    return tuple(draw(x) for x in inputs)


def difference(path: Path, outputs: Sequence[Tensor], expected: Any) -> float:
    leaves = [leaf for leaf in tree_leaves(expected) if isinstance(leaf, Tensor)]
    if [tuple(out.shape) for out in outputs] != [tuple(leaf.shape) for leaf in leaves]:
        raise RuntimeError(f"expected outputs of {path} shaped like the model's, got other shapes")
    worst = 0.0
    for out, leaf in zip(outputs, leaves, strict=True):
        if leaf.numel() == 0:
            continue
        found = float((out - leaf).abs().max()) / max(float(leaf.abs().max()), 1e-30)
        if not found <= TOLERANCE:  # nor NaN
            raise RuntimeError(f"expected outputs of {path} within {TOLERANCE} of the model's, got {found:.1e}")
        worst = max(worst, found)
    return worst


def unique(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a state dict, with tied ones once."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return list({(each.untyped_storage().data_ptr(), each.storage_offset()): each for each in tensors}.values())


def zeros(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() - int(torch.count_nonzero(each)) for each in tensors if each.ndim > 1)
