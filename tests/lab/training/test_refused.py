"""What a run refuses, with a message that says what to do: states of other versions, other places, missing GPUs."""

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Dies

from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data import ImageSet
from gossamer.lab.training import Run, distributed, loop, result, train
from gossamer.lab.training.folder_lock import only_one

RUN = Run(
    model="digits_cnn",
    model_options={"width": 4},
    data="digits",
    epochs=2,
    batch_size=8,
    log_steps=1,
    checkpoint_steps=2,
    device="cpu",
)


@pytest.fixture
def torn(images: ImageSet, tmp_path: Path) -> Path:
    """A run that has died, with a checkpoint."""
    with pytest.raises(MemoryError):
        train(RUN, tmp_path, observers=[Dies(5)])
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    checkpoints = Checkpoints(folder)
    state = checkpoints.load()
    assert state is not None
    checkpoints.save({**state, **values}, state["step"])


def test_a_checkpoint_of_a_newer_version(torn: Path) -> None:
    change(torn, format=2)
    with pytest.raises(
        ValueError, match="expected a checkpoint in format 1, got 2: resume with the version of gossamer"
    ):
        train(RUN, torn)


def test_a_checkpoint_of_more_processes(torn: Path) -> None:
    change(torn, ranks=[{}, {}])
    with pytest.raises(
        ValueError, match="expected 2 processes, as at the start of the run, got 1: start the same number"
    ):
        train(RUN, torn)


def test_a_checkpoint_of_another_run(torn: Path) -> None:
    (torn / "run.json").unlink()
    with pytest.raises(ValueError, match="is from another run, which differs in lr: choose another folder"):
        train(RUN.with_settings(["lr=0.05"]), torn)
    assert not (torn / "run.json").exists()  # who was refused does not take the folder over
    assert train(RUN, torn)["complete"] is True


def test_a_run_file_that_was_damaged(torn: Path) -> None:
    (torn / "run.json").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"JSON object in .*run\.json, got something else .*: if it is damaged, delete it"
    ):
        train(RUN, torn)
    (torn / "run.json").unlink()
    assert train(RUN, torn)["complete"] is True


def test_a_result_file_that_was_damaged(torn: Path) -> None:
    (torn / "result.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"JSON object in .*result\.json, got .*: if it is damaged, delete it to train"
    ):
        train(RUN, torn)
    (torn / "result.json").unlink()
    assert train(RUN, torn)["complete"] is True


def test_the_command_that_goes_on_can_be_copied_whatever_the_folder_is_called(images: ImageSet, tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    train(RUN, folder)
    with pytest.raises(ValueError, match=f"; gossamer train '{folder}/run.json' --out '{folder}' resumes the run"):
        train(RUN.with_settings(["seed=1"]), folder)


@pytest.mark.parametrize("wrong", ["digits", None, {"model": "resnet20"}])
def test_what_is_no_run(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a Run, got .*recipes\.find\('digits'\)\.run"):
        train(wrong, tmp_path)


@pytest.mark.parametrize("name", [result.MODEL, result.RESULT, result.LAYERS])
def test_files_of_others_are_not_overwritten(images: ImageSet, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"expected an empty folder .* which has {name} but no run\.json"):
        train(RUN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "{}"


def test_a_lost_process_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    message = "the other processes of this run cannot be reached .*pair.cc.*: check .*, and run the same command again"
    with pytest.raises(RuntimeError, match=message), distributed.advice_on_lost_processes():
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error\nmore of it")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), distributed.advice_on_lost_processes():
        raise RuntimeError("out of memory")


def test_a_run_that_another_process_has_finished_meanwhile_is_shown(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[dict[str, Any]] = []

    def hold(folder: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(loop, "only_one", only_one)
        finished.append(train(RUN, folder))
        return only_one(folder)

    monkeypatch.setattr(loop, "only_one", hold)
    assert [train(RUN, tmp_path, observers=[Dies(1)])] == finished


def test_a_run_of_a_newer_version_is_refused_by_the_name_of_its_file(torn: Path) -> None:
    (torn / "run.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"run\.json: expected a run in format 1 or older, got format 2"):
        train(RUN, torn)


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_a_folder_in_which_another_process_trains(torn: Path) -> None:
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True)"
    )
    other = [sys.executable, "-c", f"{hold}; sys.stdin.read()", str(torn / ".lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ValueError, match=r"another process trains in .* at this moment: wait for it"):
            train(RUN, torn)
        process.kill()
    assert train(RUN, torn)["complete"] is True


def test_a_number_of_processes_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"expected MASTER_ADDR, MASTER_PORT with WORLD_SIZE=2.*start several .*unset"):
        train(RUN, tmp_path)


def test_a_process_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="process 1 finds only 1: start --nproc-per-node=1, or set device=cpu"):
        distributed.join("cuda")


def test_a_gpu_that_is_asked_for_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    places = [distributed.join(name).device for name in ("cuda:3", "cuda", "auto")]
    assert places == taken == [torch.device("cuda", 3), torch.device("cuda", 2), torch.device("cuda", 2)]


def test_a_graph_where_there_can_be_none(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capture=true was requested, but there are no CUDA graphs on device=cpu"):
        train(RUN.with_settings(["capture=true"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_that_cannot_be_sent_to_other_processes_goes_as_its_words() -> None:
    class Local(Exception):  # which pickle does not find
        pass

    assert str(distributed._as_sent(Local("of this process"))) == "Local: of this process"
    known = FileNotFoundError(2, "nothing there")
    assert distributed._as_sent(known) is known


@pytest.mark.parametrize(
    "content", ["[]", "null", "3", "{", "[" * 100_000], ids=["list", "null", "number", "cut", "deep"]
)
def test_files_of_a_run_that_are_not_its_own(tmp_path: Path, content: str) -> None:
    for name, read in (
        ("run.json", lambda: result.read_result(tmp_path, Run())),
        ("result.json", lambda: result.read_result_file(tmp_path)),
        ("layers.json", lambda: result.read_layers(tmp_path)),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"expected a JSON object in .*{name}"):
            read()
        (tmp_path / name).unlink()


def test_layers_of_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gossamer train writes them, a sweep does not"):
        result.read_layers(tmp_path / "0123456789.json")


@pytest.mark.parametrize("content", ["{}", '{"rows": 3}', '{"rows": [1]}', '{"rows": [{"shape": [2]}]}'])
def test_layers_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "layers.json").write_text(content)
    with pytest.raises(ValueError, match="expected the layers of a finished run in"):
        result.read_layers(tmp_path)
