"""Truncated, corrupted and malicious files are refused by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from gossamer.lab.data.files import CorruptData, File, gunzip, read_checked, read_tar_members

CONTENT = bytes(range(256)) * 4


def file(content: bytes = CONTENT) -> File:
    return File("some.bin", f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "some.bin").write_bytes(CONTENT)
    assert read_checked(tmp_path, file()) == CONTENT
    md5 = File("some.bin", f"md5:{hashlib.md5(CONTENT).hexdigest()}")
    assert read_checked(tmp_path, md5) == CONTENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT[:-1], "truncated: expected 1024 bytes, got 1023"),
        (b"", "truncated: expected 1024 bytes, got 0"),
        (CONTENT + b"x", "too long: expected 1024 bytes, got 1025"),
        (b"x" + CONTENT[1:], "corrupted: expected sha256"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "some.bin").write_bytes(content)
    with pytest.raises(CorruptData, match=message) as raised:
        read_checked(tmp_path, file())
    assert str(tmp_path / "some.bin") in str(raised.value)
    assert "fetch it again" in str(raised.value)


def test_gunzip_gives_exactly_what_was_promised() -> None:
    packed = gzip.compress(CONTENT)
    assert gunzip(packed, 1024, "x.gz") == CONTENT
    with pytest.raises(CorruptData, match=r"x\.gz: expected 1000 bytes after decompression, got more than 1000"):
        gunzip(packed, 1000, "x.gz")
    with pytest.raises(CorruptData, match="expected 2000 bytes after decompression, got 1024"):
        gunzip(packed, 2000, "x.gz")
    with pytest.raises(CorruptData, match="not a complete gzip file"):
        gunzip(packed[:-12], 1024, "x.gz")
    with pytest.raises(CorruptData, match="not a complete gzip file"):
        gunzip(b"plain text", 1024, "x.gz")


def archive(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tar_members_are_read_in_memory(mode: str) -> None:
    content = archive({"./a/one": b"11", "a/two": b"222", "other": b"xxxx"}, mode)
    assert read_tar_members(content, {"a/one": 2, "a/two": 3}, "t") == {"a/one": b"11", "a/two": b"222"}


def test_bad_archives_are_refused() -> None:
    content = archive({"one": b"11"})
    with pytest.raises(CorruptData, match="expected it to hold two"):
        read_tar_members(content, {"one": 2, "two": 3}, "t")
    with pytest.raises(CorruptData, match="expected one to be a file of 3 bytes, got 2"):
        read_tar_members(content, {"one": 3}, "t")
    with pytest.raises(CorruptData, match="not a complete tar archive"):
        read_tar_members(content[: len(content) // 2], {"one": 2}, "t")
    packed = archive({"one": b"1" * 5000}, "w:xz")
    with pytest.raises(CorruptData, match="not a complete tar archive"):
        read_tar_members(packed[:80], {"one": 5000}, "t")


def test_a_link_in_an_archive_is_not_followed() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        link = tarfile.TarInfo("one")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(CorruptData, match="expected one to be a file"):
        read_tar_members(stream.getvalue(), {"one": 0}, "t")
