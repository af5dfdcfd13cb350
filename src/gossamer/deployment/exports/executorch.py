"""ExecuTorch: float32 for CPUs (XNNPACK), and int8 for Arm's Ethos-U, whose compiler encodes zeros in few bits."""

from __future__ import annotations

import copy
import csv
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.exports.checks import difference, drawn, inputs_of, require, single_line, zeros
from gossamer.deployment.exports.record import Comparison, Exported
from gossamer.deployment.filled import filled
from gossamer.deployment.graph import trace
from gossamer.deployment.quiet import quiet
from gossamer.io.container import writable
from gossamer.patterns import NM, Shape, canonical
from gossamer.prunable import Weight, select
from gossamer.selectors import some

XNNPACK = "xnnpack"
NPUS = tuple(
    f"ethos-{model}-{macs}"
    for model, sizes in {"u55": (32, 64, 128, 256), "u65": (256, 512), "u85": (128, 256, 512, 1024, 2048)}.items()
    for macs in sizes
)
_RANDOM_SAMPLES = 8
_QUANTITIES = {  # names of ours, and columns of the summary that Vela writes
    "bytes of encoded weights": "total_npu_encoded_weights",
    "multiplications": "nn_macs",
    "cycles (estimate)": "cycles_total",
}


def to_executorch(
    model: nn.Module,
    example_input: Tensor | Sequence[Any],
    path: str | Path,
    *,
    target: str = XNNPACK,
    calibration: Sequence[Tensor | Sequence[Any]] = (),
    system_config: str | None = None,
    memory_mode: str | None = None,
) -> Exported:
    """Write an ExecuTorch program (usually ``.pte``) for exactly the shapes of the example.

    For XNNPACK, the program is float32, and runs here on random inputs. For an NPU such as ``ethos-u85-256``, it is
    int8: activations get their ranges from the inputs in ``calibration`` (random ones if there are none), and the
    result compares encoded weights, size and estimated cycles with those of the same network without zeros. The
    estimate is for ``system_config`` and ``memory_mode`` of Vela; by default, weights are outside of the SRAM.
    """
    if target not in (XNNPACK, *NPUS):
        raise ValueError(f"expected a target from {', '.join((XNNPACK, *NPUS))}, got {target!r}")
    inputs, file = inputs_of(example_input), writable(path)
    frozen = copy.deepcopy(model).eval()
    if target == XNNPACK:
        require("executorch")
        return _for_cpus(frozen, inputs, file)
    require("executorch", "ethosu", install='"executorch[ethos-u]" in an environment of its own (see docs/deploy.md)')
    flash = target.startswith("ethos-u85")
    npu = _Npu(
        target,
        system_config or ("Ethos_U85_SYS_Flash_High" if flash else None),
        memory_mode or ("Shared_Sram" if flash else None),
        [inputs_of(each) for each in calibration],
    )
    return npu.export(frozen, inputs, file)


def _for_cpus(model: nn.Module, inputs: tuple[Any, ...], path: Path) -> Exported:
    sizes = {}
    for kind, each in {"dense": filled(model, 1.0), "sparse": model}.items():
        program = trace(each, inputs).program
        with quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

            buffer = _lowered(model, program, XnnpackPartitioner()).to_executorch().buffer
        sizes[kind] = len(buffer)
    path.write_bytes(buffer)
    random = drawn(inputs, None, 0)
    with quiet():
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method("forward")
        out = method.execute(tree_leaves(random))
        expected = model(*random)
    worst = difference(path, out, expected)
    kept = zeros([weight.parameter for weight in select(model)])
    return Exported(
        path,
        path.stat().st_size,
        kept,
        worst,
        f"ExecuTorch differs by {worst:.1e}",
        (Comparison("bytes of the file", sizes["dense"], sizes["sparse"]),),
        ("XNNPACK stores zeros like other numbers",),
    )


@dataclass(frozen=True)
class _Compiled:
    """A network for an NPU."""

    program: bytes
    quantized: Any
    """The int8 network as a module."""
    summary: dict[str, int]
    """What Vela estimates, summed over the parts that run on the NPU."""
    on_cpu: tuple[str, ...]
    """Operations that do not run on the NPU."""


