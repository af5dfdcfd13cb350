"""Sweeps: grids of runs, shared warm-ups, records, what is refused, resuming after an interruption."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batched.alone import train_alone
from methods.test_captured import Watch, as_on_a_gpu

import gossamer
from gossamer import cli
from gossamer.lab.batched import runs_of, sweep, sweeps
from gossamer.lab.batched.rows import row_changes, rows_at
from gossamer.lab.batched.supported import batched_run
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.results import sweep_table
from gossamer.lab.training import networks
from gossamer.lab.training.run import Run
from gossamer.schedule import Plan

CPU = torch.device("cpu")
BASE = Run(
    model="digits_cnn", model_options={"width": 3}, data="digits", epochs=4, batch_size=16, method="scl", sparsity=0.8
)
PHASES = {"warmup": "1ep", "sparsify": "1ep", "stabilise": "1ep", "min_density": 0.02}
# With a constant start the floor chooses among equals, and a stack has the connections of filters in another order.
FROM_MAGNITUDE = {**PHASES, "start": "magnitude"}


def images(count: int = 100) -> ImageSet:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    part = Labelled(pixels, torch.randint(0, 10, (count,), generator=generator))
    return ImageSet("digits", part, part, tuple("0123456789"), (0.5,), (0.3,))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images in the place of the real ones."""
    monkeypatch.setattr(sweeps.data, "load", lambda name, root=None: images())


def test_runs_that_share_warm_ups_for_a_while_are_the_runs_alone() -> None:
    """Other phases, methods, rates, weight decay, seeds; masks that begin and freeze in the middle of an epoch."""
    runs = [
        replace(BASE, settings=PHASES),
        replace(BASE, settings={**PHASES, "warmup": "2ep"}, sparsity=0.5),
        replace(BASE, settings=PHASES, schedule="restart", lr_restart=0.05),
        replace(BASE, settings={"warmup": "9it", "sparsify": "5it", "stabilise": "0it", "min_density": 0.02}),
        replace(
            BASE, settings={"warmup": "0it", "sparsify": "3ep", "stabilise": "1ep", "min_density": 0.02}, sparsity=0.6
        ),
        replace(BASE, method="dense", sparsity=None),
        replace(BASE, method="dense", sparsity=None, schedule="phases"),
        replace(BASE, method="dpf", settings=PHASES, weight_decay=1e-3),
        replace(BASE, method="dpf", settings=PHASES, weight_decay=0.02, weight_decay_power=0.5),
        replace(BASE, settings=PHASES, weight_decay=0.02, weight_decay_power=0.5),
        replace(BASE, method="rigl", settings=PHASES, schedule="phases_cosine"),
        replace(BASE, method="lottery", settings=PHASES, momentum=0.5),
        replace(BASE, preset="paper", decay=0.3, sparsity=None, schedule="phases", seed=3, settings=FROM_MAGNITUDE),
        replace(BASE, seed=3, settings={**PHASES, "scale": "none", "mask_lr": 3.0, "l2": 1e-3}, lr=0.03),
    ]
    trained = sweeps.train_together(runs, images(), lambda: networks.create(BASE, 10), device=CPU, dtype=torch.float64)
    for run, (outcome, network) in zip(runs, trained, strict=True):
        expected = train_alone(run, images(), lambda: networks.create(BASE, 10))
        for (name, ours), theirs in zip(
            network.double().state_dict().items(), expected.state_dict().values(), strict=True
        ):
            if "num_batches" not in name:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, r=run: f"{r}: {m}")
                assert torch.equal(ours == 0, theirs == 0)
        assert outcome.sparsity == pytest.approx(gossamer.report(expected).sparsity)


def test_a_warm_up_is_shared_until_masks_begin_or_rates_part() -> None:
    run = replace(BASE, epochs=10, settings=PHASES)
    runs = [
        batched_run(each, 4)
        for each in (
            run,
            replace(run, sparsity=0.5),
            replace(run, settings={**PHASES, "warmup": "2ep"}),
            replace(run, method="dense", sparsity=None),
            replace(run, method="dense", sparsity=None, schedule="steps", lr_drops=("6it",), lr_factor=0.5),
            replace(run, method="dense", sparsity=None, schedule="constant"),
            replace(run, method="dpf", seed=1),
        )
    ]
    assert row_changes(runs) == [0, 4, 8, 12, 16]
    assert rows_at(runs, 0).warmups == ((0, 1, 2, 3), (4, 5), (6,))
    at_4 = rows_at(runs, 4)
    assert (at_4.groups, at_4.warmups) == (((0, 1), (6,)), ((2, 3), (4,), (5,)))
    assert at_4.of_runs() == [0, 1, 3, 3, 4, 5, 2]
    assert rows_at(runs, 8).warmups == ((3,), (4,), (5,))


