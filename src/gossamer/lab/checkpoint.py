"""Checkpoints of runs and of batches of runs, which survive a kill at any moment, a full disk and a corrupted file.

A checkpoint is written to a temporary file, synchronized to disk and only then renamed, so a file with the final name
is complete. Its SHA-256 is stored next to it. If a file does not match its digest, or the digest is damaged, the file
is renamed, and the previous checkpoint is used, with a warning. The two newest are kept. Only files with exactly these
names are ever removed. They are plain `torch.save` files, readable with `torch.load(path, weights_only=True)`.
"""

import hashlib
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gossamer.io.atomic import replacing, through_links
from gossamer.io.torch_files import read_torch_file
from gossamer.provenance import cpu_name

_OF_A_RUN = r"(run|result|layers|health)\.json|log\.jsonl|model(\.sparse)?\.safetensors"  # what a run writes besides
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_KEPT = 2
_DAMAGED = ".damaged"  # suffix of a damaged file
_SHARD = "__shard__"  # marks the local shard of a tensor


class Checkpoints:
    """The checkpoints of one run, or of one batch of runs, in one folder: NAME-STEP.pt."""

    def __init__(self, folder: Path, name: str = "checkpoint") -> None:
        self.folder, self.name = folder, name

    def paths(self) -> list[Path]:
        """The existing checkpoints, newest first."""
        return sorted(self._own("pt"), reverse=True)

    def _own(self, ending: str) -> list[Path]:
        """Files with exactly the names of checkpoints or of their digests."""
        name = re.compile(rf"{re.escape(self.name)}-\d{{9}}\.{ending}")
        return [path for path in self.folder.glob(f"{self.name}-*.{ending}") if name.fullmatch(path.name)]

    def next_time(self) -> str:
        """What the same command would do now, in words."""
        kept = self.paths()
        return f"it resumes from {kept[0].name}" if kept else "it starts over, as there is no checkpoint"

    def save(self, state: dict[str, Any], step: int) -> bool:
        """Write a checkpoint. On a disk error, warn and return False; training can continue."""
        path = self.folder / f"{self.name}-{step:09d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: torch.save(state, file), before=_write_digest)
        except (OSError, RuntimeError) as error:
            if not path.exists():  # otherwise the digest still belongs to the current file
                _digest_path(path).unlink(missing_ok=True)
            kept = self.paths()
            last = f"the last good one is {kept[0].name}" if kept else "there is none so far"
            warnings.warn(
                f"no checkpoint at step {step}: writing {path} failed ({error}); {last}; free some space on the disk",
                stacklevel=2,
            )
            return False
        before = [each for each in self.paths() if each != path]
        for old in before[_KEPT - 1 :]:
            _remove(old)
        return True

    def load(self) -> dict[str, Any] | None:
        """The newest intact checkpoint, or None. Removes unfinished files that a kill left behind.

        A damaged checkpoint is renamed, so that it can be inspected but no longer counts as a checkpoint.
        """
        written = rf"{re.escape(self.name)}-\d{{9}}\.(pt|sha256)|{_OF_A_RUN}"
        for unfinished in self.folder.glob(".*.part"):
            if re.fullmatch(rf"\.({written})\.[0-9a-f]{{12}}\.part", unfinished.name):
                unfinished.unlink(missing_ok=True)
        paths = self.paths()
        for path in paths:
            problem = _problem(path)
            if problem is None:
                try:
                    return _read(path)
                except Exception as error:  # whatever the error, an older file may be intact
                    problem = f"cannot be read: {error}"
            aside = path.replace(path.with_name(path.name + _DAMAGED))
            remedy = "starting over" if path == paths[-1] else "resuming from the previous one"
            warnings.warn(f"the checkpoint {path} {problem}; it is now called {aside.name}; {remedy}", stacklevel=2)
        return None

    def peek(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole, with nothing moved or removed."""
        for path in self.paths():
            if _problem(path) is None:
                try:
                    return _read(path)
                except Exception:  # `load` warns about it
                    continue
        return None

    def clear(self) -> None:
        """Remove all checkpoints of a complete run. Files without a digest are not ours and are kept."""
        for digest in self._own("sha256"):
            path = digest.with_suffix(".pt")
            path.with_name(path.name + _DAMAGED).unlink(missing_ok=True)
            _remove(path)


def write_atomically(
    path: Path,
    write: Callable[[IO[bytes]], object],
    *,
    before: Callable[[Path, str], object] = lambda path, digest: None,
) -> str:
    """Write a file with `write`, and rename it to `path` only when it is complete and on disk. Returns its SHA-256.

    `before` is called with the path and the digest just before the file is renamed. If `path` is a link, its target is
    written.
    """
    path = through_links(path)
    with replacing(path, before=lambda: before(path, hashing.digest.hexdigest())) as file:
        hashing = _Hashing(file)
        try:
            write(hashing)  # type: ignore[arg-type]
        except RuntimeError:  # an error of the torch writer that follows from the first one
            if hashing.error is None:
                raise
        if hashing.error is not None:
            raise hashing.error
    return hashing.digest.hexdigest()


def remove_unfinished(path: Path) -> None:
    """Remove unfinished files of earlier attempts to write this one, which no other process writes at the moment."""
    unfinished = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.part")
    for each in path.parent.glob(".*.part"):
        if unfinished.fullmatch(each.name):
            each.unlink(missing_ok=True)


class _Hashing:
    """A file that hashes everything written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None  # the torch writer may suppress it

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_digest(path: Path, digest: str) -> None:
    """Write the digest of the new file in addition to that of the current one, which is valid until the rename."""
    before = _digests(path)[:1] if path.exists() else []
    write_atomically(_digest_path(path), lambda file: file.write("\n".join([digest, *before]).encode()))


def _digests(path: Path) -> list[str]:
    """The valid digests of a checkpoint; none if their file is missing or damaged."""
    try:
        lines = _digest_path(path).read_bytes()[:1024].split()
    except OSError:
        return []
    return [line.decode() for line in lines] if all(_DIGEST.fullmatch(line) for line in lines) else []


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _digest_path(path).unlink(missing_ok=True)


def _problem(path: Path) -> str | None:
    digest_name = _digest_path(path).name
    expected = _digests(path)
    if not expected:
        found = "a damaged one" if _digest_path(path).exists() else "none"
        return f"cannot be trusted (expected its SHA-256 in {digest_name}, got {found})"
    try:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error})"
    return None if got in expected else f"is corrupted (expected SHA-256 {expected[0][:12]}…, got {got[:12]}…)"


