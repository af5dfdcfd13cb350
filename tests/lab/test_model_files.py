"""Networks from files: by name, by the file's own word, by the run beside it, or by an import."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gossamer
from gossamer import cli
from gossamer.cli.deploy import calibration
from gossamer.deployment.runtime import memory
from gossamer.lab import models
from gossamer.lab.json_files import read_object
from gossamer.lab.model_files import open_network
from gossamer.lab.models.digits_cnn import DigitsNet


def make_net() -> nn.Module:
    return nn.Linear(4, 3)


def make_nothing() -> int:
    return 3


def sparse(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.where(torch.rand_like(p) < 0.9, 0, p))
    return model.eval()


def test_the_name_comes_from_the_command_the_file_or_the_run(tmp_path: Path) -> None:
    model = sparse(models.create("lenet300", num_classes=7))
    named, bare = tmp_path / "named.safetensors", tmp_path / "bare.safetensors"
    gossamer.save(model, named, network="lenet300")
    save_file(model.state_dict(), bare)
    with pytest.raises(ValueError, match=r"bare\.safetensors or a .*to name the network.*add --net NAME"):
        open_network(bare)
    found = [open_network(named), open_network(bare, "lenet300")]
    (tmp_path / "run.json").write_text(json.dumps({"model": "lenet300", "model_options": {}}))
    found.append(open_network(bare))
    x = torch.randn(2, 1, 28, 28)
    for each in found:
        assert each.name == "lenet300"
        assert each.example(3).shape == (3, 1, 28, 28)
        assert not each.model.training
        with torch.no_grad():
            assert torch.equal(each.model(x), model(x))


def test_tied_weights_need_only_one_of_their_names(tmp_path: Path) -> None:
    """As the runs of `gossamer train` write them."""
    model = sparse(models.create("lstm_lm", num_classes=30, hidden=8))
    state = model.state_dict()
    del state["decoder.weight"]
    gossamer.save(state, tmp_path / "model.safetensors")
    (tmp_path / "run.json").write_text(json.dumps({"model": "lstm_lm", "model_options": {"hidden": 8}}))
    found = open_network(tmp_path / "model.safetensors")
    assert found.batch_axis == 1
    words = found.example(4)
    assert words.shape == (35, 4)
    assert int(words.max()) < 30
    with torch.no_grad():
        assert torch.equal(found.model(words)[0], model(words)[0])


def test_the_network_of_the_quick_start(tmp_path: Path) -> None:
    for classes in (10, 3):
        gossamer.save(DigitsNet(classes, width=4), tmp_path / "model.safetensors", network="digits_cnn")
        found = open_network(tmp_path / "model.safetensors")
        assert found.model(found.example(2)).shape == (2, classes)


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    gossamer.save(make_net(), path)
    found = open_network(path, f"{__name__}:make_net", shape=(4,))
    assert found.model(found.example(2)).shape == (2, 3)
    with pytest.raises(ValueError, match="add --shape"):
        open_network(path, f"{__name__}:make_net")
    with pytest.raises(ValueError, match="cannot be imported"):
        open_network(path, "no_such_module:make", shape=(4,))
    with pytest.raises(ValueError, match=r"to return a torch.nn.Module, got int"):
        open_network(path, f"{__name__}:make_nothing", shape=(4,))


def test_a_network_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "networks_of_mine.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(4, 3)\n")
    gossamer.save(make_net(), tmp_path / "own.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert open_network("own.safetensors", "networks_of_mine:make", shape=(4,)).name == "networks_of_mine:make"


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    gossamer.save(make_net(), tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"expected the tensors of lenet300 .*missing: .*; unknown: weight, bias"):
        open_network(tmp_path / "own.safetensors", "lenet300")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_network(tmp_path / "nowhere.safetensors", "lenet300")
    with pytest.raises(FileNotFoundError, match=r"is a folder without model\.safetensors: name a file"):
        open_network(tmp_path, "lenet300")


@pytest.mark.parametrize("name", ["os:abort", f"{__name__}:make_net", "no.such:thing"])
def test_a_file_cannot_name_code_to_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    gossamer.save(make_net(), path, network=name)
    with pytest.raises(ValueError, match="would run code"):
        open_network(path, shape=(4,))
    gossamer.save(make_net(), path)
    (tmp_path / "run.json").write_text(json.dumps({"model": name}))
    with pytest.raises(ValueError, match="would run code"):
        open_network(path, shape=(4,))


def test_sizes_in_a_file_are_checked_before_memory_is_asked_for(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", models.create("lenet300").state_dict()
    last = next(name for name, tensor in state.items() if tensor.shape == (10, 100))
    save_file({**state, last: torch.empty(1 << 50, 0)}, path)  # no bytes, yet as many rows as no machine has room for
    with pytest.raises(ValueError, match="of another shape"):
        open_network(path, "lenet300")
    save_file({"features.0.weight": torch.empty(1 << 20, 0)}, path)
    with pytest.raises(ValueError, match=r"missing: features\.1\.weight"):
        open_network(path, "digits_cnn")


def test_options_that_the_network_does_not_have_are_named(tmp_path: Path) -> None:
    gossamer.save(models.create("lenet300"), tmp_path / "model.safetensors")
    (tmp_path / "run.json").write_text(json.dumps({"model": "lenet300", "model_options": {"depth": 3}}))
    with pytest.raises(ValueError, match=r"options of lenet300 in .*run.json, got .*depth"):
        open_network(tmp_path / "model.safetensors")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return int(stop.value.code or 0)


def test_speed_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cache_directory", lambda: tmp_path / "cache")
    path, out = tmp_path / "model.safetensors", tmp_path / "speed.json"
    gossamer.save(sparse(models.create("lenet300")), path)
    short = ["--batch", "1", "4", "--seconds", "0", "--engines", "torch", "gossamer"]
    assert run("speed", str(path), *short) == 2
    assert "add --net NAME" in capsys.readouterr().err
    assert run("speed", str(path), "--net", "lenet300", *short, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "batch 4, 1 thread" in shown
    assert "gossamer" in shown
    assert [each["batch"] for each in json.loads(out.read_text())["cases"]] == [1, 4]


def test_export_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The suffix decides about the format, and a run folder stands for its network."""
    path = tmp_path / "model.safetensors"
    model = sparse(models.create("lenet300"))
    gossamer.save(model, path, network="lenet300")
    assert run("export", str(path), str(tmp_path / "other.pt2")) == 0
    assert run("export", str(tmp_path), "--to", "dense") == 0
    shown = capsys.readouterr().out
    assert "bitwise equal" in shown
    assert gossamer.load(tmp_path / "model.dense.safetensors").keys() == model.state_dict().keys()
    x = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(tmp_path / "other.pt2").module()(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "that ends in .mlpackage, .pte, .onnx, .pt2, .safetensors, got neither"),
        (["model.tflite"], "got model.tflite"),
        (["model.pt2", "--int8"], "expected --int8 with --to coreml, got --to pt2: omit it"),
        (["model.mlpackage", "--pattern", "2:4"], "expected --pattern with --to onnx, got --to coreml: omit it"),
    ],
)
def test_export_says_what_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    gossamer.save(sparse(models.create("lenet300")), tmp_path / "model.safetensors", network="lenet300")
    assert run("export", str(tmp_path), *arguments) == 2
    assert re.search(problem, " ".join(capsys.readouterr().err.split()))


