"""Every reader of files that others may have written, as a function of bytes, with whole files to begin from."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import random
import socket
import struct
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import gossamer
from fuzz import forge
from fuzz.forge import Forge
from fuzz.limits import Bounds
from fuzz.mutate import mutated_bytes
from gossamer.deployment.runtime import memory
from gossamer.deployment.runtime.capture import capture
from gossamer.deployment.runtime.compiling import content_digest, is_whole
from gossamer.deployment.runtime.native_model import Setting, possible_lanes
from gossamer.io.checkpoints import read_checkpoint
from gossamer.lab import frontier, models, recipes, report_pages, tables
from gossamer.lab.batched.sweeps import begun_batches, checkpoints_of
from gossamer.lab.batched.training import check_state, fill_
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data import Position
from gossamer.lab.data.cifar import CifarSpec, load_cifar
from gossamer.lab.data.files import File
from gossamer.lab.data.folder import load_folder
from gossamer.lab.data.idx import IdxPart, IdxSpec, load_idx
from gossamer.lab.data.pixels import centre_crop, decode, random_crop_flip
from gossamer.lab.data.text import TextSpec, load_text
from gossamer.lab.frontier import Frontier, Point
from gossamer.lab.model_files import open_network
from gossamer.lab.results import comparison_page, records
from gossamer.lab.training import Run, mask_variables, result, snapshot
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.mask_variables import MASK_VARIABLES
from gossamer.lab.training.progress import JsonLines, Status
from gossamer.methods.scl import SCLOptions
from gossamer.report import report
from gossamer.report.page import Page


@dataclass(frozen=True)
class Reader:
    """``read`` is given the bytes of a file and an empty folder; it raises what the reader raises, or AssertionError
    where the reader has returned something that is wrong."""

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Callable[[], list[bytes]]
    forge: Forge
    bounds: Bounds = field(default_factory=Bounds)


# ----------------------------------------------------------------------------------------------------- sparse files


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sparse = torch.randn(20, 30, generator=generator) * (torch.rand(20, 30, generator=generator) > 0.9)
    return {"a": sparse, "b": torch.arange(7), "tied": sparse, "c": torch.ones(2, 3), "h": sparse.half()[:4].clone()}


@cache
def _sparse_seeds() -> list[bytes]:
    found = []
    for how in (
        *({"compress": "none"}, {"compress": "zlib"}, {"compress": "zstd"}, {"values": "int8", "compress": "none"}),
        *({"values": "bfloat16"}, {"negative_zeros": "keep", "network": "lenet300"}),
    ):
        found.append(_written(lambda path, how=how: gossamer.save(_state(), path, **how)))
    return [*found, _written(lambda path: gossamer.save({}, path)), _plain_safetensors()]


def _plain_safetensors() -> bytes:
    return safetensors.torch.save({name: tensor.clone() for name, tensor in _state().items()})


def _written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.safetensors")
        write(path)
        return path.read_bytes()


def _read_sparse(content: bytes, folder: Path) -> object:
    path = folder / "f.safetensors"
    path.write_bytes(content)
    return gossamer.load(path, max_bytes=16 << 20)


# ----------------------------------------------------------------------------------------- checkpoints and states


def _small() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gossamer.Sparsifier(model, optimizer, sparsity=0.5, total_steps=20)


_RUN = Run(model="digits_cnn", model_options={"width": 4}, data="digits", epochs=2, batch_size=8)


def _parts() -> snapshot.Parts:
    model, optimizer, sparsifier = _small()
    task: Any = SimpleNamespace(load_state=lambda state: None, state=dict, source=SimpleNamespace(state=Position()))
    return snapshot.Parts(model, optimizer, sparsifier, task)


@cache
def _checkpoint_seeds() -> list[bytes]:
    found = []
    for steps in (0, 12):
        parts = _parts()
        for _ in range(steps):
            parts.model(torch.randn(4, 6)).square().mean().backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            snapshot.save(checkpoints, _RUN, DistributedContext(torch.device("cpu")), parts, step=steps, seconds=1.0)
            found.append(checkpoints.paths()[0].read_bytes())
        _finish(parts)
    return found


def _finish(parts: snapshot.Parts) -> None:
    assert parts.sparsifier is not None
    _finish_quietly(parts.sparsifier)


def _finish_quietly(sparsifier: gossamer.Sparsifier) -> None:
    """A Sparsifier that is discarded before would warn."""
    with warnings.catch_warnings(), suppress(RuntimeError):  # of weights that are not finite
        warnings.simplefilter("ignore")
        sparsifier.finish()


def _write_checkpoint(content: bytes, folder: Path, step: int, name: str = "checkpoint") -> None:
    path = folder / f"{name}-{step:09d}.pt"
    path.write_bytes(content)
    path.with_suffix(".sha256").write_bytes(hashlib.sha256(content).hexdigest().encode())


def _read_checkpoint(content: bytes, folder: Path) -> object:
    """The damage agrees with its digest; a run goes on from it, or says why not. One that cannot be read is set
    aside."""
    _write_checkpoint(content, folder, 2)
    random_state, parts = torch.get_rng_state(), _parts()
    try:
        return snapshot.restore(Checkpoints(folder), _RUN, DistributedContext(torch.device("cpu")), parts)
    finally:
        torch.set_rng_state(random_state)
        _finish(parts)


def _read_digest(content: bytes, folder: Path) -> None:
    """Of the newest of two checkpoints the digest is damaged: one of them is loaded whatever is in it."""
    for step in (1, 2):
        _write_checkpoint(_short_checkpoint(), folder, step)
    (folder / "checkpoint-000000002.sha256").write_bytes(content)
    assert Checkpoints(folder).load() is not None, "no checkpoint was loaded, though an older one is whole"


@cache
def _foreign_seeds() -> list[bytes]:
    """Checkpoints of other programs, in both formats of torch.save."""
    content = {"epoch": 3, "state_dict": {name: each for name, each in _state().items() if each.is_floating_point()}}
    found = []
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
        found.append(buffer.getvalue())
    return found


def _read_foreign(content: bytes, folder: Path) -> object:
    path = folder / "model.pt"
    path.write_bytes(content)
    found = read_checkpoint(path)
    return _show(report(found).table()) if any(each.ndim > 1 for each in found.values()) else None


def _short_checkpoint() -> bytes:
    stream = io.BytesIO()
    torch.save({"step": 1}, stream)
    return stream.getvalue()


@cache
def _digest_seeds() -> list[bytes]:
    digest = hashlib.sha256(_short_checkpoint()).hexdigest().encode()
    return [digest, digest + b"\n" + b"0" * 64]


@cache
def _batch_seeds() -> list[bytes]:
    tensors = {"weights": torch.ones(2, 5), "step": torch.tensor(3)}
    state = {"format": 3, "runs": [_RUN.run_id], "steps": 3, "seconds": 1.5, "tensors": tensors, "random": {}}
    stream = io.BytesIO()
    torch.save(state, stream)
    return [stream.getvalue()]


def _read_batch(content: bytes, folder: Path) -> object:
    """The checkpoint of a batch, whose damage agrees with its digest."""
    checkpoints = checkpoints_of([_RUN], folder)
    _write_checkpoint(content, folder, 3, checkpoints.name)
    begun_batches({_RUN.run_id: _RUN}, folder)
    state = checkpoints.load()
    if state is not None:
        check_state(state, [_RUN.run_id], 20)
        fill_({"weights": torch.zeros(2, 5)}, state["tensors"])
    return state


# -------------------------------------------------------------------------------- what runs and calls leave behind


def _log_seeds() -> list[bytes]:
    lines = [json.dumps({**asdict(_status(step)), "loss": 0.5}) for step in (1, 2, 3)]
    return ["\n".join(lines).encode(), "\n".join([*lines, lines[0][:20]]).encode()]


def _status(step: int) -> Status:
    return Status(step, 9, 0.5, 2, "sparsify", 0.1, 1.0)


def _read_log(content: bytes, folder: Path) -> None:
    """A resumed run drops the lines of later steps and what is no line, and goes on."""
    log = JsonLines(folder)
    log.path.write_bytes(content)
    log.begin(_status(2))
    log.tell(_status(3))
    steps = [json.loads(line)["step"] for line in log.path.read_text().splitlines()]
    assert all(step <= 2 for step in steps[:-1]), "a line of a later step was kept"


@cache
def _graph() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    return capture(model, (torch.randn(2, 20),))


@cache
def _timing_seeds() -> list[bytes]:
    setting = Setting(possible_lanes(_graph(), 2)[0], 1)
    decision = memory.Decision(setting, {"torch": 2e-6, "native": 1e-6}, {0: {"rows": 1e-6}})
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", GOSSAMER_CACHE=folder):
        memory.remember("a", decision)
        return [(Path(folder) / memory.FILE).read_bytes()]


def _read_timings(content: bytes, folder: Path) -> object:
    """Damaged timings are ignored, with a warning."""
    (folder / memory.FILE).write_bytes(content)
    with patch.dict("os.environ", GOSSAMER_CACHE=str(folder)):
        return memory.recall("a", _graph(), 2, 1)


def _library_seeds() -> list[bytes]:
    """The frame of an ELF file: a header, and a table of sections at the end."""
    header = struct.pack("<4s5B7x2HI3QI6H", b"\x7fELF", 2, 1, 1, 0, 0, 3, 62, 1, 0, 0, 100, 0, 64, 0, 0, 64, 3, 0)
    return [header + bytes(36 + 3 * 64), header.replace(b"\x7fELF\2\1", b"\x7fELF\1\2") + bytes(300)]


def _read_library(content: bytes, folder: Path) -> bool:
    path = folder / "kernels.so"
    path.write_bytes(content)
    content_digest(path)
    return is_whole(path)


# ------------------------------------------------------------------------------------------ run and result files

_RESULT: Mapping[str, Any] = MappingProxyType(
    {
        "accuracy": 0.9,
        "validation_accuracy": None,
        "sparsity": 0.5,
        "nonzeros": 5,
        "weights": 10,
        "seconds": 3.5,
        "complete": True,
        "train_loss": 0.5,
        "diverged": False,
        "config": _RUN.to_dict(),
    }
)


def _show(table: Any) -> None:
    Console(file=io.StringIO(), width=200).print(table)  # with markup, as a user's own would be


def _read_run(content: bytes, folder: Path) -> object:
    path = folder / result.RUN
    path.write_bytes(content)
    return recipes.find(str(path)).run.run_id


def _read_result(content: bytes, folder: Path) -> None:
    (folder / result.RESULT).write_bytes(content)
    found = result.read_result_file(folder)
    _show(tables.of_results([("a", found)]))
    if isinstance(found.get("config"), dict):
        result.read_run(folder / result.RESULT)
    _write_page(folder)
    if not found.get("diverged") and "accuracy" in found:
        _as_text(report_pages.page_of_panels("x", "y", [("z", report_pages.panel_of_sweep([found, _RESULT]))]))


def _read_layers(content: bytes, folder: Path) -> None:
    (folder / result.LAYERS).write_bytes(content)
    _show(result.read_layers(folder).table("x"))
    _write_page(folder)


def _read_beside(name: str) -> Callable[[bytes, Path], None]:
    """A reader of a file beside a result, which `gossamer report` shows on a page."""

    def read(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        _write_page(folder)

    return read


def _write_page(folder: Path) -> None:
    """The page of a run, whose other files are whole."""
    for name, whole in ((result.RESULT, json.dumps(dict(_RESULT)).encode()), (result.LAYERS, _layers()[0])):
        if not (folder / name).exists():
            (folder / name).write_bytes(whole)
    _as_text(report_pages.page_of_run(folder))


def _as_text(page: Page) -> None:
    """What text from files may not do to a page: start a script, or be no text."""
    page.to_html().encode()
    assert "<script>alert" not in "".join(page.parts) + page.plain


def _read_record(content: bytes, folder: Path) -> object:
    (folder / "a.json").write_bytes(content)
    for heading, panel in report_pages.panels_of_comparison([folder]):
        _as_text(report_pages.page_of_panels("x", "y", [(heading, panel)]))
    return comparison_page(records.read_records(folder, ("tier", "options", "hardware")), "final")


def _health_seeds() -> list[bytes]:
    layers = [{"name": name, "gradient_scale": 0.5} for name in ("0.weight", "1.weight")]
    traces = {"steps": [1, 2], "decay": [0.5, None], "nonzeros": [9, 8], "flips": [0, 3]}
    return [json.dumps({**traces, "layers": layers}).encode()]


def _speed_seeds() -> list[bytes]:
    timed = {"median": 0.5, "lower": 0.4, "upper": 0.6, "note": ""}
    failed = {"engine": "openvino", "kind": "dense", "median": None, "lower": None, "upper": None, "note": "none"}
    rows = [{"engine": "torch", "kind": "dense", **timed}, {"engine": "gossamer", "kind": "sparse", **timed}, failed]
    return [json.dumps({"cases": [{"batch": 1, "threads": 1, "rows": rows}]}).encode()]


def _frontier_seeds() -> list[bytes]:
    points = (Point(0.5, 0.9, None, None, 0), Point(0.9, 0.8, 0.79, 0.85, 3))
    return [json.dumps(Frontier("magnitudes", points).to_dict()).encode()]


def _read_curve(content: bytes, folder: Path) -> None:
    """The weights of a frontier, with their mask variables."""
    (folder / MASK_VARIABLES).write_bytes(content)
    model = _small()[0]
    scores, _ = frontier.scores_of(folder, model)
    gossamer.impose(model, frontier.masks_at(scores, 0.5))


@cache
def _curve_seeds() -> list[bytes]:
    model, _, sparsifier = _small()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(12):
            model(torch.randn(4, 6)).square().mean().backward()
            sparsifier._owned[0][0].step()
        mask_variables.write(Path(folder), model, sparsifier)
        found = (Path(folder) / MASK_VARIABLES).read_bytes()
    _finish_quietly(sparsifier)
    return [found]


def _index_seeds() -> list[bytes]:
    return [json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.bin", "c": "a.safetensors"}}).encode()]


def _read_index(content: bytes, folder: Path) -> object:
    """The index of a folder with weights in several files."""
    (folder / "model.safetensors.index.json").write_bytes(content)
    (folder / "a.safetensors").write_bytes(_plain_safetensors())
    (folder / "b.bin").write_bytes(_foreign_seeds()[0])
    return read_checkpoint(folder)


def _layers() -> list[bytes]:
    found = report(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(1, 4))
    return [json.dumps(found.to_dict()).encode()]


def _record() -> list[bytes]:
    about = {"run_id": _RUN.run_id, "tier": "final", "seed": 0, "hardware": {"device": "cpu"}}
    return [json.dumps({**_RESULT, **about, "options": asdict(SCLOptions())}).encode()]


_NETWORKS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "map_fit": {"width": 4, "depth": 2},
        "lstm_lm": {"hidden": 4, "layers": 1},
        "indrnn": {"hidden_size": 4, "layers": 2},
    }
)


def _network_seeds() -> list[bytes]:
    return [json.dumps({"model": name, "model_options": dict(chosen)}).encode() for name, chosen in _NETWORKS.items()]


@cache
def _model_files() -> dict[str, bytes]:
    made = {name: models.create(name, num_classes=5, **chosen) for name, chosen in _NETWORKS.items()}
    return {name: _written(lambda path, model=model: gossamer.save(model, path)) for name, model in made.items()}


def _read_network(content: bytes, folder: Path) -> object:
    """The run file beside a model: says which network, and how large it is."""
    named = (name for name in _NETWORKS if f'"{name}"'.encode() in content)
    (folder / result.MODEL).write_bytes(_model_files()[next(named, "map_fit")])
    (folder / result.RUN).write_bytes(content)
    with (
        patch.object(socket.socket, "connect", side_effect=AssertionError("a file has contacted the network")),
        patch.object(socket, "getaddrinfo", side_effect=AssertionError("a file has contacted the network")),
    ):
        return open_network(folder / result.MODEL, max_bytes=16 << 20)


# ---------------------------------------------------------------------------------------------- data and images


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


_SHAPES = ((5, 4, 3), (5,), (2, 4, 3), (2,))
_IDX = ("train-images", "train-labels", "test-images", "test-labels")


def _idx(shape: tuple[int, ...]) -> bytes:
    pixels = (np.arange(np.prod(shape)) % 3).astype(np.uint8)
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + pixels.tobytes()


def _idx_seeds() -> list[bytes]:
    return [*map(_idx, _SHAPES[:2]), gzip.compress(_idx(_SHAPES[0]), 1)]


def _read_idx(content: bytes, folder: Path) -> None:
    """As the training images and as the training labels, with a checksum that agrees."""
    suffix = ".gz" if content[:2] == b"\x1f\x8b" else ""
    plain = content
    if suffix:
        try:
            plain = gzip.GzipFile(fileobj=io.BytesIO(content)).read(1000)
        except Exception:  # the reader has to say so
            plain = b""
    refused: list[ValueError] = []
    for place in (0, 1):
        held = [_idx(shape) for shape in _SHAPES]
        held[place] = plain
        parts = [IdxPart(n, s, _digest(c), "md5:0") for n, s, c in zip(_IDX, _SHAPES, held, strict=True)]
        spec = IdxSpec("x", ("a", "b", "c"), (0.5,), (0.5,), (parts[0], parts[1], parts[2], parts[3]), ("x",), ())
        (folder / "x").mkdir(exist_ok=True)
        for number, (name, each) in enumerate(zip(_IDX, held, strict=True)):
            stored = content if number == place else gzip.compress(each, 1) if suffix else each
            (folder / "x" / f"{name}{suffix}").write_bytes(stored)
        try:
            load_idx(spec, folder)
        except ValueError as error:
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]


_GRID = 2
_RECORD = 1 + 3072


def _cifar_files() -> dict[str, bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (3 * _GRID * _GRID, 3072), dtype=np.uint8)
    labels = (np.arange(len(pixels)) % 3).astype(np.uint8)
    packed = np.concatenate([labels[:, None], pixels], axis=1)
    batches = {f"bin/{n}.bin": part.tobytes() for n, part in enumerate(np.split(packed, 3))}
    stream = io.BytesIO()
    np.savez(stream, labels=labels)
    grids = {}
    for number in range(3):
        image = io.BytesIO()
        Image.new("RGB", (32 * _GRID, 32 * _GRID), (number, 0, 0)).save(image, "WEBP", lossless=True)
        grids[f"{number}.webp"] = image.getvalue()
    archive = gzip.compress(forge.plain_tar([*batches], [*batches.values()]), 1)
    return {**batches, "all.tar.gz": archive, "labels.npz": stream.getvalue(), **grids}


_cifar = cache(_cifar_files)


def _read_cifar(content: bytes, folder: Path) -> object:
    """In place of the file that it begins like, with a checksum that agrees."""
    names = {b"\x1f\x8b": "all.tar.gz", b"PK": "labels.npz"}
    changed = names.get(content[:2], "0.webp")
    files = {**_cifar(), changed: content}
    layout = ("all.tar.gz",) if changed == "all.tar.gz" else ("labels.npz", "0.webp", "1.webp", "2.webp")
    for name in layout:
        (folder / name).write_bytes(files[name])
    described = {name: File(name, _digest(each), len(each)) for name, each in files.items()}
    spec = CifarSpec(
        name="x",
        class_names=("a", "b", "c"),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        label_bytes=1,
        binary=tuple(described[f"bin/{number}.bin"] for number in range(3)),
        archive=described["all.tar.gz"],
        address="https://example.invalid/all.tar.gz",
        python_version=(),
        grids=tuple(described[f"{number}.webp"] for number in range(3)),
        packed_label_file=described["labels.npz"],
        packed_labels=("labels",),
        grid=_GRID,
    )
    return load_cifar(spec, folder)


def _image(form: str, size: tuple[int, int] = (9, 7), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, 3 if mode in "LP" else None).save(stream, form)
    return stream.getvalue()


def _look_at(content: bytes) -> None:
    image = decode(content, "x")
    centre_crop(image, 8, 10)
    random_crop_flip(image, 8, np.random.default_rng(0))


def _images() -> list[bytes]:
    wide = [_image("PNG", (1, 3000)), _image("PNG", mode="P"), _image("PNG", mode="L")]
    return [*(_image(form) for form in ("PNG", "JPEG", "BMP", "WEBP")), *wide]


_NAMES = ("train/a/1.png", "train/b/2.png", "val/a/3.png", "README")


@cache
def _tar_seeds() -> list[bytes]:
    forms = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    image = _image("PNG", (3, 3))
    long_names = tuple("x" * 90 + "/" + name.replace(".png", f"{'ü' * 40}.png") for name in _NAMES)
    return [
        *(forge.plain_tar(_NAMES, [image] * 4, form) for form in forms),
        *(forge.plain_tar(long_names, [image] * 4, form) for form in forms[1:]),
    ]


@cache
def _image_members() -> frozenset[str]:
    return frozenset(name.partition("/")[2] for name in _NAMES[:3])


def _read_tar(content: bytes, folder: Path) -> None:
    path = folder / "x.tar"
    path.write_bytes(content)
    dataset = load_folder(path)
    for part in (dataset.train, dataset.validation):
        assert part.spans is not None
        for index in range(min(len(part), 8)):
            span = part.spans[index].tolist()
            assert min(span) >= 0, "an image lies outside of its archive"
            assert sum(span) <= len(content), "an image lies outside of its archive"
            try:
                _look_at(part.read(index))
            except ValueError:
                continue  # damaged inside, which is a matter of its own format


def _read_folder(content: bytes, folder: Path) -> None:
    """Each line is the name of an image; the rest of the line, after a tab, what is in it."""
    for line in content.split(b"\n")[:20]:
        name, _, held = line.partition(b"\t")
        parts = [part[:100] for part in name.replace(b"\0", b"").split(b"/") if part not in (b"", b".", b"..")][:4]
        if parts:
            place = folder / "set" / Path(*(part.decode("utf-8", "surrogateescape") for part in parts))
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(held)
            except OSError:
                continue  # a file is where a folder would be
    dataset = load_folder(folder / "set")
    dataset.digest()
    for part in (dataset.train, dataset.validation):
        for index in range(len(part)):
            try:
                _look_at(part.read(index))
            except ValueError:
                continue


def _folder_seeds() -> list[bytes]:
    lines = [f"{name}\t".encode() + b"GIF89a" for name in _NAMES]
    return [b"\n".join(lines), b"\n".join(each.replace(b"png", b"JPEG") for each in lines)]


_TEXTS = (b"a b a\nc\n", b"b d\n", b"a\n")


def _read_text(content: bytes, folder: Path) -> object:
    """As the training text, or as the archive of all three, with a checksum that agrees."""
    packed = content[:6] == b"\xfd7zXZ\0"
    names = ("train.txt", "valid.txt", "test.txt")
    held = _TEXTS if packed else (content, *_TEXTS[1:])
    parts = tuple(File(name, _digest(each), len(each)) for name, each in zip(names, held, strict=True))
    archive = File("all.tar.xz", _digest(content), len(content)) if packed else None
    for name, each in (("all.tar.xz", content),) if packed else zip(names, held, strict=True):
        (folder / name).write_bytes(each)
    return load_text(TextSpec("x", (parts[0], parts[1], parts[2]), ("", "", ""), archive=archive), folder)


@forge.or_anywhere
def _forge_text(content: bytes, rng: random.Random) -> bytes:
    if content[:6] != b"\xfd7zXZ\0":
        return forge.text(content, rng)
    plain = lzma.decompress(content)
    return lzma.compress(forge.tar_archive(plain, rng), preset=0)


def _texts() -> list[bytes]:
    packed = forge.plain_tar(("train.txt", "valid.txt", "test.txt"), _TEXTS)
    return [_TEXTS[0], "ä ö\u2028ü\n\n x".encode(), lzma.compress(packed, preset=0)]


_IMAGES = Bounds(seconds=3.0, seconds_per_byte=1e-4, memory=160 << 20, memory_per_byte=16_384)

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        reader.name: reader
        for reader in (
            Reader("sparse", _read_sparse, _sparse_seeds, forge.sparse_file, Bounds(memory=80 << 20)),
            Reader("checkpoint", _read_checkpoint, _checkpoint_seeds, forge.torch_file),
            Reader("foreign", _read_foreign, _foreign_seeds, forge.torch_file),
            Reader("digest", _read_digest, _digest_seeds, forge.text),
            Reader("batch", _read_batch, _batch_seeds, forge.torch_file),
            Reader("log", _read_log, _log_seeds, forge.text),
            Reader("timings", _read_timings, _timing_seeds, forge.or_anywhere(forge.json_file)),
            Reader("library", _read_library, _library_seeds, mutated_bytes),
            Reader("run", _read_run, lambda: [json.dumps(_RUN.to_dict()).encode()], forge.or_anywhere(forge.json_file)),
            Reader(
                "result", _read_result, lambda: [json.dumps(dict(_RESULT)).encode()], forge.or_anywhere(forge.json_file)
            ),
            Reader("layers", _read_layers, _layers, forge.or_anywhere(forge.json_file)),
            *(
                Reader(name.partition(".")[0], _read_beside(name), seeds, forge.or_anywhere(forge.json_file))
                for name, seeds in (
                    ("health.json", _health_seeds),
                    ("speed.json", _speed_seeds),
                    ("frontier.json", _frontier_seeds),
                )
            ),
            Reader("shown_log", _read_beside("log.jsonl"), _log_seeds, forge.text),
            Reader("mask_variables", _read_curve, _curve_seeds, forge.sparse_file),
            Reader("index", _read_index, _index_seeds, forge.or_anywhere(forge.json_file)),
            Reader("record", _read_record, _record, forge.or_anywhere(forge.json_file)),
            Reader(
                "network",
                _read_network,
                _network_seeds,
                forge.or_anywhere(forge.json_file),
                Bounds(4.0, memory=96 << 20),
            ),
            Reader("idx", _read_idx, _idx_seeds, forge.packed_idx),
            Reader(
                "cifar",
                _read_cifar,
                lambda: [_cifar()[n] for n in ("all.tar.gz", "labels.npz", "0.webp")],
                forge.cifar_file,
                _IMAGES,
            ),
            Reader("tar", _read_tar, _tar_seeds, forge.tar_archive, _IMAGES),
            Reader("folder", _read_folder, _folder_seeds, forge.text, _IMAGES),
            Reader("image", lambda content, folder: _look_at(content), _images, forge.image_file, _IMAGES),
            Reader("text", _read_text, _texts, _forge_text),
        )
    }
)
