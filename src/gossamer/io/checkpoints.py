"""The tensors of a checkpoint from another program: safetensors, torch.save, a Hugging Face folder.

Files of torch.save are pickles, which can run code. ``torch_files`` reads only tensors and plain containers from them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.io.container import parse_json
from gossamer.io.reader import default_limit
from gossamer.io.sparse_file import load
from gossamer.io.torch_files import FOREIGN, read_torch_file

# Names of the weight file in a folder, best first; an index lists the files of sharded weights.
_IN_A_FOLDER = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("adapter_model.safetensors", "model.sparse.safetensors"),
)
# Keys of the weights in larger checkpoints of trainers, best first.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights")
_MAGIC = (b"PK\x03\x04", b"\x80")  # of the two formats of torch.save: a zip archive, and a bare pickle
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")  # DistributedDataParallel, torch.compile
_INDEX_LIMIT = 64 << 20


def read_checkpoint(path: Path, *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """All tensors of a file or folder, by name, on the CPU.

    A weight that torch.nn.utils.prune has split into ``weight_orig`` and ``weight_mask`` is returned as their
    product, and the prefixes of wrappers are removed. More than ``max_bytes`` of tensors are refused, by default 1024
    times the size of the files and at least 64 MiB.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a checkpoint, got {path}, which does not exist")
    tensors: dict[str, Tensor] = {}
    files = _files(path)
    left = default_limit(sum(file.stat().st_size for file in files)) if max_bytes is None else max_bytes
    for file in files:
        found = _read_file(file, left)
        left -= sum(each.numel() * each.element_size() for each in found.values())
        tensors |= found
    if not tensors:
        raise ValueError(f"expected tensors in {path}, got none: save the state_dict() of the model")
    return effective(_unwrapped(tensors))


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like a checkpoint for `read_checkpoint`."""
    if path.is_dir():
        return any((path / name).is_file() for name in _IN_A_FOLDER)
    return path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def effective(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The effective weights of a model: each pair of torch.nn.utils.prune as its product."""
    found = dict(tensors)
    for name in tensors:
        base = name.removesuffix("_orig")
        mask, weight = tensors.get(f"{base}_mask"), tensors[name]
        if base == name or mask is None or mask.shape != weight.shape:
            continue
        if weight.is_floating_point() and weight.element_size() > 1:  # torch does not multiply float8
            found[base] = found.pop(name) * found.pop(f"{base}_mask")
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        named = next((path / name for name in _IN_A_FOLDER if (path / name).is_file()), None)
        if named is None:
            raise ValueError(
                f"expected a folder with weights in it ({_IN_A_FOLDER[0]}, {_IN_A_FOLDER[2]} or an index), got {path}: "
                "name the file"
            )
        path = named
    return _listed(path) if path.name.endswith(".index.json") else [path]


def _listed(index: Path) -> list[Path]:
    """The files in an index, which must be in the same folder."""
    if index.stat().st_size > _INDEX_LIMIT:
        raise ValueError(f"expected an index of at most {_INDEX_LIMIT} bytes, got {index}, which is larger")
    values = parse_json(index.read_bytes(), index, "an index of weights")
    names = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"expected a weight_map from tensors to files in {index}, got something else")
    files = list(dict.fromkeys(names.values()))
    outside = [name for name in files if Path(name).name != name or name in ("", "..") or "\0" in name]
    if outside:
        raise ValueError(f"expected files next to {index} in its weight_map, got {outside[0]!r}")
    return [index.with_name(name) for name in files]


def _read_file(path: Path, max_bytes: int) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load(path, max_bytes=max_bytes)
    with path.open("rb") as file:
        begin = file.read(4)
    if not begin.startswith(_MAGIC):
        return load(path, max_bytes=max_bytes)
    try:
        content = read_torch_file(path, allowed=FOREIGN, max_bytes=max_bytes)
    except ValueError as error:
        raise ValueError(
            f"expected a file of torch.save with only tensors, got {path}, which holds other objects, claims more than "
            f"it has, or is damaged ({error}). It is not read, as it could run code: save model.state_dict() instead"
        ) from error
    return {name: each if each.layout is torch.strided else each.to_dense() for name, each in _tensors_in(content)}


def _tensors_in(content: Any) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a state dict, or of the state dict in a larger checkpoint."""
    if not isinstance(content, Mapping):
        return
    own = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    inner = [name for name, value in content.items() if isinstance(value, Mapping)]
    if not any(value.ndim > 1 for value in own.values()) and inner:
        known = [name for name in _NESTED if name in inner]
        candidates = [dict(_tensors_in(content[name])) for name in (known or inner)]
        own = max(candidates, key=len) if not known else candidates[0] or max(candidates, key=len)
    for name, value in own.items():
        if not value.is_meta:
            yield name, value.detach()


def _unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the prefixes of wrappers that all of them have."""
    prefix = _WRAPPERS.match(os.path.commonprefix([*tensors]))  # noqa: RUF071 (names, not paths)
    length = prefix.end() if prefix else 0
    return {name[length:]: value for name, value in tensors.items()}
