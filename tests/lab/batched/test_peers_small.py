"""The race that one CPU core runs, what it trains on, and its records; and benchmarks beside it."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.provenance import commit

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small = load("peers_small")


def images() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(200) % 10
    nothing = Labelled(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    whole = ImageSet("cifar10", Labelled(pixels, labels), nothing, tuple("0123456789"), (0.5,) * 3, (0.25,) * 3)
    part = small.small_images(whole, 128, held_out=50)
    assert isinstance(part, ImageSet)
    first = part.train.images[0].double()
    means = pixels.double().unflatten(3, (16, 2)).unflatten(2, (16, 2)).mean((3, 5))
    assert ((means - first).abs().amax((1, 2, 3)) <= 0.5).sum() == 1  # one of the training images
    assert (len(part.train), len(part.test)) == (128, 50)
    return part


def test_the_networks_have_the_counts_that_are_told() -> None:
    counts = {"residual": (13, 43_160), "deep": (109, 107_692), "plain": (7, 109_360)}
    for name, (convolutions, count) in counts.items():
        network = small.NETWORKS[name][1]()
        weights = [each for each in network.parameters() if each.dim() > 1]
        assert sum(each.dim() == 4 for each in weights) == convolutions
        assert sum(each.numel() for each in weights) == count
        assert f"{count:,}" in type(network).__doc__


def test_a_record_a_run_and_none_twice(tmp_path: Path) -> None:
    files = small.race(tmp_path, small.NETWORKS["residual"], ["dpf", "str:rate=50"], 0.9, 1, 4, images())
    assert [file.name for file in files] == ["dpf-90-4ep-s0.json", "str-rate-50-90-4ep-s0.json"]
    told = [json.loads(file.read_text()) for file in files]
    assert [each["method"] for each in told] == ["dpf", "str"]
    assert told[1]["settings"]["rate"] == 50
    assert [each["commit"] for each in told] == [commit()] * 2
    assert all(abs(each["sparsity"] - 0.9) < 1e-4 for each in told)
    times = [file.stat().st_mtime_ns for file in files]
    assert small.race(tmp_path, small.NETWORKS["residual"], ["dpf", "str:rate=50"], 0.9, 1, 4, images()) == files
    assert [file.stat().st_mtime_ns for file in files] == times
    files[1].write_text(json.dumps({**told[1], "settings": {**told[1]["settings"], "rate": 7.0}}))
    with pytest.raises(ValueError, match=r"expected a run of str:rate=50 .* another rate: its default has changed"):
        small.race(tmp_path, small.NETWORKS["residual"], ["dpf", "str:rate=50"], 0.9, 1, 4, images())


def test_smoothed_labels_are_another_run(tmp_path: Path) -> None:
    files = small.race(tmp_path, small.NETWORKS["residual"], ["dpf"], 0.9, 1, 4, images(), 0.1)
    assert [file.name for file in files] == ["dpf-label-smoothing-0.1-90-4ep-s0.json"]
    assert json.loads(files[0].read_text())["race"]["label_smoothing"] == 0.1


def test_the_small_network_for_long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sinking = load("sinking")
    count = sum(each.numel() for each in sinking.small_network().parameters() if each.dim() > 1)
    assert f"{count:,} connections" in sinking.small_network.__doc__
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator)
    part = Labelled(pixels, torch.arange(96) % 10)
    whole = ImageSet("cifar10", part, part, tuple("0123456789"), (0.5,) * 3, (0.25,) * 3)
    tiny = sinking.tiny_images(whole, held_out=32)
    torch.testing.assert_close(tiny.test.images[0, 0, 0, 0].double(), pixels[64, 0, :4, :4].double().mean().round())
    net = ("six convolutions", sinking.small_network)
    (file,) = sinking.race(tmp_path, net, ["scl:midpoint=5"], 0.9, 1, 4, tiny, weight_decay=1e-3)
    told = json.loads(file.read_text())["settings"]
    assert (told["weight_decay"], told["midpoint"]) == (1e-3, 5.0)


def test_a_plain_loop_leaves_a_record_of_the_sparsity_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plain = load("plain_loop")
    monkeypatch.setattr(plain, "prepare", lambda out, count: images())
    asked = ["--out", str(tmp_path), "--epochs", "4", "--seeds", "1", "--settings", "scale=per_sample,mask_lr=0.05"]
    plain.main(asked)
    (path,) = tmp_path.iterdir()
    assert path.name == "scale-per-sample-mask-lr-0.05-95-4ep-s0.json"
    told = json.loads(path.read_text())
    assert told["settings"] == {"scale": "per_sample", "mask_lr": 0.05}
    assert told["sparsity"] == pytest.approx(0.95, abs=1e-4)
    assert 0 <= told["accuracy"] <= 100
    monkeypatch.setattr(plain, "train", lambda *arguments, **settings: pytest.fail("trained again"))
    plain.main(asked)


def test_statistics_taken_anew_are_those_of_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that tells dark from bright images, with statistics of others, takes all for dark."""
    recalibrate = load("recalibrate")
    labels = torch.arange(20) % 2
    pixels = (40 + 160 * labels).to(torch.uint8).view(-1, 1, 1, 1).expand(20, 3, 8, 8).contiguous()
    part = Labelled(pixels, labels)
    two = ImageSet("cifar10", part, part, ("dark", "bright"), (0.5,) * 3, (0.25,) * 3, padding=1, flip=True)
    monkeypatch.setattr(recalibrate.data, "load", lambda name: two)
    norm = nn.BatchNorm2d(3, affine=False)
    norm.running_mean.fill_(1000.0)
    network = nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        network[3].weight.copy_(torch.tensor([[-1.0] * 3, [1.0] * 3]))
    monkeypatch.setattr(recalibrate, "open_network", lambda path, net: SimpleNamespace(model=network))
    recalibrate.main(["a.safetensors", "--images", "20", "--out", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row == {"file": "a", "accuracy": 50.0, "augmented": 100.0, "as they are": 100.0}


def test_an_interrupted_race_ends_with_the_records_of_one_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt_race = load("interrupt_race")
    asked = ["--net", "digits_cnn", "--data", "digits", "--methods", "scl", "--sparsity", "0.9", "--seeds", "1"]
    told = ["--interrupts", "1", "--within", "0.2", "--group", "--", *asked, "--epochs", "30", "--device", "cpu"]
    assert interrupt_race.main(told) == 0
    shown = capsys.readouterr().out
    assert "1: code 130" in shown
    assert "after 1 interrupts, 0 of them wrong: codes [0, 0], the same records" in shown
