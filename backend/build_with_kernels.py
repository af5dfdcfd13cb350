"""How pip builds this package: setuptools, plus the native kernels.

Kernels are compiled by the functions that the first use would call (compiling.py of the runtime, which needs no torch),
and the library goes beside their source: into the wheel, or into the source tree of an editable
installation. A machine without a compiler still gets the package: the extension is optional, a failure is a warning,
and the first ``deploy`` tries again.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # what pip asks a backend for
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

RUNTIME = Path(__file__).resolve().parents[1] / "src" / "gossamer" / "deployment" / "runtime"
ZIG = "ziglang>=0.13"
ZIG_HAS_WHEELS = {"Linux": ("x86_64", "aarch64"), "Darwin": ("x86_64", "arm64"), "Windows": ("AMD64", "ARM64")}


def _load_compiling() -> ModuleType:
    """The module that compiles, without the package around it, which would import torch."""
    name = "gossamer_compiling"
    spec = importlib.util.spec_from_file_location(name, RUNTIME / "compiling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


compiling = _load_compiling()


def _compiler_from_pip() -> list[str]:
    """The wheel of zig, where the machine has no compiler of its own and there is such a wheel."""
    if compiling.chosen_compiler() or compiling.system_compilers():
        return []
    return [ZIG] if platform.machine() in ZIG_HAS_WHEELS.get(platform.system(), ()) else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler_from_pip()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler_from_pip()]


class BuildKernels(build_ext):
    """Builds the one extension there is, which is a plain library and no Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(compiling.installed_name()))

    def build_extension(self, ext: Any) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        _remove_others(target)
        try:
            compiling.compile_with_any(target)
        except compiling.NoCompilerError as error:
            raise CompileError(str(error)) from None  # a warning, since the extension is optional

    def copy_extensions_to_source(self) -> None:
        _remove_others(RUNTIME / compiling.installed_name())
        super().copy_extensions_to_source()


def _remove_others(target: Path) -> None:
    """Libraries of sources that have changed since."""
    for path in target.parent.glob("kernels-*.so"):
        if path.name != target.name:
            path.unlink()


class TagByPlatform(bdist_wheel):
    """The library knows nothing of Python, so one wheel serves every version; but only on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])
