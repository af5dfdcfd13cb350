import errno
import hashlib
import os
import random
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.lab import checkpoint
from gossamer.lab.checkpoint import Checkpoints, random_states, set_random_states, write_atomically


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "list": [1, "a", None]}


def value_of(loaded: dict[str, Any] | None) -> float | None:
    return None if loaded is None else float(loaded["weights"][0])


def test_the_two_newest_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.load() is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".checkpoint-000000003.pt.0123456789ab.part").write_bytes(b"what a kill left")
    assert checkpoints.load() is None
    for step in (5, 20, 100):
        assert checkpoints.save(state(step), step)
    assert [path.name for path in checkpoints.paths()] == ["checkpoint-000000100.pt", "checkpoint-000000020.pt"]
    assert value_of(checkpoints.load()) == 100
    assert sorted(path.suffix for path in (tmp_path / "run").iterdir()) == [".pt", ".pt", ".sha256", ".sha256"]
    plain = torch.load(checkpoints.paths()[0], weights_only=True)
    assert plain["list"] == [1, "a", None]
    checkpoints.clear()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "no digest", "damaged digest", "empty digest"])
def test_a_corrupted_newest_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)
    checkpoints.save(state(2), 2)
    newest = checkpoints.paths()[0]
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    elif damage == "no digest":
        newest.with_suffix(".sha256").unlink()
    elif damage == "damaged digest":  # one byte of it, which is no text any more
        newest.with_suffix(".sha256").write_bytes(b"\xff" + newest.with_suffix(".sha256").read_bytes()[1:])
    elif damage == "empty digest":
        newest.with_suffix(".sha256").write_bytes(b"")
    else:
        newest.write_bytes(content[: len(content) // 2 if damage == "truncate" else 0])
    with pytest.warns(UserWarning, match=r"checkpoint-000000002.pt .*resuming from the previous one"):
        assert value_of(checkpoints.load()) == 1
    assert checkpoints.save(state(3), 3)  # the damaged one takes no place
    assert [path.name for path in checkpoints.paths()] == ["checkpoint-000000003.pt", "checkpoint-000000001.pt"]


def test_where_all_are_damaged_the_new_ones_are_kept_though_they_are_of_earlier_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (500, 550):
        checkpoints.save(state(step), step)
    for path in checkpoints.paths():
        path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="is corrupted") as warned:
        assert checkpoints.load() is None
    assert [str(each.message).partition("; ")[2] for each in warned] == [
        "it is now called checkpoint-000000550.pt.damaged; resuming from the previous one",
        "it is now called checkpoint-000000500.pt.damaged; starting over",
    ]
    assert (tmp_path / "checkpoint-000000550.pt.damaged").read_bytes() == b"damaged"
    assert checkpoints.next_time() == "it starts over, as there is no checkpoint"
    assert checkpoints.save(state(50), 50)
    assert checkpoints.save(state(100), 100)
    assert checkpoints.next_time() == "it resumes from checkpoint-000000100.pt"
    assert value_of(checkpoints.load()) == 100
    assert len(checkpoints.paths()) == 2
    checkpoints.clear()
    assert list(tmp_path.iterdir()) == []


def test_what_was_just_written_is_never_removed(tmp_path: Path) -> None:
    for step in (500, 550):
        Checkpoints(tmp_path).save(state(step), step)
    assert Checkpoints(tmp_path).save(state(50), 50)
    assert [path.name for path in Checkpoints(tmp_path).paths()] == [
        "checkpoint-000000550.pt",
        "checkpoint-000000050.pt",
    ]


@pytest.mark.parametrize("broken", ["limit", "write", "fsync", "replace"])
def test_a_full_disk_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, broken: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "limit":  # the system itself refuses, in the middle of the file
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))
        elif broken == "write":
            patch.setattr(checkpoint._Hashing, "write", full)
        else:
            patch.setattr(os, broken, full)
        why = "File too large" if broken == "limit" else "No space left on device"
        with pytest.warns(
            UserWarning, match=rf"no checkpoint at step 2.*{why}.*the last good one is checkpoint-000000001.pt"
        ):
            assert not checkpoints.save(state(2), 2)
        if broken == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert value_of(checkpoints.load()) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "checkpoint-000000001.pt",
        "checkpoint-000000001.sha256",
    ]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def write(file: Any) -> None:
        file.write(b"new, but not all of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def draw() -> tuple[float, float, float, float]:
    return float(torch.rand(())), random.random(), random.gauss(), float(np.random.standard_normal())


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    draw()
    Checkpoints(tmp_path).save({"random": random_states()}, 1)
    expected = [draw(), draw()]
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    set_random_states(loaded["random"])
    assert [draw(), draw()] == expected


def test_a_digest_whose_checkpoint_was_never_finished_goes_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"step": 1}, 1)
    (tmp_path / "checkpoint-000000002.sha256").write_text("killed before the checkpoint had its name")
    assert checkpoints.load() is not None
    checkpoints.clear()
    assert list(tmp_path.iterdir()) == []


def test_files_that_only_look_like_those_of_a_run_are_left_alone(tmp_path: Path) -> None:
    theirs = {
        *("notes.part", ".notes.part", ".draft.txt.part", ".thesis.tex.0123.part", "checkpoint-notes.sha256"),
        *("checkpoint-best.pt", "checkpoint-best.pt.damaged", "checkpoint-000000007.pt.damaged", "checkpoint-1.sha256"),
    }
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(state(step), step)
    assert value_of(checkpoints.load()) == 3
    checkpoints.clear()
    assert {path.name for path in tmp_path.iterdir()} == theirs


def test_a_kill_while_a_checkpoint_is_written_again_leaves_the_one_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped before its first step writes the checkpoint that it has begun from once more."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 5)
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target.suffix == ".pt":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(state(2), 5)
    assert value_of(checkpoints.load()) == 1

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="no checkpoint at step 5"):
            assert not checkpoints.save(state(2), 5)
    assert value_of(checkpoints.load()) == 1
    assert checkpoints.save(state(2), 5)
    assert value_of(checkpoints.load()) == 2


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    """A megabyte of zeros could be a gigabyte of tensors; none that is written here is compressed."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)
    path = checkpoints.paths()[0]
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, each in content.items():
            archive.writestr(name, each)
    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.warns(UserWarning, match=r"not compressed.*starting over"):
        assert checkpoints.load() is None


def test_a_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    write_atomically(tmp_path / "link", lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"new"
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(OSError, match="a broken link"):
        write_atomically(tmp_path / "round", lambda file: file.write(b"new"))
