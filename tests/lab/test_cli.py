import errno
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import gossamer
from gossamer import cli
from gossamer.cli.train import Train
from gossamer.lab import data, models, tables
from gossamer.lab.batched import runs_of
from gossamer.lab.recipes import RECIPES, find
from gossamer.lab.training import Run
from gossamer.lab.training.progress import JsonLines, LiveLine, PlainLines, Status
from gossamer.lab.training.result import read_result_file, read_run
from gossamer.methods.scl import SCLOptions
from gossamer.settings import Phases

SHORT = ["--epochs", "2", "--log-steps=4", "--set", "model_options.width=4"]


def run(*arguments: str) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return int(stop.value.code or 0)


def test_train_writes_the_model_and_shows_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "digits", "--out", str(tmp_path), *SHORT) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert f"{result['accuracy']:.2%}" in shown
    assert f"{result['nonzeros']:,}" in shown
    assert result["config"]["epochs"] == 2
    assert result["config"]["model_options"] == {"width": 4}
    assert {"log.jsonl", "layers.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}

    assert run("report", str(tmp_path), str(tmp_path / "result.json"), "--layers") == 0
    shown = capsys.readouterr().out
    matrices = [tensor for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.ndim > 1]
    assert len(matrices) == 4
    for tensor in matrices:
        assert f" {int(tensor.count_nonzero())} " in shown


def test_train_with_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("train", "digits", *SHORT, "--pattern", "2:4")
    assert run(*asked, "--out", str(tmp_path / "refused")) == 2
    assert "pattern 2:4 allows" in capsys.readouterr().err
    folder = str(tmp_path / "run")
    assert run(*asked, "--sparsity", "none", "--out", folder) == 0
    matrices = [tensor for tensor in load_file(tmp_path / "run" / "model.safetensors").values() if tensor.ndim > 1]
    halves = [2 * int(tensor.count_nonzero()) == tensor.numel() for tensor in matrices]
    assert halves == [tensor.shape[1] % 4 == 0 for tensor in matrices]
    assert capsys.readouterr()
    assert run("report", folder, "--layers") == 0
    assert "2:4" in capsys.readouterr().out
    assert run("frontier", folder) == 2
    assert "expected a run without a pattern, got pattern=2:4" in capsys.readouterr().err


def test_the_quick_start_compares_dense_and_sparse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cli.train._train
    monkeypatch.setattr(cli.train, "_train", lambda name, run, out: whole(name, replace(run, epochs=4), out))
    assert run("quickstart", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert re.search(r"digits-dense .* 0\.00% +58,144 ", shown)
    assert re.search(r"digits .* 95\.00% +2,907 ", shown)
    assert "features.3" in shown
    assert str(tmp_path / "digits" / "model.safetensors") in shown.replace("\n", "")
    assert re.search(
        r"On this machine \(.*\) gossamer.deploy runs it [\d.]+ times as fast as torch and [\d.]+ times", shown
    )
    if importlib.util.find_spec("plotly") is not None:
        assert f"is in {tmp_path / 'report.html'}" in shown
        text = (tmp_path / "report.html").read_text()
        assert "Speed on this machine" in text
        assert f"{read_result_file(tmp_path / 'digits-dense')['accuracy']:.2%} dense" in text


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"gossamer {gossamer.__version__}, torch {torch.__version__}")


def test_a_report_of_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"sparsity": 0.5, "nonzeros": 123, "weights": 246, "seconds": 1.0, "accuracy": 0.5}
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "result.json").write_text(json.dumps(values))
    older = {{"nonzeros": "connections"}.get(key, key): value for key, value in values.items()}
    (tmp_path / "runs" / "two" / "result.json").write_text(json.dumps(older))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "0123456789.json").write_text(json.dumps(values))
    assert run("report", str(tmp_path / "runs")) == 0
    assert capsys.readouterr().out.count(" 123 ") == 2
    assert run("report", str(tmp_path / "sweep"), str(tmp_path / "runs" / "one")) == 0
    assert capsys.readouterr().out.count(" 123 ") == 2
    (tmp_path / "sweep" / "lost.json").write_text(json.dumps(values | {"diverged": True, "nonzeros": 0}))
    assert run("report", str(tmp_path / "sweep")) == 0
    assert "diverged – – – – 1 s" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    assert run("report", str(tmp_path / "begun")) == 2
    assert "train it to the end first" in capsys.readouterr().err
    assert run("report") == 2
    assert "expected folders of finished runs, or a model, got none" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.json").write_text(json.dumps({"accuracy": 0.9}))
    assert run("report", str(tmp_path / "other")) == 2
    assert "name folders of gossamer train, sweep or compare" in " ".join(capsys.readouterr().err.split())


