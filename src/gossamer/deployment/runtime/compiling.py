"""Compilation of the native kernels with any available compiler: during installation, or on first use.

The C file is compiled once for each set of instructions (on x86-64 AVX-512 with and without VNNI, AVX2, and what every
processor has) and linked into one library. pip has a compiler for machines without one (``pip install ziglang``). This
file downloads nothing and imports only the standard library, because the build of the package runs it without torch.
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
_PARTS = (
    *("attention", "int8", "normalising", "one_vector", "pointwise", "pooling", "products", "transposing"),
    "vectors",
)
HEADERS = [SOURCE.with_name(f"{name}.h") for name in _PARTS]
FLAGS: tuple[str, ...] = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)
#: Rounding may differ from the source (fused multiply-add); NaN and infinity behave as usual.
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
VARIANTS: dict[str, tuple[str, ...]] = {
    "vnni": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512vnni", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512vl", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "dotprod": ("-DDOTPROD",),
    "portable": ("-DFEATURES",),
}
_OF_MACHINES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("x86_64", "amd64"), ("vnni", "avx512", "avx2", "portable")),
    **dict.fromkeys(("aarch64", "arm64"), ("dotprod", "portable")),
}


def variants_for(machine: str) -> tuple[str, ...]:
    """The variants for a kind of processor, best first. The portable one uses NEON on aarch64 and SSE2 on x86-64."""
    return _OF_MACHINES.get(machine.lower(), ("portable",))


class NoCompilerError(RuntimeError):
    """The native kernels are not available; the message says why and what to do."""


def chosen_compiler() -> list[tuple[str, ...]]:
    """The command in ``GOSSAMER_CC``, if there is one."""
    chosen = os.environ.get("GOSSAMER_CC", "").split()
    return [tuple(chosen)] if chosen else []


def system_compilers() -> list[tuple[str, ...]]:
    return [(path,) for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]


def find_compilers() -> list[tuple[str, ...]]:
    """Commands that may compile C, best first; ``GOSSAMER_CC`` takes precedence."""
    found = chosen_compiler() + system_compilers()
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "cc"))
    return found


def recipe_digest(*more: str) -> str:
    """Hash of everything that determines the library: sources, flags, kind of processor, and ``more``."""
    sources = [path.read_text() for path in (SOURCE, *HEADERS)]
    recipe = [*sources, repr(FLAGS), repr(VARIANTS), sys.platform, platform.machine(), *more]
    return hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]


def installed_name() -> str:
    """The name of the library that an installation builds next to these sources.

    It contains a hash of the sources, so a library of other sources is not found.
    """
    return f"kernels-{recipe_digest()}.so"


def build(compiler: Sequence[str], directory: Path, *, extra: Sequence[str] = ()) -> Path:
    """The library built by a compiler, or an existing one from the directory.

    Its name ends with a hash of its content: a truncated or changed file does not match and is compiled again.
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
    """Whether a library has the length given in its header: loading a truncated one crashes the process.

    An ELF file ends with its section table. Other files are not checked.
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
    """Compile every variant for this kind of processor and link them to ``target``. The file is on disk before it is
    renamed, so that neither another process nor a crash leaves a partial one."""
    variants = variants_for(platform.machine())
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
    """Synchronize new file names to disk, if the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # not supported by some file systems; the hash in the name still shows whether the file is complete
    finally:
        os.close(descriptor)


def compile_with_any(target: Path) -> None:
    """Compile ``target`` with the first compiler that works; raise ``NoCompilerError`` if none does."""
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
