"""`gossamer doctor`: what this installation can do on this machine, and the command that adds what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

import gossamer
from gossamer.cli.console import Answer
from gossamer.deployment.runtime.compiling import NoCompilerError, find_compilers
from gossamer.deployment.runtime.native import load_native
from gossamer.lab import tables
from gossamer.lab.data.files import DataNotFound
from gossamer.lab.data.registry import DATA_SETS
from gossamer.provenance import cpu_name

# What each extra of the package is for. The packages of an extra are those in its metadata.
_EXTRAS = {
    "report": "HTML pages",
    "demo": "gossamer quickstart",
    "plot": "plots",
    "data": "image folders",
    "vision": "the models of torchvision",
    "zstd": "a stronger compression of sparse files",
    "integrations": "Lightning, transformers, accelerate and PEFT",
    "onnx": "ONNX files, and onnxruntime in gossamer speed",
    "coreml": "Core ML packages",
    "executorch": "ExecuTorch programs for CPUs",
    "speed": "OpenVINO in gossamer speed",
    "tensorboard": "TensorBoard logs",
    "compiler": "a C compiler from pip",
    "docs": "the docs as a site",
}


@dataclass(frozen=True)
class Finding:
    """One part of the installation."""

    part: str
    state: Literal["ok", "missing", "broken"]
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Doctor:
    """Show what is installed, which devices, compilers and data sets there are, and how to get what is missing. The
    exit code is 1 if something is broken; what is only missing is optional."""

    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    def carry_out(self, console: Console) -> Answer:
        found = [*_basics(), *_compiler(), *_extras(), *_data()]
        rows = [[each.part, each.state, each.found + (f"\n→ {each.remedy}" if each.remedy else "")] for each in found]
        console.print(tables.of_words(("part", "", "found"), rows))
        broken = [each.part for each in found if each.state == "broken"]
        summary = f"Broken: {', '.join(broken)}." if broken else "Nothing is broken. What is missing is optional."
        console.print(summary, soft_wrap=True, highlight=False)
        return Answer({"findings": [asdict(each) for each in found]}, 1 if broken else 0)


def _basics() -> Iterator[Finding]:
    folder = Path(gossamer.__file__).parent
    yield Finding("gossamer", "ok", f"{gossamer.__version__} in {folder}, Python {platform.python_version()}")
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    yield Finding("torch", "ok", f"{torch.__version__}, {threads}")
    yield Finding("processor", "ok", f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            yield Finding(f"GPU {number}", "ok", f"{device.name}, {device.total_memory / 2**30:.0f} GiB")
        yield _triton()
    elif torch.backends.mps.is_available():
        yield Finding("GPU", "ok", "Apple, through mps; the fused kernels need CUDA")
    elif torch.version.cuda is None:
        remedy = "if there is an NVIDIA GPU: install a CUDA build of torch, see pytorch.org/get-started"
        yield Finding("GPU", "missing", "this torch was built without CUDA", remedy)
    else:
        yield Finding("GPU", "missing", "none that CUDA can use", "if there is one, nvidia-smi says what is wrong")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", "missing", "steps on a GPU use the slower kernels of torch", "pip install triton")
    return Finding("triton", "ok", importlib.metadata.version("triton"))


def _compiler() -> Iterator[Finding]:
    compilers = find_compilers()
    remedy = "install gcc or clang, or: pip install 'gossamer[compiler]'"
    if compilers:
        yield Finding("C compiler", "ok", ", ".join(" ".join(each) for each in compilers))
    else:
        yield Finding("C compiler", "missing", "none on the path", remedy)
    try:
        kernels = load_native()
    except NoCompilerError as error:
        # With a compiler there should be kernels; without one, deployed models run through torch.
        yield Finding("CPU kernels", "broken" if compilers else "missing", " ".join(str(error).split()), remedy)
    else:
        yield Finding("CPU kernels", "ok", f"{kernels.variant}, {kernels.library}")


def _extras() -> Iterator[Finding]:
    wanted = _packages()
    for extra, use in _EXTRAS.items():
        missing = [name for name in wanted.get(extra, ()) if not _is_installed(name)]
        if missing:
            yield Finding(extra, "missing", f"{use}: needs {', '.join(missing)}", f"pip install 'gossamer[{extra}]'")
        else:
            yield Finding(extra, "ok", use)


def _packages() -> dict[str, list[str]]:
    """The packages of each extra, from the metadata of the package. An extra may name others."""
    found: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("gossamer") or ():
        named = re.fullmatch(r"""([\w.-]+).*;.*extra == ['"]([\w-]+)['"].*""", requirement)
        if named and named[1] != "gossamer":
            found.setdefault(named[2], []).append(named[1])
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _data() -> Iterator[Finding]:
    for entry in DATA_SETS:
        try:
            place = entry.locate()
        except DataNotFound as error:  # GOSSAMER_DATA names something that is not a folder
            yield Finding("GOSSAMER_DATA", "broken", str(error), "unset GOSSAMER_DATA, or correct it")
            return
        if place is not None:
            yield Finding(entry.name, "ok", f"in {place}")
        elif entry.name == "digits":
            yield Finding(entry.name, "missing", entry.description, "pip install 'gossamer[demo]'")
        elif entry.kind == "sentences":
            yield Finding(entry.name, "missing", entry.description, "set GOSSAMER_DATA to a folder that has it")
        elif entry.kind == "folder":
            yield Finding(entry.name, "missing", entry.description, "--data-root DIR, or set GOSSAMER_DATA")
        else:
            remedy = "the first run downloads it; or set GOSSAMER_DATA to a folder that has it"
            chosen = os.environ.get("GOSSAMER_DATA")
            yield Finding(entry.name, "missing", f"not in {chosen}" if chosen else "not on this machine", remedy)
