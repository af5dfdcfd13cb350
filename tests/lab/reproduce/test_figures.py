"""The figures that need no training, and the list of exhibits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from gossamer import cli
from gossamer.lab import models
from gossamer.lab.batched.sweeps import sweep
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.reproduce import figures, indrnn
from gossamer.lab.reproduce.registry import EXHIBITS, exhibit, mask_gradients_of
from gossamer.lab.results import density
from gossamer.lab.results.exhibits import short_decay_table
from gossamer.lab.short_runs import rows_of_traces
from gossamer.lab.training.run import Run
from gossamer.methods.scl import ESTIMATORS

pytest.importorskip("matplotlib")


def test_dead_zones_are_where_the_paper_has_them() -> None:
    dead = {each.name: each.dead for each in figures.estimators()}
    assert dead.keys() == ESTIMATORS.keys()
    assert [name for name in dead if not dead[name]] == ["identity", "leaky_relu", "softplus"]
    assert dead["relu"] == [(-figures.RANGE, 0.0)]
    (below, above) = dead["clipped_relu"]
    assert below == (-figures.RANGE, 0.0)
    assert above == (pytest.approx(figures.ALPHA["clipped_relu"], abs=0.011), figures.RANGE)


def test_pruning_u_cuts_the_gradient_off_and_pruning_w_does_not(tmp_path: Path) -> None:
    curves = {(each["pruned"], each["sparsity"]): each for each in indrnn.reproduce(tmp_path, seeds=1)}
    assert (tmp_path / indrnn.PICTURE).is_file()
    dense, w, u = (curves[kind] for kind in (("dense", 0.0), ("W pruned", 0.9), ("u pruned", 0.9)))
    assert min(w["norms"]) > 0.5 * min(dense["norms"])
    # Where u is zero, no gradient reaches an earlier step.
    assert all(share < 0.15 for share in u["reached"][:-1])
    assert u["reached"][-1] > 0.5
    pairs = zip(u["norms"][:-1], dense["norms"][:-1], strict=True)
    assert all(pruned < 0.5 * whole for pruned, whole in pairs)
    record = json.loads((tmp_path / indrnn.RECORD).read_text())
    assert record["seeds"] == 1
    assert indrnn.reproduce(tmp_path, seeds=3) == [*curves.values()]  # not computed again


def images(side: int, channels: int) -> ImageSet:
    pixels = torch.randint(0, 256, (20, channels, side, side), dtype=torch.uint8)
    part = Labelled(pixels, torch.arange(20) % 10)
    return ImageSet("noise", part, part, tuple("0123456789"), (0.5,) * channels, (0.3,) * channels)


def test_normalised_mask_gradients_are_alike_in_all_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = models.create("digits_cnn", num_classes=10)
    found = figures.mask_gradients(network, *figures.batch_of(images(8, 1)))
    weights = [p for p in network.parameters() if p.dim() > 1]
    assert len(found.by_layer) == len(weights)
    # By hand, for the first layer.
    pixels, labels = figures.batch_of(images(8, 1))
    torch.manual_seed(0)
    twin = models.create("digits_cnn", num_classes=10).train()
    pixels = torch.zeros_like(pixels) + torch.linspace(0, 1, 20).view(-1, 1, 1, 1)
    again = figures.mask_gradients(twin, pixels, labels)
    nn.functional.cross_entropy(twin(pixels), labels).backward()
    first = next(iter(twin.parameters()))
    assert first.grad is not None
    assert again.by_layer[0] == pytest.approx(float((first.grad * first).detach().abs().mean()), rel=1e-4)

    def spread(values: Any) -> float:
        return float(max(values) / min(values))

    assert spread(found.normalised_by_layer) < 2 < spread(found.by_layer)
    for values in found.normalised_by_channel.values():
        assert max(values) <= 1.0  # the mean of magnitudes whose root mean square is 1
    shown = mask_gradients_of(network, images(8, 1), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").is_file()
    assert [row[0] for row in shown.tables[0][1]] == ["raw", "normalised"]


def test_density_profiles_of_trained_networks(tmp_path: Path) -> None:
    model = {"model": "digits_cnn", "model_options": {"width": 3}, "data": "digits"}
    runs = [Run(**model, epochs=3, method="scl", sparsity=sparsity) for sparsity in (0.1, 0.7, 0.9)]
    trained: dict[str, nn.Module] = {}

    def further(run: Run, network: nn.Module) -> dict[str, object]:
        trained[run.run_id] = network
        return {}

    records = sweep(runs, tmp_path, device=torch.device("cpu"), further=further)
    found = density.profiles(records, [("digits_cnn", 0.3), ("digits_cnn", 0.11), ("digits_cnn", 0.5)])
    assert [each.title for each in found] == ["digits_cnn, 30% dense", "digits_cnn, 10% dense"]
    for run, profile in zip(runs[1:], found, strict=True):
        weights = [weight for weight in trained[run.run_id].parameters() if weight.dim() > 1]
        assert list(profile.density) == [float((weight != 0).double().mean()) for weight in weights]
    density.draw([*found, found[0]], tmp_path / "profiles.svg")
    assert "30% dense" in (tmp_path / "profiles.svg").read_text()


def record(decay: float, trace: list[float], **further: Any) -> dict[str, Any]:
    return {"config": {"decay": decay, **further}, "sparsity_by_epoch": trace}


def test_short_runs_beside_whole_ones() -> None:
    whole = [
        {"part": "decay", "sparsity": end, "config": {"decay": 0.03, "settings": {"sparsify": f"{epochs}ep"}}}
        for end, epochs in ((0.5, 2), (0.9, 25), (0.8, 25))
    ]
    _, rows = short_decay_table([record(0.03, [0.1, 0.7]), record(0.0, [0.1, 0.2])], whole)
    assert rows == [["0", "20.0 %", "–", "34.0 %"], ["0.03", "70.0 %", "85.0 %", "96.2 %"]]
    head, traces = rows_of_traces([record(0.03, [0.1, 0.7]), record(0.0, [0.1, 0.2])])
    assert head == ["λ1", "zeros after mask epoch 1", "zeros after mask epoch 2"]
    assert traces == [["0", "10.0 %", "20.0 %"], ["0.03", "10.0 %", "70.0 %"]]
    assert len(rows_of_traces([record(0.1, [0.1] * 20)])[0]) == 4


def test_the_list_shows_every_exhibit(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({each.name for each in EXHIBITS}) == len(EXHIBITS)
    assert cli.run(cli.Reproduce(list=True)) == 0
    said = capsys.readouterr().out
    assert all(each.name in said for each in EXHIBITS)
    for name, wanted in (("resnet-20", "resnet20"), ("", "--list")):
        with pytest.raises(ValueError, match=wanted):
            exhibit(name) if name else cli.Reproduce().carry_out(Console())


def test_exhibits_without_training_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ste", "indrnn", "density", "imagenet", "wikitext2"):
        assert cli.run(cli.Reproduce(name, tmp_path / name, seeds=1)) == 0
    said = capsys.readouterr().out
    assert "-3 to 0" not in said
    assert "-∞ to 0" in said
    assert "imagenet-efficientnet-b0" in said
    assert "no records of DenseNet-40" in said
    assert (tmp_path / "ste" / "estimators.svg").is_file()
    assert cli.run(cli.Reproduce("mask-gradients", tmp_path)) == 2
    assert "--network" in capsys.readouterr().err


def test_tune_decay_finds_a_decay_and_shows_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = "epochs=20 decay=0.1 sparsity=none preset=paper validation=0 settings.warmup=2ep device=cpu"
    asked = f"tune-decay digits --sparsity 0.8 --decays 0.01 0.3 --epochs 3 --out {tmp_path} --set {changes}"
    with pytest.raises(SystemExit, match="0"):
        cli.main(asked.split())
    said = capsys.readouterr().out
    assert "--decay 0." in said
    assert "--leave-at 0." in said
    assert len(list(tmp_path.glob("*.json"))) == 2
