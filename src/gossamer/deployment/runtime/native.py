"""Loading of the native kernels: the installed library, or one compiled on first use.

Installing the package compiles the kernels and puts the library next to their source (``compiling``). If that was not
possible, or the source has changed since, they are compiled on first use and stored in the user's cache under the
hashes of source, flags and compiler, and of their content. The processor determines which variant of the library runs.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.deployment.runtime.compiling import (
    SOURCE,
    NoCompilerError,
    build,
    chosen_compiler,
    find_compilers,
    installed_name,
    is_whole,
    no_compiler,
)

_FEATURE_BITS = {"vnni": 4, "avx512": 2, "avx2": 1, "dotprod": 8, "portable": 0}


@dataclass(frozen=True)
class Native:
    """The loaded library: one entry point for a whole network, in the variant chosen for this processor."""

    variant: str
    library: Path
    run: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies load the library of this machine, with the same variant or the best available one."""
        return _load_variant, (self.variant,)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the library, as timings of one compiler's kernels do not apply to another's."""
        return hashlib.sha256(self.library.read_bytes()).hexdigest()[:16]


def cache_directory() -> Path:
    if chosen := os.environ.get("GOSSAMER_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gossamer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "gossamer"
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "gossamer"


@functools.cache
def _private_directory() -> Path:
    """A directory for this process alone: code is never loaded from a place that others can write to."""
    directory = tempfile.mkdtemp(prefix="gossamer-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def open_library(path: Path, variant: str | None = None) -> Native:
    """Load a library and select a variant: the requested one, or the best for this processor."""
    library = ctypes.CDLL(str(path))
    library.gossamer_features.restype = ctypes.c_int64
    features = int(library.gossamer_features())
    runnable = [name for name, bit in _FEATURE_BITS.items() if bit == 0 or features & bit]
    chosen = variant or os.environ.get("GOSSAMER_VARIANT") or runnable[0]
    if chosen not in runnable:
        raise ValueError(f"expected one of the kernel variants {', '.join(runnable)} on this processor, got {chosen!r}")
    run = getattr(library, f"gossamer_run_{chosen}")
    run.argtypes = [ctypes.c_void_p]
    run.restype = ctypes.c_int64
    return Native(chosen, path, run)


def installed_library() -> Path | None:
    """The library that was built from the current sources during installation, if there is one."""
    path = SOURCE.with_name(installed_name())
    return path if path.exists() and is_whole(path) else None


def _libraries() -> Iterator[Callable[[], Path]]:
    """Sources of a library, best first: a compiler named by the user, the installation, any compiler."""
    chosen, installed = chosen_compiler(), installed_library()
    yield from _built_by(chosen)
    if installed is not None:
        yield lambda: installed
    yield from _built_by([compiler for compiler in find_compilers() if compiler not in chosen])


def _built_by(compilers: Sequence[Sequence[str]]) -> Iterator[Callable[[], Path]]:
    for compiler in compilers:
        for directory in (cache_directory, _private_directory):
            yield functools.partial(_build_in, compiler, directory)


def _build_in(compiler: Sequence[str], directory: Callable[[], Path]) -> Path:
    return build(compiler, directory())


@functools.cache
def _load_cached(variant: str | None) -> Native:
    problems = []
    for library in _libraries():
        try:
            return open_library(library(), variant)
        except (NoCompilerError, OSError) as error:
            problems.append(str(error))
    raise no_compiler(problems)


def load_native(variant: str | None = None) -> Native:
    """The kernels, compiled if necessary; raises ``NoCompilerError`` with advice."""
    return _load_cached(variant)


def _load_variant(variant: str) -> Native:
    try:
        return load_native(variant)
    except ValueError:  # pickled on another kind of processor
        return load_native()
