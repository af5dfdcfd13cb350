"""Comparisons: their runs, records and tables, resuming after an interruption, the command."""

import errno
import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gossamer
from gossamer import cli
from gossamer.cli import many
from gossamer.lab import data, models
from gossamer.lab.batched import sweeps
from gossamer.lab.batched.compare import Comparison, compare, parse_variant
from gossamer.lab.batched.sweeps import record_path
from gossamer.lab.batched.training import BatchedTraining
from gossamer.lab.data.sets import ImageSet, Labelled
from gossamer.lab.results.records import read_record
from gossamer.lab.training.run import Run
from gossamer.methods import METHODS

CPU = torch.device("cpu")
SMALL = Comparison("lenet300", "mnist", methods=("dense", "scl"), sparsity=(0.9,), seeds=1, epochs=4, validation=16)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images in the place of the real ones."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (208, 1, 28, 28), dtype=torch.uint8, generator=generator)
    part = Labelled(images, torch.randint(0, 10, (208,), generator=generator))
    loaded = ImageSet("mnist", part, part, tuple("0123456789"), (0.5,), (0.25,))
    monkeypatch.setattr(data, "load", lambda name, root=None: loaded)


@pytest.mark.usefixtures("tiny")
def test_one_record_a_run_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = compare(SMALL, tmp_path, device=CPU)
    assert [record["method"] for record in records] == ["dense", "scl"]
    assert {record["tier"] for record in records} == {"screening"}
    assert [Run.from_dict(record["config"]) for record in records] == SMALL.runs()
    assert records[1]["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert len(list(tmp_path.glob("*.json"))) == 2

    trained = list[Run]()
    real = sweeps.train_together
    monkeypatch.setattr(sweeps, "train_together", lambda runs, *a, **k: trained.extend(runs) or real(runs, *a, **k))
    assert compare(SMALL, tmp_path, device=CPU) == records
    assert trained == []
    record_path(tmp_path, SMALL.runs()[1]).unlink()
    again = compare(SMALL, tmp_path, device=CPU)
    assert [run.method for run in trained] == ["scl"]
    assert again[1]["accuracy"] == records[1]["accuracy"]


@pytest.mark.usefixtures("tiny")
def test_a_record_says_what_was_used_as_settings_may_be_left_open(tmp_path: Path) -> None:
    asked = replace(SMALL, methods=("scl", "scl:mask_lr=0.5", "dpf"))
    default, told, peer = compare(asked, tmp_path, device=CPU)
    left = 1.0 - default["sparsity"]
    assert default["settled"] == {"mask_lr": 0.015, "pruned_grad_scale": pytest.approx(left**0.4)}
    assert told["settled"] == {"mask_lr": 0.5, "pruned_grad_scale": pytest.approx(left**0.4)}
    assert "settled" not in peer


@pytest.mark.usefixtures("tiny")
def test_a_record_from_before_a_default_changed_is_refused(tmp_path: Path) -> None:
    compare(SMALL, tmp_path, device=CPU)
    path = record_path(tmp_path, SMALL.runs()[1])
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "options": {**content["options"], "mask_decay": 0.0}}))
    message = r"was trained when mask_decay=0\.0 was the default: name these settings, choose another folder"
    with pytest.raises(ValueError, match=message):
        compare(SMALL, tmp_path, device=CPU)
    path.write_text('{"config": ')
    with pytest.raises(ValueError, match=f"expected the record of a run in .*{path.name}.*: delete it"):
        compare(SMALL, tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_variants_of_a_method_are_compared(tmp_path: Path) -> None:
    variants = ("autoprune", "autoprune:estimator=leaky_relu,two_pass=True", "lottery:rewind=weights", "scl:distil=0.5")
    records = compare(replace(SMALL, methods=("dense", *variants)), tmp_path, device=CPU)
    assert [record["method"] for record in records] == ["dense", "autoprune", "autoprune", "lottery", "scl"]
    assert [records[number]["options"]["two_pass"] for number in (1, 2)] == [False, True]
    assert records[3]["options"]["rewind"] == "weights"
    assert records[4]["teacher"] == {"from": "trunk", "network": "lenet300", "steps": 3}
    page = (tmp_path / "screening.md").read_text()
    title = METHODS["autoprune"].title
    assert f"| {title} |" in page
    assert f"| {title}, estimator=leaky_relu, two_pass=True |" in page
    for wrong in ("scl:mask_lr", "scl:rewind=rate", "scl:epochs=3"):
        with pytest.raises(ValueError, match=r"expected scl:SETTING=VALUE, got .*: (the settings are|did you mean)"):
            compare(replace(SMALL, methods=(wrong,)), tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_what_a_later_batch_cannot_do_is_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedTraining, "train_epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match="teacher=trunk needs a warm-up before the masks, but method=rigl is sparse"):
        compare(replace(SMALL, methods=("dense", "rigl:distil=0.5")), tmp_path, device=CPU, together=1)
    with pytest.raises(ValueError, match=r"expected a plot whose name ends in one of .*svg.*, got 'plot\.xyz'"):
        compare(SMALL, tmp_path, device=CPU, plot=tmp_path / "plot.xyz")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"expected a folder for records, got .*file, which is a file"):
        compare(SMALL, file, device=CPU)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "got one without run_id, config, diverged"), ('{"run_id": "0", "config": 3}', "got one without diverged")],
)
def test_a_record_that_lacks_something_is_named(tmp_path: Path, content: str, message: str) -> None:
    compare(SMALL, tmp_path, device=CPU)
    path = record_path(tmp_path, SMALL.runs()[1])
    path.write_text(content)
    with pytest.raises(ValueError, match=f"expected the record of a run in .*{path.name}, {message}.*: delete it"):
        compare(SMALL, tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_the_table_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    """Also where the records are of runs that another tier had asked for."""
    compare(SMALL, tmp_path, device=CPU)
    told: list[str] = []
    compare(replace(SMALL, tier="final"), tmp_path, device=CPU, progress=told.append)
    assert told == [f"the records and their table, final.md, are in {tmp_path}"]
    assert (tmp_path / "final.md").exists()


@pytest.mark.usefixtures("tiny")
def test_all_methods_and_variants_of_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Comparison] = []
    monkeypatch.setattr(many, "compare", lambda comparison, *args, **how: asked.append(comparison))
    cli.Compare(tmp_path, methods=("all", "autoprune:two_pass=True", "dpf"), device="cpu").carry_out(Console())
    assert asked[0].methods == (*METHODS, "autoprune:two_pass=True")
    cli.Compare(tmp_path, methods=("tuned",), device="cpu").carry_out(Console())
    assert [parse_variant(each)[0] for each in asked[1].methods] == [*METHODS]
    assert "autoprune:weight_decay_power=0.5,mask_lr=0.003" in asked[1].methods