def _read(path: Path) -> dict[str, Any]:
    state = read_torch_file(path)
    if not isinstance(state, dict):
        raise ValueError(f"expected a table of values, got {type(state).__name__}")
    return state


# --- the random number generators ---


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """The state of every generator that training on `device` uses, as tensors and plain values.

    Of GPUs, only `device` is read: reading the others would allocate memory on each of them.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else [],
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
    }


def set_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    torch.set_rng_state(states["torch"])
    if device is not None and device.type == "cuda" and states["cuda"]:
        torch.cuda.set_rng_state(states["cuda"][0], device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


# --- the machine ---


def machine() -> dict[str, int | str]:
    """What decides, on a CPU, in which order numbers are added up, and so the last bits of a result."""
    return {"threads": torch.get_num_threads(), "processor": cpu_name()}


def warn_of_another_machine(before: Any) -> None:
    now = machine()
    if not isinstance(before, dict) or before.keys() != now.keys():  # a checkpoint of an earlier version
        return
    changes = [
        f"{name} {value} instead of {before[name]!s:.80}" for name, value in now.items() if before[name] != value
    ]
    if changes:
        warnings.warn(
            f"training resumes with {', '.join(changes)}: sums are added up in another order, so its last bits will "
            "differ from those of an uninterrupted run",
            stacklevel=3,
        )


# --- sharded tensors ---


def unshard(tree: Any) -> Any:
    """The same tree with each DTensor replaced by its local shard and placement."""
    if isinstance(tree, DTensor):
        places = [placement.dim if isinstance(placement, Shard) else None for placement in tree.placements]
        shape, stride = list(tree.shape), list(tree.stride())
        return {_SHARD: tree.to_local().detach().cpu(), "places": places, "shape": shape, "stride": stride}
    if isinstance(tree, Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: unshard(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(unshard(value) for value in tree)
    return tree


def reshard(tree: Any, mesh: DeviceMesh | None) -> Any:
    """The inverse of `unshard` on `mesh`."""
    if isinstance(tree, dict) and _SHARD in tree:
        assert mesh is not None
        return DTensor.from_local(
            tree[_SHARD].to(mesh.device_type),
            mesh,
            [Replicate() if dim is None else Shard(dim) for dim in tree["places"]],
            run_check=False,
            shape=torch.Size(tree["shape"]),
            stride=tuple(tree["stride"]),
        )
    if isinstance(tree, dict):
        return {key: reshard(value, mesh) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(reshard(value, mesh) for value in tree)
    return tree