def test_samples_for_calibration_come_from_a_file(tmp_path: Path) -> None:
    gossamer.save(sparse(models.create("lenet300")), tmp_path / "model.safetensors", network="lenet300")
    stored = open_network(tmp_path / "model.safetensors")
    np.save(tmp_path / "samples.npy", np.ones((3, 1, 28, 28)))
    samples = calibration(tmp_path / "samples.npy", stored)
    assert [(each.shape, each.dtype) for each in samples] == [((1, 1, 28, 28), torch.float32)] * 3
    np.save(tmp_path / "flat.npy", np.ones((3, 784)))
    with pytest.raises(ValueError, match=r"expected samples of shape \(3, 1, 28, 28\) in .*, got \(3, 784\)"):
        calibration(tmp_path / "flat.npy", stored)
    np.save(tmp_path / "objects.npy", np.array([print]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"expected a \.npy file of numbers"):
        calibration(tmp_path / "objects.npy", stored)


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("lstm_lm", {"layers": 1_000_000_000}),
        ("indrnn", {"layers": 1_000_000_000}),
        ("map_fit", {"depth": 1_000_000_000}),
        ("lstm_lm", {"layers": 1_000_000}),
        ("indrnn", {"layers": 1_000_000}),
        ("map_fit", {"depth": 1_000_000}),
        ("map_fit", {"width": 1 << 62}),
        ("map_fit", {"width": -1}),
        ("map_fit", {"width": 1e300}),
        ("lstm_lm", {"dropout": "much"}),
        ("map_fit", ["width"]),
    ],
)
def test_a_run_file_with_absurd_options_is_refused_at_once(tmp_path: Path, network: str, options: object) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "run.json").write_text(json.dumps({"model": network, "model_options": options}))
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"expected .*got"):
        open_network(tmp_path / "model.safetensors")
    assert time.perf_counter() - started < 10


def test_opening_a_network_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = pytest.importorskip("torchvision")
    asked: list[object] = []
    real = vision.models.get_model
    monkeypatch.setattr(vision.models, "get_model", lambda *a, **how: asked.append(how) or real(*a, **how))
    monkeypatch.setattr(socket, "socket", None)
    model = models.create("efficientnet_b0", num_classes=3)
    asked.clear()
    gossamer.save(model, tmp_path / "model.safetensors")
    run = {"model": "efficientnet_b0", "model_options": {"pretrained": True}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    found = open_network(tmp_path / "model.safetensors").model
    assert torch.equal(found.state_dict()["classifier.1.weight"], model.state_dict()["classifier.1.weight"])
    assert not any("weights" in how for how in asked)  # type: ignore[operator]


def test_max_bytes_bounds_the_tensors_of_a_network(tmp_path: Path) -> None:
    gossamer.save(models.create("lenet300"), tmp_path / "f.safetensors", network="lenet300")
    with pytest.raises(ValueError, match="expected at most 1000 bytes of tensors"):
        open_network(tmp_path / "f.safetensors", max_bytes=1000)


def test_a_json_file_is_at_most_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=r"of at most 67108864 bytes in .*run\.json, got 67108865 bytes"):
        read_object(path)
