import copy
import hashlib
import json
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gossamer.lab.training.run import FORMAT, Run
from gossamer.methods.hyperflux import HyperfluxOptions
from gossamer.methods.scl import SCLOptions
from gossamer.settings import Phases

SPARSE = Run(model="lenet300", data="mnist", method="scl", sparsity=0.95, settings={"mask_lr": 0.5}, epochs=3)


def test_a_run_comes_back_from_its_dictionary_through_json() -> None:
    assert Run.from_dict(json.loads(json.dumps(SPARSE.to_dict()))) == SPARSE


def test_a_run_can_be_copied_and_pickled() -> None:
    assert pickle.loads(pickle.dumps(SPARSE)) == SPARSE
    assert copy.deepcopy(SPARSE) == SPARSE
    assert len({SPARSE, copy.deepcopy(SPARSE)}) == 1


def test_the_identity_is_the_hash_of_what_differs_from_the_defaults() -> None:
    text = '{"epochs":7,"lr":0.05}'
    assert Run(epochs=7, lr=0.05).run_id == hashlib.sha256(text.encode()).hexdigest()[:10]
    assert Run().run_id == hashlib.sha256(b"{}").hexdigest()[:10]


@pytest.mark.parametrize("change", ["seed=1", "lr=0.2", "settings.mask_lr=0.4", "model_options.x=1", "precision=bf16"])
def test_what_changes_the_numbers_changes_the_identity(change: str) -> None:
    assert SPARSE.with_settings([change]).run_id != SPARSE.run_id


@pytest.mark.parametrize("change", ["device=cpu", "checkpoint_steps=7", "log_steps=3", "workers=0", "data_root=x"])
def test_where_it_runs_and_what_is_written_is_not_part_of_the_identity(change: str) -> None:
    changed = SPARSE.with_settings([change])
    assert changed != SPARSE
    assert changed.run_id == SPARSE.run_id


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("epochs=12", "epochs", 12),
        ("lr=5e-2", "lr", 0.05),
        ("nesterov=true", "nesterov", True),
        ("augment=no", "augment", False),
        ("clip=0.25", "clip", 0.25),
        ("clip=none", "clip", None),
        ("exclude=*.bias, decoder", "exclude", ("*.bias", "decoder")),
        ("settings.min_density=0", "settings", {"mask_lr": 0.5, "min_density": 0}),
        ("model_options.deep=true", "model_options", {"deep": True}),
    ],
)
def test_settings_are_read_by_the_type_of_their_field(text: str, name: str, value: object) -> None:
    changed = getattr(SPARSE.with_settings([text]), name)
    assert changed == value
    assert type(changed) is type(value) or isinstance(value, dict)


def test_the_scale_called_none_is_a_name() -> None:
    assert SPARSE.with_settings(["settings.scale=none"]).options == replace(SPARSE.options, scale="none")


def test_several_settings_add_up() -> None:
    run = SPARSE.with_settings(
        ["settings.min_density=0.01", "settings.mask_lr=2", "schedule=steps", "lr_drops=2ep,0.9run"]
    )
    assert (run.phases, run.options) == (Phases(min_density=0.01), SCLOptions(mask_lr=2.0))
    assert run.lr_drops == ("2ep", "0.9run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch=3", "unknown key 'epoch' of a run: did you mean 'epochs'?"),
        ("mask_lr=3", "did you mean 'settings.mask_lr'?"),
        ("warmup=3ep", "unknown key 'warmup' of a run: did you mean 'settings.warmup'?"),
        ("stabilize=3ep", "did you mean 'settings.stabilise'?"),
        ("fration=0.2", "the keys are model, model_options, data"),
        ("=3", "expected key=value, such as lr=0.05, got '=3'"),
        ("", "expected key=value, such as lr=0.05, got ''"),
        ("zzz=3", "the keys are model, model_options, data"),
        ("settings.maskrate=3", "unknown setting 'maskrate'"),
        ("epochs", "expected key=value, such as lr=0.05, got 'epochs'"),
        ("epochs=2.5", "epochs: expected a whole number, got '2.5'"),
        ("lr=fast", "lr: expected a number, got 'fast'"),
        ("augment=maybe", "augment: expected true or false, got 'maybe'"),
        ("lr.x=3", "expected a plain value for lr"),
        ("settings=3", "expected settings.key=value"),
        ("settings.=3", "expected settings.key=value"),
        ("settings.lr=0.2", "lr is a key of the run, not of its settings: lr=0.2"),
        ("optimizer=sdg", "optimizer: expected one of sgd, adam, adamw, got 'sdg'"),
        ("epochs=0", "epochs: expected at least 1 and below 2^31, got 0"),
        ("epochs=9999999999", "epochs: expected at least 1 and below 2^31, got 9999999999"),
        ("seed=9223372036854775808", "seed: expected a whole number from 0 to below 2^63, got 9223372036854775808"),
        ("lr=inf", "lr: expected a finite number (float32), got inf"),
        ("weight_decay=1e39", "weight_decay: expected a finite number (float32), got 1e+39"),
        ("settings.mask_lr=inf", "settings.mask_lr: expected a finite number (float32), got inf"),
        ("lr_warmup=5", "lr_warmup: expected a duration with its unit"),
        ("settings.warmup=0.25", "settings.warmup: expected a duration with its unit, such as '150ep'"),
        ("settings.warmup=2run", "settings.warmup: expected a fraction of the run between 0 and 1, got '2run'"),
        ("settings.stabilise=1.5it", "settings.stabilise: expected a whole number of steps, got '1.5it'"),
        ("settings.sparsify=4ep", "the phases take 5.2 epochs, but the run has epochs=3: shorten them"),
        ("lr_drops=5ep", "lr_drops needs schedule=steps"),
        ("sparsity=95", "sparsity: expected a number of at least 0 and below 1, such as 0.95, got 95.0"),
        ("sparsity=nan", "sparsity: expected a number of at least 0 and below 1"),
        ("flops=0", "flops: expected the fraction to keep, above 0"),
        ("decay=-1", "decay: expected a number of at least 0"),
        ("leave_at=2", "leave_at: expected a sparsity between 0 and 1"),
        (
            "flops=0.1",
            "expected one of sparsity, flops and decay, got sparsity, flops; set what you do not mean to none",
        ),
        (
            "sparsity=none",
            "expected one of sparsity, flops and decay, got none of them; set sparsity=0.95, for example",
        ),
        ("method=dense", "method=dense: expected no sparsity, got 0.95; set sparsity=none for a dense network"),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SPARSE.with_settings([text])


