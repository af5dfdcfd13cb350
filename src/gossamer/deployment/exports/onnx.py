"""ONNX, with the 2:4 layers that TensorRT's sparse tensor cores can use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.exports.checks import (
    batches,
    difference,
    drawn,
    dynamic,
    inputs_of,
    require,
    single_line,
    unique,
    zeros,
)
from gossamer.deployment.exports.record import Comparison, Exported
from gossamer.deployment.graph import trace
from gossamer.deployment.quiet import quiet
from gossamer.io.container import writable
from gossamer.patterns import NM, canonical, parse
from gossamer.selectors import some

TENSOR_CORES = NM(2, 4)  # at most 2 of 4 consecutive inputs of a feature, at each position of a kernel


def to_onnx(
    model: nn.Module,
    example_input: Tensor | Sequence[Any],
    path: str | Path,
    *,
    batch_axis: int | None = 0,
    pattern: str | None = None,
) -> Exported:
    """Write an ONNX file, and run it with onnxruntime on random inputs, if that is installed.

    Any batch size is allowed along ``batch_axis`` of every input; with None, only that of the example. The example
    should have at least two samples, because exporters may treat a size of one as a constant.

    The result says which layers of the file have 2:4 zeros. With ``pattern="2:4"`` (or another N:M), nothing is written
    unless all of them have it; layers whose inputs M does not divide, such as a first convolution of three channels,
    are excepted.
    """
    require("onnx", "onnxscript")
    inputs, target = inputs_of(example_input), writable(path)
    wanted = _n_of_m(pattern)
    frozen = copy.deepcopy(model).eval()
    program = trace(frozen, inputs, dynamic_shapes=dynamic(inputs, batch_axis)).program
    try:
        with quiet():
            written = cast(Any, torch.onnx.export(program, dynamo=True, verbose=False))
    except Exception as error:
        raise ValueError(
            f"expected a model whose operations ONNX supports, but for {type(model).__name__} torch.onnx reports: "
            f"{single_line(error)}. Replace that operation, or export with to_torch"
        ) from error
    if pattern is not None:
        _demand(wanted, list(_layers(written.model_proto.graph, wanted)))
    written.save(str(target))
    kept = zeros(unique(frozen.state_dict()))
    graph = _read(target)
    found = _zeros(graph)
    if found < kept:
        raise RuntimeError(f"expected {kept} zeros in {target}, got {found}: the exporter changed the weights")
    layers = list(_layers(graph, wanted))
    worst, checked = _run(target, frozen, inputs, batch_axis)
    return Exported(target, _size(target), kept, worst, checked, _comparisons(wanted, layers), _notes(wanted, layers))


@dataclass(frozen=True)
class _Layer:
    """A product with constant weights in an ONNX graph."""

    name: str
    weights: int
    misfit: str
    """Why it cannot have the pattern; empty if it can."""
    broken: int
    """Groups of consecutive inputs with too many nonzeros."""

    @property
    def qualifies(self) -> bool:
        return not self.misfit and not self.broken


def _n_of_m(pattern: str | None) -> NM:
    if pattern is None:
        return TENSOR_CORES
    parsed = parse(pattern)
    if not isinstance(parsed, NM):
        raise ValueError(f"expected an N:M pattern such as '2:4' to check in the ONNX file, got {pattern!r}")
    return parsed


def _demand(wanted: NM, layers: Sequence[_Layer]) -> None:
    broken = [f"{each.name} ({each.broken:,} groups)" for each in layers if each.broken]
    if broken or not any(each.qualifies for each in layers):
        found = f"more nonzeros in {some(broken)}" if broken else "no layer that could have it"
        raise ValueError(
            f"expected at most {wanted.keep} nonzeros of {wanted.of} consecutive inputs in every layer, got {found}: "
            f"train with pattern='{wanted}', or export without a pattern"
        )


def _comparisons(wanted: NM, layers: Sequence[_Layer]) -> tuple[Comparison, ...]:
    dense = sum(each.weights for each in layers)
    sparse = sum(each.weights * wanted.keep // wanted.of if each.qualifies else each.weights for each in layers)
    return (Comparison(f"weights to multiply with {wanted}", dense, sparse),)


def _notes(wanted: NM, layers: Sequence[_Layer]) -> tuple[str, ...]:
    others = [f"{each.name}: {each.misfit or f'{each.broken:,} groups'}" for each in layers if not each.qualifies]
    line = f"{len(layers) - len(others)} of {len(layers)} layers have {wanted} zeros"
    return (f"{line}, not {some(others, 3)}" if others else line,)


def _layers(graph: Any, wanted: NM) -> Iterator[_Layer]:
    """The layers that TensorRT can run on sparse tensor cores: convolutions and products of matrices."""
    import onnx

    constants = {each.name: each for each in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}

    def value(name: str) -> Any:
        """A constant matrix, also if it is transposed or copied in the graph; None for other inputs."""
        if name in constants:
            return onnx.numpy_helper.to_array(constants[name])
        node = makers.get(name)
        if node is None or node.op_type not in ("Transpose", "Identity"):
            return None
        found = value(node.input[0])
        if found is None or node.op_type == "Identity":
            return found
        order = [list(each.ints) for each in node.attribute if each.name == "perm"]
        return found.transpose(*order)

    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        for position in (1, 0) if node.op_type == "MatMul" else (1,):
            weight = value(node.input[position])
            if weight is None or weight.ndim < 2:
                continue
            transposed = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
            if node.op_type != "Conv" and position == 1 and not transposed:
                weight = weight.swapaxes(-1, -2)  # outputs first
            if node.op_type != "Conv":
                weight = weight.reshape(-1, weight.shape[-1])
            yield _layer(node.input[position], torch.from_numpy(np.array(weight)), wanted)


def _layer(name: str, weight: Tensor, wanted: NM) -> _Layer:
    kept = canonical(weight != 0)
    inputs = kept.shape[-1]
    misfit = f"{wanted.of} does not divide its {inputs} inputs" if inputs % wanted.of else ""
    return _Layer(name, weight.numel(), misfit, 0 if misfit else wanted.broken(kept, exactly=False))


def _run(path: Path, model: nn.Module, inputs: tuple[Any, ...], batch_axis: int | None) -> tuple[float | None, str]:
    try:
        import onnxruntime
    except ImportError:
        return None, "not run: onnxruntime is not installed"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    worst = 0.0
    for batch in batches(inputs, batch_axis):
        random = drawn(inputs, batch_axis, batch)
        out = session.run(None, {name: x.numpy() for name, x in zip(names, tree_leaves(random), strict=True)})
        with torch.no_grad():
            worst = max(worst, difference(path, [torch.from_numpy(each) for each in out], model(*random)))
    return worst, f"onnxruntime differs by {worst:.1e}"


def _read(path: Path) -> Any:
    import onnx

    return onnx.load(str(path)).graph


def _zeros(graph: Any) -> int:
    import onnx

    arrays = [onnx.numpy_helper.to_array(each) for each in graph.initializer]
    return sum(each.size - int(np.count_nonzero(each)) for each in arrays if each.ndim > 1)


def _size(path: Path) -> int:
    """The size of a file in bytes, with the separate data file of large ONNX models."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
