"""Exporters of a sparse network: ONNX, torch.export and plain safetensors.

These formats are dense: they store zeros, and the usual engines multiply them, so the files are neither small
(``gossamer.save`` is) nor fast (``gossamer.deploy`` is). Nothing is lost: every zero of the model is a zero in the
file, and each function reads its file back and runs it on random inputs before it returns.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.graph import quiet_export, trace
from gossamer.io.container import writable

TOLERANCE = 1e-4  # relative to the largest output: other engines sum in another order


@dataclass(frozen=True)
class Exported:
    """The written file, and how it was checked."""

    path: Path
    file_bytes: int
    zeros: int
    """Number of zeros among the weights (tensors of two or more dimensions), in the file and in the model."""
    difference: float | None
    """Largest difference of the outputs relative to the largest output; None if nothing could run the file."""
    checked: str

    def __str__(self) -> str:
        return f"{self.path}: {self.file_bytes:,} bytes, {self.zeros:,} zeros kept; {self.checked}"


def to_onnx(
    model: nn.Module, example_input: Tensor | Sequence[Any], path: str | Path, *, batch_axis: int | None = 0
) -> Exported:
    """Write an ONNX file, and run it with onnxruntime on random inputs, if that is installed.

    Any batch size is allowed along ``batch_axis`` of every input; with None, only that of the example. The example
    should have at least two samples, because exporters may treat a size of one as a constant.
    """
    require("onnx", "onnxscript")
    inputs, target = _inputs(example_input), writable(path)
    frozen = copy.deepcopy(model).eval()
    program = trace(frozen, inputs, dynamic_shapes=_dynamic(inputs, batch_axis)).program
    try:
        with quiet_export():
            written = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        message = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(
            f"expected a model whose operations ONNX supports, but for {type(model).__name__} torch.onnx reports: "
            f"{message}. Replace that operation, or export with to_torch"
        ) from error
    cast(Any, written).save(str(target))
    zeros = _zeros(_unique(frozen.state_dict()))
    found = _onnx_zeros(target)
    if found < zeros:
        raise RuntimeError(f"expected {zeros} zeros in {target}, got {found}: the exporter changed the weights")
    try:
        import onnxruntime
    except ImportError:
        return Exported(target, _size(target), zeros, None, "not run: onnxruntime is not installed")
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    worst = 0.0
    for batch in _batches(inputs, batch_axis):
        drawn = _drawn(inputs, batch_axis, batch)
        out = session.run(None, {name: x.numpy() for name, x in zip(names, tree_leaves(drawn), strict=True)})
        with torch.no_grad():
            worst = max(worst, _difference(target, [torch.from_numpy(each) for each in out], frozen(*drawn)))
    return Exported(target, _size(target), zeros, worst, f"onnxruntime differs by {worst:.1e}")


def to_torch(
    model: nn.Module, example_input: Tensor | Sequence[Any], path: str | Path, *, batch_axis: int | None = 0
) -> Exported:
    """Write a file of ``torch.export`` (usually ``.pt2``), read it back and run it on random inputs."""
    inputs, target = _inputs(example_input), writable(path)
    frozen = copy.deepcopy(model).eval()
    program = trace(frozen, inputs, dynamic_shapes=_dynamic(inputs, batch_axis)).program
    with quiet_export():
        torch.export.save(program, target)
        again = torch.export.load(target)
    zeros = _zeros(_unique(frozen.state_dict()))
    found = _zeros(_unique(again.state_dict))
    if found < zeros:
        raise RuntimeError(f"expected {zeros} zeros in {target}, got {found}: the exporter changed the weights")
    worst, run = 0.0, again.module()
    for batch in _batches(inputs, batch_axis):
        drawn = _drawn(inputs, batch_axis, batch)
        with torch.no_grad():
            worst = max(worst, _difference(target, tree_leaves(run(*drawn)), frozen(*drawn)))
    return Exported(target, _size(target), zeros, worst, f"torch.export differs by {worst:.1e}")


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
    return Exported(target, _size(target), _zeros(_unique(given)), 0.0, "read back, bitwise equal")


def require(*packages: str) -> None:
    """Raise an error that names all missing packages."""
    missing = []
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            missing.append(package)
    if missing:
        names = " ".join(missing)
        raise ImportError(f"expected {' and '.join(packages)}, got no {' and no '.join(missing)}: pip install {names}")


def _inputs(example: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not inputs or not all(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError("expected a tensor or a sequence of tensors as example input, got something else")
    return inputs


def _dynamic(inputs: tuple[Any, ...], axis: int | None) -> tuple[Any, ...] | None:
    if axis is None:
        return None
    batch = torch.export.Dim("batch", min=1)
    return tuple({axis: batch} if isinstance(x, Tensor) else tuple({axis: batch} for _ in x) for x in inputs)


def _batches(inputs: tuple[Any, ...], axis: int | None) -> list[int]:
    size = tree_leaves(inputs)[0].shape[axis or 0]
    return [size] if axis is None else [size, size + 3]


def _drawn(inputs: tuple[Any, ...], axis: int | None, batch: int) -> tuple[Any, ...]:
    """Random inputs like the example, with a given batch size."""

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(draw(each) for each in x)
        shape = [batch if i == axis else size for i, size in enumerate(x.shape)]
        if x.is_floating_point():
            return torch.randn(shape, dtype=x.dtype)
        return torch.randint(0, int(x.max()) + 1, shape, dtype=x.dtype)

    return tuple(draw(x) for x in inputs)


def _difference(path: Path, outputs: Sequence[Tensor], expected: Any) -> float:
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


def _unique(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a state dict, with tied ones once."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return list({(each.untyped_storage().data_ptr(), each.storage_offset()): each for each in tensors}.values())


def _zeros(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() - int(torch.count_nonzero(each)) for each in tensors if each.ndim > 1)


def _onnx_zeros(path: Path) -> int:
    import onnx

    arrays = [onnx.numpy_helper.to_array(each) for each in onnx.load(str(path)).graph.initializer]
    return sum(each.size - int(np.count_nonzero(each)) for each in arrays if each.ndim > 1)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _size(path: Path) -> int:
    """The size of a file in bytes, with the separate data file of large ONNX models."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
