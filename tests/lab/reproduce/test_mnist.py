"""The batched runs of the MNIST exhibit against plain networks, the plain optimizer and the Sparsifier."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gossamer import Sparsifier, cli
from gossamer.lab.batched import sweeps
from gossamer.lab.batched.optimizer import BatchedOptimizer
from gossamer.lab.batched.stack import NetworkStack
from gossamer.lab.batched.sweeps import sweep, train_together
from gossamer.lab.data import Batches
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.models.fc_densenet import FullyConnectedDenseNet
from gossamer.lab.reproduce import mnist
from gossamer.lab.reproduce.picture import panels
from gossamer.lab.results import mnist as mnist_section
from gossamer.lab.results import mnist_decay_table, mnist_estimator_table
from gossamer.lab.results.exhibits import figures, mnist_readings_table
from gossamer.lab.results.records import read_records
from gossamer.lab.training import Interrupted, train
from gossamer.lab.training.optimise import learning_rate
from gossamer.lab.training.run import Run

REMOVED = "pruned_grad_scale"
CPU = torch.device("cpu")
BASE = Run(model="fc_densenet_mnist", data="mnist", epochs=4, batch_size=16)
PHASES = {"warmup": "1ep", "sparsify": "1ep", "stabilise": "1ep"}
RUNS = {
    "dense": BASE,
    "default": replace(BASE, method="scl", sparsity=0.8, seed=1),
    "the same with another target": replace(BASE, method="scl", sparsity=0.5),
    "paper": replace(BASE, method="scl", preset="paper", decay=0.03, schedule="phases", settings=PHASES),
    "no decay": replace(BASE, method="scl", preset="paper", decay=0.0, schedule="phases", settings=PHASES, seed=1),
    "decay with a floor": replace(
        BASE, method="scl", preset="paper", decay=0.5, schedule="phases", settings={**PHASES, "min_density": 0.05}
    ),
    "leaky": replace(
        BASE,
        method="scl",
        preset="paper",
        sparsity=0.9,
        settings={**PHASES, "estimator": "leaky_relu", "scale": "none", "mask_lr": 30.0},
    ),
    "softplus": replace(
        BASE, method="scl", preset="paper", sparsity=0.9, settings={**PHASES, "estimator": "softplus", "l2": 1e-4}
    ),
}


def small_network() -> FullyConnectedDenseNet:
    return FullyConnectedDenseNet(in_features=36, layers=3, growth=4)


def images(side: int, count: int = 100) -> ImageSet:
    generator = torch.Generator().manual_seed(7)

    def part(size: int) -> Labelled:
        pixels = torch.randint(0, 256, (size, 1, side, side), generator=generator, dtype=torch.uint8)
        return Labelled(pixels, torch.randint(0, 10, (size,), generator=generator))

    return ImageSet("noise", part(count), part(60), tuple("0123456789"), (0.5,), (0.3,))


def trained_alone(run: Run, data: ImageSet) -> FullyConnectedDenseNet:
    """The same run with torch's SGD and the Sparsifier."""
    torch.manual_seed(run.seed)
    network = small_network().double()
    batches = Batches.training(data, run.batch_size, seed=run.seed, dtype=torch.float64)
    total, steps_per_epoch = run.epochs * len(batches), len(batches)
    optimizer = torch.optim.SGD(network.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)
    sparsifier = None
    if run.method != "dense":
        options: dict[str, Any] = dict(run.settings)
        request = {"sparsity": run.sparsity, "decay": run.decay}
        sparsifier = Sparsifier(
            network,
            optimizer,
            total_steps=total,
            steps_per_epoch=steps_per_epoch,
            preset=run.preset,
            **request,  # type: ignore[arg-type]
            **options,
        )
    plan = None if sparsifier is None else sparsifier.plan
    for step in range(total):
        if step % steps_per_epoch == 0:
            epoch = iter(batches)
        pixels, labels = next(epoch)
        rate = learning_rate(run, plan, step, total_steps=total, steps_per_epoch=steps_per_epoch)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(network(pixels), labels).backward()
        optimizer.step()
        if (step + 1) % steps_per_epoch == 0:
            assert next(epoch, None) is None
    if sparsifier is not None:
        sparsifier.finish()
    return network


