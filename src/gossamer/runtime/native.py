"""Building and loading the native kernels: once, on first use, with whatever compiler the machine has.

The C file is compiled three times, for AVX-512, for AVX2 and for any processor, linked to one library and
kept in the user's cache under the hash of source, flags and compiler; which of the three runs is decided by
asking the processor. A machine without a compiler can have one from pip (``pip install ziglang``). Nothing is
downloaded here.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("kernels.c")
HEADERS = [SOURCE.with_name(name) for name in ("one_vector.h", "pooling.h", "products.h", "vectors.h")]
FLAGS: tuple[str, ...] = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)
#: Results may be rounded differently than written (fused multiply-add); NaN and infinity keep their meaning.
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
VARIANTS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512vl", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": ("-DFEATURES",),
}
_FEATURE_BITS = {"avx512": 2, "avx2": 1, "portable": 0}
_X86 = ("x86_64", "amd64")


class NoCompilerError(RuntimeError):
    """No native kernels here; the message says why and what to do."""


@dataclass(frozen=True)
class Native:
    """The loaded library: one entry point for a whole network, in the variant chosen for this processor."""

    variant: str
    library: Path
    run: Any


def find_compilers() -> list[tuple[str, ...]]:
    """Commands that may compile C here, best first; ``GOSSAMER_CC`` goes before all."""
    found: list[tuple[str, ...]] = []
    if chosen := os.environ.get("GOSSAMER_CC"):
        found.append(tuple(chosen.split()))
    found += [(path,) for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "cc"))
    return found


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
    """For this process alone: code is not loaded from a place that others could have written to."""
    directory = tempfile.mkdtemp(prefix="gossamer-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def build(compiler: Sequence[str], directory: Path, *, extra: Sequence[str] = ()) -> Path:
    """The library made by one compiler, from the cache where it is there."""
    variants = list(VARIANTS) if platform.machine().lower() in _X86 else ["portable"]
    version = _run([*compiler, "--version"])
    recipe = [
        *(path.read_text() for path in (SOURCE, *HEADERS)),
        version,
        repr(FLAGS),
        repr(VARIANTS),
        repr(tuple(extra)),
        platform.machine(),
    ]
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    target = directory / f"kernels-{key}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        objects = []
        for variant in variants:
            objects.append(f"{scratch}/{variant}.o")
            options = [*FLAGS, *VARIANTS[variant], *extra, f"-DVARIANT={variant}"]
            _run([*compiler, *options, "-c", str(SOURCE), "-o", objects[-1]])
        _run([*compiler, "-shared", *extra, *objects, "-o", f"{scratch}/library.so", "-lm"])
        os.replace(f"{scratch}/library.so", target)  # atomic: two processes may build at once
    return target


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def open_library(path: Path, variant: str | None = None) -> Native:
    """Loads a library and picks the best variant this processor can run, or the one asked for."""
    library = ctypes.CDLL(str(path))
    library.gossamer_features.restype = ctypes.c_int64
    features = int(library.gossamer_features())
    runnable = [name for name, bit in _FEATURE_BITS.items() if bit == 0 or features & bit]
    chosen = variant or os.environ.get("GOSSAMER_VARIANT") or runnable[0]
    if chosen not in runnable:
        raise ValueError(f"expected a kernel variant out of {', '.join(runnable)} on this processor, got {chosen!r}")
    run = getattr(library, f"gossamer_run_{chosen}")
    run.argtypes = [ctypes.c_void_p]
    run.restype = ctypes.c_int64
    return Native(chosen, path, run)


@functools.cache
def _load_cached(variant: str | None) -> Native:
    problems = []
    for compiler in find_compilers():
        for directory in (cache_directory, _private_directory):
            try:
                return open_library(build(compiler, directory()), variant)
            except (NoCompilerError, OSError) as error:
                problems.append(str(error))
    reason = "\n".join(problems) or "no cc, gcc or clang on the path"
    raise NoCompilerError(
        f"expected a C compiler for the native kernels, got none that works ({reason}); install one "
        "(gcc, clang), or `pip install ziglang`; until then sparse layers run through torch"
    )


def load_native(variant: str | None = None) -> Native:
    """The kernels, built if this is the first time; raises ``NoCompilerError`` with advice."""
    return _load_cached(variant)
