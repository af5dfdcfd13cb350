"""The engines of a speed comparison, each prepared for one network, one batch size and a number of threads.

The row of an engine that is not installed says so. Every dense engine gets its best configuration: static shapes,
inputs in its own dtype, folded weights, and no more threads than requested.
"""

from __future__ import annotations

import copy
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.deployment.quiet import quiet
from gossamer.deployment.runtime import deploy
from gossamer.deployment.runtime.records import Line

Run = Callable[..., Any]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
Kind = Literal["dense", "int8", "sparse", "sparse int8"]


class Unavailable(Exception):
    """The engine is unavailable; the message appears in its row."""


@dataclass(frozen=True, eq=False)
class Job:
    """The network and settings for an engine."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    threads: int
    folder: Path  # for temporary files
    seconds: float  # for our runtime to choose kernels
    remember: bool = True

    @cached_property
    def onnx(self) -> Path:
        """The network as an ONNX file for exactly these shapes."""
        _need("onnx", "onnxscript")
        path = self.folder / f"batch-{'x'.join(map(str, self.inputs[0].shape))}.onnx"
        if not path.is_file():
            with quiet():
                program = torch.onnx.export(copy.deepcopy(self.model), self.inputs, dynamo=True, verbose=False)
            cast(Any, program).save(str(path))
        return path


@dataclass(frozen=True, eq=False)
class Ready:
    """A prepared engine: the call, its float outputs, and the bytes of weights and buffers, if known."""

    run: Run
    memory: int | None = None
    note: str = ""
    layers: tuple[Line, ...] = ()
    """What runs for each operation, if the engine says so."""


@dataclass(frozen=True)
class Engine:
    name: str
    kind: Kind
    prepare: Callable[[Job], Ready]


def _need(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Unavailable(f"not installed (pip install {' '.join(missing)})")


def weights_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def outputs(value: Any) -> list[Tensor]:
    """The tensors that an engine returned, in order."""
    leaves = [torch.from_numpy(leaf) if not isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]
    return [leaf.detach() for leaf in leaves]


def _torch(job: Job) -> Ready:
    model = copy.deepcopy(job.model).eval()

    def run(*inputs: Tensor) -> Any:
        with torch.inference_mode():
            return model(*inputs)

    return Ready(run, weights_bytes(model))


def _compiled(job: Job) -> Ready:
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        raise Unavailable("no C++ compiler")
    torch._dynamo.reset()  # compiled code keeps its number of threads
    frozen = copy.deepcopy(job.model).eval()
    with quiet():
        model = torch.compile(frozen, options={"freezing": True})

        def run(*inputs: Tensor) -> Any:
            with torch.inference_mode():
                return model(*inputs)

        run(*job.inputs)
    return Ready(run, weights_bytes(frozen))


def _session(path: Path, job: Job) -> Ready:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    # Its threads would otherwise still be spinning in the turn of the next engine.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, job.inputs, strict=True)}
    data = path.with_name(path.name + ".data")
    size = path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
    return Ready(lambda *_: session.run(None, feed), size)


def _onnxruntime(job: Job) -> Ready:
    _need("onnxruntime")
    return _session(job.onnx, job)


def _onnxruntime_int8(job: Job) -> Ready:
    """Dense int8: static for convolutions, with scales from the example; dynamic for the rest."""
    _need("onnxruntime")
    return _session(_in_int8(job, static=any(isinstance(each, _CONVOLUTIONS) for each in job.model.modules())), job)


def _onnxruntime_static(job: Job) -> Ready:
    """Dense int8 with scales from the example in every layer."""
    _need("onnxruntime")
    return _session(_in_int8(job, static=True), job)


def _in_int8(job: Job, *, static: bool) -> Path:
    """The network as ONNX with weights, and values, in int8."""
    source = job.onnx
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    target = source.with_suffix(f".{'static' if static else 'dynamic'}.onnx")
    if not target.is_file():
        prepared = source.with_suffix(".prepared.onnx")
        with quiet():
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            network = onnx.load(str(prepared))
            del network.graph.value_info[:]  # shapes of weights, which quantisation transposes
            onnx.save(network, str(prepared))
            if static:
                quantization.quantize_static(
                    str(prepared), str(target), _calibration(prepared, job.inputs), per_channel=True
                )
            else:
                quantization.quantize_dynamic(str(prepared), str(target), per_channel=True)
    return target


def _calibration(path: Path, inputs: Sequence[Tensor]) -> Any:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader

    names = [each.name for each in onnx.load(str(path), load_external_data=False).graph.input]

    class Once(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = [{name: x.numpy() for name, x in zip(names, inputs, strict=True)}]

        def get_next(self) -> Any:
            return self._left.pop() if self._left else None

    return Once()


def _openvino(job: Job, path: Path | None = None) -> Ready:
    _need("openvino")
    with quiet():
        import openvino

    settings = {"INFERENCE_NUM_THREADS": job.threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    source = str(path or job.onnx)
    with quiet():
        compiled = openvino.Core().compile_model(source, "CPU", settings)
    request = compiled.create_infer_request()
    arrays = [x.numpy() for x in job.inputs]

    def run(*_: Tensor) -> Any:
        found = request.infer(arrays)
        return [found[port] for port in compiled.outputs]

    return Ready(run)


def _openvino_int8(job: Job) -> Ready:
    """Dense int8, from the file that onnxruntime quantised with scales from the example."""
    _need("openvino", "onnxruntime")
    return _openvino(job, _in_int8(job, static=True))


def _gossamer(job: Job, **precision: Any) -> Ready:
    fast = deploy(job.model, job.inputs, threads=job.threads, seconds=job.seconds, remember=job.remember, **precision)
    explanation = fast.explain()
    memory = None if fast.native is None else fast.native.plan_for(fast.native.example_batch).nbytes
    if explanation.engine != "native":
        memory = weights_bytes(job.model)
    reason = explanation.reason.splitlines()[0]
    if explanation.engine != "torch":  # the speed-up over torch while it was deployed would contradict the table
        reason = "; ".join(clause for clause in reason.split("; ") if "times as fast as torch" not in clause)
    note = f"runs {explanation.engine}: {reason}"
    return Ready(fast, memory, note, explanation.lines)


def _gossamer_int8(job: Job) -> Ready:
    """With scales from the example, as those of onnxruntime."""
    return _gossamer(job, precision="int8", calibration=job.inputs)


OURS = "gossamer"
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("torch", "dense", _torch),
        Engine("torch.compile", "dense", _compiled),
        Engine("onnxruntime", "dense", _onnxruntime),
        Engine("onnxruntime int8", "int8", _onnxruntime_int8),
        Engine("onnxruntime static int8", "int8", _onnxruntime_static),
        Engine("openvino", "dense", _openvino),
        Engine("openvino int8", "int8", _openvino_int8),
        Engine(OURS, "sparse", _gossamer),
        Engine(f"{OURS} int8", "sparse int8", _gossamer_int8),
    )
}
