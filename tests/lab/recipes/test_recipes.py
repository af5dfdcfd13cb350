import json
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.lab import data, models
from gossamer.lab.recipes import RECIPES, Published, Recipe, find, names
from gossamer.lab.training import Run
from gossamer.methods import METHODS
from gossamer.methods.scl import SCLOptions
from gossamer.schedule import Plan, make_plan


def test_names_are_unique_and_so_are_runs() -> None:
    assert len(set(names())) == len(RECIPES)
    assert len({recipe.run.run_id for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=names())
def test_every_recipe_is_of_known_parts_and_its_phases_fit(recipe: Recipe) -> None:
    run = recipe.run
    assert run.model in models.names()
    assert run.data in data.names()
    assert run.method in METHODS
    assert Run.from_dict(run.to_dict()) == run
    phases = run.phases
    plan = make_plan(
        run.epochs * 100,
        warmup=phases.warmup,
        sparsify=phases.sparsify,
        stabilise=phases.stabilise,
        steps_per_epoch=100,
    )
    assert plan.finetune > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cifar10-resnet20", 0.9008),
        ("cifar10-resnet20-dense", 0.9125),
        ("cifar10-resnet110", 0.9456),
        ("cifar10-vgg16-paper", 0.9439),
        ("mnist-fc-densenet-paper", 0.9801),
        ("wikitext2-lstm", 91.27),
        ("cifar100-wrn28-10", 0.8151),
    ],
)
def test_the_number_of_the_paper_that_belongs_to_a_recipe(name: str, value: float) -> None:
    expected = find(name).expected()
    assert expected is not None
    assert expected.value == value


def test_the_schedule_of_the_paper_on_cifar() -> None:
    run = find("cifar10-resnet20-paper").run
    phases, options = run.phases, run.options
    assert isinstance(options, SCLOptions)
    assert (run.batch_size, run.lr, run.epochs) == (64, 0.1, 150 + 40 + 20 + 80 + 80)
    assert (phases.warmup, phases.stabilise, options.scale) == ("150ep", "20ep", "batch")


def steps(recipe: Recipe, steps_per_epoch: int) -> Plan:
    phases = {name: getattr(recipe.run.phases, name) for name in ("warmup", "sparsify", "stabilise")}
    return make_plan(recipe.run.epochs * steps_per_epoch, steps_per_epoch=steps_per_epoch, **phases)


@pytest.mark.parametrize("steps_per_epoch", [781, 703, 390])  # batch 64, with 5,000 images held out, batch 128
@pytest.mark.parametrize("name", ["cifar10-resnet20", "cifar10-densenet40-dense", "cifar100-wrn28-10"])
def test_our_phases_on_cifar_are_whole_epochs_at_the_length_of_the_recipe(name: str, steps_per_epoch: int) -> None:
    plan = steps(find(name), steps_per_epoch)
    found = (plan.warmup, plan.sparsify, plan.stabilise, plan.finetune)
    assert found == tuple(epochs * steps_per_epoch for epochs in (60, 84, 36, 60))


def test_our_phases_on_imagenet_are_whole_epochs_at_the_length_of_the_recipe() -> None:
    plan = steps(find("imagenet-resnet50"), 1_281_167 // 128)
    found = (plan.warmup, plan.sparsify, plan.stabilise, plan.finetune)
    assert found == tuple(epochs * 10_009 for epochs in (0, 70, 20, 60))


@pytest.mark.parametrize("recipe", RECIPES, ids=names())
@pytest.mark.parametrize("epochs", [1, 12])
def test_phases_shrink_with_the_run_or_it_is_told_what_to_set(recipe: Recipe, epochs: int) -> None:
    given = {name: getattr(recipe.run.phases, name) for name in ("warmup", "sparsify", "stabilise")}
    in_epochs = any(duration.endswith("ep") for duration in given.values())
    assert in_epochs == (recipe.name.endswith("-paper") and recipe.run.data != "wikitext2")
    if not in_epochs:
        shorter = replace(recipe, run=recipe.run.with_settings([f"epochs={epochs}"]))
        whole, part = steps(recipe, 781), steps(shorter, 781)
        longer = epochs / recipe.run.epochs
        assert part.sparsify == pytest.approx(whole.sparsify * longer, abs=max(1.0, longer))
        return
    with pytest.raises(ValueError, match=f"but the run has epochs={epochs}: shorten them") as refused:
        recipe.run.with_settings([f"epochs={epochs}"])
    remedy = [word for word in str(refused.value).split() if word.startswith("settings.") and word.endswith("run")]
    assert [word.partition("=")[0] for word in remedy] == [f"settings.{name}" for name in given]
    assert recipe.run.with_settings([f"epochs={epochs}", *remedy]).epochs == epochs


def test_agreement_is_one_sided() -> None:
    recipe = Recipe("x", "", Run(), (Published("t", accuracy=0.9, sparsity=0.0),), tolerance=0.01)
    assert recipe.agrees("accuracy", 0.95)
    assert recipe.agrees("accuracy", 0.895)
    assert not recipe.agrees("accuracy", 0.88)
    words = replace(recipe, published=(Published("t", perplexity=90.0, sparsity=0.0),), tolerance=1.0)
    assert words.agrees("perplexity", 80.0)
    assert not words.agrees("perplexity", 92.0)
    assert replace(recipe, published=()).agrees("accuracy", 0.1) is None


def test_a_recipe_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(find("digits").run.to_dict()))
    assert find(str(path)).run == find("digits").run
    path.write_text(json.dumps({"run_id": "0123456789", "accuracy": 0.9, "config": find("digits").run.to_dict()}))
    assert find(str(path)).run == find("digits").run


def test_a_recipe_can_be_the_folder_of_a_run_and_is_called_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"or the folder of a run, got .*mine, which has no run\.json"):
        find(str(folder))
    (folder / "run.json").write_text(json.dumps(find("digits").run.to_dict()))
    for given in (folder, folder / "run.json"):
        assert (find(str(given)).name, find(str(given)).run) == ("mine", find("digits").run)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/mine").run == find("digits").run
    (tmp_path / "other.json").write_text("{}")
    assert find(str(tmp_path / "other.json")).name == "other"


def test_what_is_no_recipe_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    for wrong in ("digit", "DIGITS"):
        with pytest.raises(ValueError, match="did you mean 'digits'"):
            find(wrong)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find(str(tmp_path / "none.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object in"):
        find(str(tmp_path / "list.json"))
    (tmp_path / "text.json").write_text("lr = 3")
    with pytest.raises(ValueError, match="expected a JSON object in"):
        find(str(tmp_path / "text.json"))
    (tmp_path / "new.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="newer version of gossamer"):
        find(str(tmp_path / "new.json"))
