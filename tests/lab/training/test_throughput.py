"""The benchmark of all networks: runs on a CPU, survives a failure, goes on where it stopped."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gossamer.lab import results
from gossamer.lab.training.modes import Measured

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("throughput", ROOT / "benchmarks" / "throughput.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "throughput", module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--tiny", "--out", str(out), *more])
    benchmark.main()
    found: dict[str, Any] = json.loads(out.read_text())["networks"]
    return found


def test_every_kind_of_network_is_measured_and_a_failure_survived(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = benchmark.models.create

    def broken(name: str, **options: Any) -> Any:
        if name == "lenet300":
            raise RuntimeError("no such luck")
        return whole(name, **options)

    monkeypatch.setattr(benchmark.models, "create", broken)
    names = ["lenet300", "lenet5", "lstm_lm", "map_fit"]
    found = run(benchmark, monkeypatch, tmp_path / "out.json", "--networks", *names)
    assert [*found] == names
    assert found["lenet300"]["tried"]["float32"] == {"error": "RuntimeError: no such luck"}
    assert "alone" not in found["lenet300"]
    for name, samples in (("lenet5", 4), ("lstm_lm", 20), ("map_fit", 4)):
        alone = found[name]["alone"]
        assert alone["per_second"] == pytest.approx(1e3 * samples / alone["sparse_ms"])
        assert alone["mode"] in found[name]["tried"]
    alone = found["lenet5"]["alone"]
    assert alone["epoch_s"] == pytest.approx(alone["sparse_ms"] * 1e-3 * 60_000 / 4)


def test_the_same_command_measures_only_what_is_missing(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = run(benchmark, monkeypatch, tmp_path / "out.json", "--networks", "lenet300")
    both = run(benchmark, monkeypatch, tmp_path / "out.json", "--networks", "lenet300", "map_fit")
    assert both["lenet300"] == first["lenet300"]
    assert "alone" in both["map_fit"]


def test_again_measures_the_fastest_mode_anew_and_says_of_when_the_others_are(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = (tmp_path / "out.json", "--networks", "lenet300", "--commit")
    first = run(benchmark, monkeypatch, *asked, "old")["lenet300"]
    fastest = first["alone"]["tried"]
    slower = next(name for name in first["tried"] if name != fastest)
    second = run(benchmark, monkeypatch, *asked, "new", "--again")["lenet300"]
    assert second["tried"][slower] == {**first["tried"][slower], "commit": "old"}
    assert second["tried"][fastest]["sparse_ms"] != first["tried"][fastest]["sparse_ms"]
    assert "commit" not in second["tried"][fastest]
    assert second["tried"][fastest]["start_up_s"] >= first["tried"][fastest]["start_up_s"]  # the longest is kept
    assert second["alone"]["sparse_ms"] != first["alone"]["sparse_ms"]
    assert run(benchmark, monkeypatch, *asked, "new", "--again")["lenet300"] == second  # that was done


def test_again_leaves_networks_that_are_not_named_or_have_no_time_as_they_are(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, names = tmp_path / "out.json", ("--networks", "lenet300", "map_fit")
    first = run(benchmark, monkeypatch, out, *names, "--commit", "old")
    again = run(benchmark, monkeypatch, out, "--networks", "lenet300", "--commit", "new", "--again")
    assert "commit" not in again["lenet300"]["alone"]
    assert again["map_fit"]["alone"] == {**first["map_fit"]["alone"], "commit": "old"}
    late = run(benchmark, monkeypatch, out, *names, "--commit", "newest", "--again", "--minutes", "0")
    assert late["lenet300"]["alone"] == {**again["lenet300"]["alone"], "commit": "new"}
    assert late["map_fit"] == again["map_fit"]
    page = results.costs._earlier(json.loads(out.read_text()))
    assert page == ", but lenet300 at new; map_fit at old"


def test_what_is_compiled_is_measured_again_with_what_it_is_compared_with(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    entry = {"sparse_ms": 1.0, "start_up_s": 2.0}
    names = ("float32", "float32, graph", "bf16, graph", "bf16, compiled, graph")
    network = {"tried": {name: dict(entry) for name in names}, "alone": {"tried": "bf16, compiled, graph"}}
    (tmp_path / "out.json").write_text(json.dumps({"networks": {"lenet300": network}, "commit": "old"}))
    book = benchmark.Book(tmp_path / "out.json", {"hardware": "CPU", "commit": "new"})
    book.forget_the_fastest("lenet300")
    left = book.record["networks"]["lenet300"]
    assert left["tried"] == {name: {**entry, "commit": "old"} for name in names[:2]}
    assert left["starts"] == {"bf16, graph": 2.0, "bf16, compiled, graph": 2.0}


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ({"float32": 10.0, "bf16": 9.9}, Measured()),  # a gain of one percent is none
        ({"float32": 10.0, "bf16": 8.0, "bf16, channels-last": 5.0}, Measured("bf16", channels_last=True)),
        ({"float32": 10.0, "bf16, channels-last, compiled, graph": 9.5}, Measured()),  # too little for what it takes
        (
            {"float32, graph": 10.0, "bf16, channels-last, compiled, graph": 6.0},
            Measured("float32", capture=True),  # compiled, another precision and layout
        ),
        (
            {"bf16, channels-last, graph": 10.0, "bf16, channels-last, compiled, graph": 6.0},
            Measured("bf16", channels_last=True, capture=True, compile_from=7500),  # 30 s, at 4 ms a step
        ),
        (
            {
                "bf16, channels-last": 10.1,
                "bf16, channels-last, graph": 10.0,
                "bf16, channels-last, compiled, graph": 6.0,
            },
            Measured("bf16", channels_last=True, capture=True, compile_from=7500),  # captured as what is compiled is
        ),
    ],
)
def test_the_table_of_modes_gets_the_simplest_that_is_fast(
    benchmark: ModuleType, tmp_path: Path, milliseconds: dict[str, float], expected: Measured
) -> None:
    case = benchmark.case_of("resnet20", benchmark.torch.device("cpu"), tiny=True)
    tried: dict[str, Any] = {
        name: {"sparse_ms": value, "start_up_s": 30.0 if "compiled" in name else 0.5}
        for name, value in milliseconds.items()
    }
    tried["bf16, graph"] = {"error": "no"}
    table = tmp_path / "modes.json"
    table.write_text('{"Some GPU": {"resnet20": {}, "resnet56": {"precision": "bf16"}}}')
    benchmark.write_modes(
        table, {"hardware": "Some GPU", "networks": {"resnet20": {"tried": tried}}}, {"resnet20": case}
    )
    written = json.loads(table.read_text())["Some GPU"]
    assert Measured(**written["resnet20"]) == expected
    assert written["resnet56"] == {"precision": "bf16"}


def test_modes_of_different_commits_are_not_compared(benchmark: ModuleType, tmp_path: Path) -> None:
    case = benchmark.case_of("resnet20", benchmark.torch.device("cpu"), tiny=True)
    tried: dict[str, Any] = {"float32": {"sparse_ms": 5.0, "start_up_s": 0.1, "commit": "old"}}
    tried["bf16, graph"] = {"sparse_ms": 8.0, "start_up_s": 0.1}
    table = tmp_path / "modes.json"
    before = {"resnet20": {"precision": "bf16", "capture": True}}
    table.write_text(json.dumps({"Some GPU": before}))
    record = {"hardware": "Some GPU", "networks": {"resnet20": {"tried": tried}}}
    benchmark.write_modes(table, record, {"resnet20": case})
    assert Measured(**json.loads(table.read_text())["Some GPU"]["resnet20"]) == Measured("bf16", capture=True)


def test_a_faster_mode_that_fails_leaves_the_slower_one(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book = benchmark.Book(tmp_path / "out.json", {"hardware": "CPU"})
    case = benchmark.case_of("lenet300", benchmark.torch.device("cpu"), tiny=True)
    found = book.of(case)
    found["tried"]["float32"] = {"sparse_ms": 2.0, "peak_gib": None}
    monkeypatch.setattr(benchmark, "alone", lambda case, mode, seconds: {"dense_ms": 1.0, "sparse_ms": 2.0})
    benchmark.measure_alone(book, case, [], 0.01)
    assert found["alone"]["mode"] == "float32"

    def fails(case: object, mode: object, seconds: float) -> None:
        raise RuntimeError("out of memory")

    found["tried"]["bf16"] = {"sparse_ms": 1.0, "peak_gib": None}
    monkeypatch.setattr(benchmark, "alone", fails)
    benchmark.measure_alone(book, case, [], 0.01)
    assert (found["alone"]["mode"], found["alone"]["sparse_ms"]) == ("float32", 2.0)
    assert found["alone"]["error"] == "RuntimeError: out of memory"
    monkeypatch.setattr(benchmark, "alone", lambda case, mode, seconds: pytest.fail("measured again"))
    benchmark.measure_alone(book, case, [], 0.01)


def test_the_table_of_the_docs_is_there_once_it_was_measured(tmp_path: Path) -> None:
    assert results.throughput(tmp_path) == ""
    alone = {"mode": "bf16, graph", "epoch_s": 1.234, "per_second": 40_519.0, "sparsifier_share": 0.11, "peak_gib": 0.5}
    networks = {
        "resnet20": {"batch_size": 64, "unit": "images", "alone": alone, "batched": {"runs": 8, "epoch_s": 0.3}},
        "vgg16": {"batch_size": 128, "unit": "images", "alone": {"error": "no"}, "batched": {"error": "no"}},
    }
    record = {"networks": networks, "hardware": "Some GPU", "command": "python it.py", "commit": "abc"}
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput" / "h200.json").write_text(json.dumps(record))
    page = results.throughput(tmp_path)
    assert "| resnet20 | 64 | bf16, graph | 1.23 | 40,519 images | 11.0% | 0.50 | 0.300 |" in page
    assert "| vgg16 | 128 | – | – | – images | – | – | – |" in page
    assert "8 runs batched |" in page