def test_a_report_of_a_sweep_says_what_its_runs_differ_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"sparsity": 0.5, "nonzeros": 123, "weights": 246, "seconds": 1.0, "validation_accuracy": None}
    for number, (seed, share) in enumerate([(0, 0.9), (1, 0.9), (0, 0.8)]):
        told = {"config": {"seed": seed, "sparsity": share}, "accuracy": 0.5 + seed / 10, "train_loss": 0.25}
        (tmp_path / f"{number}.json").write_text(json.dumps({**values, **told, "diverged": False}))
    expected = "seeds ─ 0.8 50.00 – 50.00% 0.250 1 0.9 55.00 ± 7.07 – 50.00% 0.250 2"
    for files in ([str(tmp_path)], [str(each) for each in tmp_path.glob("*.json")]):
        assert run("report", *files) == 0
        assert expected in re.sub("─+", "─", " ".join(capsys.readouterr().out.split()))
    assert run("report", str(tmp_path / "0.json")) == 0
    assert "seeds" not in capsys.readouterr().out  # one run differs in nothing


def test_list_shows_everything_with_its_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    shown = capsys.readouterr().out
    for name in (*models.names(), *data.names(), *(recipe.name for recipe in RECIPES), "scl"):
        assert name in shown
    assert f"{len(RECIPES)} recipes" in shown
    assert all(f"{entry.weights:,}" in shown for entry in models.MODELS)