def test_a_step_with_runs_in_all_phases_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up, masks that learn and masks that are frozen: no look at values, no data from the host."""
    as_on_a_gpu(monkeypatch)
    short = {**PHASES, "warmup": "3it", "sparsify": "3it", "stabilise": "0it"}
    runs = [replace(BASE, settings=PHASES), replace(BASE, settings=short), replace(BASE, method="dense", sparsity=None)]
    batched = [batched_run(run, 6) for run in runs]
    training = BatchedTraining(batched, images(), lambda: networks.create(BASE, 10), device=CPU, dtype=torch.float32)
    training.train_epoch(0)
    training.arrange_rows(6)
    optimizer = training.optimizer
    assert [type(group.method).__name__ for group in optimizer.groups] == ["SCL", "Frozen", "Dense"]
    training.loader.begin_epoch(1)
    places = {name: tensor.data_ptr() for name, tensor in optimizer.tensors().items()}
    watch = Watch()
    with watch:
        training.captured()
    assert watch.seen == []
    assert {name: tensor.data_ptr() for name, tensor in optimizer.tensors().items()} == places


def test_a_grid_is_every_combination() -> None:
    runs = runs_of(BASE, ["seed=0,1", "method=dense,scl,dpf", "sparsity=0.5,0.9"])
    assert [(run.seed, run.method, run.sparsity) for run in runs] == [
        (seed, method, sparsity)
        for seed in (0, 1)
        for method, sparsity in (("dense", None), ("scl", 0.5), ("scl", 0.9), ("dpf", 0.5), ("dpf", 0.9))
    ]
    by_decay = runs_of(BASE, ["decay=0.1,0.2", "settings.mask_lr=0.01,0.03"])
    assert [(run.decay, run.sparsity, run.settings["mask_lr"]) for run in by_decay] == [
        (0.1, None, 0.01),
        (0.1, None, 0.03),
        (0.2, None, 0.01),
        (0.2, None, 0.03),
    ]
    assert runs_of(BASE, []) == [BASE]
    with pytest.raises(ValueError, match="unknown key 'sed' of a run: did you mean 'seed'"):
        runs_of(BASE, ["sed=1"])
    with pytest.raises(ValueError, match=r"lr=-1: a run that cannot be trained:\n  lr: expected a number above 0"):
        runs_of(BASE, ["lr=0.1,-1"])
    with pytest.raises(ValueError, match="expected key=value,value,… in a grid, such as seed=0,1,2, got 'seed=1,'"):
        runs_of(BASE, ["seed=1,"])
    with pytest.raises(ValueError, match="each key of the grid once, got seed more than once"):
        runs_of(BASE, ["seed=1", "seed=2"])


def test_a_setting_goes_to_the_methods_that_have_it() -> None:
    """The example of the docstring; runs that go without are not repeated for every value."""
    told = r"^method=dense does not take settings\.mask_lr; method=dpf does not take settings\.mask_lr: such runs"
    with pytest.warns(UserWarning, match=told):
        runs = runs_of(BASE, ["seed=0,1", "method=dense,scl,dpf,autoprune", "settings.mask_lr=0.01,0.03"])
    assert [(run.seed, run.method, run.settings.get("mask_lr")) for run in runs] == [
        (seed, method, rate)
        for seed in (0, 1)
        for method, rates in (
            ("dense", (None,)),
            ("scl", (0.01, 0.03)),
            ("dpf", (None,)),
            ("autoprune", (0.01, 0.03)),
        )
        for rate in rates
    ]
    assert len(runs_of(BASE, ["method=dense,dpf,scl", "settings.warmup=1ep,2ep"])) == 6  # phases are everybody's
    with pytest.warns(UserWarning, match=r"^method=rigl does not take settings\.momentum"):  # also a key of the run
        runs_of(BASE, ["method=rigl,str", "settings.momentum=0.5"])
    with pytest.warns(UserWarning, match=r"^method=scl does not take settings\.fraction: such"):
        runs = runs_of(BASE, ["settings.fraction=0.1,0.2", "method=rigl,scl"])
    assert [(run.method, run.settings.get("fraction")) for run in runs] == [("rigl", 0.1), ("scl", None), ("rigl", 0.2)]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            ["method=dpf,rigl", "settings.mask_lr=0.1"],
            r"no run of the grid takes settings\.mask_lr \(method=d",
        ),
        (["method=dense", "settings.mask_lr=0.1,0.2"], "leave it out, or add a method that does"),
        (["method=dense,scl", "settings.masklr=0.1"], r"did you mean 'settings\.mask_lr'\?"),
        (["method=dpf,scl", "settings.lr=0.1"], "lr is a key of the run, not of its settings: lr=0.1"),
        (["method=rigle,scl", "settings.mask_lr=0.1"], "unknown method 'rigle': did you mean 'rigl'"),
    ],
)
def test_a_setting_that_no_method_has_is_refused(grid: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs_of(BASE, grid)


@pytest.mark.usefixtures("tiny")
def test_one_record_a_run_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(BASE, validation=20)
    told: list[str] = []
    runs = runs_of(base, ["seed=0,1", "sparsity=0.5,0.8", "epochs=4,5"])
    for ending in (".json", ".safetensors"):  # as kills leave them while the files of a run are written
        (tmp_path / f".{runs[0].run_id}{ending}.0a1b2c3d4e5f.part").touch()
    records = sweep(runs, tmp_path, together=3, save_models=True, progress=told.append)
    assert [line.split(",")[0].removeprefix("a batch of ") for line in told if "a batch of" in line] == [
        "3 runs of 4 epochs",
        "1 runs of 4 epochs",
        "3 runs of 5 epochs",
        "1 runs of 5 epochs",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{run.run_id}{ending}" for run in runs for ending in (".json", ".safetensors")
    }
    for run, record in zip(runs, records, strict=True):
        assert Run.from_dict(record["config"]) == run
        assert record["run_id"] == run.run_id
        assert record["sparsity"] == pytest.approx(run.sparsity, abs=1e-3)
        assert record["settled"] == {"mask_lr": 0.015, "pruned_grad_scale": (1 - record["sparsity"]) ** 0.4}
        network = networks.create(run, 10)
        gossamer.load(tmp_path / f"{run.run_id}.safetensors", model=network)
        assert gossamer.report(network).total.nonzeros == record["nonzeros"]
        normal = (images().test.images.float() / 255 - 0.5) / 0.3
        right = (network.eval()(normal).argmax(1) == images().test.labels).float().mean()
        assert record["accuracy"] == pytest.approx(float(right))
    monkeypatch.setattr(sweeps, "train_together", lambda *a, **k: pytest.fail("trained again"))
    assert sweep(runs, tmp_path) == records


@pytest.mark.usefixtures("tiny")
def test_a_sweep_that_is_cut_short_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before every epoch, in every phase, with runs that branch at different times."""
    often = replace(BASE, checkpoint_minutes=1e-9, epochs=6)
    runs = runs_of(often, ["method=dense,scl,rigl", "settings.warmup=1ep,2ep", "sparsity=0.6"])
    whole = sweep(runs, tmp_path / "whole")
    real, epochs = BatchedTraining.train_epoch, set[int]()

    def one_epoch(self: BatchedTraining, number: int) -> None:
        if number not in epochs:
            epochs.add(number)
            raise KeyboardInterrupt
        real(self, number)

    monkeypatch.setattr(BatchedTraining, "train_epoch", one_epoch)
    for number in range(6):
        with pytest.raises(KeyboardInterrupt):
            sweep(runs, tmp_path / "again")
        assert epochs == set(range(number + 1))
    again = sweep(runs, tmp_path / "again")
    same = ["run_id", "accuracy", "sparsity", "train_loss", "nonzeros_by_tensor"]
    assert [[each[key] for key in same] for each in again] == [[each[key] for key in same] for each in whole]
    assert not list((tmp_path / "again").glob("batch-*"))


