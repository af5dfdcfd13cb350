"""A reader with a fault that only coverage leads to: a word of three letters, one line for each."""

from __future__ import annotations

from pathlib import Path


def read(content: bytes, folder: Path) -> None:
    if content[:1] != b"s":
        raise ValueError("expected a word that begins with s, got another one")
    if content[1:2] != b"p":
        raise ValueError("expected a word that goes on with p, got another one")
    if content[2:3] == b"a":
        raise KeyError("planted")