def test_signs_that_a_terminal_does_not_know_are_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-m", "gossamer", "list"], env=environment, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert " 2 ? " in shown.stdout  # 2 × LSTM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digitz", "--out", "OUT"], "got 'digitz': did you mean 'digits'?"),
        (
            ["train", "digits", "--out", "OUT", "--set", "epoch=3"],
            "unknown key 'epoch' of a run: did you mean 'epochs'?",
        ),
        (["train", "digits", "--out", "OUT", "--set", "device=cuda"], "device=cuda was requested, but torch"),
        (["train", "digits", "--out", "OUT", "--set", "lr=1e30"], "the loss is not finite"),
        (["train", "digits", "--out", "OUT", "--set", "model=resnet20"], "resnet20 does not take batches of digits"),
        (["train", "cifar10-resnet20", "--out", "OUT", "--set", "data_root=OUT"], "to name a folder with data sets"),
        (["train", "NEW", "--out", "OUT"], "written by a newer version of gossamer"),
        (["sweep", "digits", "--out", "OUT"], "got no option with several values: add --seed 0,1,2"),
        (["sweep", "digits", "--out", "OUT", "--seed", "0"], "got no option with several values: add --seed 0,1,2"),
        (["sweep", "digits", "--out", "OUT", "--epochs", "1,"], "such as seed=0,1,2, got 'epochs=1,'"),
        (["train", "digits", "--out", "OUT", "--epochs", "2.5"], "epochs: expected a whole number, got '2.5'"),
        (["train", "digits", "--out", "OUT", "--epochs="], "expected a value after --epochs, got an empty one"),
        (["train", "digits", "--out", "OUT", "--nesterov=2"], "nesterov: expected true or false, got '2'"),
        (["train", "digits", "--out", "OUT", "--optimizer", "sdg"], "expected one of sgd, adam, adamw, got 'sdg'"),
        (
            ["train", "digits", "--out", "OUT", "--flops", "0.1"],
            "set what you do not mean to none, such as",
        ),
        (["train", "digits", "--out", "OUT", "--settings.fraction", "0.1"], "unknown setting 'fraction'"),
        (
            ["train", "digits", "--out", "OUT", "--settings.mask-lr", "1", "--set", "settings.mask_lr=1"],
            "expected each key once, got settings.mask_lr more than once, as an option or after --set or --grid: keep",
        ),
        (["train", "digits", "--out", "OUT", "--set", "lr=1", "--set", "lr=2"], "expected each key once, got lr more"),
        (["sweep", "digits", "--out", "OUT", "--seed", "0,1", "--grid", "seed=2,3"], "each key once, got seed more"),
        (["train", "digits", "--out", "OUT", "--batch-size=8", "--batch_size", "9"], "expected --batch-size once, got"),
        (["compare", "--out", "OUT", "--sparsity", "95"], "such as 0.95, got [95.0]"),
        (["speed", "NEW", "--out", "OUT/nowhere/speed.json"], "create it first"),
        (["train", "NEW", "--out", "OUT"], "new.json: expected a run in format 1 or older, got format 7"),
        (["train", "digits", "--out", ""], "expected a folder after --out, got an empty name: write --out . for"),
        (["sweep", "digits", "--out=", "--grid", "seed=0"], "expected a folder after --out, got an empty name"),
        (["report", "OUT"], "expected the folder of a finished run, got "),
        (["report", "EMPTY"], "expected a finished run with a result.json in it"),
        (["train", "digits", "--out", "NEW"], "is a file: choose another name"),
        (["train", "digits", "--out", "NEW/deeper"], "is a file: choose another name"),
        (["train", "digits", "--out", "OUT", "--set", ""], "expected key=value, such as lr=0.05, got ''"),
        (["train", "digits", "--out", "OUT", "--set"], "expected key=value after --set and --grid, got nothing"),
        (["sweep", "digits", "--out", "OUT", "--grid"], "expected key=value after --set and --grid, got nothing"),
        (["sweep", "digits", "--out", "NEW", "--grid", "seed=0"], "which is a file: choose another name (--out)"),
    ],
)
def test_an_error_is_one_message_without_a_traceback(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    new = tmp_path / "new.json"
    new.write_text('{"format": 7}')
    (tmp_path / "empty").mkdir()
    for name, place in {"OUT": tmp_path / "out", "NEW": new, "EMPTY": tmp_path / "empty"}.items():
        arguments = [each.replace(name, str(place)) for each in arguments]
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "gossamer: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "device: free some space on the disk, and run"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "'x': choose another place, or change its perm"),
        (OSError("expected a folder"), "gossamer: expected a folder\n"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "directory: 'x'\n"),
    ],
)
def test_an_error_of_the_system_comes_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def fail(self: object, console: object) -> None:
        raise error

    monkeypatch.setattr(cli.commands.List, "carry_out", fail)
    assert run("list") == 2
    assert said in capsys.readouterr().err


def test_a_run_that_has_finished_before_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "digits", "--out", str(tmp_path), "--set", "epochs=1", "model_options.width=4"]
    said = "nothing was trained"
    assert run(*command) == 0
    shown = capsys.readouterr().out
    assert said not in shown
    assert str(tmp_path / "model.safetensors") in shown  # in one piece
    assert run(*command) == 0
    assert said in capsys.readouterr().out
    assert run(*command, "--set", "seed=1") == 2
    assert f"gossamer train {tmp_path / 'run.json'} --out {tmp_path} resumes" in capsys.readouterr().err


