"""Methods from outside the package: how they are found, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.methods import METHODS, find, load, register, registry
from gossamer.methods.dpf import DPF
from methods.documented import CLASS, MODULE, NAME, write_documented_method
from methods.toy import begin, gradient_like, left, step, top

OWN = "from gossamer.methods import Method, find\nfrom gossamer.methods.dpf import DPF\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory; modules and methods from it are forgotten afterwards."""
    methods = dict(METHODS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]
    for name in set(METHODS) - set(methods):
        del registry._REGISTERED[name]
    registry._LOADED.clear()


def test_the_documented_method_works(folder: Path) -> None:
    path = write_documented_method(folder)
    assert len((folder / f"{MODULE}.py").read_text().splitlines()) <= 40
    with pytest.raises(ValueError, match=r"method=taylor:Taylor is not loaded, and reading a file never imports code"):
        find(path)
    found = load(path)
    assert found.__name__ == CLASS
    assert found is find(NAME) is find(path) is METHODS[NAME]
    method, weights, timeline = begin(NAME, 0.5, 0.75, memory=0.8)
    mean = np.zeros((2, 40))
    for number in range(10):
        mean = 0.8 * mean + 0.2 * np.abs(gradient_like(weights, number).numpy() * weights.numpy())
        step(method, weights, timeline, number)
        for row, keep in enumerate((20, 10)):
            expected = top(mean[row : row + 1], left((number + 1) / 10, 40, keep))[0]
            assert np.array_equal(method.mask[row].numpy(), expected)
    with pytest.raises(ValueError, match=r"memory: expected a number of at least 0 and below 1, got 1\.0"):
        begin(NAME, 0.5, memory=1.0)


def test_a_class_without_the_decorator_is_registered_when_it_is_found(folder: Path) -> None:
    (folder / "own_plain.py").write_text(OWN + "class Plain(DPF):\n    name = 'plain'\n")
    assert load("own_plain:Plain") is find("plain")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("own_missing:Mine", ValueError, r"found no module 'own_missing'; expected own_missing.py or a package in"),
        ("own_other:Mine", ValueError, r"found no 'Mine' in .*own_other.py; its methods are Other"),
        ("own_other:find", TypeError, r"expected a subclass of gossamer.methods.Method, got <function find"),
        ("own_other:Other", ValueError, r"'dpf', which is gossamer.methods.dpf:DPF: give own_other:Other another name"),
        ("own_half:Half", TypeError, r"own_half:Half to define all abstract methods, but it lacks .*finalize, state"),
        ("own_broken:Mine", ModuleNotFoundError, r"No module named 'not_installed'"),
    ],
)
def test_what_cannot_be_used_is_refused(folder: Path, path: str, error: type[Exception], message: str) -> None:
    (folder / "own_other.py").write_text(OWN + "class Other(DPF):\n    pass\n")
    (folder / "own_half.py").write_text(OWN + "class Half(Method):\n    name = title = 'half'\n")
    (folder / "own_broken.py").write_text("import not_installed\n")
    with pytest.raises(error, match=message):
        load(path)


def test_names_are_checked_and_registering_twice_is_harmless() -> None:
    assert register(DPF) is DPF
    with pytest.raises(TypeError, match=r"expected a subclass of gossamer.methods.Method to register, got 3"):
        register(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"letters, digits and underscores, got 'a b'"):
        register(type("Own", (DPF,), {"name": "a b"}))
    with pytest.raises(ValueError, match=r"'magnitude', which is gossamer.methods.dpf:DPF"):
        register(type("Own", (DPF,), {"name": "magnitude"}))


def test_the_documented_method_trains_any_model(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path = write_documented_method(folder)
    sparsifier = gossamer.Sparsifier(model, optimizer, method=path, sparsity=0.8, total_steps=40, memory=0.8)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
    sparsifier.finish()
    assert sum(int((layer.weight != 0).sum()) for layer in (model[0], model[2])) == 160 - 128


def test_the_documented_method_in_train_and_compare(folder: Path) -> None:
    """In processes of their own, from the folder where the user keeps the module."""
    path = write_documented_method(folder)
    short = ["epochs=2", "sparsity=0.9", f"method={path}", "settings.memory=0.8"]
    train = ["train", "digits", "--out", "a", "--set", *short]
    compare = ["compare", "--net", "digits_cnn", "--data", "digits", "--methods", f"{path}:memory=0.8", "dpf"]
    compare += ["--sparsity", "0.9", "--epochs", "4", "--seeds", "1", "--validation", "100", "--out", "b"]
    for command in (train, compare):
        done = subprocess.run([sys.executable, "-m", "gossamer", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    result = json.loads((folder / "a" / "result.json").read_text())
    assert result["config"]["method"] == path
    assert result["sparsity"] == pytest.approx(0.9, abs=1e-4)
    records = [json.loads(each.read_text()) for each in (folder / "b").glob("*.json")]
    assert [record["sparsity"] for record in records if record["method"] == NAME] == [pytest.approx(0.9, abs=1e-4)]