def test_runs_in_batch_are_the_runs_alone() -> None:
    data = images(side=6)
    trained = train_together([*RUNS.values()], data, small_network, device=CPU, dtype=torch.float64)
    for (name, run), (outcome, network) in zip(RUNS.items(), trained, strict=True):
        alone, together = trained_alone(run, data), network.double()
        for (where, ours), theirs in zip(together.state_dict().items(), alone.state_dict().values(), strict=True):
            if "num_batches" not in where:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # in single precision in the end
                assert torch.equal(ours == 0, theirs == 0), (name, where)
        test = Batches.evaluation(data, data.test, 60, dtype=torch.float64)
        pixels, labels = next(iter(test))
        right = (alone.eval()(pixels).argmax(1) == labels).double().mean()
        assert outcome.accuracy == pytest.approx(float(right), abs=1e-6)


def test_a_stack_computes_what_each_network_computes() -> None:
    torch.manual_seed(3)
    networks = [small_network().double() for _ in range(3)]
    stack = NetworkStack(networks, device=CPU, dtype=torch.float64)
    pixels = torch.randn(3, 10, 1, 6, 6, dtype=torch.float64)
    labels = torch.randint(0, 10, (3, 10))
    gradient = stack.gradients(F.cross_entropy(stack(pixels).flatten(0, 1), labels.flatten(), reduction="sum"))
    for row, network in enumerate(networks):
        F.cross_entropy(network(pixels[row]), labels[row], reduction="sum").backward()
        expected = torch.cat([network.get_parameter(name).grad.flatten() for name in stack.names])  # type: ignore[union-attr]
        torch.testing.assert_close(gradient[row], expected)
    stack.template.eval()
    outputs = stack.on_same_images(pixels[0])
    for row, network in enumerate(networks):
        torch.testing.assert_close(outputs[row], network.eval()(pixels[0]))


def test_what_a_batch_cannot_do() -> None:
    data = images(side=6)

    def train(*runs: Run) -> None:
        train_together(runs, data, small_network, device=CPU, dtype=torch.float32)

    with pytest.raises(ValueError, match="nesterov=True"):
        train(replace(BASE, nesterov=True))
    with pytest.raises(ValueError, match="per_sample"):
        train(replace(BASE, method="scl", sparsity=0.5, settings={"scale": "per_sample"}))
    with pytest.raises(ValueError, match="some that differ in epochs"):
        train(BASE, replace(BASE, epochs=2))


def test_the_entries_are_the_tables_of_the_paper() -> None:
    found = mnist.entries(seeds=2)
    assert len(found) == 2 * (1 + 10 + 9 + 6)
    assert len({entry.run.run_id for entry in found}) == len(found)
    rows = {(e.run.decay, e.paper_sparsity, e.paper_accuracy) for e in found if e.part == "decay"}
    expected = {(0.0, 0.34, 0.9847), (0.01, 0.913, 0.9824), (0.03, 0.962, 0.9801)}
    assert rows == expected | {(0.08, 0.988, 0.9464), (0.1, 0.998, 0.7846)}
    whole = [e.run for e in found if e.part == "decay" and e.run.settings["sparsify"] == "25ep"]
    assert all(run.settings["warmup"] == "15ep" and run.epochs == 55 for run in whole)
    assert {e.run.sparsity for e in found if e.part == "default"} == {0.34, 0.913, 0.95, 0.962, 0.988, 0.998}
    assert all(e.run.options.start == "constant" and e.run.lr == 0.1 for e in found if e.part == "estimator")
    with pytest.raises(ValueError, match="at least 1 seed and 3 epochs"):
        mnist.entries(seeds=1, epochs=2)