def test_without_a_folder_a_run_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in ("0", "1", "0"):
        assert run("train", "digits", "--epochs", "1", "--sparsity", "0.9", "--seed", seed) == 0
    assert capsys.readouterr().out.count("This run had already finished in runs/digits-") == 1
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("digits-*/run.json")]
    assert sorted((each["epochs"], each["sparsity"], each["seed"]) for each in runs) == [(1, 0.9, 0), (1, 0.9, 1)]


@pytest.mark.filterwarnings("always:this run has finished")
def test_a_model_that_is_gone_is_not_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "digits", "--out", str(tmp_path), "--set", "epochs=1", "model_options.width=4"]
    assert run(*command) == 0
    (tmp_path / "model.safetensors").unlink()
    capsys.readouterr()
    assert run(*command) == 0
    said = capsys.readouterr()
    assert "The model is in" not in said.out
    assert f"model.safetensors is no longer in {tmp_path}: put it back, or delete {tmp_path}/result.json" in said.err


def test_the_home_of_the_user_is_found_where_the_shell_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run("train", "digits", "--out=~/mine", "--set", "epochs=1", "model_options.width=2") == 0
    assert (tmp_path / "mine" / "result.json").is_file()
    assert not (tmp_path / "~").exists()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    told = io.StringIO()
    console = Console(file=told, width=20)  # narrower than a line
    often, seldom = PlainLines("mine", console, every=0.0), PlainLines("mine", console, every=1e9)
    statuses = [
        Status(step=step, total_steps=4, epoch=step / 2, epochs=2, phase="dense", lr=0.1, seconds=60.0 * step)
        for step in range(5)
    ]
    often.begin(statuses[0])
    often.tell(replace(statuses[1], loss=0.5, validation=0.9))
    often.tell(statuses[2])
    often.close()
    assert told.getvalue().splitlines() == [
        "mine: 1/2 dense",
        "mine: 1/2 dense · loss 0.500 · 90.00% · 0:03:00 left",
        "mine: 2/2 dense · 90.00% · 0:02:00 left",
    ]
    told.seek(told.truncate(0))
    seldom.begin(statuses[0])
    for status in statuses[1:]:
        seldom.tell(status)
    assert told.getvalue().splitlines() == ["mine: 1/2 dense", "mine: 2/2 dense"]


def test_between_two_statuses_the_line_moves_and_says_that_it_evaluates() -> None:
    status = Status(step=0, total_steps=4, epoch=0, epochs=2, phase="dense", lr=0.1, seconds=0.0)
    told = io.StringIO()
    plain = PlainLines("mine", Console(file=told), every=0.0)
    plain.begin(status)
    plain.tell(replace(status, step=1, epoch=0.5, seconds=60.0, loss=0.5))
    plain.move(2, 120.0)
    plain.move(4, 240.0, "evaluating test 40%")
    assert told.getvalue().splitlines()[2:] == [
        "mine: 2/2 dense · loss 0.500 · 0:02:00 left",
        "mine: 2/2 dense · evaluating test 40%",
    ]
    shown = io.StringIO()
    live = LiveLine("mine", Console(file=shown, width=80, force_terminal=True, color_system=None))
    live.begin(status)
    live.move(4, 240.0, "evaluating test 40%")
    live.close()
    assert "2/2 dense · evaluating test 40%" in shown.getvalue()


