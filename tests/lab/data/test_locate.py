"""The order of the search, and downloads that are complete or not there at all."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gossamer.lab.data import locate
from gossamer.lab.data.files import DataNotFound, File
from gossamer.lab.data.locate import Download, Layout, fetch, read_first, search_folders

CONTENT = b"the content of a file"
FILE = File("sub/x.bin", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", len(CONTENT))
LAYOUT = Layout("plain files", ("x.bin", "y.bin"), lambda folder: (folder / "x.bin").read_text())


def put(folder: Path, text: str, names: tuple[str, ...] = ("x.bin", "y.bin")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


def test_folders_come_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "pyproject.toml").parent.mkdir()
    (tmp_path / "a" / "pyproject.toml").touch()
    named, shared, system, cache = (
        tmp_path / "named",
        tmp_path / "shared" / "data",
        tmp_path / "system",
        tmp_path / "cache",
    )
    put(cache, "cache")
    assert read_first("s", [LAYOUT], []) == "cache"
    put(system, "system")
    assert read_first("s", [LAYOUT], [], system=system) == "system"
    put(shared, "shared")
    assert read_first("s", [LAYOUT], [], system=system) == "shared"
    put(named, "named")
    monkeypatch.setenv("GOSSAMER_DATA", str(named))
    assert read_first("s", [LAYOUT], [], system=system) == "named"
    assert search_folders() == (named, shared, cache)
    put(tmp_path / "root", "root")
    assert read_first("s", [LAYOUT], [], root=tmp_path / "root", system=system) == "root"


def test_a_set_missing_in_the_first_folder_is_taken_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "named", "half", ("x.bin",))
    put(tmp_path / "cache", "whole")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "named"))
    assert read_first("s", [LAYOUT], []) == "whole"


def test_a_missing_set_says_where_and_what(tmp_path: Path) -> None:
    put(tmp_path / "cache", "half", ("x.bin",))
    with pytest.raises(DataNotFound) as raised:
        read_first("some_set", [LAYOUT, Layout("an archive", ("z.tar",), str)], [], hint=lambda f: f"look at {f}")
    message = str(raised.value)
    for part in ("'some_set'", str(tmp_path / "cache"), "x.bin, y.bin), or an archive", "GOSSAMER_DATA"):
        assert part in message
    assert "plain files without y.bin" in message
    assert f"look at {tmp_path / 'cache'}" in message


def test_a_set_missing_in_an_explicit_root_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"Put the files there, or name the .* root \(data_root of a run\)$"):
        read_first("some_set", [LAYOUT], [], root=tmp_path)


def test_a_folder_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFound, match=r"expected root \(data_root of a run\) to name a folder"):
        read_first("s", [LAYOUT], [], root=tmp_path / "nowhere")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataNotFound, match="expected GOSSAMER_DATA to name a folder"):
        read_first("s", [LAYOUT], [])


def address(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return path.as_uri()


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_download_is_checked_then_named(tmp_path: Path) -> None:
    download = Download(FILE, (address(tmp_path / "source", CONTENT),))
    target = fetch(download, tmp_path / "to")
    assert target == tmp_path / "to" / "sub" / "x.bin"
    assert target.read_bytes() == CONTENT
    assert leftovers(tmp_path / "to") == ["x.bin"]
    (tmp_path / "source").unlink()
    assert fetch(download, tmp_path / "to") == target, "a file that is there is not fetched again"


@pytest.mark.parametrize("wrong", [CONTENT[:-1], CONTENT + b"more", b"X" + CONTENT[1:], b""])
def test_a_wrong_download_leaves_nothing(tmp_path: Path, wrong: bytes) -> None:
    download = Download(FILE, (address(tmp_path / "source", wrong),))
    with pytest.raises(ConnectionError, match="source: expected"):
        fetch(download, tmp_path / "to")
    assert leftovers(tmp_path / "to") == []


def test_the_next_address_is_tried(tmp_path: Path) -> None:
    bad, good = address(tmp_path / "bad", b"bad"), address(tmp_path / "good", CONTENT)
    missing = (tmp_path / "missing").as_uri()
    assert fetch(Download(FILE, (missing, bad, good)), tmp_path / "to").read_bytes() == CONTENT


def test_a_missing_set_is_downloaded_into_the_cache(tmp_path: Path) -> None:
    layout = Layout("a file", ("sub/x.bin",), lambda folder: (folder / "sub/x.bin").read_bytes())
    download = Download(FILE, (address(tmp_path / "source", CONTENT),))
    assert read_first("s", [layout], [download]) == CONTENT
    assert leftovers(tmp_path / "cache") == ["x.bin"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataNotFound):
        read_first("s", [layout], [download], root=empty)
    assert leftovers(empty) == [], "nothing is downloaded into a folder the caller named"


def test_a_failed_download_is_told(tmp_path: Path) -> None:
    download = Download(FILE, (address(tmp_path / "source", b"not it"),))
    with pytest.raises(DataNotFound, match=r"the download failed: .*source: expected sha256"):
        read_first("s", [Layout("a file", ("sub/x.bin",), str)], [download])


@pytest.fixture
def server_that_hangs_up() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:10])

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_broken_connection_leaves_nothing(tmp_path: Path, server_that_hangs_up: str) -> None:
    with pytest.raises(ConnectionError):
        fetch(Download(FILE, (server_that_hangs_up,)), tmp_path / "to")
    assert leftovers(tmp_path / "to") == []


@pytest.mark.skipif(sys.platform != "linux", reason="the folder differs by system")
def test_the_cache_follows_the_systems_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert locate.cache_folder() == Path("/some/where/gossamer/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert locate.cache_folder() == Path.home() / ".cache" / "gossamer" / "data"
