"""The code itself: style, types, imports that point down, a README of one screen, an example that runs."""

import subprocess
import sys
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

from imports import imports, modules, package, room

from gossamer.lab.results import documents
from gossamer.methods.scl import SCLOptions
from gossamer.settings import Phases

ROOT = Path(__file__).parent.parent

ROOMS = ("library", "deployment", "lab", "cli")  # each may import itself and those before it
FACADES = {"gossamer", "gossamer.__main__"}  # they offer everything, and import the later rooms on first use

MODULES = modules()
IMPORTS = [each for name, path in MODULES.items() for each in imports(name, path, MODULES)]


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_style() -> None:
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")


def test_types() -> None:
    run("mypy")


def test_imports_point_from_the_cli_to_the_library() -> None:
    upwards = [
        f"{each.importer} imports {each.imported}"
        for each in IMPORTS
        if each.importer not in FACADES and ROOMS.index(room(each.imported)) > ROOMS.index(room(each.importer))
    ]
    assert not upwards


def test_no_imports_go_in_circles() -> None:
    """Neither between files nor between packages that are not inside one another."""
    between_packages: dict[str, set[str]] = {}
    between_files: dict[str, set[str]] = {}
    for each in IMPORTS:
        between_files.setdefault(each.importer, set()).add(each.imported)
        importer, imported = package(each.importer, MODULES), package(each.imported, MODULES)
        if not (f"{imported}.".startswith(f"{importer}.") or f"{importer}.".startswith(f"{imported}.")):
            between_packages.setdefault(importer, set()).add(imported)
    for graph in (between_files, between_packages):
        TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_no_import_hides_inside_a_function() -> None:
    """Only files of Triton kernels are imported late, as Triton is optional."""
    hidden = [each for each in IMPORTS if each.inside_a_function and not each.imported.endswith("_triton")]
    assert not hidden


def test_the_reference_shares_no_code_with_the_library() -> None:
    for path in (ROOT / "tests" / "core" / "reference").glob("*.py"):
        assert not list(imports(path.stem, path, MODULES)), path.name


def test_import_is_light_and_the_parts_are_there() -> None:
    code = """
import sys, gossamer
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("gossamer.")}
assert not loaded & {"deployment", "lab", "cli"}, loaded
heavy = {"triton", "torchvision", "pandas", "plotly", "onnx", "onnxruntime", "tyro", "transformers", "sklearn"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert callable(gossamer.deploy) and callable(gossamer.compact)
assert gossamer.lab.models.create("lenet300") and gossamer.lab.recipes.find("digits")
assert not hasattr(gossamer, "model")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 66


def test_generated_tables_are_current() -> None:
    for path, content in documents(ROOT).items():
        assert path.read_text() == content, f"{path.name}: run python -m gossamer.lab.results"


def test_the_example_runs() -> None:
    path = ROOT / "examples" / "one_file.py"
    assert len(path.read_text().splitlines()) <= 150
    result = subprocess.run([sys.executable, str(path), "--epochs", "12"], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "5.00%" in result.stdout
    assert "same; compared zeros of 4 tensors" in result.stdout


def test_the_docs_name_every_setting() -> None:
    page = (ROOT / "docs" / "method.md").read_text()
    settings = [*fields(SCLOptions), *fields(Phases)]
    missing = [field.name for field in settings if f"`{field.name}`" not in page]
    assert not missing