def test_on_a_terminal_of_80_columns_every_number_is_seen() -> None:
    told = io.StringIO()
    line = LiveLine("cifar10-resnet20", Console(file=told, width=80, force_terminal=True, color_system=None))
    status = Status(
        step=1000, total_steps=4000, epoch=119.5, epochs=240, phase="sparsify", lr=0.1, seconds=60.0, loss=0.0664
    )
    line.begin(status)
    line.tell(replace(status, validation=0.94, sparsity=0.2461, decay=0.253))
    line.close()
    shown = told.getvalue()
    assert "120/240 sparsify · loss 0.066 · 94.00% · sparse 24.6% · λ1 0.25 -:--:--" in shown
    assert "cif… " in shown
    assert "acc" not in shown  # where images are held out their number is enough


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"train": 0.9312, "sparsity": 0.2461, "decay": 0.253}, "train acc 93.1% · sparse 24.6% · λ1 0.25 -:--:--"),
        ({"train": 81.5, "metric": "perplexity"}, "train ppl 81.50 -:--:--"),
    ],
)
def test_the_live_line_shows_the_training_accuracy_where_no_images_are_held_out(
    told: dict[str, Any], words: str
) -> None:
    shown = io.StringIO()
    line = LiveLine("digits", Console(file=shown, width=80, force_terminal=True, color_system=None))
    status = Status(
        step=1000, total_steps=4000, epoch=119.5, epochs=240, phase="sparsify", lr=0.1, seconds=60.0, loss=0.0664
    )
    line.begin(status)
    line.tell(replace(status, **told))
    line.close()
    assert f"120/240 sparsify · loss 0.066 · {words}" in shown.getvalue()


def test_the_number_of_the_paper_is_told_for_the_same_run_wherever_it_was_computed() -> None:
    recipe = find("cifar10-resnet20-dense")
    for change, told in (("device=cpu", "reached within"), ("seed=1", "for the recipe as it stands")):
        run = recipe.run.with_settings([change])
        result = {"accuracy": 0.92, "run_id": run.run_id, "config": run.to_dict()}
        assert told in tables.against_paper(recipe, result)


def test_a_sweep_tells_what_is_there_and_its_example_can_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sweep", "--help") == 0
    grid = re.findall(r"[a-z_.]+=[a-z0-9.]+(?:,[a-z0-9.]+)+(?=[ .])", " ".join(capsys.readouterr().out.split()))
    assert len(grid) == 3
    assert len(runs_of(find("digits").run, [each.rstrip(".") for each in grid])) == 12
    sweep = ["sweep", "digits", "--out", str(tmp_path), "--set", "epochs=1", "model_options.width=2", "--grid"]
    assert run(*sweep, "seed=0") == 0
    assert "not trained again" not in capsys.readouterr().out
    assert run(*sweep, "seed=0,1") == 0
    assert "1 of 2 runs have their record in" in capsys.readouterr().out


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("train", "digitz", "--out", str(tmp_path), "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_fields_of_a_run_are_options(tmp_path: Path) -> None:
    options = ["--epochs", "2", "--batch-size=90", "--nesterov", "--augment", "no", "--clip", "none", "--method=rigl"]
    nested = ["--settings.fraction", "0.2", "--model-options.width=4", "--settings.sparsify", "0.2run"]
    assert run("train", "digits", "--out", str(tmp_path), *options, *nested, "--sparsity", "0.8") == 0
    found = read_run(tmp_path / "run.json")
    changes = "epochs=2 batch_size=90 nesterov=true augment=no clip=none method=rigl sparsity=0.8"
    changes += " settings.fraction=0.2 model_options.width=4 settings.sparsify=0.2run"
    assert found == find("digits").run.with_settings(changes.split())
    assert (found.epochs, found.nesterov, found.model_options) == (2, True, {"width": 4})


def test_a_switch_without_a_value_does_not_take_the_recipe_for_one(tmp_path: Path) -> None:
    assert run("train", "--nesterov", "digits", "--out", str(tmp_path), *SHORT) == 0
    assert read_run(tmp_path / "run.json").nesterov


def test_the_help_shows_every_field_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    train = capsys.readouterr().out
    assert run("sweep", "--help") == 0
    shown, swept = (" ".join(each.replace("│", " ").split()) for each in (train, capsys.readouterr().out))
    names = [each.name for each in fields(Run) if each.name not in ("settings", "model_options")]
    names += [f"settings.{each.name}" for each in (*fields(SCLOptions), *fields(Phases))] + [
        "settings.fraction",
        "model-options.width",
    ]
    for name in names:
        assert f"--{name.replace('_', '-')} " in shown
        assert f"--{name.replace('_', '-')} " in swept
    assert "The defaults, here and below, are those of the recipe." in shown
    assert "--epochs INT Passes over the training set. --batch-size INT Samples per step" in shown
    assert "--optimizer sgd|adam|adamw The optimizer" in shown


@pytest.mark.filterwarnings("always:method=dense does not take")
def test_options_of_a_sweep_with_commas_are_its_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seed", "0,1", "--method", "dense,scl", "--sparsity=0.8", "--device", "cpu", "--model-options.width=2"]
    lists = ["--epochs=1", "--schedule=steps", "--lr-drops", "2it,3it", "--settings.mask-lr=0.1"]
    assert run("sweep", "digits", "--out", str(tmp_path), *options, *lists) == 0
    assert "warning: method=dense does not take settings.mask_lr" in capsys.readouterr().err
    found = [json.loads(path.read_text())["config"] for path in tmp_path.glob("*.json")]
    assert sorted((each["seed"], each["method"], each["sparsity"] or 0) for each in found) == [
        (0, "dense", 0),
        (0, "scl", 0.8),
        (1, "dense", 0),
        (1, "scl", 0.8),
    ]
    assert all(each["lr_drops"] == ["2it", "3it"] for each in found)


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--epoch", "--epochs"), ("--batchsize", "--batch-size"), ("--mask-lr", "--settings.mask-lr")],
)
def test_a_misspelt_option_suggests_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, meant: str
) -> None:
    assert run("train", "digits", "--out", str(tmp_path / "out"), option, "3") == 2
    said = capsys.readouterr().err
    assert f"Unrecognized options: {option}, 3" in said
    assert f" {meant} " in said.partition("Perhaps you meant")[2]
    assert not (tmp_path / "out").exists()


