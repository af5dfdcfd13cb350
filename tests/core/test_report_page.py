"""The HTML page of a report: its pictures, its figures, its size, and how it behaves in a browser."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import BROWSER, browser
from PIL import Image
from torch import Tensor, nn

import gossamer
from gossamer.report import Report, report
from gossamer.report.page import MOST_PICTURES, Page, page_of, thinned
from gossamer.report.pictures import block_density, picture_of

graph_objects = pytest.importorskip("plotly.graph_objects")
offline = pytest.importorskip("plotly.offline")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: apt-get install chromium")


def sparse(model: nn.Module, density: float = 0.1) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(torch.rand(each.shape, generator=generator) < density)
    return model


def convolutional() -> nn.Module:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=2), nn.Flatten(), nn.Linear(288, 5))
    return sparse(nn.Sequential(*layers))


@pytest.fixture
def example() -> Report:
    return report(convolutional(), torch.ones(1, 3, 8, 8))


# --- pictures ---


def test_a_pixel_of_a_small_tensor_is_a_weight() -> None:
    weight = sparse(nn.Linear(7, 5), 0.4).weight
    picture = picture_of(weight)
    with Image.open(io.BytesIO(picture.png)) as image:
        opacity = np.asarray(image.convert("RGBA"))[..., 3]
    assert (picture.width, picture.height, picture.densest) == (7, 5, 1.0)
    assert np.array_equal(opacity, 255 * (weight.detach().numpy() != 0))


def test_a_pixel_of_a_large_tensor_is_a_block() -> None:
    matrix = (torch.rand(150, 401, generator=torch.Generator().manual_seed(1)) < 0.05).float()
    found = block_density(matrix, 96)
    rows, columns = np.arange(97) * 150 // 96, np.arange(97) * 401 // 96
    for row in (0, 17, 95):
        for column in (0, 50, 95):
            block = matrix[rows[row] : rows[row + 1], columns[column] : columns[column + 1]]
            assert float(found[row, column]) == pytest.approx(float((block != 0).double().mean()))
    picture = picture_of(matrix)
    assert (picture.width, picture.height) == (96, 96)
    assert picture.densest == float(found.max())
    with Image.open(io.BytesIO(picture.png)) as image:
        opacity = np.asarray(image.convert("RGBA"))[..., 3]
    assert np.array_equal(opacity > 0, found.numpy() > 0)


def test_a_tensor_without_nonzeros_has_an_empty_picture() -> None:
    picture = picture_of(torch.zeros(3, 4, 2))
    with Image.open(io.BytesIO(picture.png)) as image:
        assert not np.asarray(image.convert("RGBA"))[..., 3].any()
    assert (picture.width, picture.height, picture.densest) == (8, 3, 0.0)


# --- the file ---


def content_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_table_has_the_numbers_of_the_report(example: Report, tmp_path: Path) -> None:
    path = example.save_html(tmp_path / "page.html", title="A <title>")
    text = path.read_text()
    layers = content_of(text)["layers"]
    assert layers["name"] == [row.name for row in example.rows]
    assert layers["nonzeros"] == [row.nonzeros for row in example.rows]
    assert layers["macs"] == [row.flops_sparse // 2 for row in example.rows if row.flops_sparse is not None]
    assert f"{example.sparsity:.2%}" in text
    assert "<title>A &lt;title&gt;</title>" in text
    assert text.count("<img ") == len(example.rows)
    without_input = report(convolutional())
    assert "macs" not in content_of(page_of(without_input.rows, without_input.tensors, title="").to_html())["layers"]


def test_plotly_accepts_all_figures(example: Report) -> None:
    page = page_of(example.rows, example.tensors, title="")
    figures = [view for chart in page.charts for view in chart.views]
    assert [view.label for view in figures] == ["Density", "Multiply-adds", "Bytes", "Dead features"]
    for view in figures:
        text = re.sub(r"var\(--[\w-]+\)", "red", json.dumps({"data": list(view.data), "layout": dict(view.layout)}))
        graph_objects.Figure(json.loads(text))  # raises ValueError for what plotly does not know


def test_names_in_a_checkpoint_cannot_leave_their_place(tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    text = report({name: torch.ones(2, 2)}).save_html(tmp_path / "page.html").read_text()
    assert "<img src=x" not in text
    assert content_of(text)["layers"]["name"] == [name]


def test_sizes_are_those_of_the_sparse_file_without_entropy_coding(tmp_path: Path) -> None:
    state = {"a": torch.eye(300), "b": torch.randn(40, 30)}
    page = page_of(*_rows_and_tensors(state), title="")
    saved = gossamer.save(state, tmp_path / "a.safetensors", compress="none")
    table = 1500  # the header, and the description of the tensors
    assert 0 < saved.file_bytes - sum(page.layers["bytes"]) < table


def _rows_and_tensors(state: dict[str, Tensor]) -> tuple[Any, Any]:
    found = report(state)
    return found.rows, found.tensors


@pytest.mark.parametrize("layers", [1, 5000])
def test_the_page_stays_small(layers: int) -> None:
    state = {f"blocks.{number}.weight": torch.eye(20, 30) for number in range(layers)}
    text = page_of(*_rows_and_tensors(state), title="").to_html()
    own = len(text.encode()) - len(offline.get_plotlyjs().encode())
    assert own < (20_000 if layers == 1 else 1_500_000)
    assert text.count("<img ") == min(layers, MOST_PICTURES)


def test_a_notebook_shows_a_folded_table_without_scripts(example: Report) -> None:
    text = example._repr_html_()
    assert all(row.name in text for row in example.rows)
    assert "<script" not in text
    folded = report({f"blocks.{number}.weight": torch.eye(2) for number in range(12)})._repr_html_()
    assert "blocks.{0..11}.weight" in folded


def test_thinned_lines_keep_their_ends() -> None:
    assert thinned(range(5), 10) == [0, 1, 2, 3, 4]
    found = thinned(range(12345), 1000)
    assert (len(found), found[0], found[-1]) == (1000, 0, 12344)
    assert found == sorted(set(found))


# --- in a browser ---


@needs_browser
def test_the_page_in_a_browser(example: Report, tmp_path: Path) -> None:
    path = example.save_html(tmp_path / "page.html")
    first_cells = "[...document.querySelectorAll('#layers tbody tr')].map(row => row.cells[0].textContent)"
    with browser() as page:
        page.open(path)
        assert page.run("document.querySelectorAll('.plot .main-svg').length") > 0
        assert page.run(first_cells) == ["1", "2", "3"]

        # With the keyboard alone: to the sort button of the nonzeros, and press it twice.
        page.run("document.querySelector('[data-column=nonzeros] button').focus()")
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.press("Enter", text="\r")
        falling = page.run(first_cells)
        numbers = {str(number): row.nonzeros for number, row in enumerate(example.rows, 1)}
        assert falling == sorted(numbers, key=lambda each: -numbers[each])
        assert page.run("document.querySelector('[data-column=nonzeros]').getAttribute('aria-sort')") == "descending"
        page.press("Enter", text="\r")
        assert page.run(first_cells) == falling[::-1]

        page.run(
            "(filter => { filter.value = 'linear'; filter.dispatchEvent(new Event('input')) })"
            "(document.getElementById('filter'))"
        )
        assert page.run(first_cells) == ["3"]
        assert page.run("document.getElementById('shown').textContent") == "1 of 3 layers"

        bars = "document.querySelectorAll('.plot .bars .point').length"
        before = page.run(bars)
        page.run("document.querySelector('[data-view-of][data-number=\"1\"]').click()")
        assert page.run(bars) == 2 * before  # dense and sparse

        colors = []
        for dark in (False, True):
            page.open(path, width=390, height=844, dark=dark)
            assert page.run("document.documentElement.scrollWidth") <= 390
            colors.append(page.run("getComputedStyle(document.body).backgroundColor"))
        assert colors[0] != colors[1]
        assert page.errors == []


@needs_browser
def test_every_control_can_be_reached_with_the_tab_key(example: Report, tmp_path: Path) -> None:
    path = example.save_html(tmp_path / "page.html")
    with browser() as page:
        page.open(path)
        controls = page.run("document.querySelectorAll('button:not([hidden]), input, [tabindex=\"0\"]').length")
        seen = set()
        for _ in range(controls):
            page.press("Tab")
            seen.add(page.run("document.activeElement.outerHTML"))
        assert len(seen) == controls
        assert page.errors == []


@needs_browser
@pytest.mark.parametrize("layers", [1, 5000])
def test_very_few_and_very_many_layers_in_a_browser(layers: int, tmp_path: Path) -> None:
    state = {f"blocks.{number}.weight": torch.eye(20, 30) for number in range(layers)}
    path = report(state).save_html(tmp_path / "page.html")
    with browser() as page:
        page.open(path)
        assert page.run("document.querySelectorAll('#layers tbody tr').length") == min(layers, 100)
        if layers > 100:
            page.run("document.getElementById('more').click()")
            assert page.run("document.querySelectorAll('#layers tbody tr').length") == 600
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []


def test_a_page_needs_plotly_and_a_folder(example: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="nowhere"):
        example.save_html(tmp_path / "nowhere" / "page.html")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'gossamer\[report\]'"):
        example.save_html(tmp_path / "page.html")


def test_an_empty_page_is_a_page(tmp_path: Path) -> None:
    assert "<h1>Nothing</h1>" in Page("Nothing").to_html()
