"""Tables of what things cost, from records made up here."""

import json
from pathlib import Path

from gossamer.lab.results.costs import product_rows, products_on_a_gpu, wins


def row(**formats: tuple[str, float] | None) -> dict[str, object]:
    told = {
        name.replace("_", " "): {"remark": "not possible"}
        if each is None
        else {"run": each[0], "microseconds": each[1]}
        for name, each in formats.items()
    }
    return {"layer": "a layer", "shape": [4, 8], "sparsity": 0.955, "batch": 64, "formats": told}


RECORD = {
    "hardware": "a GPU",
    "rows": [
        row(dense_float32=("graph", 20.0), dense_bfloat16=("graph", 10.0), CSR=("graph", 8.0), BSR=("eager", 300.0)),
        row(dense_float32=("graph", 20.0), dense_bfloat16=("graph", 10.0), CSR=("graph", 15.0), BSR=("eager", 1.0)),
        row(dense_float32=("graph", 20.0), CSR=None),
    ],
}


def test_products_that_were_launched_call_by_call_win_nothing() -> None:
    assert wins([RECORD]) == "the best is faster than the best dense one in 1 of 2 rows, by at most 25 %"
    slower = {"rows": RECORD["rows"][1:2]}
    assert wins([slower]) == "the best is faster than the best dense one in 0 of 1 rows"


def test_a_row_a_layer_and_batch(tmp_path: Path) -> None:
    formats = ["dense bfloat16", "CSR", "BSR"]
    found = product_rows([RECORD], formats)
    assert found[0] == ["a layer", "4×8", "95.5 %", "64", "10", "8", "300 *"]
    assert found[2] == ["a layer", "4×8", "95.5 %", "64", "–", "–", "–"]
    assert products_on_a_gpu(tmp_path) == ""
    (tmp_path / "speed-gpu").mkdir()
    (tmp_path / "speed-gpu" / "layers.json").write_text(json.dumps(RECORD))
    assert "in 1 of 2 rows" in products_on_a_gpu(tmp_path)
