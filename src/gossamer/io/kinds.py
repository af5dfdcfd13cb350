"""What a file is, by its first bytes: for messages about a file in the wrong place."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["pickle", "torch", "safetensors", "json", "run", "folder"]
IN_WORDS: dict[Kind, str] = {
    "pickle": "a pickle, which can run code and is not read",
    "torch": "a file of torch.save",
    "safetensors": "a safetensors file",
    "json": "a JSON file",
    "run": "the folder of a run",
    "folder": "a folder",
}
_OF_A_RUN = ("result.json", "run.json")


def kind_of(path: Path) -> Kind | None:
    """The kind of a file or folder; None if it does not exist or is something else."""
    if path.is_dir():
        return "run" if any((path / name).is_file() for name in _OF_A_RUN) else "folder"
    try:
        with path.open("rb") as file:
            begin = file.read(16)
    except OSError:
        return None
    if begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= path.stat().st_size:
        return "safetensors"
    if begin.startswith(b"PK\x03\x04"):
        return "torch"
    if begin[:1] == b"\x80" and begin[1:2] in b"\x02\x03\x04\x05":
        return "pickle"
    return "json" if begin.lstrip()[:1] in (b"{", b"[") else None


def in_words(path: Path) -> str | None:
    """The kind of a file for a message."""
    kind = kind_of(path)
    return None if kind is None else IN_WORDS[kind]
