"""The folder of many runs: who may train there, and what becomes of runs whose records cannot be written."""

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import cli
from gossamer.lab import data
from gossamer.lab.batched import compare, folder, runs_of, sweep, sweeps
from gossamer.lab.batched.compare import Comparison
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training import folder_lock
from gossamer.lab.training.run import Run

BASE = Run(
    model="digits_cnn", model_options={"width": 3}, data="digits", epochs=4, batch_size=16, method="scl", sparsity=0.5
)
RUNS = runs_of(BASE, ["seed=0,1,2"])
COMPARISON = Comparison("digits_cnn", "digits", ("dense", "scl"), (0.5,), seeds=1, epochs=4, validation=0)
Command = Callable[[Path], list[dict[str, Any]]]


def sweep_there(out: Path) -> list[dict[str, Any]]:
    return sweep(RUNS, out, device="cpu")


def compare_there(out: Path) -> list[dict[str, Any]]:
    return compare.compare(COMPARISON, out, device="cpu")


BOTH = pytest.mark.parametrize("command", [sweep_there, compare_there])


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images in the place of the real ones."""
    numbers = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (90, 1, 8, 8), generator=numbers, dtype=torch.uint8)
    part = Labelled(pixels, torch.randint(0, 10, (90,), generator=numbers))
    images = ImageSet("digits", part, part, tuple("0123456789"), (0.5,), (0.3,))
    monkeypatch.setattr(data, "load", lambda name, root=None: images)


@pytest.fixture
def never_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedTraining, "train_epoch", lambda *arguments: pytest.fail("a step was taken"))


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@BOTH
@pytest.mark.usefixtures("never_trains")
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folder_lock, "open", read_only, raising=False)
    said = rf"expected a folder for records that can be written, got {tmp_path} \(.*Read-only.*\): choose another one"
    with pytest.raises(OSError, match=said):
        command(tmp_path)


@BOTH
@pytest.mark.usefixtures("never_trains")
def test_a_full_disk_is_refused_before_the_first_step(
    tmp_path: Path, request: pytest.FixtureRequest, command: Command
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))
    with pytest.raises(OSError, match=r"expected a folder for records that can be written, got .* make room"):
        command(tmp_path)
    assert not list(tmp_path.iterdir())


def test_records_that_are_there_are_read_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = sweep_there(tmp_path)
    monkeypatch.setattr(folder_lock, "open", full, raising=False)
    assert sweep_there(tmp_path) == records


HOLDS = """
import sys
from pathlib import Path
from gossamer.lab.training.folder_lock import only_one

with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@BOTH
@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_one_process_trains_in_a_folder_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    holding = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with monkeypatch.context() as patch:
            patch.setattr(BatchedTraining, "train_epoch", lambda *arguments: pytest.fail("a step was taken"))
            with pytest.raises(ValueError, match=r"another process trains in .* at this moment: wait for it"):
                command(tmp_path)
        other.stdin.close()
    assert command(tmp_path)
    assert not (tmp_path / folder_lock.NAME).exists()


@pytest.mark.parametrize(
    "command",
    [
        "sweep digits --grid seed=0,1 --device cpu --out",
        "compare --net digits_cnn --data digits --seeds 1 --device cpu --out",
    ],
)
@pytest.mark.usefixtures("never_trains")
def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), str(tmp_path / "new")])
    assert "expected one process, as batched runs share one device, got WORLD_SIZE=2" in capsys.readouterr().err
    assert not torch.distributed.is_initialized()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["record", "model"])
@pytest.mark.parametrize("which", ["sweep", "compare"])
def test_a_record_that_cannot_be_written_costs_no_other_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, kind: str
) -> None:
    """Also where a stack is smaller than what is missing, and the command could put its runs together anew."""
    place, name = {"record": (sweeps.result, "write_json"), "model": (sweeps, "save")}[kind]
    real, calls = getattr(place, name), list[Path]()

    def fails_at_first(*arguments: Any) -> Any:
        calls.append(next(each for each in arguments if isinstance(each, Path)))
        return full() if len(calls) == 1 else real(*arguments)

    def command() -> list[dict[str, Any]]:
        if which == "sweep":
            return sweep(RUNS, tmp_path, device="cpu", together=2, save_models=True)
        return compare.compare(COMPARISON, tmp_path, device="cpu", save_models=True)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, fails_at_first)
        with pytest.raises(OSError, match=r"the last step is done, but some records cannot") as error:
            command()
    failed = calls[0].with_suffix(".json")
    checkpoint = max(tmp_path.glob("batch-*.pt"))
    assert f"{failed} ([Errno 28] No space left on device): free some space" in str(error.value)
    assert str(error.value).endswith(f"these runs then resume from {checkpoint.name}")
    (other,) = tmp_path.glob("*.json")
    content = other.read_text()
    trained, epoch = list[int](), BatchedTraining.train_epoch
    monkeypatch.setattr(
        BatchedTraining, "train_epoch", lambda self, number: trained.append(len(self.runs)) or epoch(self, number)
    )
    assert len(command()) == len(list(tmp_path.glob("*.json")))
    assert set(trained) == ({1} if which == "sweep" else set())  # the third run of the sweep, which had not begun
    assert other.read_text() == content
    assert not list(tmp_path.glob("batch-*"))
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.json")))


@pytest.mark.filterwarnings("always:no checkpoint at step")
def test_a_disk_that_takes_nothing_in_the_end_is_named_with_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.lab.checkpoint.write_atomically", full)
    monkeypatch.setattr(sweeps.result, "write_json", full)
    with (
        pytest.warns(UserWarning, match="no checkpoint at step 20"),
        pytest.raises(OSError, match=r"these runs then start again, as there is no checkpoint$") as error,
    ):
        sweep_there(tmp_path)
    assert all(str(sweeps.record_path(tmp_path, run)) in str(error.value) for run in RUNS)


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = compare_there(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(
        OSError, match=r"the records are in .*, but their table, screening.md, or the plot .* free some"
    ):
        compare_there(tmp_path)
    assert len(records) == len(list(tmp_path.glob("*.json")))


def test_a_batch_that_was_begun_comes_first_and_whole() -> None:
    assert folder.portions([2, 3, 4, 5], [[1, 2], [5, 4]], together=2) == [[1, 2], [5, 4], [3]]
    assert folder.portions([2, 3], [[1, 2, 3], [0, 1]], together=2) == [[2, 3]]  # too large, and done
    assert folder.portions([], [[1, 2]], together=2) == []


def test_a_batch_is_known_by_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.result, "write_json", full)
    with pytest.raises(OSError, match="cannot be written"):
        sweep_there(tmp_path)
    known = {run.run_id: run for run in RUNS}
    assert sweeps.begun_batches(known, tmp_path) == [RUNS]
    assert sweeps.begun_batches({name: run for name, run in known.items() if run.seed}, tmp_path) == []
    for path in tmp_path.glob("batch-*.pt"):
        path.write_bytes(path.read_bytes()[:-1])  # which its digest says
    assert sweeps.begun_batches(known, tmp_path) == []