@dataclass(frozen=True)
class _Npu:
    """An Ethos-U with its memories, and the inputs for calibration."""

    target: str
    system_config: str | None
    memory_mode: str | None
    samples: Sequence[tuple[Any, ...]]

    def export(self, model: nn.Module, inputs: tuple[Any, ...], path: Path) -> Exported:
        kept = zeros([weight.parameter for weight in select(model)])
        random = [drawn(inputs, None, 0) for _ in range(_RANDOM_SAMPLES)]
        dense = self._compiled(filled(model, 1.0), inputs, random)
        sparse = self._compiled(model, inputs, random)
        found = zeros(_constants(sparse.quantized))
        if found < kept:
            raise RuntimeError(f"expected {kept} zeros in int8, got {found}: the exporter changed the weights")
        path.write_bytes(sparse.program)
        comparisons = [Comparison("bytes of the file", len(dense.program), len(sparse.program))]
        comparisons += [Comparison(name, dense.summary[name], sparse.summary[name]) for name in _QUANTITIES]
        worst = self._difference(sparse.quantized, model, random)
        checked = f"int8 differs by {worst:.1e} in torch; compiled for {self.target}, not run"
        notes = tuple(self._notes(model, sparse))
        return Exported(path, path.stat().st_size, kept, worst, checked, tuple(comparisons), notes)

    def _compiled(self, model: nn.Module, inputs: tuple[Any, ...], random: Sequence[tuple[Any, ...]]) -> _Compiled:
        module = trace(model, inputs).program.module(check_guards=False)
        with quiet(), tempfile.TemporaryDirectory() as folder:
            from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner
            from executorch.backends.arm.quantizer import EthosUQuantizer, get_symmetric_quantization_config
            from executorch.exir import ExecutorchBackendConfig
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

            spec = EthosUCompileSpec(self.target, self.system_config, self.memory_mode)
            spec.dump_intermediate_artifacts_to(folder)
            quantizer = EthosUQuantizer(spec)
            quantizer.set_global(get_symmetric_quantization_config())
            prepared = prepare_pt2e(module, quantizer)
            for sample in self.samples or random:
                prepared(*sample)
            quantized = convert_pt2e(prepared)
            lowered = _lowered(model, torch.export.export(quantized, inputs), EthosUPartitioner(spec))
            config = ExecutorchBackendConfig(extract_delegate_segments=False)
            parts = sorted(Path(folder).glob("output_tag*.tosa"))
            if not parts:
                raise ValueError(
                    f"expected a network that runs on {self.target}, at least in part, but it supports no operation of "
                    f"{type(model).__name__}: export it for {XNNPACK}"
                )
            summary = _summed([_summary(part, spec.compiler_flags) for part in parts])
            names = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
            inside = ("quantize", "executorch_call_delegate", "getitem")
            on_cpu = [name.partition(":")[0] for name in names if not any(word in name for word in inside)]
            return _Compiled(lowered.to_executorch(config).buffer, quantized, summary, tuple(on_cpu))

    def _difference(self, quantized: Any, model: nn.Module, random: Sequence[tuple[Any, ...]]) -> float:
        """The largest difference of the int8 outputs, relative to the largest output."""
        worst = 0.0
        with torch.no_grad():
            for sample in self.samples or random:
                for out, wanted in zip(tree_leaves(quantized(*sample)), tree_leaves(model(*sample)), strict=True):
                    worst = max(worst, float((out - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30))
        return worst

    def _notes(self, model: nn.Module, compiled: _Compiled) -> Iterator[str]:
        if not self.samples:
            yield "calibrated with random inputs: pass real ones for a network in use"
        if compiled.on_cpu:
            yield f"{len(compiled.on_cpu)} operations stay on the CPU: {some(sorted(set(compiled.on_cpu)))}"
        if self.target.startswith("ethos-u85"):
            fits = [_is_two_of_four(weight) for weight in select(model)]
            yield f"{sum(fits)} of {len(fits)} layers have 2:4 zeros, of which this NPU multiplies only half"


def _is_two_of_four(weight: Weight) -> bool:
    pattern, kept = NM(2, 4), canonical(weight.parameter != 0, weight.feature_axis, weight.groups)
    return not (pattern.misfit(Shape.of_weight(weight)) or pattern.broken(kept, exactly=False))


def _lowered(model: nn.Module, program: Any, partitioner: Any) -> Any:
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    try:
        return to_edge_transform_and_lower(
            program, partitioner=[partitioner], compile_config=EdgeCompileConfig(_check_ir_validity=False)
        )
    except Exception as error:
        raise ValueError(
            f"expected a model whose operations ExecuTorch supports, but for {type(model).__name__} it reports: "
            f"{single_line(error)}. Replace that operation, or export with to_onnx"
        ) from error


def _summary(part: Path, flags: Sequence[str]) -> dict[str, int]:
    """What Vela says about one part of a network."""
    from ethosu.vela import vela

    with tempfile.TemporaryDirectory() as folder:
        vela.main([*flags, f"--output-dir={folder}", str(part)])
        (file,) = Path(folder).glob("*_summary_*.csv")
        with file.open(newline="") as table:
            (row,) = csv.DictReader(table)
    return {name: int(float(row[column])) for name, column in _QUANTITIES.items()}


def _summed(summaries: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in summaries) for name in _QUANTITIES}


def _constants(module: Any) -> list[Tensor]:
    """The tensors that the graph of a module reads."""
    names = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return [tensor for name, tensor in module.state_dict().items() if name in names]
