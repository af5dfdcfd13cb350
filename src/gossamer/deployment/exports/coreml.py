"""Core ML, with sparse weights: a mask of one bit per weight, and the nonzeros in float16 or int8."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.exports.checks import inputs_of, require, single_line
from gossamer.deployment.exports.record import Comparison, Exported
from gossamer.deployment.graph import trace
from gossamer.deployment.quiet import quiet
from gossamer.io.container import writable
from gossamer.prunable import select

SUFFIX = ".mlpackage"
MINIMUM_SPARSITY = 0.125  # the mask takes one bit per weight, so int8 values are smaller in this form from here on


def to_coreml(
    model: nn.Module, example_input: Tensor | Sequence[Any], path: str | Path, *, int8: bool = False
) -> Exported:
    """Write a Core ML package (``.mlpackage``, iOS 18 or macOS 15) for exactly the shapes of the example.

    Weights are float16; with ``int8``, nonzeros take one byte each, with one scale per output feature. The package is
    read back, and its masks are compared with the zeros of the model. Outputs are not compared, because Core ML runs on
    Apple's systems only.
    """
    require("coremltools")
    inputs, target = inputs_of(example_input), _package(Path(path))
    frozen = _in_range(copy.deepcopy(model).eval())
    dense = _converted(frozen, inputs)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        packages = {("float16", "dense"): dense, ("float16", "sparse"): _sparse(dense)}
        if int8:
            packages["int8", "dense"] = _int8(dense)
            packages["int8", "sparse"] = _int8(packages["float16", "sparse"], joint=True)
        sizes = {}
        for kind, package in packages.items():
            saved = Path(folder) / f"{'-'.join(kind)}{SUFFIX}"
            package.save(str(saved))
            sizes[kind] = _size(saved)
        if target.is_dir():
            shutil.rmtree(target)
        shutil.move(saved, target)  # the last one
        stored = list(_weights(target))
    masks = [weight.parameter.detach().numpy() != 0 for weight in select(frozen)]
    zeros, found = (sum(kept.size - np.count_nonzero(kept) for kept in each) for each in (masks, stored))
    if found < zeros:
        raise RuntimeError(f"expected {zeros} zeros in {target}, got {found}: the exporter changed the weights")
    rows = _rows(kept for kept in masks if not kept.all())
    missing = (rows - _rows(stored)).total()
    checked = f"{rows.total() - missing:,} of {rows.total():,} rows of sparse weights have exactly the model's zeros"
    if missing:
        checked += "; Core ML stores the others in another layout"
    formats = ("float16", "int8") if int8 else ("float16",)
    comparisons = tuple(
        Comparison(f"bytes with {each} weights", sizes[each, "dense"], sizes[each, "sparse"]) for each in formats
    )
    return Exported(target, _size(target), zeros, None, f"{checked}; not run", comparisons)


def _in_range(model: nn.Module) -> nn.Module:
    """Move nonzeros that float16 would round to zero to its smallest number, so that exactly the zeros stay zeros."""
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    with torch.no_grad():
        for weight in select(model):
            values = weight.parameter
            tiny = (values != 0) & (values.abs() < smallest)
            values[tiny] = smallest * values[tiny].sign()
    return model


def _package(path: Path) -> Path:
    """The path of a package, which is a folder. An older package is replaced."""
    if path.suffix != SUFFIX:
        raise ValueError(f"expected a Core ML package that ends in {SUFFIX}, got {path}")
    if path.is_dir() and (path / "Manifest.json").is_file():
        writable(path.with_name("Manifest.json"))
        return path
    return writable(path)


def _converted(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The dense Core ML program in float16. It is traced twice: Core ML reads recurrent layers only in TorchScript,
    whose tracer would not notice branches that depend on values."""
    module = trace(model, inputs).program.module(check_guards=False)
    with quiet():
        import coremltools

        kinds = {torch.float32: np.float32, torch.int64: np.int32}
        jit: Any = torch.jit
        try:
            return coremltools.convert(
                jit.trace(module, inputs, check_trace=False),
                inputs=[
                    coremltools.TensorType(shape=tuple(x.shape), dtype=kinds.get(x.dtype, np.float32))
                    for x in tree_leaves(inputs)
                ],
                convert_to="mlprogram",
                compute_precision=coremltools.precision.FLOAT16,
                minimum_deployment_target=coremltools.target.iOS18,
                skip_model_load=True,
            )
        except Exception as error:
            raise ValueError(
                f"expected a model whose operations Core ML supports, but for {type(model).__name__} coremltools "
                f"reports: {single_line(error)}. Replace that operation, or export with to_onnx"
            ) from error


def _sparse(package: Any) -> Any:
    from coremltools.optimize import coreml

    options = coreml.OpThresholdPrunerConfig(
        threshold=0.0, minimum_sparsity_percentile=MINIMUM_SPARSITY, weight_threshold=0
    )
    return coreml.prune_weights(package, coreml.OptimizationConfig(global_config=options))


def _int8(package: Any, *, joint: bool = False) -> Any:
    from coremltools.optimize import coreml

    options = coreml.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", weight_threshold=0)
    config = coreml.OptimizationConfig(global_config=options)
    return coreml.linear_quantize_weights(package, config, joint_compression=joint)


def _weights(path: Path) -> Iterator[Any]:
    """Where the weights of a package are nonzero, from the file."""
    import coremltools
    from coremltools.converters.mil.frontend.milproto.load import load

    package = coremltools.models.MLModel(str(path), skip_model_load=True)
    spec = package.get_spec()
    program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=package.weights_dir)
    for operation in _operations(program.functions.values()):
        if operation.op_type == "constexpr_sparse_to_dense":
            yield operation.mask.val != 0
        elif operation.op_type == "const":
            value = operation.outputs[0].val
            users = [user.op_type for user in operation.outputs[0].child_ops]
            if np.ndim(value) > 1 and not any(user.startswith("constexpr_sparse") for user in users):
                yield value != 0


def _operations(blocks: Iterable[Any]) -> Iterator[Any]:
    """All operations, also those inside of loops."""
    for block in blocks:
        for operation in block.operations:
            yield operation
            yield from _operations(operation.blocks)


def _rows(masks: Iterable[Any]) -> Counter[tuple[int, bytes]]:
    """The masks of all output features of weights. Core ML may split, join and reorder features, such as gates."""
    counted: Counter[tuple[int, bytes]] = Counter()
    for kept in masks:
        flat = kept.reshape(len(kept), -1)
        counted.update((flat.shape[1], row.tobytes()) for row in np.packbits(flat, axis=1))
    return counted


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
