"""Comparisons: records, going on after an interruption, the command."""

import errno
import functools
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
from gossamer.lab import models
from gossamer.lab.batched import Member, Race
from gossamer.lab.batched import compare as module
from gossamer.lab.batched.compare import Comparison, compare
from gossamer.lab.batched.entrants import entrant
from gossamer.lab.batched.entries import lanes_of, teachers_of
from gossamer.lab.batched.race import Running
from gossamer.lab.results.records import BEFORE
from gossamer.methods import METHODS
from gossamer.settings import with_current_names

CPU = torch.device("cpu")
SMALL = Comparison(
    "lenet300", "mnist", methods=("dense", "scl"), sparsity=(0.9,), seeds=1, epochs=4, validation=16, commit="abc"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images in the place of the real ones."""
    from gossamer.lab.data.sets import ImageSet, Labelled

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (208, 1, 28, 28), dtype=torch.uint8, generator=generator)
    part = Labelled(images, torch.randint(0, 10, (208,), generator=generator))
    loaded = ImageSet("mnist", part, part, tuple("0123456789"), (0.5,), (0.25,))
    monkeypatch.setattr(module.data, "load", lambda name: loaded)


@pytest.mark.usefixtures("tiny")
def test_one_record_a_run_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = compare(SMALL, tmp_path, device=CPU)
    assert [record["method"] for record in records] == ["dense", "scl"]
    keys = [
        "method",
        "preset",
        "net",
        "data",
        "sparsity",
        "seed",
        "epochs",
        "accuracy",
        "validation_accuracy",
        "commit",
        "hardware",
    ]
    assert all(key in record for record in records for key in keys)
    assert records[1]["sparsity"] == pytest.approx(0.9, abs=1e-5)
    assert len(list(tmp_path.glob("*.json"))) == 2

    trained = []
    real = module.run_race
    monkeypatch.setattr(
        module, "run_race", lambda race, runs, *a, **k: trained.extend(runs) or real(race, runs, *a, **k)
    )
    assert compare(SMALL, tmp_path, device=CPU) == records
    assert trained == []
    next(tmp_path.glob("*scl*")).unlink()
    again = compare(SMALL, tmp_path, device=CPU)
    assert [member.method for member in trained] == ["scl"]
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
def test_a_record_from_before_a_default_changed_is_of_another_run(tmp_path: Path) -> None:
    asked = replace(SMALL, methods=("l0", "scl"))
    records = compare(asked, tmp_path, device=CPU)
    paths = sorted(tmp_path.glob("*.json"))
    for path, (name, before) in zip(paths, (("gate_lr", 0.3), ("pruned_grad_scale", None)), strict=True):
        content = json.loads(path.read_text())
        if before is None:
            del content["settings"][name]  # from before there was such a setting: it was 1 then
        else:
            content["settings"][name] = before
        path.write_text(json.dumps({**content, "accuracy": 12.5}))
    l0, scl = compare(asked, tmp_path, device=CPU)
    assert [l0["accuracy"], scl["accuracy"]] == [each["accuracy"] for each in records]  # trained again, beside the old
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert compare(asked, tmp_path, device=CPU) == [l0, scl]
    paths[0].write_text('{"settings": ')
    with pytest.raises(ValueError, match=f"expected the record of a run in .*{paths[0].name}.*: delete it"):
        compare(asked, tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_variants_of_a_method_race_each_other(tmp_path: Path) -> None:
    variants = ("autoprune", "autoprune:estimator=leaky_relu,two_pass=True", "lottery:rewind=weights", "scl:distil=0.5")
    records = compare(replace(SMALL, methods=("dense", *variants)), tmp_path, device=CPU)
    assert [record["method"] for record in records] == ["dense", "autoprune", "autoprune", "lottery", "scl"]
    assert [records[number]["settings"]["two_pass"] for number in (1, 2)] == [False, True]
    assert records[3]["settings"]["rewind"] == "weights"
    page = (tmp_path / "screening.md").read_text()
    title = METHODS["autoprune"].title
    assert f"| {title} |" in page
    assert f"| {title}, estimator=leaky_relu, two_pass=True |" in page
    for wrong in ("scl:mask_lr", "scl:rewind=rate"):
        with pytest.raises(ValueError, match="expected scl:SETTING=VALUE with one of weight_decay, estimator"):
            compare(replace(SMALL, methods=(wrong,)), tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_a_teacher_is_trained_again_where_it_is_not_among_the_runs(tmp_path: Path) -> None:
    """Because it has its record already, or because the runs are too many for one stack."""
    taught = ("dense", "dpf", "scl:distil=0.5")
    together = compare(replace(SMALL, methods=taught), tmp_path / "together", device=CPU, save_models=True)
    told: list[str] = []
    later = tmp_path / "later"
    compare(replace(SMALL, methods=("dense",)), later, device=CPU)
    records = compare(
        replace(SMALL, methods=taught), later, device=CPU, together=1, save_models=True, progress=told.append
    )
    assert [each["accuracy"] for each in records] == [each["accuracy"] for each in together]
    assert records[2]["train_loss"] == pytest.approx(together[2]["train_loss"], rel=1e-4)
    assert len(list(later.glob("*.json"))) == 3
    assert sum("1 dense beside them, as teachers" in line for line in told) == 1
    assert [records[number]["runs_together"] for number in (1, 2)] == [1, 2]
    assert len(list(later.glob("*.safetensors"))) == 2  # of the runs that were asked for now


@pytest.mark.usefixtures("tiny")
def test_what_a_later_stack_cannot_do_is_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Running, "epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match="rigl has no trunk"):
        compare(replace(SMALL, methods=("dense", "rigl:distil=0.5,teacher=trunk")), tmp_path, device=CPU, together=1)
    with pytest.raises(ValueError, match=r"expected a plot whose name ends in one of .*svg.*, got 'race\.xyz'"):
        compare(SMALL, tmp_path, device=CPU, plot=tmp_path / "race.xyz")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"expected a folder for records, got .*file, which is a file"):
        compare(SMALL, file, device=CPU)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "got one without tier, net, data, method"), ('{"settings": {}}', "got one without tier, net")],
)
def test_a_record_that_lacks_something_is_named(tmp_path: Path, content: str, message: str) -> None:
    compare(SMALL, tmp_path, device=CPU)
    path = next(tmp_path.glob("*scl*.json"))
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
    assert [entrant(each)[0] for each in asked[1].methods] == [*METHODS]
    assert "autoprune:weight_decay_power=0.5,mask_lr=0.003" in asked[1].methods


def test_a_setting_that_is_nearly_one_is_asked_about() -> None:
    with pytest.raises(ValueError, match=r"got 'scl:mask_rl=1': did you mean 'mask_lr'\?$"):
        entrant("scl:mask_rl=1")


def test_a_setting_with_several_values() -> None:
    assert entrant("scl:phases=0.1/0.4/0.25/0.25,mask_lr=0.03") == (
        "scl",
        {"phases": (0.1, 0.4, 0.25, 0.25), "mask_lr": 0.03},
    )
    with pytest.raises(ValueError, match="phases"):
        entrant("scl:phases=0.1/much")
    with pytest.raises(ValueError, match="four shares"):
        replace(SMALL, methods=("scl:phases=0.5/0.5",)).members()


@pytest.mark.usefixtures("tiny")
def test_networks_are_left_beside_their_records(tmp_path: Path) -> None:
    (record,) = compare(replace(SMALL, methods=("scl",)), tmp_path, device=CPU, save_models=True)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.with_suffix(".json").exists()
    network = models.create("lenet300")
    gossamer.load(path, model=network)
    assert gossamer.report(network).sparsity == pytest.approx(record["sparsity"])
    images = module.data.load("mnist").test
    normal = (images.images.float() / 255 - 0.5) / 0.25
    accuracy = 100 * (network.eval()(normal).argmax(1) == images.labels).float().mean()
    assert float(accuracy) == pytest.approx(record["accuracy"])


@pytest.mark.usefixtures("tiny")
def test_a_command_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Running, "epoch", stopped)
    command = cli.Compare(tmp_path, net="lenet300", data="mnist", epochs=4, seeds=1, validation=16, device="cpu")
    assert cli.run(command) == 130
    assert "nothing is lost: run the same command again; its runs begin again" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_a_compiler_that_dies_of_the_same_signal_is_a_stop_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [True]

    def killed(*args: object) -> None:
        if asked.pop():
            signal.raise_signal(signal.SIGINT)
        raise subprocess.CalledProcessError(-signal.SIGINT, ["gcc"])

    monkeypatch.setattr(Running, "epoch", killed)
    command = cli.Compare(tmp_path, net="lenet300", data="mnist", epochs=4, seeds=1, validation=16, device="cpu")
    assert cli.run(command) == 130
    assert "nothing is lost: run the same command again; its runs begin again" in capsys.readouterr().err
    asked.append(False)
    with pytest.raises(subprocess.CalledProcessError):  # which nobody asked for
        cli.run(command)

    def full(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Running, "epoch", full)
    assert cli.run(command) == 2
    assert "No space left on device" in capsys.readouterr().err  # the signal is no reason to hide it


@pytest.mark.usefixtures("tiny")
def test_the_weight_decay_is_that_of_the_recipes_or_what_is_asked_for(tmp_path: Path) -> None:
    asked = replace(SMALL, methods=("dense", "scl:distil=0.5", "dpf:weight_decay=1e-3"))
    assert [member.weight_decay for member in asked.members()] == [5e-4, 5e-4, 1e-3]
    assert not teachers_of(asked.members())  # the dense run is the teacher
    command = cli.Compare(
        tmp_path,
        "lenet300",
        "mnist",
        sparsity=(0.9,),
        seeds=1,
        epochs=4,
        validation=16,
        device="cpu",
        weight_decay=0.01,
    )
    assert cli.run(command) == 0
    decays = [json.loads(path.read_text())["settings"]["weight_decay"] for path in tmp_path.glob("*.json")]
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
            f"--epochs 4 --validation 16 --device cpu --together 6 --plot {tmp_path / 'race.png'}".split()
        )
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    tables = [part for part in shown.split("Final of lenet300 on mnist: 4 epochs") if "single connections" in part]
    assert len(tables) == 2  # it fills as runs finish
    first_words = {name: METHODS[name].title.split()[0] for name in ("dense", "scl", "dpf")}  # the rest may be folded
    assert f" {first_words['dpf']} " not in tables[0]
    assert all(f" {word} " in tables[1] for word in first_words.values())
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "results" / "race-lenet300"
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert {each["tier"] for each in records} == {"final"}
    raced = {(each["method"], each["asked_sparsity"]) for each in records}
    assert raced == {("dense", 0.0), ("scl", 0.5), ("scl", 0.8), ("dpf", 0.5), ("dpf", 0.8)}
    assert len(records) == 10
    page = (folder / "final.md").read_text()
    mean = sum(each["accuracy"] for each in records if each["method"] == "scl" and each["asked_sparsity"] == 0.5) / 2
    (row,) = [line for line in page.splitlines() if METHODS["scl"].title in line]
    assert row.split("|")[3].split()[0] == f"{mean:.2f}"


@pytest.mark.usefixtures("tiny")
def test_a_race_that_is_cut_short_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after every epoch, with every method in the race."""
    methods = tuple(name for name, rule in METHODS.items() if not rule.structured)
    comparison = replace(SMALL, methods=methods, epochs=5)
    whole = compare(comparison, tmp_path / "whole", device=CPU)
    real, epochs = Running.epoch, []

    def one_epoch(self: Running, number: int) -> None:
        if epochs and epochs[-1] == number - 1 and number not in epochs:
            epochs.append(number)
            raise KeyboardInterrupt
        epochs.append(number)
        real(self, number)

    monkeypatch.setattr(Running, "epoch", one_epoch)
    while True:
        try:
            again = compare(comparison, tmp_path / "again", device=CPU, checkpoint_minutes=0)
            break
        except KeyboardInterrupt:
            epochs.append(-9)
    assert [number for number in epochs if number >= 0] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    same = ["method", "seed", "sparsity", "accuracy", "validation_accuracy", "train_loss", "connections_by_tensor"]
    assert [[each[key] for key in same] for each in again] == [[each[key] for key in same] for each in whole]
    assert not list((tmp_path / "again").glob("*.safetensors"))


@pytest.mark.usefixtures("tiny")
def test_checkpoints_of_other_races_are_refused_and_other_files_passed_over(tmp_path: Path) -> None:
    race, members, path = SMALL.race(), SMALL.members(), tmp_path / "race.safetensors"
    images = module.data.load("mnist")

    def running(race: Race) -> Running:
        lanes = lanes_of(race, members, len(images.train) // race.batch_size)
        network = functools.partial(models.create, "lenet300")
        return Running(race.common, lanes, images, network, device=CPU, dtype=torch.float32)

    begun = running(race)
    assert begun.go_on_from(path) == 0
    begun.epoch(0)
    begun.save(path)
    assert running(race).go_on_from(path) == 1
    with pytest.raises(ValueError, match="of another race: delete it"):
        running(replace(race, learning_rate=0.2)).go_on_from(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.warns(UserWarning, match="expected the checkpoint of a race in .*; its runs begin again"):
        assert running(race).go_on_from(path) == 0


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
    monkeypatch.setattr(Running, "epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match=r"sparsity=0\.9999 leaves 27 connections, but min_density keeps 267"):
        compare(replace(SMALL, methods=("dense", "scl"), sparsity=(0.9999,)), tmp_path, device=CPU)


def test_the_records_that_are_there_are_recognised() -> None:
    """The name of a record that was written long ago is the one that the same comparison has now."""
    recognised = 0
    for path in (Path(__file__).parents[3] / "results" / "race-resnet20").glob("resnet20-*.json"):
        record = json.loads(path.read_text())
        settings = with_current_names({k: value for k, value in record["settings"].items() if k != "method"})
        then = {name: value for name, value in BEFORE.items() if hasattr(METHODS[record["method"]].options(), name)}
        if settings.keys() & {"curvature", "global_power", "hysteresis", "ramp_share", "score_memory"}:
            continue  # of settings that were tried and given up
        member = Member.of(method=record["method"], **{**then, **settings})
        if member.settings != Member(member.seed, member.method).settings:
            continue  # the defaults of its method have changed since
        comparison = Comparison(
            record["net"], record["data"], epochs=record["epochs"], validation=record["validation_images"]
        )
        name = module._name(comparison, comparison.race(), [member])
        assert path.name == f"resnet20-{member.method}-{name}.json"
        recognised += 1
    assert recognised > 30


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
        ({"methods": ("dense", "l1_filter")}, "nothing is left of what was asked for: l1_filter: sparsity=0.9 cannot"),
        (
            {"net": "lenet5", "methods": ("dense", "slimming"), "sparsity": (0.01,)},
            "nothing is left of what was asked for: slimming: slimming needs a batch norm behind every conv",
        ),
        ({"methods": ("scl:decay=0.01",)}, r"what comes out: .*gossamer sweep \(--grid sparsity=none decay="),
        ({"methods": ("scl:preset=papre",)}, "expected a preset out of default, paper, got 'papre'"),
        ({"methods": ("dpf:preset=paper",)}, "expected dpf:SETTING=VALUE"),
        ({"validation": 208}, "expected fewer than the 208 training images of mnist as validation, got 208"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Running, "epoch", lambda self, number: pytest.fail("trained"))
    with pytest.raises(ValueError, match=message):
        compare(replace(SMALL, **changes), tmp_path, device=CPU)


@pytest.mark.usefixtures("tiny")
def test_presets_race_by_name_and_records_and_tables_say_which(tmp_path: Path) -> None:
    asked = ("scl", "scl:preset=default", "scl:preset=paper", "scl:preset=paper,scale=none", "dpf", "l0:open=0.8")
    records = compare(replace(SMALL, methods=asked, epochs=20), tmp_path, device=CPU)
    assert [record["preset"] for record in records] == ["default", "paper", "custom", "default", "custom"]
    settings = records[1]["settings"]
    paper = {"scale": "batch", "start_value": 1.0, "mask_lr": 0.1, "mask_decay": 0.0, "min_density": 0.0}
    assert {name: settings[name] for name in paper} == paper
    assert settings["phases"] == [0.43, 0.06, 0.06, 0.45]
    assert all(record["sparsity"] == pytest.approx(0.9, abs=1e-5) for record in records)
    table = (tmp_path / "screening.md").read_text()
    assert "| gossamer (learned masks), preset=paper |" in table
    assert "scale=none" not in table.split("preset=paper")[1].splitlines()[0]


def test_too_few_epochs_and_no_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="expected at least 3 epochs, one for each phase before fine-tuning, got 2"):
        Comparison("lenet300", "mnist", epochs=2).race()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as exit_:
            cli.main(["compare", "--out", str(tmp_path), "--device", "cuda"])
        assert exit_.value.code == 2
        assert "set device=cpu (or auto)" in capsys.readouterr().err
