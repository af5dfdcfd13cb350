"""Commands for trained networks: `gossamer speed` and `gossamer export`."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar

from gossamer.cli.arguments import NetworkFile, OptionalFile, OptionalName, OptionalNumber
from gossamer.deployment.exports import Exported, to_dense, to_onnx, to_torch
from gossamer.deployment.speed import ENGINES, measure
from gossamer.deployment.speed.report import plot
from gossamer.io.container import writable
from gossamer.io.sparse_file import load
from gossamer.lab.model_files import open_network


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
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        for path in (self.out, self.plot):
            if path is not None:
                writable(path)
        stored = open_network(self.file, self.net, shape=self.shape or None, max_bytes=self.max_bytes)
        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(stored.name), total=1.0)
            measured = measure(
                stored.model,
                stored.example,
                name=stored.name,
                batches=self.batch,
                threads=self.threads,
                engines=self.engines,
                seconds=self.seconds,
                progress=lambda what, share: bar.update(
                    task, description=escape(f"{stored.name}, {what}"), completed=share
                ),
            )
        console.print(measured, highlight=False)
        if self.out is not None:
            self.out.write_text(measured.to_json())
        if self.plot is not None:
            plot(measured, self.plot)


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
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> None:
        console.print(str(self._export()), highlight=False, soft_wrap=True)

    def _export(self) -> Exported:
        if self.to == "dense":  # needs only the tensors, not the network
            return to_dense(load(self.file, max_bytes=self.max_bytes), self.out)
        stored = open_network(self.file, self.net, shape=self.shape or None, max_bytes=self.max_bytes)
        write = to_onnx if self.to == "onnx" else to_torch
        return write(stored.model, stored.example(2), self.out, batch_axis=stored.batch_axis)
