"""The tensors of a checkpoint from another program: safetensors, torch.save, a Hugging Face folder.

Files of torch.save are pickles, which can run code. They are read with ``weights_only=True``, which builds tensors and
plain containers and refuses everything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.io.container import parse_json
from gossamer.io.reader import default_limit
from gossamer.io.sparse_file import load

# Names of the weight file in a folder, best first; an index lists the files of sharded weights.
_IN_A_FOLDER = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("adapter_model.safetensors", "model.sparse.safetensors"),
)
# Keys of the weights in larger checkpoints of trainers, best first.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights")
_MAGIC = (b"PK\x03\x04", b"\x80")  # of the two formats of torch.save: a zip archive, and a bare pickle
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
_INDEX_LIMIT = 64 << 20


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a file or folder, by name, on the CPU.

    A weight that torch.nn.utils.prune has split into ``weight_orig`` and ``weight_mask`` is returned as their
    product, and the prefixes of wrappers are removed.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a checkpoint, got {path}, which does not exist")
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        tensors |= _read_file(file)
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
        mask = tensors.get(f"{base}_mask")
        if base != name and mask is not None and mask.shape == tensors[name].shape:
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
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise ValueError(f"expected files next to {index} in its weight_map, got {outside[0]!r}")
    return [index.with_name(name) for name in files]


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load(path)
    with path.open("rb") as file:
        begin = file.read(4)
    if not begin.startswith(_MAGIC):
        return load(path)
    try:
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")  # of pickles that no version of torch has written, which are refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises all kinds for damaged files
        raise ValueError(
            f"expected a file of torch.save with only tensors, got {path}, which holds other objects or is damaged. "
            "Such a file could run code, so it is not read: save model.state_dict() instead"
        ) from error
    tensors = dict(_tensors_in(content))
    limit = default_limit(path.stat().st_size)
    if (size := sum(each.numel() * each.element_size() for each in tensors.values())) > limit:
        # A sparse or expanded tensor of a few bytes can have any size.
        raise ValueError(
            f"expected at most {limit:,} bytes of tensors in {path}, got {size:,}: save them as safetensors"
        )
    return {name: each if each.layout is torch.strided else each.to_dense() for name, each in tensors.items()}


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


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without a common prefix from a wrapper."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            return _unwrapped({name.removeprefix(prefix): value for name, value in tensors.items()})
    return tensors