def test_records_tables_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweeps.data, "load", lambda name, root=None: images(side=28, count=192))
    assert mnist_section(tmp_path) == ""
    root, tmp_path = tmp_path, tmp_path / "mnist"
    lines: list[str] = []
    records = mnist.reproduce(tmp_path, seeds=1, epochs=3, device=CPU, progress=lines.append)
    assert len(records) == 21  # as one mask epoch is all there is
    assert any("epoch 3/3" in line for line in lines)
    for record in records:
        assert sum(record["nonzeros_by_tensor"]) == record["nonzeros"]
        assert record["sparsity"] == pytest.approx(1 - record["nonzeros"] / 117_152)
        assert 0 < sum(record["input_nonzeros"]) <= record["nonzeros"]
        run = Run.from_dict(record["config"])
        assert run.run_id == record["run_id"]
        if run.sparsity is not None:
            assert record["sparsity"] == pytest.approx(run.sparsity, abs=1e-5)
    dense = next(record for record in records if record["part"] == "dense")
    assert dense["input_nonzeros"] == [16 * 8 + 10] * 784
    assert (tmp_path / mnist.PICTURE).read_bytes().startswith(b"\x89PNG")
    titles = [title for title, _ in panels(records)]
    assert [title.split(":")[0] for title in titles] == ["λ1 = 0.1", "λ1 = 0.03", "λ1 = 0.01", *["default"] * 3]
    head, rows = mnist_decay_table(records)
    assert [row[0] for row in rows] == ["dense", "0", "0.01", "0.03", "0.08", "0.1"]
    assert all(len(row) == len(head) == 7 for row in rows)
    head, rows = mnist_estimator_table(records)
    assert [row[0] for row in rows] == ["leaky_relu", "softplus", "identity"]
    assert all(len(row) == len(head) == 6 for row in rows)
    assert rows[2][1] == "98.37"
    (tmp_path / "shorter.json").write_text(
        json.dumps({**dense, "config": {**dense["config"], "epochs": 2}, "accuracy": 0.0})
    )
    section = mnist_section(root)
    assert "117,152 weights, 3 epochs" in section
    assert f"| dense | 0.0 % | 98.35 | – | – | 0.0 % | {100 * dense['accuracy']:.2f} |" in section
    (tmp_path / "shorter.json").unlink()

    stored = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(stored) == len(records)
    monkeypatch.setattr(sweeps, "train_together", lambda *a, **k: pytest.fail("trained again"))
    assert mnist.reproduce(tmp_path, seeds=1, epochs=3, device=CPU) == records
    arguments = ["reproduce", "mnist", "--seeds", "1", "--epochs", "3", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    shown = capsys.readouterr().out
    assert "98.47" in shown
    assert "softplus" in shown
    assert f"thepicture{mnist.PICTURE}arein{tmp_path}" in "".join(shown.split())  # however it is folded
    broken = tmp_path / next(name for name, content in stored.items() if content["part"] == "decay")
    broken.write_text("{}")
    with pytest.raises(
        ValueError, match=rf"expected the record of a run in .*{broken.name}, got one without run_id, con"
    ):
        mnist.reproduce(tmp_path, seeds=1, epochs=3, device=CPU)
    broken.write_text(json.dumps(stored[broken.name]))

    # Records from before a default changed are called so, and refused as those of the defaults.
    assert "our defaults: zeros" in mnist_section(root)
    for name, content in stored.items():
        options = {**content["options"], REMOVED: 1.0} if content["part"] == "default" else content["options"]
        (tmp_path / name).write_text(json.dumps({**content, "options": options}))
    assert "our defaults, pruned_grad_scale=1: zeros" in mnist_section(root)
    with pytest.raises(ValueError, match=r"was trained when pruned_grad_scale=1\.0 was the default"):
        mnist.reproduce(tmp_path, seeds=1, epochs=3, device=CPU)


def test_other_readings_and_recurrent_networks_have_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.data, "load", lambda name, root=None: images(side=28, count=192))
    usual = [each.run for each in mnist.entries(seeds=1, epochs=3) if each.part == "decay" and each.run.decay == 0.03]
    run = replace(usual[0], batch_size=64)

    def reading(**settings: Any) -> Run:
        return replace(run, settings={**run.settings, **settings})

    readings = sweep([reading(l2=5e-5, warmup="1ep")], tmp_path / "mnist-readings", device=CPU)
    record = train(reading(scale="per_sample"), tmp_path / "alone")
    (tmp_path / "mnist-readings" / "per-sample.json").write_text((tmp_path / "alone" / "result.json").read_text())
    found = read_records(tmp_path / "mnist-readings")
    known = [{**each, "part": "decay"} for each in sweep([run], tmp_path / "mnist", device=CPU)]
    _, rows = mnist_readings_table(known, found)
    cells = [f"{factor * each[key]:.{digits}f}{unit}" for each in (known[0], readings[0], record)
             for key, factor, digits, unit in (("sparsity", 100, 1, " %"), ("accuracy", 100, 2, ""))]  # fmt: skip
    assert rows == [["0.03", "96.2 %", "98.01", *cells]]

    recurrent = Run(model="indrnn", data="mnist", epochs=2, batch_size=64, method="scl", sparsity=0.5)
    outcome = train(recurrent, tmp_path / "recurrent")
    (tmp_path / "indrnn-mnist").mkdir()
    (tmp_path / "indrnn-mnist" / "0.5.json").write_text((tmp_path / "recurrent" / "result.json").read_text())
    assert f"| 50.0 % | {100 * outcome['accuracy']:.2f} |" in figures(tmp_path)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [4, 9])  # within the second epoch, and in the last step of all
