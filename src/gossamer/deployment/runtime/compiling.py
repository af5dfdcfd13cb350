"""Compiling the native kernels with whatever compiler there is: when the package is installed, or on first use.

The C file is compiled three times, for AVX-512, for AVX2 and for any processor, and linked to one library. A
machine without a compiler can have one from pip (``pip install ziglang``). Nothing is downloaded here, and
nothing but the standard library is imported: the build of the package runs this file where there is no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
_PARTS = ("normalising", "one_vector", "pointwise", "pooling", "products", "vectors")
HEADERS = [SOURCE.with_name(f"{name}.h") for name in _PARTS]
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
_X86 = ("x86_64", "amd64")


class NoCompilerError(RuntimeError):
    """No native kernels here; the message says why and what to do."""


def chosen_compiler() -> list[tuple[str, ...]]:
    """The command in ``GOSSAMER_CC``, if there is one."""
    chosen = os.environ.get("GOSSAMER_CC", "").split()
    return [tuple(chosen)] if chosen else []


def system_compilers() -> list[tuple[str, ...]]:
    return [(path,) for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]


def find_compilers() -> list[tuple[str, ...]]:
    """Commands that may compile C here, best first; ``GOSSAMER_CC`` goes before all."""
    found = chosen_compiler() + system_compilers()
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "cc"))
    return found


def recipe_digest(*more: str) -> str:
    """Hash of everything that decides what is compiled: sources, flags, kind of processor, and ``more``."""
    sources = [path.read_text() for path in (SOURCE, *HEADERS)]
    recipe = [*sources, repr(FLAGS), repr(VARIANTS), sys.platform, platform.machine(), *more]
    return hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]


def installed_name() -> str:
    """What the library is called that an installation of these very sources puts beside them.

    The name changes with the sources: a library made of others is not found.
    """
    return f"kernels-{recipe_digest()}.so"


def build(compiler: Sequence[str], directory: Path, *, extra: Sequence[str] = ()) -> Path:
    """The library made by one compiler, from the directory where it is there already.

    Its name ends with the hash of its content: a file that was cut short or changed no longer matches, and is
    compiled again.
    """
    recipe = f"kernels-{recipe_digest(_run([*compiler, '--version']), repr(tuple(extra)))}"
    for found in sorted(directory.glob(f"{recipe}-*.so")):
        if found.stem.rpartition("-")[2] == content_digest(found):
            return found
        found.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / "made.so"
        compile_library(compiler, made, extra=extra)
        target = directory / f"{recipe}-{content_digest(made)}.so"
        os.replace(made, target)
    _sync_directory(directory)
    return target


def content_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def is_whole(path: Path) -> bool:
    """Whether a library ends where its header says: loading one that was cut short kills the process.

    An ELF file ends with its table of sections. Files of other kinds are taken as they are.
    """
    content = path.read_bytes()
    if content[:4] != b"\x7fELF":
        return len(content) > 0
    wide, order = content[4:5] == b"\x02", "<" if content[5:6] == b"\x01" else ">"
    try:
        (table,) = struct.unpack_from(order + ("Q" if wide else "I"), content, 40 if wide else 32)
        size, count = struct.unpack_from(order + "HH", content, 58 if wide else 46)
    except struct.error:
        return False
    return bool(table + size * count <= len(content))


def compile_library(compiler: Sequence[str], target: Path, *, extra: Sequence[str] = ()) -> None:
    """Compiles every variant this kind of processor can have and links them to ``target``, which is on disk before it
    has its name: neither another process nor a crash leaves half of it."""
    variants = list(VARIANTS) if platform.machine().lower() in _X86 else ["portable"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for variant in variants:
            objects.append(f"{scratch}/{variant}.o")
            options = [*FLAGS, *VARIANTS[variant], *extra, f"-DVARIANT={variant}"]
            _run([*compiler, *options, "-c", str(SOURCE), "-o", objects[-1]])
        _run([*compiler, "-shared", *extra, *objects, "-o", f"{scratch}/library.so", "-lm"])
        with open(f"{scratch}/library.so", "rb+") as library:
            os.fsync(library.fileno())
        os.replace(f"{scratch}/library.so", target)


def _sync_directory(directory: Path) -> None:
    """Puts new names on disk, where the system has a way to."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot; the name of the file still tells whether it is whole
    finally:
        os.close(descriptor)


def compile_with_any(target: Path) -> None:
    """Compiles ``target`` with the first compiler that can; raises ``NoCompilerError`` where none does."""
    problems = []
    for compiler in find_compilers():
        try:
            return compile_library(compiler, target)
        except NoCompilerError as error:
            problems.append(str(error))
    raise no_compiler(problems)


def no_compiler(problems: Sequence[str]) -> NoCompilerError:
    reason = "\n".join(dict.fromkeys(problems)) or "no cc, gcc or clang on the path, no ziglang"
    return NoCompilerError(
        f"expected a C compiler for the native kernels, got none that works ({reason}); install one "
        "(gcc, clang), or `pip install ziglang`; until then sparse layers run through torch"
    )


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