def test_a_setting_that_is_nearly_one_is_asked_about() -> None:
    with pytest.raises(ValueError, match=r"got 'scl:mask_rl=1': did you mean 'mask_lr'\?$"):
        parse_variant("scl:mask_rl=1")


@pytest.mark.usefixtures("tiny")
def test_networks_are_left_beside_their_records(tmp_path: Path) -> None:
    (record,) = compare(replace(SMALL, methods=("scl",)), tmp_path, device=CPU, save_models=True)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.with_suffix(".json").exists()
    network = models.create("lenet300")
    gossamer.load(path, model=network)
    assert gossamer.report(network).sparsity == pytest.approx(record["sparsity"])
    images = data.load("mnist").test
    normal = (images.images.float() / 255 - 0.5) / 0.25
    accuracy = (network.eval()(normal).argmax(1) == images.labels).float().mean()
    assert float(accuracy) == pytest.approx(record["accuracy"])


@pytest.mark.usefixtures("tiny")
def test_a_command_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchedTraining, "train_epoch", stopped)
    command = cli.Compare(tmp_path, net="lenet300", data="mnist", epochs=4, seeds=1, validation=16, device="cpu")
    assert cli.run(command) == 130
    assert "nothing is lost: run the same command again; its runs start over" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_a_compiler_that_dies_of_the_same_signal_is_a_stop_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [True]

    def killed(*args: object) -> None:
        if asked.pop():
            signal.raise_signal(signal.SIGINT)
        raise subprocess.CalledProcessError(-signal.SIGINT, ["gcc"])

    monkeypatch.setattr(BatchedTraining, "train_epoch", killed)
    command = cli.Compare(tmp_path, net="lenet300", data="mnist", epochs=4, seeds=1, validation=16, device="cpu")
    assert cli.run(command) == 130
    assert "nothing is lost: run the same command again; its runs start over" in capsys.readouterr().err
    asked.append(False)
    with pytest.raises(subprocess.CalledProcessError):  # which nobody asked for
        cli.run(command)

    def full(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BatchedTraining, "train_epoch", full)
    assert cli.run(command) == 2
    assert "No space left on device" in capsys.readouterr().err  # the signal is no reason to hide it


