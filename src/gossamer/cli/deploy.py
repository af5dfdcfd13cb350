"""Commands for trained networks: `gossamer speed`, `verify`, `compact` and `export`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gossamer.cli.arguments import (
    AnyFile,
    NetworkFile,
    OptionalFile,
    OptionalName,
    OptionalNetworkFile,
    OptionalNumber,
)
from gossamer.cli.console import Answer, live_bar
from gossamer.deployment.compaction import compact
from gossamer.deployment.exports import Exported, to_coreml, to_dense, to_executorch, to_onnx, to_torch
from gossamer.deployment.exports.executorch import XNNPACK
from gossamer.deployment.speed import ENGINES, measure
from gossamer.deployment.speed.report import plot
from gossamer.io.checkpoints import read_checkpoint
from gossamer.io.container import writable
from gossamer.io.sparse_file import load
from gossamer.lab.model_files import StoredModel, knows_its_network, network_file, open_network
from gossamer.verify import verify


@dataclass(frozen=True)
class Speed:
    """Time a network with all available engines, dense and sparse, and report the speed-up on this machine."""

    file: NetworkFile
    """A safetensors file, sparse or plain."""
    net: OptionalName = None
    """Architecture of the file: a name from `gossamer list`, or module:function. Default: from the file or its
    run.json."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    max_bytes: OptionalNumber = None
    """Largest memory for the tensors of the file, in bytes. Default: 1024 times its size, at least 64 MiB."""
    batch: tuple[int, ...] = (1, 64)
    """Batch sizes to time."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads to time."""
    engines: tuple[str, ...] = tuple(ENGINES)
    """Engines to time; the row of an engine that is not installed says so."""
    seconds: float = 5.0
    """Seconds of timing per batch size and number of threads, after preparation."""
    out: OptionalFile = None
    """Write the measurement to this JSON file."""
    plot: OptionalFile = None
    """Draw it to this file (png, svg, pdf)."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        for path in (self.out, self.plot):
            if path is not None:
                writable(path)
        stored = open_network(self.file, self.net, shape=self.shape or None, max_bytes=self.max_bytes)
        with live_bar(console, stored.name) as bar:
            measured = measure(
                stored.model,
                stored.example,
                name=stored.name,
                batches=self.batch,
                threads=self.threads,
                engines=self.engines,
                seconds=self.seconds,
                progress=lambda what, share: bar.move(share, f"{stored.name}, {what}"),
            )
        console.print(measured, highlight=False)
        if self.out is not None:
            self.out.write_text(measured.to_json())
        if self.plot is not None:
            plot(measured, self.plot)
        return Answer(measured.to_dict())


@dataclass(frozen=True)
class Verify:
    """Compare two files of a network: the positions of their zeros, and their outputs if the network is known. The exit
    code is 1 if they differ."""

    file: AnyFile
    """The network: a safetensors file, sparse or plain, a state dict of torch.save, or a folder from Hugging Face."""
    other: AnyFile
    """What to compare with it, in any of these forms."""
    net: OptionalName = None
    """Architecture, to compare outputs: a name from `gossamer list`, or module:function. Default: as the file or its
    run.json says."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    tolerance: float = 0.0
    """Largest difference of an output, relative to the largest one."""
    json: bool = False
    """Print JSON instead of text."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        other = read_checkpoint(self.other)
        if self.net is not None or knows_its_network(self.file):
            stored = open_network(self.file, self.net, shape=self.shape or None)
            found = verify(stored.model, other, stored.example(2), tolerance=self.tolerance)
        else:
            found = verify(read_checkpoint(self.file), other)
        console.print(str(found), highlight=False, soft_wrap=True)
        return Answer({"same": bool(found), **asdict(found)}, 0 if found else 1)


@dataclass(frozen=True)
class Compact:
    """Remove filters, neurons and units that zero weights have disconnected, and write the smaller network, which has
    the same outputs."""

    file: NetworkFile
    """A safetensors file, sparse or plain."""
    out: NetworkFile
    """File to write: .pt2 for torch.export, .onnx for ONNX. The smaller network has shapes of its own, so its weights
    alone are no network."""
    net: OptionalName = None
    """Architecture of the file: a name from `gossamer list`, or module:function. Default: from the file or its
    run.json."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    tolerance: float | None = None
    """Largest difference of an output, relative to the largest one. Default: that of rounding."""
    json: bool = False
    """Print JSON instead of text."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        writers = {".pt2": to_torch, ".onnx": to_onnx}
        if self.out.suffix not in writers:
            raise ValueError(f"expected a file to write that ends in {' or '.join(writers)}, got {self.out}")
        writable(self.out)
        stored = open_network(self.file, self.net, shape=self.shape or None)
        example = stored.example(2)
        compaction = compact(stored.model, example, tolerance=self.tolerance)
        console.print(str(compaction), highlight=False, soft_wrap=True)
        written = writers[self.out.suffix](compaction.model, example, self.out, batch_axis=stored.batch_axis)
        console.print(str(written), highlight=False, soft_wrap=True)
        return Answer({**asdict(compaction.report), "written": asdict(written)})


Format = Literal["coreml", "executorch", "onnx", "pt2", "dense"]
SUFFIXES: dict[Format, str] = {
    "coreml": ".mlpackage",
    "executorch": ".pte",
    "onnx": ".onnx",
    "pt2": ".pt2",
    "dense": ".dense.safetensors",
}


@dataclass(frozen=True)
class Export:
    """Write a network for another engine: Core ML, ExecuTorch, ONNX, torch.export or plain dense safetensors. The file
    is checked, and a table says what the zeros are worth in it."""

    file: NetworkFile
    """A safetensors file, sparse or plain, or a run folder."""
    out: OptionalNetworkFile = None
    """File to write. Default: next to the network, with the suffix of the format."""
    to: Format | None = None
    """Default: by the suffix: .mlpackage, .pte, .onnx, .pt2 or .safetensors (dense)."""
    net: OptionalName = None
    """Architecture of the file: a name from `gossamer list`, or module:function. Default: from the file or its
    run.json."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    int8: bool = False
    """Core ML: one byte per nonzero."""
    target: str = XNNPACK
    """ExecuTorch: xnnpack for CPUs, or an NPU such as ethos-u85-256, which gets int8."""
    calibrate: OptionalFile = None
    """ExecuTorch for an NPU: .npy file of real inputs, samples first, that set the ranges of int8. Default: random
    inputs."""
    pattern: OptionalName = None
    """ONNX: write nothing unless every layer has these zeros, such as 2:4, which TensorRT uses."""
    max_bytes: OptionalNumber = None
    """Largest memory for the tensors of the file, in bytes. Default: 1024 times its size, at least 64 MiB."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        written = self._export(network_file(self.file))
        console.print(str(written), highlight=False, soft_wrap=True)
        return Answer(asdict(written))

    def _export(self, file: Path) -> Exported:
        format = self._format()
        self._check_options(format)
        out = self.out or file.with_suffix(SUFFIXES[format])
        if format == "dense":  # needs only the tensors, not the network
            return to_dense(load(file, max_bytes=self.max_bytes), out)
        stored = open_network(file, self.net, shape=self.shape or None, max_bytes=self.max_bytes)
        if format == "coreml":
            return to_coreml(stored.model, stored.example(1), out, int8=self.int8)
        if format == "executorch":
            samples = () if self.calibrate is None else calibration(self.calibrate, stored)
            return to_executorch(stored.model, stored.example(1), out, target=self.target, calibration=samples)
        if format == "onnx":
            return to_onnx(stored.model, stored.example(2), out, batch_axis=stored.batch_axis, pattern=self.pattern)
        return to_torch(stored.model, stored.example(2), out, batch_axis=stored.batch_axis)

    def _format(self) -> Format:
        if self.to is not None:
            return self.to
        formats = {"." + suffix.rpartition(".")[2]: format for format, suffix in SUFFIXES.items()}
        if self.out is None or self.out.suffix not in formats:
            got = "neither" if self.out is None else self.out
            raise ValueError(
                f"expected --to {' or '.join(SUFFIXES)}, or a file that ends in {', '.join(formats)}, got {got}"
            )
        return formats[self.out.suffix]

    def _check_options(self, format: Format) -> None:
        """Refuse options of other formats, which would have no effect."""
        given = {
            "--int8": ("coreml", self.int8),
            "--target": ("executorch", self.target != XNNPACK),
            "--calibrate": ("executorch", self.calibrate is not None),
            "--pattern": ("onnx", self.pattern is not None),
        }
        for option, (owner, is_given) in given.items():
            if is_given and owner != format:
                raise ValueError(f"expected {option} with --to {owner}, got --to {format}: omit it")


def calibration(path: Path, stored: StoredModel) -> list[Tensor]:
    """Inputs of one sample each, from a .npy file with samples first."""
    wanted = stored.example(1)
    try:
        values = torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"expected a .npy file of numbers in {path}, got another ({error})") from error
    if values.ndim != wanted.ndim or values[:1].shape != wanted.movedim(stored.batch_axis, 0).shape:
        shape = (len(values), *wanted.movedim(stored.batch_axis, 0).shape[1:])
        raise ValueError(f"expected samples of shape {shape} in {path}, got {tuple(values.shape)}")
    return [each.unsqueeze(stored.batch_axis).to(wanted.dtype) for each in values]
