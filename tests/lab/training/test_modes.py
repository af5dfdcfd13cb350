"""What a run leaves open about how it is computed is decided by measurement, and what it says is kept."""

import json
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gossamer.lab import models
from gossamer.lab.training import Run, modes, train
from gossamer.lab.training.distributed import DistributedContext
from gossamer.lab.training.modes import Measured, Mode

CPU, GPU = DistributedContext(torch.device("cpu")), DistributedContext(torch.device("cuda", 0))
SPARSE = Run(method="scl", sparsity=0.9)
FASTEST = Mode("bf16", channels_last=True, compile=True, capture=True)
STEPS = 1000  # from which on compiling pays


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU on which ResNet-20, and nothing else, was measured."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    entry = {"precision": "bf16", "channels_last": True, "capture": True, "compile_from": STEPS}
    monkeypatch.setattr(modes, "_table", lambda: {"Some GPU": {"resnet20": entry}, "Other GPU": {"resnet56": entry}})
    monkeypatch.setattr(modes, "has_triton", lambda: True)
    monkeypatch.setenv("CC", sys.executable)  # any program will do
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))


def mode_of(run: Run, context: DistributedContext, steps: int) -> Mode:
    return modes.mode_of(modes.resolve_compile(modes.resolve(run, context), context, steps))


def test_on_a_cpu_everything_is_plain_and_a_graph_is_refused() -> None:
    assert mode_of(SPARSE, CPU, STEPS) == Mode()
    with pytest.raises(ValueError, match="capture=true was requested, but there are no CUDA graphs on device=cpu"):
        modes.resolve(SPARSE.with_settings(["capture=true"]), CPU)


@pytest.mark.usefixtures("gpu")
def test_what_is_left_open_is_what_was_measured() -> None:
    assert mode_of(SPARSE, GPU, STEPS) == FASTEST
    assert mode_of(SPARSE, GPU, STEPS - 1) == replace(FASTEST, compile=False)
    other = SPARSE.with_settings(["model=resnet56"])
    assert mode_of(other, GPU, STEPS) == Mode()  # measured on another GPU only


@pytest.mark.usefixtures("gpu")
def test_steps_are_compiled_unasked_only_as_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"precision": "bf16", "channels_last": True, "capture": True, "compile_from": STEPS}
    monkeypatch.setattr(modes, "_table", lambda: {"Some GPU": {"resnet50": entry}})
    folder = Run(model="resnet50", data="imagefolder", method="scl", sparsity=0.9)
    assert mode_of(folder, GPU, STEPS) == FASTEST
    assert not mode_of(folder, GPU, STEPS - 1).compile
    assert not mode_of(folder, DistributedContext(torch.device("cuda", 1), rank=1, world=2), STEPS).compile
    unmeasured = ("settings.scale=per_sample", "precision=float32", "channels_last=no", "capture=no", "distil=0.5",
                  "method=rigl")  # fmt: skip
    for other in unmeasured:
        assert not mode_of(folder.with_settings([other]), GPU, STEPS).compile


@pytest.mark.usefixtures("gpu")
def test_without_a_compiler_nothing_is_compiled_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not mode_of(SPARSE, GPU, STEPS).compile
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "no-such-folder")
    assert not mode_of(SPARSE, GPU, STEPS).compile


@pytest.mark.usefixtures("gpu")
def test_without_triton_nothing_is_compiled_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "has_triton", lambda: False)
    assert not mode_of(SPARSE, GPU, STEPS).compile
    assert mode_of(SPARSE.with_settings(["compile=yes"]), GPU, 1).compile  # torch will say what is missing


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("precision=float32", Mode("float32", channels_last=True, capture=True)),  # compiled, it was not measured
        ("channels_last=false", Mode("bf16", capture=True)),
        ("compile=no", Mode("bf16", channels_last=True, compile=False, capture=True)),
        ("capture=false", Mode("bf16", channels_last=True, compile=False, capture=False)),  # no such was measured
        ("capture=auto", FASTEST),
    ],
)
def test_what_a_run_says_is_kept(said: str, expected: Mode) -> None:
    assert mode_of(SPARSE.with_settings([said]), GPU, STEPS) == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("run", "context", "reason"),
    [
        (
            SPARSE,
            DistributedContext(torch.device("cuda", 1), rank=1, world=2),
            "2 processes synchronize in every step",
        ),
        (SPARSE.with_settings(["settings.scale=per_sample"]), GPU, "scale=per_sample observes the forward pass"),
        (Run(method="rigl", sparsity=0.5), GPU, "only steps of dense and scl can be replayed, not of method=rigl"),
    ],
)
def test_what_cannot_be_captured_is_left_eager_or_refused(run: Run, context: DistributedContext, reason: str) -> None:
    left = mode_of(run, context, STEPS)
    assert not left.capture
    assert not left.compile
    with pytest.raises(ValueError, match=f"capture=true was requested, but {reason}.*set capture=auto"):
        modes.resolve(run.with_settings(["capture=true"]), context)


def test_an_lstm_is_not_computed_in_float16_unasked() -> None:
    words = Run(model="lstm_lm", data="wikitext2", precision="bf16")
    assert modes.resolve(words, CPU).precision == "bf16"
    with pytest.raises(ValueError, match=r"computes cuDNN's layers of lstm_lm in float16.*: set precision=float32"):
        modes.resolve(words, GPU)


def test_the_identity_of_a_run_does_not_depend_on_its_speed() -> None:
    changed = SPARSE.with_settings(["capture=true", "compile=true", "channels_last=true"])
    assert changed.run_id == SPARSE.run_id
    assert SPARSE.with_settings(["precision=bf16"]).run_id != SPARSE.run_id


def test_the_committed_table_is_of_known_networks_and_modes() -> None:
    table = json.loads(Path(modes.__file__).with_name("modes.json").read_text())
    for device, measured in table.items():
        assert device
        for network, mode in measured.items():
            assert network in models.names()
            assert Measured(**mode).precision in ("float32", "bf16")
        assert measured.get("lstm_lm", {}).get("precision", "float32") == "float32"


def test_a_mode_in_words() -> None:
    assert str(Mode()) == "float32"
    assert str(FASTEST) == "bf16, channels-last, compiled, graph"


@pytest.mark.parametrize("asked", [None, True])
def test_a_compiler_that_fails_stops_only_a_run_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: bool | None
) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no such luck")

    torch.compiler.reset()  # which remembers what could not be compiled
    whole, called = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: called.append(forward) or whole(forward, backend=broken))
    monkeypatch.setattr(modes, "resolve_compile", lambda run, context, steps: replace(run, compile=True))
    run = Run(model="digits_cnn", data="digits", epochs=1, device="cpu", compile=asked)
    if asked:
        with pytest.raises(Exception, match="no such luck"):
            train(run, tmp_path / "run")
    else:
        assert train(run, tmp_path / "run")["complete"]
    assert called