@pytest.mark.usefixtures("tiny")
def test_the_weight_decay_is_that_of_the_recipes_or_what_is_asked_for(tmp_path: Path) -> None:
    asked = replace(SMALL, methods=("dense", "scl", "dpf:weight_decay=1e-3"))
    assert [run.weight_decay for run in asked.runs()] == [5e-4, 5e-4, 1e-3]
    command = cli.Compare(
        tmp_path,
        net="lenet300",
        data="mnist",
        sparsity=(0.9,),
        seeds=1,
        epochs=4,
        validation=16,
        device="cpu",
        weight_decay=0.01,
    )
    assert cli.run(command) == 0
    decays = [json.loads(path.read_text())["config"]["weight_decay"] for path in tmp_path.glob("*.json")]
    assert decays == [0.01] * 3


@pytest.mark.usefixtures("tiny")
def test_the_command_shows_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense network runs with the methods, and the folder is named after the network if none is given."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        cli.main(
            f"compare --net lenet300 --data mnist --methods scl magnitude --sparsity 0.5 0.8 --seeds 2 --tier final "
            f"--epochs 4 --validation 16 --device cpu --together 6 --plot {tmp_path / 'plot.png'}".split()
        )
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    tables = [part for part in shown.split("Final of lenet300 on mnist: 4 epochs") if "single weights" in part]
    assert len(tables) == 2  # it fills as runs finish
    first_words = {name: METHODS[name].title.split()[0] for name in ("dense", "scl", "dpf")}  # the rest may be folded
    assert ["(1)" in part for part in tables] == [True, False]
    assert all(f" {word} " in tables[1] for word in first_words.values())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "results" / "compare-lenet300"
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert {each["tier"] for each in records} == {"final"}
    compared = {(each["method"], each["config"]["sparsity"]) for each in records}
    assert compared == {("dense", None), ("scl", 0.5), ("scl", 0.8), ("dpf", 0.5), ("dpf", 0.8)}
    assert len(records) == 10
    page = (folder / "final.md").read_text()
    ours = [each for each in records if (each["method"], each["config"]["sparsity"]) == ("scl", 0.5)]
    mean = 100 * sum(each["accuracy"] for each in ours) / 2
    (row,) = [line for line in page.splitlines() if METHODS["scl"].title in line]
    assert row.split("|")[3].split()[0] == f"{mean:.2f}"


