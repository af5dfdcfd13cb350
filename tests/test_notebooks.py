"""The notebooks: every cell runs, and the stored outputs are complete."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
spec = importlib.util.spec_from_file_location("_notebooks", DOCS / "_notebooks.py")
assert spec is not None
assert spec.loader is not None
_notebooks = sys.modules.setdefault("_notebooks", importlib.util.module_from_spec(spec))
spec.loader.exec_module(_notebooks)


@pytest.mark.parametrize("path", _notebooks.notebooks(), ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "transformer":
        pytest.importorskip("transformers", reason='pip install -e ".[integrations]"')
    monkeypatch.chdir(tmp_path)
    outputs = _notebooks.execute(path)
    stored = [each["outputs"] for each in json.loads(path.read_text("utf-8"))["cells"] if each["cell_type"] == "code"]
    # The numbers differ between machines; what kind of output each cell has does not.
    assert [[each["output_type"] for each in cell] for cell in outputs] == [
        [each["output_type"] for each in cell] for cell in stored
    ], "run python docs/_notebooks.py"


def test_a_notebook_becomes_a_page() -> None:
    page = _notebooks.page_of(DOCS / "notebooks" / "cnn.ipynb")
    assert page.startswith("# A sparse CNN from scratch\n")
    assert "```python\nimport torch\n" in page
    assert "<table>" in page  # the report
    assert "```text\nsparse: " in page