def test_a_text_in_the_place_of_a_list_of_settings() -> None:
    with pytest.raises(TypeError, match=re.escape("expected a list of key=value, got the text 'lr=1': ['lr=1']")):
        SPARSE.with_settings("lr=1")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fration=0.2"], "did you mean 'settings.fraction'?"),
        (["settings.fraction=much"], "settings.fraction: expected a number, got 'much'"),
        (["settings.every=2.5"], "settings.every: expected a whole number, got '2.5'"),
        (
            ["settings.mask_lr=2"],
            "unknown setting 'mask_lr' of method='rigl': the settings are distribution, fraction",
        ),
        (["model=digits_cnn", "widht=4"], "did you mean 'model_options.width'?"),
    ],
)
def test_settings_of_the_method_and_of_the_network_are_known(texts: list[str], message: str) -> None:
    peer = Run(method="rigl", sparsity=0.5)
    with pytest.raises(ValueError, match=re.escape(message)):
        peer.with_settings(texts)
    if not message.startswith("did"):  # also where they come from a file
        name, _, value = texts[0].removeprefix("settings.").partition("=")
        with pytest.raises(ValueError, match=re.escape(message.partition(", got")[0])):
            Run.from_dict({"method": "rigl", "sparsity": 0.5, "settings": {name: value}})


@pytest.mark.parametrize(
    ("data", "text", "message"),
    [
        (
            "wikitext2",
            "validation=100",
            "validation: expected 0 with data=wikitext2, got 100: this set has its own validation set",
        ),
        ("ptb", "augment=false", "augment: expected True with data=ptb, got False: text is not augmented"),
        ("ptb", "image_size=32", "image_size: expected 224 with data=ptb, got 32: only the images of a folder"),
        ("cifar10", "image_size=64", "image_size: expected 224 with data=cifar10, got 64: only the images of a folder"),
        ("mnist", "bptt=70", "bptt: expected 35 with data=mnist, got 70: only text has windows"),
        ("imagefolder", "bptt=70", "bptt: expected 35 with data=imagefolder, got 70"),
        ("imagefolder", "augment=no", "the images of a folder always are"),
    ],
)
def test_what_means_nothing_for_the_data_is_refused(data: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Run(data=data).with_settings([text])
    name = text.partition("=")[0]
    good = {"validation": "digits", "augment": "cifar100", "image_size": "imagefolder", "bptt": "ptb"}[name]
    assert Run(data=good).with_settings([text]) != Run(data=good)
    assert Run(data="of my own").with_settings([text]).data == "of my own"  # which is found, or not, when it trains


def test_settings_that_make_no_sense_for_their_method_are_named_one_by_one() -> None:
    peer = Run(method="rigl", sparsity=0.95)
    with pytest.raises(ValueError, match="a run that cannot be trained") as refused:
        peer.with_settings(["settings.fraction=7", "settings.every=0"])
    assert str(refused.value).splitlines()[1:] == [
        "  settings.fraction: expected a number from 0 to 1, got 7.0",
        "  settings.every: expected at least 1 step, got 0",
    ]
    with pytest.raises(ValueError, match=r"\n  settings\.distribution: expected one of erk, uniform, got 'x'$"):
        peer.with_settings(["settings.distribution=x"])


def test_a_setting_that_two_methods_call_the_same_is_read_by_the_type_of_its_own() -> None:
    peer = Run().with_settings(["settings.start=0.3", "method=hyperflux", "sparsity=0.5"])
    assert peer.options == HyperfluxOptions(start=0.3)
    assert peer.run_id == Run(method="hyperflux", sparsity=0.5, settings={"start": 0.3}).run_id


def test_arguments_of_a_network_go_with_it() -> None:
    pretrained = Run(model="vgg16", data="imagefolder", model_options={"pretrained": True})
    assert pretrained.with_settings(["model=resnet50"]).model_options == {"pretrained": True}
    with pytest.warns(
        UserWarning, match=r"lenet300 does not take model_options\.pretrained=True, which the run had before"
    ):
        changed = pretrained.with_settings(["model=lenet300"])
    assert changed.model_options == {}
    with pytest.warns(UserWarning, match="digits_cnn does not take"):
        changed = pretrained.with_settings(["model_options.width=4", "model=digits_cnn"])
    assert changed.model_options == {"width": 4}


def test_settings_that_another_method_does_not_know_go_with_the_one_before() -> None:
    assert SPARSE.with_settings(["method=autoprune"]).settings == {"mask_lr": 0.5}
    longer = SPARSE.with_settings(["settings.warmup=0.1run"])
    with pytest.warns(UserWarning, match=r"method=dpf does not take settings\.mask_lr=0\.5, which the run had before"):
        changed = longer.with_settings(["method=dpf"])
    assert changed.settings == {"warmup": "0.1run"}
    assert longer.with_settings(["method=dense", "sparsity=none"]).settings == longer.settings
    with pytest.raises(ValueError, match="unknown setting 'scale' of method='dpf'"):
        Run().with_settings(["method=dpf", "sparsity=0.5", "settings.scale=none"])  # asked for, not inherited


def test_what_makes_two_runs_different_is_told_setting_by_setting() -> None:
    other = SPARSE.with_settings(["settings.mask_lr=0.1", "settings.min_density=0.5", "seed=1", "device=cpu"])
    assert other.differences_from(SPARSE) == ["settings.mask_lr", "settings.min_density", "seed"]
    assert SPARSE.differences_from(other) == ["settings.mask_lr", "settings.min_density", "seed"]
    whole, broken = Run(model_options={"width": 4}), Run(model_options={"width": 4.0})
    assert whole.run_id != broken.run_id
    assert whole.differences_from(broken) == ["model_options.width"]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="cannot be trained") as error:
        Run(epochs=0, lr=-1.0, precision="int3", method="scl")
    assert all(name in str(error.value) for name in ("epochs", "lr", "precision", "method=scl"))