@pytest.mark.usefixtures("tiny")
def test_a_comparison_that_is_cut_short_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after every epoch, with every method in the comparison."""
    methods = tuple(name for name, rule in METHODS.items() if not rule.structured)
    comparison = replace(SMALL, methods=methods, epochs=5)
    whole = compare(comparison, tmp_path / "whole", device=CPU)
    often = [replace(run, checkpoint_minutes=1e-9) for run in comparison.runs()]
    real, epochs = BatchedTraining.train_epoch, []

    def one_epoch(self: BatchedTraining, number: int) -> None:
        if epochs and epochs[-1] == number - 1 and number not in epochs:
            epochs.append(number)
            raise KeyboardInterrupt
        epochs.append(number)
        real(self, number)

    monkeypatch.setattr(BatchedTraining, "train_epoch", one_epoch)
    while True:
        try:
            again = sweeps.sweep(often, tmp_path / "again", device=CPU)
            break
        except KeyboardInterrupt:
            epochs.append(-9)
    assert [number for number in epochs if number >= 0] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    same = ["method", "seed", "sparsity", "accuracy", "validation_accuracy", "train_loss", "nonzeros_by_tensor"]
    assert [[each[key] for key in same] for each in again] == [[each[key] for key in same] for each in whole]
    assert not list((tmp_path / "again").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": (0.9, 95.0)}, r"shares from 0 to below 1 as sparsity, such as 0\.95, got \[95\.0\]"),
        ({"sparsity": ()}, "expected a sparsity"),
        ({"methods": ()}, "expected methods to compare, got none"),
        ({"seeds": 0}, "got 2 values, 0 seeds"),
        ({"validation": -1}, "no negative validation"),
    ],
)
def test_comparisons_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(replace(SMALL, sparsity=(0.5, 0.8)), **changes)


@pytest.mark.usefixtures("tiny")
def test_a_budget_below_the_floor_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedTraining, "train_epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match=r"sparsity=0\.9999 keeps 27 weights, but min_density keeps at least 267"):
        compare(replace(SMALL, methods=("dense", "scl"), sparsity=(0.9999,)), tmp_path, device=CPU)


RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.parametrize("method", ["dense", "scl", "dpf"])
def test_committed_records_are_found(method: str) -> None:
    runs = Comparison("resnet20", "cifar10", methods=(method,), sparsity=(0.95,)).runs()
    assert not sweeps.missing_in(RESULTS / "compare-resnet20", runs)
    assert [sweeps.read_record_of(run, RESULTS / "compare-resnet20")["seed"] for run in runs] == [0, 1, 2]


def test_committed_records_are_of_their_runs() -> None:
    """The record of a run has its identity, unless a setting of it no longer exists; its file has it as its name, or
    one from before that rule, which no comparison finds."""
    names = {"compare-resnet20": 480, "compare-fc_densenet_mnist": 39, "mnist": 78, "short-runs": 27}
    for folder, least in names.items():
        found = 0
        for path in (RESULTS / folder).glob("*.json"):
            record = read_record(path)
            run = Run.from_dict(record["config"])
            assert (record["run_id"] == run.run_id) != ("retired" in record), path
            assert "-" in path.stem or path.stem == record["run_id"], path
            found += "-" not in path.stem
        assert found >= least, folder
    (paper,) = {
        run.run_id
        for run in Comparison("resnet20", "cifar10", ("scl:preset=paper,weight_decay=1e-4",), (0.95,), 1, 350, 0).runs()
    }
    assert paper in {read_record(path)["run_id"] for path in (RESULTS / "compare-resnet20").glob("final-paper-*.json")}


@pytest.mark.usefixtures("tiny")
def test_what_whole_filters_cannot_do_is_left_out_and_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    comparison = replace(SMALL, methods=("dense", "l1_filter", "dpf"), seeds=2)
    records = compare(comparison, tmp_path, device=CPU, progress=told.append)
    assert [record["method"] for record in records] == ["dense", "dense", "dpf", "dpf"]
    (left_out,) = (line for line in told if line.startswith("left out"))
    assert "left out: l1_filter: sparsity=0.9 cannot be met by whole filters" in left_out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("dense", "l1_filter")}, "nothing is left to compare: l1_filter: sparsity=0.9 cannot"),
        (
            {"net": "lenet5", "methods": ("dense", "slimming"), "sparsity": (0.01,)},
            "nothing is left to compare: slimming: slimming needs a batch norm after every conv",
        ),
        (
            {"methods": ("dense", "apoz"), "sparsity": (0.01,)},
            r"nothing is left to compare: apoz: .*observes the forward pass, so train it by itself \(gossamer train\)",
        ),
        (
            {"methods": ("scl:decay=0.01",)},
            r"the sparsity is an outcome: .*gossamer sweep \(--grid sparsity=none decay=",
        ),
        ({"methods": ("scl:preset=papre",)}, "preset: expected one of default, paper, got 'papre'"),
        ({"methods": ("dpf:preset=paper",)}, "expected dpf:SETTING=VALUE"),
        ({"validation": 208}, "expected 1 to 207 images to hold out of mnist, got 208"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(BatchedTraining, "train_epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match=message):
        compare(replace(SMALL, **changes), tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_presets_have_their_phases_and_records_and_tables_name_them(tmp_path: Path) -> None:
    asked = ("scl", "scl:preset=default", "scl:preset=paper", "scl:preset=paper,scale=none", "dpf", "l0:open=0.8")
    records = compare(replace(SMALL, methods=asked, epochs=20), tmp_path, device=CPU)
    presets = [record["config"]["preset"] for record in records]
    assert presets == ["default", "paper", "paper", "default", "default"]  # the default preset is the default
    options, phases = records[1]["options"], records[1]["config"]["settings"]
    paper = {"scale": "batch", "start": "constant", "mask_lr": 0.1, "mask_decay": 0.0}
    assert {name: options[name] for name in paper} == paper
    assert phases == {"warmup": "9ep", "sparsify": "1ep", "stabilise": "1ep"}
    assert all(record["sparsity"] == pytest.approx(0.9, abs=1e-5) for record in records)
    table = (tmp_path / "screening.md").read_text()
    assert "| gossamer (learned masks), preset=paper, λ1=solved for, schedule=cosine |" in table
    assert "| gossamer (learned masks), preset=paper, λ1=solved for, schedule=cosine, scale=none |" in table


def test_too_few_epochs_and_no_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="expected at least 3 epochs, one for each phase before fine-tuning, got 2"):
        Comparison("lenet300", "mnist", epochs=2).runs()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as exit_:
            cli.main(["compare", "--out", str(tmp_path), "--device", "cuda"])
        assert exit_.value.code == 2
        assert "set device=cpu (or auto)" in capsys.readouterr().err
