"""The notebooks: their execution, and their pages on the site.

`python docs/_notebooks.py` executes them and stores what their cells print. No package for notebooks is needed.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def execute(path: Path) -> list[list[dict[str, Any]]]:
    """Run the code cells of a notebook in order, in one namespace, and return the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [each for each in json.loads(path.read_text("utf-8"))["cells"] if each["cell_type"] == "code"]
    return [_run(source(cell), names, f"{path.name}, cell {number}") for number, cell in enumerate(cells, 1)]


def store(path: Path) -> None:
    """Execute a notebook and write its outputs into it."""
    notebook = json.loads(path.read_text("utf-8"))
    outputs = iter(execute(path))
    for number, cell in enumerate(each for each in notebook["cells"] if each["cell_type"] == "code"):
        cell |= {"outputs": next(outputs), "execution_count": number + 1}
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", "utf-8")


def page_of(path: Path) -> str:
    """A notebook as Markdown."""
    parts = [f'<a href="../notebooks/{path.name}" download>Download this notebook</a>']
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                parts.append("".join(data["text/html"]))
            elif text := "".join(output.get("text", data.get("text/plain", ()))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.insert(1, parts.pop(0))  # below the title
    return "\n\n".join(parts) + "\n"


def _run(code: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The outputs of a cell: what it prints, and the value of its last expression."""
    body = ast.parse(code, where).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), where, "exec"), names)
        if last is not None:
            value = eval(compile(last, where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"output_type": "display_data", "data": shown, "metadata": {}})
    return outputs


if __name__ == "__main__":
    for notebook in [FOLDER / name for name in sys.argv[1:]] or notebooks():
        store(notebook)
