"""The code itself: style, types, imports that point down, a README of one screen, an example that runs."""

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gossamer.results import documents
from gossamer.settings import Settings

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gossamer"

# From the bottom up. A module may import from its own layer and from those below.
LAYERS = (
    {"method", "_json", "distillation", "schedule", "sharding", "tune", "_selectors", "_engines", "_hooks", "reach"},
    {"settings", "budget_kernels", "budget", "select", "_forward"},
    {"flops", "target", "store", "moments", "models", "data", "_claims", "keep_zeros", "sparsefile"},
    {
        "learning_kernels",
        "learning",
        "health_kernels",
        "health",
        "_resume",
        "report",
        "verify",
        "checkpoint",
        "runtime",
        "methods",
    },
    {"sample_scales", "_preconditions", "compaction", "results", "stored"},
    {"connectivity"},
    {"sparsifier"},
    {"__init__"},
    {"side_by_side", "training"},
    {"recipes", "exports"},
    {"reproduce"},
    {"tables", "speed"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_style() -> None:
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")


def test_types() -> None:
    run("mypy")


def imported(path: Path) -> set[str]:
    """The parts of gossamer that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gossamer":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gossamer.")}
    return found & set(LEVEL)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    upwards = {name for name in imported(path) if LEVEL[name] > LEVEL[own]}
    assert not upwards, f"{own} imports {', '.join(sorted(upwards))}, which lies above it"


def test_files_stay_small() -> None:
    long = [path.name for path in SOURCE.rglob("*.py") if len(path.read_text().splitlines()) > 400]
    assert not long


def test_the_reference_shares_no_code_with_the_library() -> None:
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        assert not imported(path), path.name


def test_the_parts_are_there_without_an_import_of_their_own() -> None:
    code = """
import sys, gossamer
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("gossamer.")}
assert not loaded & {"training", "recipes", "cli", "speed"}, loaded
assert gossamer.models.create("lenet300") and gossamer.exports.to_onnx and gossamer.recipes.find("digits")
assert not hasattr(gossamer, "model")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 66


def test_generated_tables_are_current() -> None:
    for path, content in documents(ROOT).items():
        assert path.read_text() == content, f"{path.name}: run python -m gossamer.results"


def test_the_example_runs() -> None:
    path = ROOT / "examples" / "one_file.py"
    assert len(path.read_text().splitlines()) <= 150
    result = subprocess.run([sys.executable, str(path), "--epochs", "12"], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "5.00%" in result.stdout
    assert "same; compared zeros of 4 tensors" in result.stdout


def test_the_docs_name_every_setting() -> None:
    page = (ROOT / "docs" / "method.md").read_text()
    missing = [field.name for field in fields(Settings) if f"`{field.name}`" not in page]
    assert not missing
