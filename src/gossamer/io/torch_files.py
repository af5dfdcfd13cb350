"""Files of torch.save from anywhere, read without running code and in memory bounded by the size of the file.

`torch.load(weights_only=True)` builds tensors and plain containers and refuses everything else. This alone does not
bound memory and time: an archive may be compressed, some names that torch trusts allocate any size, as in
`bytearray(10 ** 9)`, and a few containers that contain each other expand to any number of values.
"""

import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

PLAIN = re.compile(  # the globals that tensors and plain values are pickled with
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v[23]|parameter)|torch\.storage UntypedStorage|"
    r"torch (Size|\w+Storage|(bfloat|complex|float(?!4_)|int|uint|bool)\w*)"
)
FOREIGN = re.compile(  # those of other programs and of earlier versions of torch
    rf"{PLAIN.pattern}|collections Counter|__builtin__ (set|complex)|builtins (set|complex)|_codecs encode|"
    r"torch (Tensor|device)|torch\.nn\.parameter Parameter|torch\.serialization _get_layout|"
    r"torch\._tensor _rebuild_from_type_v2|torch\._utils _rebuild_(tensor|sparse_tensor|parameter_with_state)|"
    r"torch\._utils _rebuild_meta_tensor_no_storage|torch\.storage TypedStorage|torch\.cuda \w+Storage"
)
_ARCHIVE = b"PK\x03\x04"
_PICKLED = "data.pkl"  # suffix of the pickle in an archive
_LEGACY_PICKLES = 5  # at the start of a file of the earlier format: magic number, version, system, content, storages
_EXTENT = 64  # values per byte of the file, as they may be shared
_DEPTH = 100


def read_torch_file(path: Path, *, allowed: re.Pattern[str] = PLAIN, max_bytes: int | None = None) -> Any:
    """The content of a file of torch.save, on the CPU.

    A `ValueError` refuses globals other than the `allowed` ones, and tensors of more than `max_bytes` in all, by
    default 64 times the size of the file: tensors may be expanded and shared.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            pickles = _of_archive(path, size) if file.read(4) == _ARCHIVE else _of_legacy(file)
            for pickled in pickles:
                _check_names(pickled, allowed)
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")  # of pickles that no version of torch has written, which are refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises all kinds for damaged files
        raise ValueError(_reason(error)) from error
    _check_extent(content, size, _EXTENT * size if max_bytes is None else max_bytes)
    return content


def _of_archive(path: Path, size: int) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = any(each.compress_type != zipfile.ZIP_STORED for each in entries)
        if packed or sum(each.file_size for each in entries) > size:
            raise ValueError(f"expected at most {size} bytes of tensors that are not compressed, got others")
        for entry in entries:
            if entry.filename.endswith(_PICKLED):
                yield archive.read(entry)


def _of_legacy(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The file, once for each of the pickles that it begins with."""
    file.seek(0)
    for _ in range(_LEGACY_PICKLES):
        yield file


def _check_names(pickled: bytes | IO[bytes], allowed: re.Pattern[str]) -> None:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL" and not allowed.fullmatch(str(argument)):
            raise ValueError(f"expected tensors and plain values, got {argument!s:.80}")


def _reason(error: Exception) -> str:
    """The message of an unpickling error, without the advice of torch to trust the file."""
    text = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
    return text.split("\n")[0] or f"expected a file of torch.save, got one that raises {type(error).__name__}"


def _check_extent(tree: Any, size: int, max_bytes: int) -> None:
    """Refuse structures that are small in a file but huge when expanded, such as a list that contains itself."""
    values, of_tensors = 0, 0
    pending: list[tuple[Any, int]] = [(tree, 0)]
    while pending:
        value, depth = pending.pop()
        values += 1
        inner: list[Any] = []
        if isinstance(value, Tensor):
            if value.is_nested:
                raise ValueError("expected tensors with one shape, got a nested tensor")
            of_tensors += value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            inner = [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            inner = [*value]
        pending += [(each, depth + 1) for each in inner]
        if of_tensors > max_bytes:
            raise ValueError(f"expected at most {max_bytes:,} bytes of tensors, got {of_tensors:,}")
        if values + len(pending) > _EXTENT * size:
            raise ValueError(f"expected at most {_EXTENT * size:,} values in a file of {size:,} bytes, got more")
        if depth > _DEPTH:
            raise ValueError(f"expected values nested at most {_DEPTH} deep, got deeper ones")
