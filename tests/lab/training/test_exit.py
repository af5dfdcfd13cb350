"""Messages of a run that stops: it promises to resume from a checkpoint only if there is one."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from observers import Acts

from gossamer import cli
from gossamer.lab import checkpoint
from gossamer.lab.data import ImageSet
from gossamer.lab.training import Interrupted, Run, result, step, train

RUN = Run(
    model="digits_cnn", model_options={"width": 4}, data="digits", epochs=4, batch_size=8, log_steps=3, device="cpu"
)


ONE_OF_SEVERAL = """
import atexit, sys, torch.distributed as dist
from gossamer.lab.training.distributed import end_process

class Late:
    def __del__(self): print("in the finalization of the interpreter")

late = Late()
atexit.register(print, "at exit")
if sys.argv[1:]:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
end_process(3)
"""


@pytest.mark.parametrize("joined", [False, True])
def test_one_of_several_processes_exits_before_the_interpreter_finalizes(joined: bool, tmp_path: Path) -> None:
    """In which threads of gloo could abort it."""
    store = [str(tmp_path / "store")] if joined else []
    ended = subprocess.run([sys.executable, "-c", ONE_OF_SEVERAL, *store], capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines() == ["at exit", *([] if joined else ["in the finalization of the interpreter"])]


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            subprocess.CalledProcessError(-signal.SIGINT, ["gcc"]),  # a compiler that died of the same signal
            130,
            "stopped at once; if the same command is run again, it starts over",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (step.LossNotFinite("the loss is not finite"), 2, "the loss is not finite"),
    ],
)
def test_only_an_error_that_may_come_of_the_signal_is_the_stop_that_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    words: str,
) -> None:
    def fails(*arguments: object) -> None:
        interrupt()
        raise error

    monkeypatch.setattr(step.Step, "__call__", fails)
    assert cli.run(cli.Train("digits", {}, tmp_path, set=(("device=cpu",),))) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "next_time"),
    [(0, "it starts over, as there is no checkpoint"), (8, "it resumes from checkpoint-000000016.pt")],
)
def test_of_a_result_for_which_there_is_no_room(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, next_time: str
) -> None:
    monkeypatch.setattr(result, "save", full)
    with pytest.raises(OSError, match=rf"run the same command again; {next_time}$"):
        train(RUN.with_settings([f"checkpoint_steps={steps}"]), tmp_path)


@pytest.mark.parametrize(
    ("steps", "next_time"),
    [(0, "it starts over, as there is no checkpoint"), (2, "it resumes from checkpoint-000000002.pt")],
)
@pytest.mark.filterwarnings("always:no checkpoint at step")
def test_of_a_stop_without_room_for_a_checkpoint(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, next_time: str
) -> None:
    def full_and_interrupted() -> None:
        monkeypatch.setattr(checkpoint, "write_atomically", full)
        interrupt()

    told = rf"stopped after step 3 of 20, but no checkpoint could be written: run the same command again; {next_time}$"
    with pytest.raises(Interrupted, match=told):
        train(RUN.with_settings([f"checkpoint_steps={steps}"]), tmp_path, observers=[Acts(3, full_and_interrupted)])


@pytest.mark.parametrize(
    ("made", "next_time"),
    [([], "it starts over, as there is no checkpoint"), (["checkpoint-000000009.pt"], "from checkpoint-000000009.pt")],
)
def test_of_a_second_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made: list[str], next_time: str
) -> None:
    for name in made:
        (tmp_path / name).touch()

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.train, "train", stop)
    assert cli.run(cli.Train("digits", {}, tmp_path)) == 130
    assert capsys.readouterr().err.strip().endswith(next_time)


def test_commands_that_keep_nothing_promise_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: object, console: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Sweep, "carry_out", stop)
    assert cli.run(cli.Sweep("digits", Path("somewhere"), {}, grid=())) == 130
    assert capsys.readouterr().err.endswith("resumes the rest, from a checkpoint if there is one\n")
    monkeypatch.setattr(cli.commands.List, "carry_out", stop)
    assert cli.run(cli.commands.List()) == 130
    assert capsys.readouterr().err == "gossamer: stopped\n"


def test_a_network_that_is_not_there_is_refused_before_data_is_looked_for(tmp_path: Path) -> None:
    run = Run(data_root=str(tmp_path / "nowhere"), device="cpu")
    with pytest.raises(ValueError, match="expected the name of a model, got 'resnet21': did you mean 'resnet20'"):
        train(run.with_settings(["model=resnet21"]), tmp_path / "out")
    with pytest.raises(ValueError, match=r"resnet20 does not take model_options\.width"):
        train(run.with_settings(["model_options.width=3"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_held_out_images_that_leave_no_batch(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one batch of 8, got 3 images: lower batch_size") as refused:
        train(RUN.with_settings(["validation=37"]), tmp_path)
    assert "drop_last" not in str(refused.value)