@pytest.mark.usefixtures("tiny")
def test_a_run_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    told: list[str] = []
    runs = runs_of(BASE, ["lr=0.1,1e30"])
    good, bad = sweep(runs, tmp_path, progress=told.append)
    assert (good["diverged"], bad["diverged"], bad["train_loss"]) == (False, True, None)
    assert [line for line in told if "no longer finite" in line] == [
        f"the loss of run {runs[1].run_id} (scl, seed 0) is no longer finite: lower its learning rate"
    ]
    (expected,) = sweep(runs[:1], tmp_path / "alone")
    assert good["accuracy"] == expected["accuracy"]
    assert good["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    head, rows = sweep_table([good, bad])
    assert head[0] == "lr"
    assert [row[:2] for row in rows] == [["0.1", f"{100 * good['accuracy']:.2f}"], ["1e+30", "diverged"]]


def test_what_a_batch_cannot_do_is_named(tmp_path: Path) -> None:
    strange = [
        (replace(BASE, nesterov=True, sharding="fsdp2"), "nesterov=True, sharding='fsdp2'"),
        (replace(BASE, sparsity=None, flops=0.5), "flops=0.5"),
        (replace(BASE, settings={"scale": "per_sample"}), "settings.scale='per_sample'"),
        (replace(BASE, settings={"mask_momentum": 0.9}), "settings.mask_momentum=0.9"),
        (replace(BASE, model="lstm_lm", data="wikitext2"), "model='lstm_lm', data='wikitext2'"),
        (replace(BASE, schedule="plateau", validation=10), "schedule='plateau'"),
        (replace(BASE, distil=0.5, teacher="runs/dense"), "teacher='runs/dense'"),
        (replace(BASE, model="indrnn", model_options={}), "model='indrnn'"),
        (replace(BASE, method="dpf", sparsity=None, decay=0.1), "decay=0.1 with method=dpf"),
    ]
    with pytest.raises(ValueError, match="train such a run by itself") as error:
        sweep([BASE, *(run for run, _ in strange)], tmp_path)
    assert str(error.value).splitlines()[1:] == [f"  run {run.run_id}: {told}" for run, told in strange]
    with pytest.raises(ValueError, match="at least 1 run at a time"):
        sweep([BASE], tmp_path, together=0)


@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_reached_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be met by whole filters") as error:
        sweep(runs_of(BASE, ["method=l1_filter,scl", "sparsity=0.999"]), tmp_path)
    assert "method=scl: sparsity=0.999 keeps 1 weights, but min_density keeps at least 4" in str(error.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="at least one batch of 128 images, got 100"):
        sweep([replace(BASE, batch_size=128)], tmp_path)


@pytest.mark.usefixtures("tiny")
def test_the_command_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(
            f"sweep digits --out {tmp_path} --grid seed=0,1 sparsity=0.5,0.8 --grid method=dense,scl "
            "--set epochs=4 validation=20 model_options.width=3 --set batch_size=16 --device cpu".split()
        )
    shown = capsys.readouterr().out
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(records) == 6
    dense = [100 * record["accuracy"] for record in records if record["method"] == "dense"]
    mean, spread = sum(dense) / 2, abs(dense[0] - dense[1]) / 2**0.5
    assert f"{mean:.2f} ± {spread:.2f}" in shown
    assert "50.0" in shown
    with pytest.raises(SystemExit, match="2"):
        cli.main(f"sweep digits --out {tmp_path} --grid sparsity=0.5 nesterov=true --device cpu".split())
    assert "nesterov=True" in capsys.readouterr().err


def test_a_table_has_the_settings_that_differ() -> None:
    def record(seed: int, accuracy: float, **settings: Any) -> dict[str, Any]:
        config = replace(BASE, seed=seed, settings=settings).to_dict()
        about = {"validation_accuracy": None, "sparsity": 0.8, "train_loss": 0.25, "diverged": False}
        return {"config": config, "accuracy": accuracy, **about}

    head, rows = sweep_table([record(0, 0.9, mask_lr=0.1), record(1, 0.91, mask_lr=0.1), record(0, 0.8)])
    assert head == ["settings.mask_lr", "test", "validation", "zeros", "loss", "seeds"]
    assert rows[0] == ["0.1", "90.50 ± 0.71", "–", "80.00%", "0.250", "2"]
    assert rows[1][:2] == ["–", "80.00"]


@pytest.mark.usefixtures("tiny")
def test_phases_that_a_dense_run_has_not_do_not_refuse_it(tmp_path: Path) -> None:
    """Its learning rate follows the phases until the run ends within them."""
    long = {"warmup": "1ep", "sparsify": "40ep", "stabilise": "20ep"}
    run = replace(BASE, method="dense", sparsity=None, epochs=2, schedule="phases_cosine", lr_factor=0.5, settings=long)
    with pytest.warns(UserWarning, match=r"settings\.sparsify=40ep.* take 244 steps, and the run ends after 8"):
        batched = batched_run(run, 4)
    assert batched.plan is None
    falling = [0.1 * (0.5 + 0.25 * (1 + math.cos(math.pi * step / 240))) for step in range(4)]
    assert batched.rates.tolist() == pytest.approx([0.1] * 4 + falling)
    with pytest.warns(UserWarning, match="the run ends after 12"):
        (record,) = sweep([run], tmp_path)
    assert (record["run_id"], record["diverged"]) == (run.run_id, False)
    with pytest.raises(ValueError, match="the phases take 61 epochs, but the run has epochs=2"):
        replace(run, method="scl", sparsity=0.5)


def test_phases_of_a_run_have_to_fit_its_rates() -> None:
    run = batched_run(replace(BASE, settings=PHASES), 4)
    with pytest.raises(ValueError, match="expected 12 learning rates, got 16"):
        replace(run, plan=Plan(4, 4, 4, 0))
