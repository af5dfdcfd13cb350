"""Kernels that come with the installation: built without torch, packed with the right tag, used while they fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gossamer.deployment.runtime import compiling, native

ROOT = Path(__file__).parents[3]
BUILD = """
import sys
sys.modules["torch"] = None  # what a build in isolation has
sys.path.insert(0, "backend")
import build_with_kernels as backend
sys.stdout.write("\\n" + getattr(backend, sys.argv[1])(*sys.argv[2:]))
"""
# Stands for a compiler: packing does not depend on what is in the file.
FAKE_COMPILER = """
import sys
from pathlib import Path
if "-o" in sys.argv:
    Path(sys.argv[sys.argv.index("-o") + 1]).write_text("library")
"""


@pytest.fixture(autouse=True)
def _fresh_library_cache() -> None:
    native._load_cached.cache_clear()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The part of the source tree that a build reads."""
    copy = tmp_path / "tree"
    names = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    shutil.copytree(ROOT / "backend", copy / "backend", ignore=shutil.ignore_patterns("__pycache__"))
    leave = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=leave)
    for name in names:
        shutil.copy(ROOT / name, copy)
    return copy


def call_backend(tree: Path, what: str, *arguments: str, compiler: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GOSSAMER_CC": compiler, "PATH": str(tree), "PYTHONPATH": ""}
    command = [sys.executable, "-c", BUILD, what, *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def fake_compiler(tree: Path) -> str:
    script = tree / "fake_cc.py"
    script.write_text(FAKE_COMPILER)
    return f"{sys.executable} {script}"


def libraries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


def test_a_wheel_has_the_library_and_the_tag_of_its_platform(tree: Path, tmp_path: Path) -> None:
    done = call_backend(tree, "build_wheel", str(tmp_path), compiler=fake_compiler(tree))
    (wheel,) = tmp_path.glob("*.whl")
    assert libraries(wheel) == [f"gossamer/deployment/runtime/{compiling.installed_name()}"]
    assert wheel.name.startswith("gossamer-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert "failed" not in done.stderr


def test_without_a_compiler_the_package_installs_and_says_so(tree: Path, tmp_path: Path) -> None:
    done = call_backend(tree, "build_wheel", str(tmp_path), compiler="/nonexistent/cc")
    (wheel,) = tmp_path.glob("*.whl")
    assert "warning" in done.stdout + done.stderr
    assert "expected a C compiler for the native kernels" in done.stdout + done.stderr
    assert not libraries(wheel)


def test_an_editable_installation_puts_the_library_beside_its_source_and_clears_old_ones(
    tree: Path, tmp_path: Path
) -> None:
    runtime = tree / "src" / "gossamer" / "deployment" / "runtime"
    (runtime / "kernels-0123456789abcdef.so").write_text("of sources that have changed since")
    call_backend(tree, "build_editable", str(tmp_path), compiler=fake_compiler(tree))
    assert [path.name for path in runtime.glob("*.so")] == [compiling.installed_name()]


@pytest.mark.parametrize(("compiler", "wanted"), [("cc", False), ("", True)])
def test_pip_brings_a_compiler_where_there_is_none(tree: Path, compiler: str, wanted: bool) -> None:
    code = (
        "import sys; sys.path.insert(0, 'backend'); import platform; platform.machine = lambda: 'x86_64';"
        "platform.system = lambda: 'Linux'; import build_with_kernels as b;"
        "sys.stdout.write('|'.join(b.get_requires_for_build_wheel() + b.get_requires_for_build_editable()))"
    )
    environment = {**os.environ, "GOSSAMER_CC": compiler, "PATH": str(tree), "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.stdout.count("ziglang") == (2 if wanted else 0), done.stderr


def test_the_installed_library_is_used_until_the_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiling.find_compilers():
        pytest.skip("no compiler")
    library = native.load_native().library
    native._load_cached.cache_clear()
    for path in (compiling.SOURCE, *compiling.HEADERS):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(compiling, "SOURCE", tmp_path / compiling.SOURCE.name)
    monkeypatch.setattr(compiling, "HEADERS", [tmp_path / path.name for path in compiling.HEADERS])
    monkeypatch.setattr(native, "SOURCE", compiling.SOURCE)
    monkeypatch.delenv("GOSSAMER_CC", raising=False)
    assert native.installed_library() is None
    installed = tmp_path / compiling.installed_name()
    shutil.copy(library, installed)
    monkeypatch.setattr(native, "find_compilers", list)
    assert native.load_native().library == installed
    with (tmp_path / "pooling.h").open("a") as header:
        header.write("/* one more line */\n")
    native._load_cached.cache_clear()
    with pytest.raises(compiling.NoCompilerError):
        native.load_native()


def test_a_compiler_that_the_user_names_goes_before_the_installed_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiling.find_compilers():
        pytest.skip("no compiler")
    library = native.load_native().library
    native._load_cached.cache_clear()
    asked = []
    monkeypatch.setenv("GOSSAMER_CC", "my-cc --fast")
    monkeypatch.setattr(native, "installed_library", lambda: tmp_path / "never.so")
    monkeypatch.setattr(native, "build", lambda compiler, directory: asked.append(compiler) or library)
    assert native.load_native().library == library
    assert asked == [("my-cc", "--fast")]


@pytest.mark.parametrize(
    ("platform", "machine", "wheel"),
    [
        ("linux", "x86_64", "cp311-manylinux_x86_64"),
        ("linux", "aarch64", "cp311-manylinux_aarch64"),
        ("macos", "arm64", "cp311-macosx_arm64"),
        ("windows", "AMD64", "cp311-win_amd64"),
    ],
)
def test_cibuildwheel_reads_its_configuration(platform: str, machine: str, wheel: str) -> None:
    """One wheel for each platform; it serves every Python."""
    pytest.importorskip("cibuildwheel", reason="cibuildwheel is not installed")
    options = ["--print-build-identifiers", "--platform", platform, "--archs", machine]
    command = [sys.executable, "-m", "cibuildwheel", *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [wheel]