def test_a_command_that_is_stopped_goes_on_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: signal.Signals, at: int
) -> None:
    """On a CPU seed by seed: asked in the last step of the first, it has the records of that one, and stops."""
    some = [each for each in mnist.entries(seeds=2, epochs=3) if each.part in ("dense", "default")]
    monkeypatch.setattr(mnist, "entries", lambda **asked: some)
    monkeypatch.setattr(sweeps.data, "load", lambda name, root=None: images(side=28, count=192))
    monkeypatch.setattr(mnist, "draw_input_connections", lambda *args: None)
    whole = mnist.reproduce(tmp_path / "whole", seeds=2, epochs=3, device=CPU)
    with monkeypatch.context() as patch:
        real = BatchedOptimizer.update_topology

        def update_topology(self: BatchedOptimizer, steps: int) -> None:
            if steps == at:
                signal.raise_signal(asked)
            real(self, steps)

        patch.setattr(BatchedOptimizer, "update_topology", update_topology)
        words = {4: r"stopped after step 4 of 9; a checkpoint is in", 9: r"stopped before the last 7 runs"}[at]
        with pytest.raises(Interrupted, match=words):
            mnist.reproduce(tmp_path / "again", seeds=2, epochs=3, device=CPU)
    assert len([*(tmp_path / "again").glob("*.json")]) == (0 if at == 4 else 7)
    again = mnist.reproduce(tmp_path / "again", seeds=2, epochs=3, device=CPU)
    same = ("run_id", "accuracy", "train_loss", "nonzeros_by_tensor")
    assert [[each[key] for key in same] for each in again] == [[each[key] for key in same] for each in whole]
    assert not [*(tmp_path / "again").glob("batch-*")]


def test_pixels_are_counted_by_hand() -> None:
    network = small_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        weights = [parameter for parameter in network.parameters() if parameter.dim() > 1]
        weights[0][2, 5] = weights[2][1, 5] = weights[3][7, 35] = 1.0
        weights[1][0, 36] = 1.0  # reads a hidden unit, not a pixel
    counts = mnist.input_nonzeros(network)
    assert (counts[5], counts[35], sum(counts)) == (2, 1, 3)
