"""Word ids, columns and windows; tiny text sets written here, the real one where it is."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import torch

from gossamer.lab.data import CorruptData, DataNotFound, Position, TextBatches
from gossamer.lab.data.files import File
from gossamer.lab.data.text import PTB, WIKITEXT2, TextSpec, batchify, encode, load_text, windows

TEXTS = {"t/train.txt": " the cat \n \n the dog \n", "t/valid.txt": "a cat\n", "t/test.txt": "a bird é"}
VOCABULARY = ("the", "cat", "<eos>", "dog", "a", "bird", "é")
STREAMS = [[0, 1, 2, 2, 0, 3, 2], [4, 1, 2], [4, 5, 6, 2]]


def described(path: str, content: bytes) -> File:
    return File(path, f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def tar_xz() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as tar:
        for name, text in TEXTS.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


def spec(archive: bytes) -> TextSpec:
    train, valid, test = (described(name, text.encode()) for name, text in TEXTS.items())
    return TextSpec(
        "tiny", (train, valid, test), ("", "", ""), (("o/1", "o/2", "o/3"),), described("t.tar.xz", archive)
    )


@pytest.mark.parametrize("layout", ["plain", "other names", "archive"])
def test_all_layouts_give_the_same_set(tmp_path: Path, layout: str) -> None:
    archive = tar_xz()
    if layout == "archive":
        (tmp_path / "t.tar.xz").write_bytes(archive)
    else:
        names = TEXTS if layout == "plain" else ("o/1", "o/2", "o/3")
        for name, text in zip(names, TEXTS.values(), strict=True):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(text.encode())
    dataset = load_text(spec(archive), tmp_path)
    assert dataset.vocabulary == VOCABULARY
    assert [dataset.train.tolist(), dataset.validation.tolist(), dataset.test.tolist()] == STREAMS


def test_damaged_text_is_refused(tmp_path: Path) -> None:
    archive = tar_xz()
    (tmp_path / "t.tar.xz").write_bytes(archive[:-1])
    with pytest.raises(CorruptData, match=r"t\.tar\.xz is truncated"):
        load_text(spec(archive), tmp_path)
    (tmp_path / "t").mkdir()
    for name in TEXTS:
        (tmp_path / name).write_bytes(b"\xff\xfe")
    latin = described("t/train.txt", b"\xff\xfe")
    parts = tuple(dataclasses.replace(latin, path=name) for name in TEXTS)
    with pytest.raises(CorruptData, match="expected UTF-8"):
        load_text(dataclasses.replace(spec(archive), parts=parts), tmp_path)  # type: ignore[arg-type]


def test_encode_handles_no_text_and_no_last_newline() -> None:
    (empty, one, two), words = encode(["", "a", "a\n"])
    assert empty.tolist() == []
    assert one.tolist() == two.tolist() == [0, 1]
    assert words == ("a", "<eos>")


def test_batchify_cuts_into_columns() -> None:
    columns = batchify(torch.arange(11), 3)
    assert columns.t().tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for batch_size in (0, 6):
        with pytest.raises(ValueError, match="lower batch_size"):
            batchify(torch.arange(11), batch_size)


def test_windows_cover_every_prediction_once() -> None:
    columns = batchify(torch.arange(40), 2)
    pairs = [
        (int(a), int(b))
        for tokens, targets in windows(columns, 7)
        for a, b in zip(tokens.flatten(), targets.flatten(), strict=True)
    ]
    assert sorted(pairs) == [(i, i + 1) for i in range(39) if i != 19]
    assert [len(tokens) for tokens, _ in windows(columns, 7)] == [7, 7, 5]


def test_text_batches_go_on_from_any_position() -> None:
    loader = TextBatches(torch.arange(100), 4, length=7)
    seen = [(loader.state, tokens, targets) for _ in range(2) for tokens, targets in loader]
    assert len(loader) == 4
    assert loader.state == Position(2, 0)
    for number, (state, _, _) in enumerate(seen[:-1]):
        resumed = TextBatches(torch.arange(100), 4, length=7)
        resumed.state = state
        tokens, targets = next(iter(resumed))
        assert torch.equal(tokens, seen[number + 1][1])
        assert torch.equal(targets, seen[number + 1][2])
    with pytest.raises(ValueError, match="another batch size"):
        loader.state = Position(0, 4)
    with pytest.raises(ValueError, match="at least one step"):
        TextBatches(torch.arange(100), 4, length=0)


def test_real_wikitext2(shared_data: Path) -> None:
    dataset = load_text(WIKITEXT2, shared_data)
    assert len(dataset.vocabulary) == 33_278
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (2_088_628, 217_646, 245_569)
    words = [dataset.vocabulary[i] for i in dataset.train[:8].tolist()]
    assert words == ["<eos>", "=", "Valkyria", "Chronicles", "III", "=", "<eos>", "<eos>"]


def test_penn_treebank_is_described(tmp_path: Path) -> None:
    assert len(PTB.parts) == len(PTB.addresses) == 3
    assert all(part.path.split("/")[-1] == a.split("/")[-1] for part, a in zip(PTB.parts, PTB.addresses, strict=True))
    with pytest.raises(
        DataNotFound, match=r"\(ptb/ptb\.train\.txt, .*, or the same as penn/train\.txt, penn/valid\.txt"
    ):
        load_text(PTB, tmp_path)
