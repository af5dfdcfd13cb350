"""What deploy decides from timings, how it says so, and what is remembered of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.deployment.runtime import (
    NativeModel,
    NoCompilerError,
    compile_plan,
    deployed,
    load_native,
    memory,
    tuning,
)

try:
    load_native()
except NoCompilerError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cache_directory", lambda: tmp_path / "cache")


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(60, 40) < 0.05)  # type: ignore[operator, union-attr]
    return model.eval()


def times(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> list[str]:
    """Replace the timing by these seconds, one for a candidate without a name here. Returns the timed candidates."""
    timed: list[str] = []

    def time_in_turns(
        candidates: Mapping[str, Any], inputs: Sequence[Any], _: float, wanted: int = 3
    ) -> dict[str, list[float]]:
        timed.extend(candidates)
        return {name: [seconds.get(name, 1.0)] for name in candidates}

    monkeypatch.setattr(deployed, "time_in_turns", time_in_turns)
    return timed


def test_no_gain_is_called_no_gain_and_the_model_runs_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"torch": 1.0, "1/1": 1.25})
    model, x = network(), torch.randn(1, 40)
    fast = gossamer.deploy(model, x, seconds=0)
    assert fast.explain().engine == "torch"
    assert "no gain from sparsity: the native kernels take 1.25 times as long" in str(fast.explain())
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))


def test_noise_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"torch": 1.01, "1/1": 1.0})
    assert gossamer.deploy(network(), torch.randn(1, 40), seconds=0).explain().engine == "torch"


@pytest.mark.parametrize(("two", "threads"), [(0.79, 1), (0.5, 2)])
def test_a_second_thread_has_to_earn_its_place(monkeypatch: pytest.MonkeyPatch, two: float, threads: int) -> None:
    timed = times(monkeypatch, {"torch": 9.0, "32/1": 0.8, "32/2": two})
    fast = gossamer.deploy(network(), torch.randn(64, 40), threads=2, seconds=0)
    assert {"32/1", "32/2", "64/1", "torch"} <= set(timed)
    assert not {"64/2", "32/3"} & set(timed)  # one group cannot be shared, a third thread was not asked for
    assert fast.native is not None
    assert fast.native.setting_for(64).threads == threads
    assert fast.native.setting_for(64).lanes == 32


def test_each_layer_gets_its_fastest_kernel_and_says_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"torch": 9.0})
    costs = {"gather": 3e-6, "loads": 2e-6, "windows": 4e-6, "dense": 1e-6}

    def profile(self: NativeModel, *_: Any) -> dict[int, float]:
        assert self.setting is not None
        return dict.fromkeys(range(-1, len(self.graph.operations)), 0.0) | {
            number: costs[kernel] for number, kernel in self.setting.kernels
        }

    monkeypatch.setattr(NativeModel, "profile", profile)
    monkeypatch.setattr(tuning, "_POINTLESS", {name: frozenset() for name in tuning._POINTLESS})
    lines = {line.name: line for line in gossamer.deploy(network(), torch.randn(1, 40), seconds=0).explain().lines}
    assert lines["0"].kernel == "one vector, loads"  # too sparse to be tried dense
    assert lines["0"].reason == "loads 2.0 µs, gather 3.0 µs, windows 4.0 µs"
    assert lines["2"].kernel == "one vector, dense"
    assert lines["2"].reason.startswith("dense 1.0 µs, loads 2.0 µs")


def test_a_profile_accounts_for_the_call() -> None:
    native = compile_plan(network(), torch.randn(64, 40))
    spent = native.profile(torch.randn(64, 40))
    assert set(spent) == {-1, *range(len(native.graph.operations))}
    assert all(0 < seconds < 1 for seconds in spent.values())


def test_a_decision_is_remembered_for_the_same_shapes_and_densities(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = times(monkeypatch, {"torch": 9.0, "1/1": 2.0})
    first = gossamer.deploy(network(), torch.randn(1, 40), seconds=0)
    assert "timed now" in first.explain().reason
    del timed[:]
    second = gossamer.deploy(network(), torch.randn(1, 40), seconds=0)
    assert not timed
    assert "remembered" in second.explain().reason
    assert second.explain().milliseconds == {"torch": 9000.0, "native": 2000.0}
    assert second.explain().lines == first.explain().lines
    gossamer.deploy(network(), torch.randn(2, 40), seconds=0)
    assert timed
    del timed[:]
    gossamer.deploy(network(), torch.randn(1, 40), seconds=0, threads=2)
    assert timed
    del timed[:]
    gossamer.deploy(network(), torch.randn(1, 40), seconds=0, remember=False)
    assert timed


@pytest.mark.parametrize("damage", ["not json", "[]", '{"KEY": 3}', '{"KEY": {"lanes": 1}}', "nothing", "kernel"])
def test_damaged_memory_is_ignored_with_a_warning(tmp_path: Path, damage: str) -> None:
    model, x = network(), torch.randn(1, 40)
    gossamer.deploy(model, x, seconds=0)
    file = tmp_path / "cache" / memory.FILE
    entries = json.loads(file.read_text())
    (key,) = entries
    if damage == "kernel":
        entries[key]["chosen"]["1"] = "rocket"
    file.write_text({"nothing": "{}", "kernel": json.dumps(entries)}.get(damage, damage.replace("KEY", key)))
    if damage == "nothing":
        fast = gossamer.deploy(model, x, seconds=0)
    else:
        with pytest.warns(UserWarning, match="expected remembered timings in"):
            fast = gossamer.deploy(model, x, seconds=0)
    assert "timed now" in fast.explain().reason
    assert json.loads(file.read_text()).keys() == {key}


@pytest.mark.parametrize(
    "damage",
    [
        *({"lanes": 3}, {"lanes": 10**9}, {"threads": 10**7}, {"threads": 1.5}),
        *({"seconds": {}}, {"seconds": {"torch": 1.0, "native": 0.0}}),
    ],
)
def test_an_entry_that_cannot_be_true_is_ignored_with_a_warning(tmp_path: Path, damage: dict[str, Any]) -> None:
    model, x = network(), torch.randn(4, 40)
    gossamer.deploy(model, x, seconds=0)
    file = tmp_path / "cache" / memory.FILE
    file.write_text(json.dumps({key: entry | damage for key, entry in json.loads(file.read_text()).items()}))
    with pytest.warns(UserWarning, match="expected remembered timings in"):
        assert "timed now" in gossamer.deploy(model, x, seconds=0).explain().reason


def test_memory_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert "timed now" in gossamer.deploy(network(), torch.randn(1, 40), seconds=0).explain().reason


def test_memory_stays_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "LIMIT", 2)
    decision = memory.Decision(gossamer.deployment.runtime.Setting(1), {"torch": 1.0, "native": 1.0}, {})
    for key in ("a", "b", "c"):
        memory.remember(key, decision)
    assert list(json.loads((tmp_path / "cache" / memory.FILE).read_text())) == ["b", "c"]


@pytest.mark.parametrize(("example", "message"), [(torch.zeros(4, 9), "RuntimeError: mat1"), (None, "got NoneType")])
def test_an_example_that_does_not_fit_is_refused(example: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossamer.deploy(network(), example)
