"""The speed report: what it computes from times, and a small measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.deployment.filled import filled
from gossamer.deployment.runtime import compile_plan, memory
from gossamer.deployment.speed import ENGINES, Case, Row, SpeedReport, measure
from gossamer.deployment.speed.engines import Unavailable
from gossamer.deployment.speed.report import plot


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cache_directory", lambda: tmp_path / "cache")


def row(engine: str, milliseconds: float | None, **changes: Any) -> Row:
    kind = ENGINES[engine].kind
    return replace(Row(engine, kind, milliseconds, milliseconds, milliseconds, 100, 0.0), **changes)


def case(*rows: Row, half: float | None = None, density: float = 0.05) -> Case:
    return Case(1, 1, rows, half, density)


def test_the_baseline_is_the_fastest_dense_float_engine() -> None:
    found = case(
        row("torch", 9.0),
        row("onnxruntime", 6.0),
        row("onnxruntime int8", 4.0),
        row("openvino", None),
        row("gossamer", 2),
    )
    assert found.best_dense is not None
    assert found.best_dense.engine == "onnxruntime"
    assert found.speedup == 3.0
    assert found.ratio(found.rows[0]) == pytest.approx(6 / 9)
    assert found.fastest is found.rows[-1]
    assert found.verdict == (
        "3.00 times as fast as onnxruntime; the fastest of all is gossamer, 2.00 times as fast as onnxruntime int8"
    )
    plain = case(row("torch", 9.0), row("onnxruntime int8", None), row("gossamer", 2))
    assert plain.verdict == "4.50 times as fast as torch"


def test_no_gain_int8_and_a_busy_machine_are_said() -> None:
    slow = case(row("torch", 2.0), row("onnxruntime int8", 1.0), row("gossamer", 1.98))
    assert slow.verdict == (
        "no gain over torch; the fastest of all is onnxruntime int8, 1.98 times as fast as gossamer"
    )
    small = case(row("torch", 2.0), row("onnxruntime int8", 1.0), row("gossamer", 1.5), row("gossamer int8", 0.5))
    assert small.verdict == (
        "1.33 times as fast as torch; the fastest of all is gossamer int8, 2.00 times as fast as onnxruntime int8"
    )
    busy = case(row("torch", 2.0, lower=1.0, upper=4.0), row("gossamer", 1.0))
    assert busy.verdict == "2.00 times as fast as torch; the machine was busy, measure again"
    assert case(row("gossamer", 1.0)).verdict == "nothing to compare with"


def report(*cases: Case) -> SpeedReport:
    return SpeedReport("net", 100, 5, 200, 10, 4000, 300, cases, {"hardware": "a processor"})


def test_a_report_ends_with_one_sentence() -> None:
    fast = case(row("torch", 9.0), row("onnxruntime", 6.0), row("gossamer", 2.0))
    slow = replace(case(row("torch", 2.0), row("onnxruntime int8", 1.0), row("gossamer", 2.0)), batch=16)
    assert report(fast).sentence == (
        "net with 95.0% zeros runs 3.00 times as fast at batch 1 as the best dense float32 engine (onnxruntime), "
        "on a processor, with 1 thread."
    )
    assert report(fast, slow).sentence == (
        "net with 95.0% zeros runs 3.00 times as fast at batch 1 as the best dense float32 engine (onnxruntime or "
        "torch), and no faster at batch 16, on a processor, with 1 thread; dense int8 is faster still at batch 16, "
        "with other outputs."
    )
    assert report(slow).sentence.startswith("net with 95.0% zeros runs no faster than the best dense float32 engine")
    twice = report(fast, replace(fast, batch=4), replace(fast, threads=2)).sentence
    assert "3.00 times as fast at batch 1 with 1 thread, 3.00 times as fast at batch 4 with 1 thread and 3.00" in twice
    assert report(case(row("gossamer", 1.0))).sentence == "net with 95.0% zeros was compared with no dense engine."
    assert " ".join(str(report(fast)).split()).endswith(report(fast).sentence)
    assert report(fast).to_dict()["sentence"] == report(fast).sentence


@pytest.mark.parametrize(
    ("ours", "half", "dense", "expected"),
    [
        (1.0, 5.5, 4.0, 1 - (0.1 + 3 / (4.5 / 0.4))),  # by hand: 11.25 ms a unit of density
        (1.0, 5.5, 100.0, 0.0),  # always faster
        (1.0, 0.9, 4.0, None),  # more work took less time: no line to speak of
        (1.0, None, 4.0, None),
    ],
)
def test_break_even_lies_on_the_measured_line(
    ours: float, half: float | None, dense: float, expected: float | None
) -> None:
    found = case(row("torch", dense), row("gossamer", ours), half=half, density=0.1).break_even
    assert found == (None if expected is None else pytest.approx(expected))


def sparse_mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.where(torch.rand_like(layer.weight) < 0.9, 0, layer.weight))  # type: ignore[arg-type, union-attr, operator]
    return model


def example(batch: int) -> Tensor:
    return torch.randn(batch, 64)


def test_filling_keeps_what_was_there() -> None:
    model = sparse_mlp()
    half = filled(model, 0.5)
    for before, after in zip(model.parameters(), half.parameters(), strict=True):
        if before.ndim > 1:
            assert int(torch.count_nonzero(after)) == before.numel() // 2
            assert torch.equal(after[before != 0], before[before != 0])
        else:
            assert torch.equal(before, after)


def test_a_real_measurement(tmp_path: Path) -> None:
    model = sparse_mlp()
    shares: list[float] = []
    found = measure(
        model,
        example,
        name="mlp",
        batches=(1, 16),
        threads=(1, 2),
        engines=("torch", "gossamer"),
        seconds=0.02,
        rounds=3,
        progress=lambda what, share: shares.append(share),
    )
    assert [(each.batch, each.threads) for each in found.cases] == [(1, 1), (1, 2), (16, 1), (16, 2)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found.nonzeros == sum(int(torch.count_nonzero(p)) for p in model.parameters() if p.ndim > 1)
    assert found.flops_sparse == 2 * found.nonzeros
    assert found.sparse_file < found.dense_file
    for each in found.cases:
        assert each.half is not None
        for part in each.rows:
            assert "times as fast" not in part.note  # a second speed-up, from while it was deployed
            assert part.lower is not None
            assert part.upper is not None
            assert 0 < part.lower <= (part.median or 0) <= part.upper
            assert (part.difference or 0) < 1e-5
    read = json.loads(found.to_json())
    assert read["sparsity"] == found.sparsity
    assert read["cases"][0]["speedup"] == found.cases[0].speedup
    assert read["about"]["versions"]["torch"] == torch.__version__
    shown = str(found)
    assert "batch 16, 2 threads" in shown
    assert f"{found.nonzeros:,} of {found.weights:,} weights" in shown


def test_memory_is_that_of_weights_as_other_engines_tell_it() -> None:
    plan = compile_plan(nn.Conv2d(1, 1, 3), torch.randn(1, 1, 128, 128)).plan(1)
    assert 0 < plan.nbytes < 4 * plan.arena


def test_an_engine_that_is_missing_or_fails_says_so_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> Any:
        raise Unavailable("not installed (pip install openvino)")

    def broken(_: object) -> Any:
        raise KeyError("Gelu\nof many lines")

    monkeypatch.setitem(ENGINES, "openvino", replace(ENGINES["openvino"], prepare=missing))
    monkeypatch.setitem(ENGINES, "onnxruntime", replace(ENGINES["onnxruntime"], prepare=broken))
    engines = ("torch", "onnxruntime", "openvino", "gossamer")
    found = measure(
        sparse_mlp(), example, name="mlp", batches=(1,), engines=engines, seconds=0, rounds=3, break_even=False
    )
    notes = {each.engine: each.note for each in found.cases[0].rows}
    assert notes["openvino"] == "not installed (pip install openvino)"
    assert notes["onnxruntime"].startswith("failed: ")
    assert "openvino: not installed" in str(found)
    assert found.cases[0].speedup is not None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected engines from torch, .*, got warp"):
        measure(sparse_mlp(), example, name="mlp", engines=("warp",))
    with pytest.raises(ValueError, match="at least 1"):
        measure(sparse_mlp(), example, name="mlp", batches=(0,))


@pytest.mark.parametrize("engine", ["onnxruntime", "onnxruntime int8", "openvino"])
def test_other_engines_compute_the_same_network_and_print_nothing(
    engine: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip(engine.split()[0])
    # A batch norm in front cannot be folded, and its weights have one axis, which a quantiser could remark upon.
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).eval()
    found = measure(
        model,
        lambda b: torch.randn(b, 3, 8, 8),
        name="net",
        batches=(2,),
        engines=("torch", engine),
        seconds=0,
        rounds=3,
    )
    (part,) = [each for each in found.cases[0].rows if each.engine == engine]
    assert part.median is not None, part.note
    assert part.difference is not None
    assert part.difference < (0.1 if "int8" in engine else 1e-5)
    assert not [each for each in caplog.records if each.name == "root"]
    assert capfd.readouterr() == ("", "")


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = (case(row("torch", 2.0), row("openvino", None), row("gossamer", 1.0)),)
    plot(report(*cases), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