def test_a_wrong_option_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "digits", "--otu", "x") == 2
    assert "--otu" in capsys.readouterr().err


def test_ctrl_c_stops_after_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = JsonLines.tell

    def tell_and_press(self: JsonLines, status: Status) -> None:
        tell(self, status)
        if status.step == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "tell", tell_and_press)
        assert run("train", "digits", "--out", str(tmp_path), *SHORT) == 130
    said = capsys.readouterr().err
    assert "stopped after step 8 of" in said
    assert "run the same command again to resume" in said
    assert run("train", "digits", "--out", str(tmp_path), *SHORT) == 0


@pytest.mark.filterwarnings("always:the checkpoint")
def test_a_warning_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "digits", "--out", str(tmp_path), *SHORT, "--set", "checkpoint_steps=15") == 0
    (tmp_path / "result.json").unlink()
    (tmp_path / "checkpoint-000000001.pt").write_bytes(b"nonsense")
    assert run("train", "digits", "--out", str(tmp_path), *SHORT) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert warned[0].startswith("warning: the checkpoint")
    assert warned[0].endswith("; starting over")


def test_numbers_stay_whole_beside_a_long_name() -> None:
    result = {"accuracy": 0.91, "sparsity": 0.95, "nonzeros": 36_461_232, "flops": 1e9, "seconds": 3725}
    rows = [["magnitude, chosen anew in every step", *["98.19 ± 0.20"] * 4]]
    for table, numbers in (
        (tables.of_results([("runs/" * 30, result)]), ("91.00%", "95.00%", "36,461,232", "62 min 5 s")),
        (tables.of_rows(["method", "0 %", "90 %", "95 %", "98 %"], rows), ("98.19 ± 0.20",)),
    ):
        console = Console(width=80, file=io.StringIO())
        console.print(table)
        shown = console.file.getvalue()
        assert all(number in shown for number in numbers)
        assert max(map(len, shown.splitlines())) <= 80


def test_a_stop_before_the_first_step_is_explained_without_a_folder() -> None:
    assert "at once" in cli._afterwards(Train("digits", {}))
