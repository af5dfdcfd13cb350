"""What the command line says to newcomers: help without torch, suggestions, answers for programs, files in the wrong
place, and what is missing."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

import gossamer
from gossamer import cli
from gossamer.cli.commands import COMMANDS
from gossamer.cli.console import Answer, live_bar
from gossamer.cli.help_texts import help_texts
from gossamer.lab import data, models, tables
from gossamer.lab.batched import runs_of, sweep
from gossamer.lab.recipes import RECIPES, find
from gossamer.lab.training import train
from gossamer.methods import METHODS
from gossamer_start import HELP, answered

SOURCE = Path(__file__).parents[2] / "src"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([*map(str, arguments)])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(find("digits").run.with_settings(["epochs=3", "model_options.width=4"]), folder)
    return folder


# --- before torch ---


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from gossamer_start import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["-h"], ["train", "--help"], ["doctor", "-h"], ["help"], ["help", "train"]]
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    found = start(*arguments)
    assert (found.returncode, found.stderr) == (0, "")
    named = [each for each in arguments if each in COMMANDS]
    assert found.stdout.startswith(f"usage: gossamer {named[0] if named else '[-h]'}")


def test_the_help_that_is_shown_is_that_of_the_commands() -> None:
    """`python -m gossamer.cli.help_texts` writes it."""
    shown, now = json.loads(HELP.read_text("utf-8")), help_texts()
    assert list(shown) == ["", *COMMANDS]
    for name, text in now.items():  # versions of tyro draw other lines
        assert words_of(shown[name]) == words_of(text), "run python -m gossamer.cli.help_texts"


def words_of(text: str) -> list[str]:
    return [word for word in text.split() if word.strip("─-│╭╮╰╯•")]


@pytest.mark.parametrize(("wrong", "right"), [("trian", "train"), ("lst", "list"), ("verfy", "verify")])
def test_a_misspelt_command_suggests_the_right_one(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = start(wrong, "--out", "x")
    said = f"gossamer: expected a command, got {wrong!r}: did you mean {right!r}? gossamer --help describes them\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", said)
    assert run(wrong) == 2
    assert capsys.readouterr().err == said


def test_a_command_like_no_other_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(["xyzzy"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)
    assert answered(["train", "digits", "--out", "x"]) is None


# --- list ---


@pytest.mark.parametrize("kind", tables.KINDS)
def test_a_list_of_one_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", kind, "--json") == 0
    (name, rows), *others = json.loads(capsys.readouterr().out).items()
    assert (name, others) == (kind, [])
    named = [row["name"] for row in rows]
    expected = {
        "models": [*models.names()],
        "data": [*data.names()],
        "methods": [*METHODS],
        "recipes": [recipe.name for recipe in RECIPES],
    }
    assert named == expected.get(kind, sorted(named))
    assert run("list", kind) == 0
    shown = capsys.readouterr().out
    assert f"{len(rows)} {'data sets' if kind == 'data' else kind}" in shown
    assert all(name in shown for name in named)


def test_settings_say_which_methods_have_them() -> None:
    rows = {row["name"]: row for row in tables.rows_of_kind("settings")}
    assert rows["settings.fraction"]["methods"] == ["rigl", "granet"]
    assert rows["settings.warmup"]["methods"] == ["all"]
    assert rows["settings.mask_lr"]["type"] == "number or none"


# --- verify, compact, card ---


def test_verify_compares_zeros_and_outputs(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, sparse = trained / "model.safetensors", trained / "model.sparse.safetensors"
    assert run("verify", plain, sparse) == 0
    assert capsys.readouterr().out.startswith("same; compared zeros of 4 tensors and 1 outputs")
    state = load_file(plain)
    state["classifier.weight"][state["classifier.weight"] == 0] = 1.0
    save_file(state, tmp_path / "filled.safetensors")
    assert run("verify", plain, tmp_path / "filled.safetensors", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"]
    assert any("classifier.weight" in each and "zeros lost" in each for each in found["differences"])
    assert any(each.startswith("output differs") for each in found["differences"])


def test_verify_compares_files_of_unknown_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"a.weight": torch.eye(3), "a.bias": torch.zeros(3)}}, tmp_path / "a.pt")
    save_file({"a.weight": torch.eye(3) * 2}, tmp_path / "b.safetensors")
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "c.safetensors")
    assert run("verify", tmp_path / "a.pt", tmp_path / "b.safetensors") == 0
    assert capsys.readouterr().out == "same; compared zeros of 1 tensors\n"
    assert run("verify", tmp_path / "a.pt", tmp_path / "c.safetensors") == 1
    assert "a.weight: 6 zeros lost of 6, the first at (0, 1)" in capsys.readouterr().out


def small() -> nn.Module:
    """For --net: half of the hidden neurons are dead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[0].weight[:4])
    nn.init.zeros_(model[0].bias[:4])
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["small.pt2", "small.onnx"])
def test_compact_writes_the_smaller_network(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, out = small().eval(), tmp_path / name
    gossamer.save(model, tmp_path / "model.safetensors")
    network = ["--net", "test_commands:small", "--shape", "6"]
    assert run("compact", tmp_path / "model.safetensors", out, *network, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters_before"], found["parameters_after"]) == (83, 43)
    assert found["written"]["file_bytes"] == out.stat().st_size
    x = torch.randn(5, 6)
    if out.suffix == ".pt2":
        torch.testing.assert_close(torch.export.load(out).module()(x), model(x))
    else:
        assert sum(each.dims[0] == 4 for each in onnx.load(str(out)).graph.initializer) >= 1
    assert run("compact", tmp_path / "model.safetensors", tmp_path / "small.txt", *network) == 2
    assert "ends in .pt2 or .onnx" in capsys.readouterr().err


def test_a_card_says_what_the_run_is(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("card", trained) == 0
    card = capsys.readouterr().out
    result = json.loads((trained / "result.json").read_text())
    for said in (
        f"| test accuracy | {result['accuracy']:.2%} |",
        f"{result['nonzeros']:,} of its",
        "| `epochs` | `3` |",
    ):
        assert said in card
    assert card.startswith("---\nlibrary_name: gossamer\n")
    code = (
        card.partition("```python\n")[2]
        .partition("```")[0]
        .replace("model.safetensors", f"{trained}/model.safetensors")
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert isinstance(names["model"], nn.Module)
    assert run("card", trained, "--out", tmp_path / "README.md") == 0
    assert (tmp_path / "README.md").read_text() == card


# --- answers for programs ---


def test_every_command_with_a_table_answers_programs(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "digits", "--out", tmp_path / "s", "--seed", "0,1", "--epochs", "1", "--device", "cpu"]
    compare = ["compare", "--net", "digits_cnn", "--data", "digits", "--methods", "scl", "--sparsity", "0.9"]
    commands = {
        "train": (["train", "digits", "--out", trained, "--set", "epochs=3", "model_options.width=4"], "accuracy"),
        "report": (["report", trained, "--layers"], 0),
        "model": (["report", trained / "model.safetensors"], "rows"),
        "sweep": ([*sweep, "--model-options.width", "2"], 1),
        "compare": ([*compare, "--out", tmp_path / "c", "--seeds", "1", "--epochs", "3", "--device", "cpu"], 1),
    }
    for name, (arguments, key) in commands.items():
        assert run(*arguments, "--json") == 0, name
        found = json.loads(capsys.readouterr().out)
        assert found[key], name
    others = {name for name, kind in COMMANDS.items() if not hasattr(kind, "json")}
    assert others == {"card", "completion"}  # they print texts


def test_json_has_no_infinities() -> None:
    assert json.loads(str(Answer({"a": float("inf"), "b": float("nan"), "c": Path("x")}))) == {
        "a": None,
        "b": None,
        "c": "x",
    }


def test_a_sweep_shows_the_time_that_is_left() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with live_bar(console, "digits") as bar:
        bar.line("epoch 1/4")
        bar.move(0.25)
    text = shown.getvalue()
    assert "epoch 1/4" in text
    assert "25%" in text
    assert "left" in text


def test_the_progress_of_a_sweep_grows_to_one(tmp_path: Path) -> None:
    base = find("digits").run.with_settings(["epochs=1", "model_options.width=2", "device=cpu"])
    shares: list[float] = []
    sweep(runs_of(base, ["seed=0,1,2"]), tmp_path, together=2, moved=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 2 / 3 in shares  # the first batch has two of the three runs


# --- files in the wrong place ---


@pytest.fixture
def files(trained: Path, tmp_path: Path) -> Path:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a.weight": torch.eye(4)}, tmp_path / "a.pt")
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed", "a.pt"], "expected a safetensors file, got a.pt, which is a file of torch.save: gossamer.save"),
        (["speed", "a.pkl"], "which is a pickle, which can run code and is not read"),
        (["speed", "."], "or a run folder, got ., which is a folder without model.safetensors: name a file"),
        (["speed", "run/result.json"], "which is a JSON file"),
        (["compact", "a.pt", "b.pt2"], "which is a file of torch.save"),
        (
            ["train", "a.pt", "--out", "new"],
            "expected the name of a recipe, the folder of a run or its run.json, got a.pt",
        ),
        (["train", "run/model.safetensors", "--out", "new"], "which is a safetensors file"),
        (["train", "digits", "--out", "new", "--distil", "0.5", "--teacher", "a.pkl"], "which is a pickle"),
        (["report", "a.pkl"], "expected a file of torch.save with only tensors, got a.pkl"),
        (
            ["frontier", "run/model.safetensors"],
            "the folder of a finished run, got run/model.safetensors, which is a saf",
        ),
        (["card", "a.pt"], "the folder of a finished run, got a.pt, which is a file of torch.save: name the folder"),
        (["card", "nowhere"], "which does not exist"),
        (["verify", "run", "nowhere"], "expected a checkpoint, got nowhere, which does not exist"),
    ],
)
def test_a_file_in_the_wrong_place_is_named(
    files: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


# --- doctor, completion ---


def test_the_doctor_names_what_is_there_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    assert run("doctor", "--json") == 0
    found = {each["part"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert torch.__version__ in found["torch"]["found"]
    assert found["digits"]["state"] == "ok"
    assert {"C compiler", "CPU kernels", "GPU" if not torch.cuda.is_available() else "GPU 0"} <= found.keys()
    assert all(each["remedy"] for each in found.values() if each["state"] != "ok")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "MNIST" / "raw" / f"{name}-ubyte").touch()
    assert run("doctor") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mnist ok in" in shown
    assert "Nothing is broken" in shown


def test_the_doctor_reports_what_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "nowhere"))
    assert run("doctor") == 1
    assert "Broken: GOSSAMER_DATA." in capsys.readouterr().out


def test_the_doctor_names_the_command_for_a_missing_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.doctor, "_is_installed", lambda name: name != "plotly")
    assert run("doctor", "--json") == 0
    found = {each["part"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["report"]["found"] == "HTML pages: needs plotly"
    assert found["report"]["remedy"] == "pip install 'gossamer[report]'"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "bash") == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    code = (
        f'source "{script}"; complete -p gossamer; function=$(complete -p gossamer | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
        'COMP_WORDS=(gossamer qu); COMP_CWORD=1; COMPREPLY=(); "$function" gossamer qu gossamer; echo "${COMPREPLY[@]}"'
    )
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1].split() == ["quickstart"], found.stderr


def test_zsh_has_a_completion_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "zsh") == 0
    assert capsys.readouterr().out.startswith("#compdef gossamer")
