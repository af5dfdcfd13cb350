"""Pages of runs, sweeps, comparisons and models, as `gossamer report --html` writes them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from chromium import BROWSER, browser

import gossamer
from gossamer import cli
from gossamer.lab.recipes import find
from gossamer.lab.report_pages import (
    page_of_panels,
    page_of_run,
    panel_of_sweep,
    panels_of_comparison,
    speed_ratios,
)
from gossamer.lab.results import plot
from gossamer.lab.training import train
from gossamer.methods import METHODS
from gossamer.report.page import Page
from gossamer.report.style import COLORS, ORDER, Style, style_of

graph_objects = pytest.importorskip("plotly.graph_objects")
RESULTS = Path(__file__).parents[2] / "results"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return int(stop.value.code or 0)


def checked(page: Page) -> Page:
    """The page, after plotly has accepted all of its figures."""
    for chart in page.charts:
        for view in chart.views:
            assert view.data, chart.title
            text = json.dumps({"data": list(view.data), "layout": dict(view.layout)}, allow_nan=False)
            graph_objects.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "red", text)))
    return page


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(find("digits").run.with_settings(["epochs=4", "model_options.width=4"]), folder)
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


TIMES = {"torch": ("dense", 0.9), "onnxruntime": ("dense", 0.3), "gossamer": ("sparse", 0.1)}
CASE = {
    "batch": 1,
    "threads": 1,
    "rows": [
        {"engine": name, "kind": kind, "median": ms, "lower": ms, "upper": ms, "note": ""}
        for name, (kind, ms) in TIMES.items()
    ]
    + [{"engine": "openvino", "kind": "dense", "median": None, "lower": None, "upper": None, "note": "not installed"}],
}


def test_a_run_has_its_curves_its_layers_and_its_files(finished: Path) -> None:
    page = checked(page_of_run(finished, dense={"accuracy": 0.9876}))
    assert [chart.title for chart in page.charts] == [
        *("Accuracy, %", "Loss", "Sparsity, %", "Learning rate", "λ₁", "Flips"),
        "Layer by layer",
    ]
    assert [view.label for view in page.charts[-1].views] == [
        *("Density", "Multiply-adds", "Bytes", "Dead features", "Mask gradient")
    ]
    text = page.to_html()
    result = json.loads((finished / "result.json").read_text())
    assert f"{result['accuracy']:.2%}" in text
    assert "98.76% dense" in text
    size = (finished / "model.sparse.safetensors").stat().st_size
    assert f"{size / 1000:.3g} kB" in text
    assert text.count("<img ") == 4
    health = json.loads((finished / "health.json").read_text())
    flips = page.charts[5].views[0].data[0]
    assert sum(flips["y"]) == sum(health["flips"]) > 0
    sparsity = page.charts[2].views[0].data[0]
    assert sparsity["y"][-1] == pytest.approx(95, abs=0.01)


def test_a_run_of_an_earlier_version_without_diagnostics_or_model(finished: Path) -> None:
    for name in ("health.json", "model.safetensors", "log.jsonl"):
        (finished / name).unlink()
    page = checked(page_of_run(finished))
    assert [chart.title for chart in page.charts] == ["Layer by layer"]
    assert "<img " not in page.to_html()


def test_lines_that_a_kill_left_incomplete_are_skipped(finished: Path) -> None:
    log = finished / "log.jsonl"
    whole = len(checked(page_of_run(finished)).charts[0].views[0].data[0]["x"])
    log.write_text(log.read_text() + '{"step": 9, "loss": \n[1]\n{"step": "x"}\n')
    assert len(checked(page_of_run(finished)).charts[0].views[0].data[0]["x"]) == whole


@pytest.mark.parametrize("name", ["health.json", "speed.json"])
@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"cases": 3, "steps": [1], "layers": []}'])
def test_damaged_files_beside_a_run_are_refused_by_name(finished: Path, name: str, text: str) -> None:
    (finished / name).write_text(text)
    with pytest.raises(ValueError, match=rf"expected .* in .*{name}, got"):
        page_of_run(finished)


def test_a_measured_speed_is_in_the_headline_and_a_table(finished: Path) -> None:
    (finished / "speed.json").write_text(json.dumps({"cases": [CASE]}))
    assert speed_ratios(CASE) == {"torch": pytest.approx(9), "onnxruntime": pytest.approx(3)}
    text = checked(page_of_run(finished)).to_html()
    assert "<dd>9.0×</dd><dd>that of torch and 3.0× onnxruntime, batch 1</dd>" in text
    assert "openvino: not installed" in text


def test_a_page_shows_what_deploy_chose_for_each_layer(finished: Path) -> None:
    line = {
        **{"name": "features.3", "kind": "convolution", "shape": "64x4x4", "kernel": "planes of 1"},
        **{"weights": 18432, "nonzeros": 881, "multiplications": 14096, "operation": 2},
        "reason": "panels 0.4 µs, dense 0.5 µs",
    }
    case = {**CASE, "rows": [{**row, "layers": [line] if row["kind"] == "sparse" else []} for row in CASE["rows"]]}
    (finished / "speed.json").write_text(json.dumps({"cases": [case]}))
    text = checked(page_of_run(finished)).to_html()
    damaged = {**case, "rows": [{**row, "layers": [{"name": 3}]} for row in case["rows"]]}
    (finished / "speed.json").write_text(json.dumps({"cases": [damaged]}))
    with pytest.raises(ValueError, match="expected a measurement of gossamer speed"):
        page_of_run(finished)
    for said in ("planes of 1", "881 of 18,432", "14,096", "panels 0.4 µs"):
        assert f">{said}" in text


def test_runs_of_the_same_network_beside_a_run_are_compared_with_it(finished: Path) -> None:
    assert "Accuracy against sparsity" not in page_of_run(finished).to_html()
    own = json.loads((finished / "result.json").read_text())
    others = {
        "dense": own | {"method": "dense", "accuracy": 0.5, "config": own["config"] | {"method": "dense"}},
        "dpf": own | {"method": "dpf", "accuracy": 0.4, "config": own["config"] | {"method": "dpf"}},
        "longer": own | {"epochs": 99},
    }
    for name, other in others.items():
        (finished.parent / name).mkdir()
        (finished.parent / name / "result.json").write_text(json.dumps(other))
    (finished.parent / "broken").mkdir()
    (finished.parent / "broken" / "result.json").write_text("{")
    page = checked(page_of_run(finished))
    (chart,) = [each for each in page.charts if each.title == "Test accuracy"]
    assert [trace["name"] for trace in chart.views[0].data] == [METHODS["scl"].title, METHODS["dpf"].title]
    assert "50.00% dense" in page.to_html()


def test_a_method_has_one_color_everywhere() -> None:
    """Colors do not depend on which methods are shown, or on their order in the registry."""
    assert style_of("scl") == Style(0)
    assert len({style_of(name) for name in ORDER}) == len(ORDER)
    assert {"dpf", "rigl", "str", "slimming"} <= {*ORDER} & {*METHODS}
    assert style_of("my_package:MyMethod") == style_of("my_package:MyMethod")
    colors = re.findall(r"--c\d: (#\w+);", (Path(gossamer.__file__).parent / "report" / "page.css").read_text())
    assert tuple(colors[: len(COLORS)]) == COLORS  # those of light screens
    forward, backward = panel_of_sweep(records()), panel_of_sweep(records()[::-1])
    pages = [page_of_panels("", "", [("", panel)]) for panel in (forward, backward)]
    found = [{trace["name"]: trace["line"]["color"] for trace in page.charts[0].views[0].data} for page in pages]
    assert found[0] == found[1]


def test_axes_of_percentages_end_at_one_hundred() -> None:
    high = [{**each, "accuracy": 0.995 + each["accuracy"] / 1000} for each in records()]
    one = [each for each in high if each["sparsity"] in (0, 0.9)]
    lines, rows = (page_of_panels("", "", [("", panel_of_sweep(each))]).charts[0].views[0] for each in (high, one))
    assert lines.layout["yaxis"]["range"][1] <= 100
    assert rows.layout["xaxis"]["range"][1] <= 100
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for axes, draw, drawn in zip(figure.subplots(1, 2), (plot._draw, plot._draw_rows), (high, one), strict=True):
        draw(axes, panel_of_sweep(drawn))
    assert figure.axes[0].get_ylim()[1] <= 100
    assert figure.axes[1].get_xlim()[1] <= 100


def records() -> list[dict[str, Any]]:
    return [
        {
            "config": {"method": method, "sparsity": sparsity or None, "seed": seed, "settings": {}},
            "method": method,
            "accuracy": 0.9 - sparsity / 10 + seed / 100,
            "sparsity": sparsity,
            "diverged": False,
        }
        for method, sparsities in (("dense", [0.0]), ("scl", [0.9, 0.95]), ("dpf", [0.9, 0.95]))
        for sparsity in sparsities
        for seed in (0, 1)
    ]


def test_a_sweep_has_a_line_for_each_method() -> None:
    lost = {**records()[2], "diverged": True, "accuracy": 0.0}
    panel = panel_of_sweep([*records(), lost])
    assert [line.label for line in panel.dense] == [METHODS["dense"].title]
    assert [line.method for line in panel.sparse] == ["scl", "dpf"]
    for line in panel.sparse:
        assert line.sparsity == (90, 95)
        assert line.accuracy == pytest.approx((81.5, 81.0))
        assert line.spread == pytest.approx((0.5**0.5, 0.5**0.5))


def test_settings_that_differ_have_lines_of_their_own() -> None:
    several = [
        {**each, "config": {**each["config"], "settings": {"mask_lr": lr}, "device": str(lr)}}
        for each in records()[2:4]
        for lr in (0.1, 0.2)
    ]
    labels = [line.label for line in panel_of_sweep(several).sparse]
    assert sorted(labels) == [f"{METHODS['scl'].title}, mask_lr={lr}" for lr in (0.1, 0.2)]


def test_the_committed_comparisons_have_pages(tmp_path: Path) -> None:
    (folder,) = RESULTS.glob("*-vgg16_cifar")
    headed = panels_of_comparison([folder])
    assert headed
    assert all("vgg16_cifar on cifar10" in heading for heading, _ in headed)
    assert run("report", str(folder), "--html", str(tmp_path / "page.html")) == 0
    text = (tmp_path / "page.html").read_text()
    assert all(line.label in text for _, panel in headed for line in panel.sparse)


def test_pages_from_the_command_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, record in enumerate(records()):
        whole = {"connections": 1, "weights": 2, "seconds": 1.0, "train_loss": 0.1, "validation_accuracy": None}
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep" / f"{number}.json").write_text(json.dumps(whole | record))
    folder = tmp_path / "hugging-face"
    folder.mkdir()
    state = {"decoder.weight": torch.eye(8), "decoder.bias": torch.ones(8)}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    torch.save({"state_dict": state}, tmp_path / "model.pt")
    expected = {
        str(finished): "digits_cnn on digits",
        str(tmp_path / "sweep"): "10 runs in",
        str(finished / "model.safetensors"): "multiply-adds",
        str(folder): "12.5%",
        str(tmp_path / "model.pt"): "87.50%",
    }
    for path, shown in expected.items():
        page = tmp_path / "page.html"
        assert run("report", path, "--html", str(page)) == 0, capsys.readouterr().err
        printed = capsys.readouterr().out
        assert f"The page is in {page}" in printed
        assert shown in page.read_text() + printed
        page.unlink()


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", str(tmp_path), "--html", str(tmp_path / "nowhere" / "page.html")) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: apt-get install chromium")
def test_pages_of_runs_and_comparisons_in_a_browser(finished: Path, tmp_path: Path) -> None:
    (finished / "speed.json").write_text(json.dumps({"cases": [CASE]}))
    (folder,) = RESULTS.glob("*-vgg16_cifar")
    pages = {str(finished): tmp_path / "run.html", str(folder): tmp_path / "comparison.html"}
    for source, page in pages.items():
        assert run("report", source, "--html", str(page)) == 0
    with browser() as tab:
        for page in pages.values():
            for width in (1200, 390):
                tab.open(page, width=width)
                assert tab.run("document.documentElement.scrollWidth") <= width
                drawn = "[...document.querySelectorAll('.plot')].every(each => each.querySelector('.main-svg'))"
                assert tab.run(drawn)
        lines = "document.querySelectorAll('.plot .scatterlayer .trace').length"
        before = tab.run(lines)
        tab.run("document.querySelectorAll('[data-key]')[1].click()")
        assert tab.run(lines) < before
        assert tab.errors == []
