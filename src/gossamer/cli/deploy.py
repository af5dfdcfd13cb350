"""Commands for trained networks: `gossamer speed`, `verify`, `compact` and `export`."""

from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from gossamer.cli.arguments import AnyFile, NetworkFile, OptionalFile, OptionalName, OptionalNumber
from gossamer.cli.console import Answer, live_bar
from gossamer.deployment.compaction import compact
from gossamer.deployment.exports import Exported, to_dense, to_onnx, to_torch
from gossamer.deployment.speed import ENGINES, measure
from gossamer.deployment.speed.report import plot
from gossamer.io.checkpoints import read_checkpoint
from gossamer.io.container import writable
from gossamer.io.sparse_file import load
from gossamer.lab.model_files import knows_its_network, open_network
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


@dataclass(frozen=True)
class Export:
    """Write a network for other programs: ONNX, torch.export or plain dense safetensors. The file is checked."""

    file: NetworkFile
    """A safetensors file, sparse or plain."""
    out: NetworkFile
    """File to write."""
    to: Literal["onnx", "pt2", "dense"]
    """pt2 is torch.export's format; dense is plain safetensors."""
    net: OptionalName = None
    """Architecture of the file: a name from `gossamer list`, or module:function. Default: from the file or its
    run.json."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, for your own network."""
    max_bytes: OptionalNumber = None
    """Largest memory for the tensors of the file, in bytes. Default: 1024 times its size, at least 64 MiB."""
    json: bool = False
    """Print JSON instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        written = self._export()
        console.print(str(written), highlight=False, soft_wrap=True)
        return Answer(asdict(written))

    def _export(self) -> Exported:
        if self.to == "dense":  # needs only the tensors, not the network
            return to_dense(load(self.file, max_bytes=self.max_bytes), self.out)
        stored = open_network(self.file, self.net, shape=self.shape or None, max_bytes=self.max_bytes)
        write = to_onnx if self.to == "onnx" else to_torch
        return write(stored.model, stored.example(2), self.out, batch_axis=stored.batch_axis)
