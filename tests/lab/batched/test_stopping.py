"""Ctrl-C in the middle of batched training: the step is finished, a checkpoint written, and the same command ends with
the same records; a second one stops at once and says what is lost."""

import errno
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import cli
from gossamer.lab import data
from gossamer.lab.batched import runs_of, sweep
from gossamer.lab.batched.optimizer import BatchedOptimizer
from gossamer.lab.batched.supported import batched_run
from gossamer.lab.batched.sweeps import checkpoints_of
from gossamer.lab.batched.training import BatchedTraining, fill_
from gossamer.lab.checkpoint import Checkpoints
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.training import Interrupted, networks
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS

BATCHED = [name for name, method in METHODS.items() if not method.observes]
BASE = Run(
    model="digits_cnn", model_options={"width": 3}, data="digits", epochs=4, batch_size=16, method="scl", sparsity=0.5
)
PER_EPOCH, TOTAL = 5, 20
SAME = ("run_id", "accuracy", "sparsity", "train_loss", "nonzeros_by_tensor", "validation_accuracy")


def images() -> ImageSet:
    numbers = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (90, 1, 8, 8), generator=numbers, dtype=torch.uint8)
    part = Labelled(pixels, torch.randint(0, 10, (90,), generator=numbers))
    return ImageSet("digits", part, part, tuple("0123456789"), (0.5,), (0.3,), padding=1, flip=True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few random images in the place of the real ones, and interrupts that are not ignored, as in the background."""
    monkeypatch.setattr(data, "load", lambda name, root=None: images())
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None] = press) -> None:
    """Do something once, in the middle of this step."""
    real, waiting = BatchedOptimizer.update_topology, [action]

    def update_topology(self: BatchedOptimizer, steps: int) -> None:
        if steps == number and waiting:
            waiting.pop()()
        real(self, steps)

    monkeypatch.setattr(BatchedOptimizer, "update_topology", update_topology)


def told(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [[each.get(key) for key in SAME] for each in records]


def test_batched_training_resumes_after_any_step_to_the_same_bits(tmp_path: Path) -> None:
    """Every method, written and read again after every step, with masks that begin and freeze within epochs."""
    phases = {"warmup": "7it", "sparsify": "6it", "stabilise": "2it"}
    runs = [replace(BASE, method=name, settings=phases) for name in BATCHED if name != "dense"]
    runs += [replace(BASE, method="dense", sparsity=None), replace(BASE, settings={"warmup": "1ep"}, seed=1)]
    fixed = replace(BASE, sparsity=None, decay=0.0, preset="paper", schedule="phases", settings=phases)
    runs += [replace(fixed, decay=decay, leave_at=0.3) for decay in (0.0, 2.0, 4.0)]
    batched, wanted = [batched_run(run, PER_EPOCH) for run in runs], []

    def fresh(*, stops: bool) -> BatchedTraining:
        torch.manual_seed(0)
        return BatchedTraining(
            batched,
            images(),
            lambda: networks.create(BASE, 10),
            device=torch.device("cpu"),
            dtype=torch.float32,
            stop=lambda: stops,
        )

    whole = fresh(stops=False)
    for epoch in range(BASE.epochs):
        whole.train_epoch(epoch)
        wanted.append(whole.train_loss.tolist())
    checkpoints = Checkpoints(tmp_path, "batch")
    for step in range(TOTAL):
        cut = fresh(stops=True)
        assert cut.restore(checkpoints) == step // PER_EPOCH
        cut.train_epoch(step // PER_EPOCH)
        assert cut.done == step + 1
        assert cut.save(checkpoints)
        if cut.done % PER_EPOCH == 0:
            assert cut.train_loss.tolist() == wanted[step // PER_EPOCH]
    assert cut.outcomes() == whole.outcomes()
    assert len({each.left for each in whole.runs[-3:]}) == 3
    for (_, ours), (_, theirs) in zip(cut.networks(), whole.networks(), strict=True):
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize("minutes", ["0", "5"])  # 0 switches off what is written by itself
def test_a_sweep_stops_after_its_step_and_goes_on_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], minutes: str
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    changes = f"epochs=4 batch_size=16 sparsity=0.5 model_options.width=3 validation=0 checkpoint_minutes={minutes}"
    asked = f"sweep digits --device cpu --grid method=dense,scl,rigl seed=0,1 --set {changes} --out"
    command, uninterrupted = [*asked.split(), str(out)], [*asked.split(), str(whole)]
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for step in (3, 11):
        with monkeypatch.context() as patch:
            at_step(patch, step)
            with pytest.raises(SystemExit, match="130"):
                cli.main(command)
        path = max(out.glob("batch-*.pt"))
        assert len(list(out.iterdir())) == 2 * (1 + (step == 11))  # each with its digest
        said = capsys.readouterr().err
        assert (
            said
            == f"stopped after step {step} of 20; a checkpoint is in {path}: run the same command again to resume\n"
        )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    for line in (command, uninterrupted):
        with pytest.raises(SystemExit, match="0"):
            cli.main(line)
    assert capsys.readouterr().out.count("resumes after step 11 of 20, in epoch 3 of 4") == 1
    records = [{path.name: _read(path) for path in sorted(folder.iterdir())} for folder in (out, whole)]
    assert [len(each) for each in records] == [6, 6]  # and no checkpoint
    assert records[0].keys() == records[1].keys()
    assert told([*records[0].values()]) == told([*records[1].values()])


def test_the_seconds_of_a_sweep_are_those_of_all_its_sittings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # stands still but where a step is slow
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slowly() -> None:
        clock[0] += 100
        press()

    for step in (5, 11):
        with monkeypatch.context() as patch:
            at_step(patch, step, slowly)
            with pytest.raises(Interrupted):
                sweep([BASE], tmp_path, device="cpu")
    (record,) = sweep([BASE], tmp_path, device="cpu")
    assert record["seconds"] == record["seconds_of_batch"] == 200


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_comparison_stops_after_its_step_and_goes_on_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--net digits_cnn --data digits --methods scl str --sparsity 0.5 --seeds 1 --epochs 8 --validation 0"
    command = [*f"compare {asked} --device cpu --out".split(), str(tmp_path / "again")]
    with monkeypatch.context() as patch:
        at_step(patch, 5)
        with pytest.raises(SystemExit, match="130"):
            cli.main(command)
    assert "stopped after step 5 of 8; a checkpoint is in" in capsys.readouterr().err
    for line in (command, [*command[:-1], str(tmp_path / "whole")]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(line)
    again, whole = (sorted((tmp_path / name).glob("*.json")) for name in ("again", "whole"))
    assert [path.name for path in again] == [path.name for path in whole]
    assert len(again) == 3
    assert told([*map(_read, again)]) == told([*map(_read, whole)])


@pytest.mark.parametrize(
    ("minutes", "lost", "next_time"),
    [
        (5.0, "12 steps are lost", "its runs start over, as there is no checkpoint of them"),
        (1e-9, "2 steps are lost", "its runs resume from the checkpoint of step 10"),
    ],
)
def test_a_second_interrupt_stops_at_once_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, lost: str, next_time: str
) -> None:
    def twice() -> None:
        press()
        press()  # which is no longer held back

    runs = [replace(BASE, checkpoint_minutes=minutes)]
    with monkeypatch.context() as patch:
        at_step(patch, 13, twice)  # which is cut short, and not counted
        with pytest.raises(Interrupted, match=f"^stopped at once after step 12 of 20, {lost}: .*; {next_time}$"):
            sweep(runs, tmp_path, device="cpu")
    assert told(sweep(runs, tmp_path, device="cpu")) == told(sweep(runs, tmp_path / "whole", device="cpu"))


def test_what_is_finished_is_written_before_a_stop_and_the_next_stack_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_of(BASE, ["seed=0,1,2"])
    with monkeypatch.context() as patch:
        at_step(patch, TOTAL)
        with pytest.raises(Interrupted, match=r"^stopped before the last 2 runs; the others have their records in"):
            sweep(runs, tmp_path, device="cpu", together=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"{runs[0].run_id}.json"]
    with monkeypatch.context() as patch:  # in the last step of the last run there is nothing left to stop
        at_step(patch, TOTAL)
        assert len(sweep(runs, tmp_path, device="cpu", together=2)) == 3


@pytest.mark.filterwarnings("always:no checkpoint at step")
def test_a_full_disk_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    often = replace(BASE, checkpoint_minutes=1e-9)
    whole = sweep([BASE], tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.lab.checkpoint.write_atomically", full)
        with pytest.warns(
            UserWarning, match=r"no checkpoint at step 5: writing .*; there is none so far; free some space"
        ):
            assert told(sweep([often], tmp_path / "full", device="cpu")) == told(whole)
        at_step(patch, 7)
        said = (
            "stopped after step 7 of 20, but no checkpoint could be written: run the same command again; its runs start"
        )
        with pytest.warns(UserWarning, match="no checkpoint at step 7"), pytest.raises(Interrupted, match=said):
            sweep([BASE], tmp_path / "stopped", device="cpu")


def flip_a_bit(path: Path, place: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damaged", "told", "goes_on"),
    [
        (("newest",), ["resuming from the previous one"], "resumes after step 3 of 20"),
        (("newest", "before"), ["resuming from the previous one", "starting over"], None),
        (("before",), [], "resumes after step 11 of 20"),
    ],
)
@pytest.mark.filterwarnings("always:the checkpoint")
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: tuple[str, ...], told: list[str], goes_on: str | None
) -> None:
    runs, said = runs_of(BASE, ["seed=0,1"]), list[str]()
    for step in (3, 11):
        with monkeypatch.context() as patch:
            at_step(patch, step)
            with pytest.raises(Interrupted):
                sweep(runs, tmp_path, device="cpu")
    newest, before = checkpoints_of(runs, tmp_path).paths()
    for name in damaged:
        flip_a_bit(newest if name == "newest" else before)
    with warnings.catch_warnings(record=True) as warned:
        records = sweep(runs, tmp_path, device="cpu", progress=said.append)
    assert [str(each.message).rpartition("; ")[2] for each in warned] == told
    assert [line.split(",")[0] for line in said if "resumes" in line] == ([goes_on] if goes_on else [])
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}  # both checkpoints are gone
    assert [each["accuracy"] for each in records] == [
        each["accuracy"] for each in sweep(runs, tmp_path / "whole", device="cpu")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"in format 3, got 2: go on with the version .* or delete it"),
        ({"runs": ["0123456789"]}, "got one of other runs: delete it"),
        *(({"steps": wrong}, f"got {wrong!r} as its steps, not 1 to 20") for wrong in (0, 21, "5", None)),
        *(({"seconds": wrong}, f"got {wrong!r} as the seconds") for wrong in (None, -1.0)),
        ({"tensors": 3}, "got no tensors"),
        ({"tensors": {}}, "no tensor of the right shape and type for variables, velocity"),
        ({"random": {}}, "got other states of random number generators"),
    ],
)
def test_impossible_checkpoints_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def fresh() -> BatchedTraining:
        make, device = (lambda: networks.create(BASE, 10)), torch.device("cpu")
        return BatchedTraining([batched_run(BASE, PER_EPOCH)], images(), make, device=device, dtype=torch.float32)

    first, checkpoints = fresh(), Checkpoints(tmp_path, "batch")
    first.train_epoch(0)
    first.save(checkpoints)
    assert fresh().restore(checkpoints) == 1
    state = checkpoints.load()
    assert state is not None
    checkpoints.save({**state, **changes}, 5)
    with pytest.raises(ValueError, match=message):
        fresh().restore(checkpoints)


def test_a_batch_that_resumes_on_another_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 7)
        with pytest.raises(Interrupted):
            sweep([BASE], tmp_path, device="cpu")
    checkpoints = checkpoints_of([BASE], tmp_path)
    state = checkpoints.load()
    assert state is not None
    checkpoints.save({**state, "machine": {**state["machine"], "threads": 3}}, state["steps"])
    with pytest.warns(UserWarning, match="resumes with threads 1 instead of 3: .* last bits"):
        sweep([BASE], tmp_path, device="cpu")


@pytest.mark.parametrize("wrong", [{}, {"step": torch.zeros(2)}, {"step": torch.zeros(())}])
def test_all_tensors_are_filled_or_none(wrong: dict[str, torch.Tensor]) -> None:
    wanted = {"mask": torch.zeros(2), "step": torch.tensor(0)}
    with pytest.raises(ValueError, match="no tensor of the right shape and type for step"):
        fill_(wanted, {"mask": torch.ones(2), **wrong})
    assert not wanted["mask"].any()
    fill_(wanted, {"mask": torch.ones(2), "step": torch.tensor(4)})
    assert wanted["mask"].all()
    assert wanted["step"] == 4
