"""Runs on an image folder, whose last evaluation takes long: what they tell meanwhile, stopping and dying in it."""

import functools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from observers import Acts
from safetensors.torch import load_file
from torch import nn

from gossamer.lab.training import Interrupted, Run, loop, networks, step, train
from gossamer.lab.training.progress import Observers, Status
from gossamer.lab.training.task import ImageTask, Tell

Image = pytest.importorskip("PIL.Image")

RUN = Run(
    model="resnet20", data="imagefolder", image_size=8, workers=0, epochs=2, batch_size=4, log_steps=2, device="cpu"
)  # 2 epochs of 3 steps, and 3 batches of an evaluation


@pytest.fixture(autouse=True)
def small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(run: Run, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, num_classes))

    monkeypatch.setattr(networks, "create", create)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    random = np.random.default_rng(0)
    for number in range(22):
        path = tmp_path / "images" / ("train" if number < 12 else "val") / f"{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)
    return RUN.with_settings([f"data_root={tmp_path / 'images'}"])


class Watches:
    """Notes what a run does between its statuses."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.doings: list[str] = []

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None: ...

    def move(self, step: int, seconds: float, doing: str | None = None) -> None:
        self.steps.append(step)
        self.doings += [] if doing is None else [doing]

    def close(self) -> None: ...


def in_the_evaluation(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do something after the first batch of the test set."""
    evaluate = ImageTask.evaluate

    def evaluating(task: ImageTask, model: nn.Module, part: str, tell: Tell) -> float:
        def acting(done: int, batches: int) -> None:
            if part == "test" and done == 1:
                action()
            tell(done, batches)

        return evaluate(task, model, part, acting)

    monkeypatch.setattr(ImageTask, "evaluate", evaluating)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def die() -> None:
    raise MemoryError("as good as a kill")


@pytest.mark.parametrize("changes", [[], ["method=scl", "sparsity=0.5"], ["method=rigl", "sparsity=0.5"]])
def test_a_run_that_dies_in_its_last_evaluation_goes_on_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    run = run.with_settings(changes)
    whole = train(run, tmp_path / "whole")
    with monkeypatch.context() as patch:
        in_the_evaluation(patch, die)
        with pytest.raises(MemoryError):
            train(run, tmp_path / "torn")
    assert [path.name for path in (tmp_path / "torn").glob("*.pt")] == ["checkpoint-000000006.pt"]
    monkeypatch.setattr(step.Step, "__call__", lambda *given: pytest.fail("there was nothing left to train"))
    torn = train(run, tmp_path / "torn")
    for key in ("accuracy", "nonzeros", "sparsity"):
        assert torn[key] == whole[key]
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "torn"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not list((tmp_path / "torn").glob("checkpoint-*"))


def test_ctrl_c_in_the_last_evaluation_stops_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        in_the_evaluation(patch, interrupt)
        words = (
            r"^stopped in the evaluation after the last step, 1 of 3 batches done: run the same command again; it goes"
        )
        with pytest.raises(Interrupted, match=rf"{words} on from checkpoint-000000006\.pt$"):
            train(run, tmp_path / "out")
    assert train(run, tmp_path / "out")["complete"] is True


def test_ctrl_c_in_a_short_evaluation_is_answered_and_the_run_ends(
    images: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "create", lambda run, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    monkeypatch.setattr("gossamer.lab.training.task._EVALUATION_BATCH", 16)  # three of them
    monkeypatch.setattr(loop, "Observers", functools.partial(Observers, every=0.0))
    in_the_evaluation(monkeypatch, interrupt)
    watches = Watches()
    run = Run(model="digits_cnn", data="digits", epochs=1, batch_size=8, device="cpu")
    assert train(run, tmp_path, observers=[watches])["complete"] is True
    assert watches.doings == [
        "evaluating test 0%",
        "evaluating test 33%, then stops",
        "evaluating test 67%, then stops",
    ]


def test_every_step_and_batch_of_an_evaluation_can_be_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Observers", functools.partial(Observers, every=0.0))
    watches = Watches()
    train(run.with_settings(["log_steps=50"]), tmp_path / "out", observers=[watches])
    assert watches.steps == [1, 2, 4, 5, 6, 6, 6, 6]  # those without a status, three of the evaluation, and its end
    assert watches.doings == [f"evaluating test {share}%" for share in (0, 33, 67)]


def test_images_held_out_of_a_folder_are_evaluated_every_epoch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Observers", functools.partial(Observers, every=0.0))
    watches = Watches()
    found = train(run.with_settings(["validation=4"]), tmp_path / "out", observers=[watches])  # 2 epochs of 2 steps
    assert watches.doings == ["evaluating validation 0%"] * 3 + [f"evaluating test {share}%" for share in (0, 33, 67)]
    assert 0 <= found["validation_accuracy"] <= 1
    assert found["validation_accuracy"] * 4 % 1 == 0


def test_observers_are_moved_once_a_second_at_most() -> None:
    watches = Watches()
    with Observers([watches]) as seldom:
        for number in range(1, 100):
            seldom.move(number, 0.0)
        seldom.move(100, 0.0, "evaluating", at_once=True)
    assert watches.steps == [1, 100]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_whose_worker_is_killed_says_what_to_do(run: Run, tmp_path: Path) -> None:
    def kill_all() -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()

    with pytest.raises(RuntimeError, match=r"a process that decodes images has died.*set fewer workers=.*workers=0"):
        train(run.with_settings(["workers=1"]), tmp_path / "out", observers=[Acts(2, kill_all)])
    assert not multiprocessing.active_children()


def take_away(folder: Path) -> None:
    (folder / "train" / "0" / "0.png").unlink()


def add(folder: Path) -> None:
    shutil.copy(folder / "train" / "0" / "0.png", folder / "train" / "1" / "new.png")


def add_a_class(folder: Path) -> None:
    shutil.copytree(folder / "train" / "0", folder / "train" / "3")


@pytest.mark.parametrize("change", [take_away, add, add_a_class])
def test_a_folder_that_was_changed_meanwhile_is_refused(
    run: Run, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with pytest.raises(MemoryError):
        train(run.with_settings(["checkpoint_steps=1"]), tmp_path / "torn", observers=[Acts(4, die)])
    change(shutil.copytree(tmp_path / "images", tmp_path / "changed"))
    with pytest.raises(ValueError, match=r"folder that this run began with, got one with other .*: set data_root="):
        train(run.with_settings([f"data_root={tmp_path / 'changed'}"]), tmp_path / "torn")
    moved = (tmp_path / "images").rename(tmp_path / "moved")  # where it lies does not matter
    assert train(run.with_settings([f"data_root={moved}"]), tmp_path / "torn")["complete"] is True