def test_a_file_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="written by a newer version of gossamer"):
        Run.from_dict({"format": FORMAT + 1, "something_new": 3})


@pytest.mark.parametrize("version", [True, -3, 0, 1.0, "1", None])
def test_a_file_whose_format_is_none_is_refused(version: object) -> None:
    with pytest.raises(ValueError, match=f"format: expected {FORMAT}, got {version!r}: write {FORMAT}, or omit it"):
        Run.from_dict({"format": version})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochz": 3}, "did you mean 'epochs'? A newer version of gossamer may know it"),
        ({"something_new": 3}, "A newer version of gossamer may know it"),
        ({"epochs": "3"}, "epochs: expected a whole number, got '3'"),
        ({"epochs": True}, "epochs: expected a whole number, got True"),
        ({"settings": [1]}, "settings: expected a table of plain values"),
        ({"lr_drops": "3ep"}, "lr_drops: expected a list of strings"),
    ],
)
def test_a_file_with_wrong_values_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Run.from_dict(values)


def test_an_unknown_name_in_python_is_asked_about() -> None:
    with pytest.raises(TypeError, match=r"unknown key 'epoch' of a run: did you mean 'epochs'\?"):
        Run(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"did you mean 'settings\.mask_lr'\?"):
        replace(Run(), mask_lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 2.5}, "epochs: expected a whole number, got 2.5"),
        ({"epochs": "5"}, "epochs: expected a whole number, got '5'"),
        ({"include": "conv*"}, "include: expected a list of strings, got 'conv*'"),
        ({"data": 3}, "data: expected a text, got 3"),
        ({"model": None}, "model: expected a text, got None"),
        ({"settings": 3}, "settings: expected a table of plain values, got 3"),
        ({"model_options": {"width": np.float64(4)}}, "model_options: expected a table of plain values, got"),
        ({"lr": "fast", "seed": 0.5}, "seed: expected a whole number, got 0.5\n  lr: expected a number, got 'fast'"),
    ],
)
def test_a_program_with_wrong_values_is_refused_as_a_file_is(values: dict[str, Any], message: str) -> None:
    for make in (Run.from_dict, lambda given: Run(**given), lambda given: replace(Run(), **given)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(values)


def test_a_list_in_the_place_of_a_tuple_is_one() -> None:
    assert Run(include=["conv*"]) == Run(include=("conv*",))  # type: ignore[arg-type]


def test_whole_numbers_are_numbers_wherever_they_come_from() -> None:
    for run in (Run.from_dict({"lr": 1}), Run(lr=1), Run(lr=np.float64(1))):
        assert type(run.lr) is float
        assert run.run_id == Run(lr=1.0).run_id
    sparse = [
        Run(method="scl", sparsity=0.5, settings={"pruned_grad_scale": one, "mask_decay_cap": 3}) for one in (1, 1.0)
    ]
    assert sparse[0].run_id == sparse[1].run_id
