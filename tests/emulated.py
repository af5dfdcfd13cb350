"""The kernels for aarch64 under qemu: ``python tests/emulated.py``, with ``--short`` for what the test suite runs.

Needs a cross compiler and an emulator, in Debian the packages ``gcc-aarch64-linux-gnu`` and ``qemu-user``. The tests of
kernels and networks run in this process, with torch's results as reference. Only native calls go to the emulator: it
shares the memory of weights, values, inputs and outputs.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).parent / "deployment" / "runtime"
HARNESS = Path(__file__).with_suffix(".c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BASE, SIZE = 1 << 40, 1 << 33  # where the memory lies in both processes; pages that are not written take no space
TESTS = {
    True: ("test_kernels.py", "test_int8.py"),
    False: ("test_kernels.py", "test_int8.py", "test_shifted.py", "test_drawn_layers.py", "test_drawn_networks.py"),
}
NETWORKS = ("resnet, odd size", "mobile", "lstm", "borders", "waves", "decoder", "generator", "convnext")


def missing() -> str | None:
    """What the tests need and this machine does not have, or None."""
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found (Debian: gcc-aarch64-linux-gnu, qemu-user)" if absent else None


def compile_program(directory: Path, variant: str) -> Path:
    """The kernels of one variant and the harness, as a program for aarch64."""
    from gossamer.deployment.runtime import compiling

    program = directory / variant
    options = [*compiling.FLAGS, *compiling.VARIANTS[variant], f"-DVARIANT={variant}", f"-DRUN=gossamer_run_{variant}"]
    sources = [str(compiling.SOURCE), str(HARNESS)]
    command = [COMPILER, *options, "-Wall", "-Werror", "-static", *sources, "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return program


class Shared:
    """Memory at a fixed address, in a file that the emulator maps, too."""

    def __init__(self, file: Path) -> None:
        self.path = file
        with file.open("wb") as opened:
            opened.truncate(SIZE)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        descriptor = os.open(file, os.O_RDWR)
        fixed = 0x10
        flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed
        if libc.mmap(BASE, SIZE, *flags, descriptor, 0) != BASE:
            raise OSError(ctypes.get_errno(), "mapping the shared memory")
        os.close(descriptor)
        self._next = BASE

    def take(self, nbytes: int) -> Any:
        """New zero bytes, aligned to a cache line."""
        import numpy as np

        begin, self._next = self._next, self._next + -(-max(1, nbytes) // 64) * 64
        if self._next > BASE + SIZE:
            raise MemoryError("the shared memory is used up; raise SIZE")
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(begin), np.uint8) if nbytes else np.zeros(0, "u1")

    def copy(self, x: Any) -> Any:
        """A copy of a tensor in this memory."""
        import torch

        room = torch.from_numpy(self.take(x.numel() * x.element_size())).view(x.dtype).view(x.shape)
        return room.copy_(x)


class Emulator:
    """A process that runs native calls."""

    def __init__(self, program: Path, shared: Shared) -> None:
        command = [EMULATOR, "-cpu", "max", str(program), str(shared.path), hex(BASE), hex(SIZE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._in, self._out = self._process.stdin, self._process.stdout
        self.calls = 0

    def run(self, address: int) -> int:
        assert self._in is not None
        assert self._out is not None
        self._in.write(address.to_bytes(8, "little"))
        self._in.flush()
        answer = self._out.read(8)
        if len(answer) < 8:
            raise RuntimeError(f"the emulated kernels ended with status {self._process.wait()}")
        self.calls += 1
        return int.from_bytes(answer, "little", signed=True)


def use(directory: Path, variants: Sequence[str]) -> dict[str, Emulator]:
    """Send the native calls of this process to emulators."""
    from gossamer.deployment.runtime import native, native_model, weights

    shared = Shared(directory / "memory")
    emulators = {variant: Emulator(directory / variant, shared) for variant in variants}
    weights.cache_lines = shared.take
    make_workspace, run = native_model.NativeModel._workspace, native_model.NativeModel._run

    def load(variant: str | None) -> native.Native:
        if variant is not None and variant not in emulators:
            raise ValueError(f"expected one of the kernel variants {', '.join(emulators)}, got {variant!r}")
        chosen = variant or next(iter(emulators))
        return native.Native(chosen, directory / chosen, emulators[chosen].run)

    def workspace(self: Any, prepared: Any) -> Any:
        made = make_workspace(self, prepared)
        records = shared.take(prepared.records.nbytes).view("i8")
        records[:] = prepared.records.ravel()
        block = (ctypes.c_int64 * len(made.block)).from_buffer(shared.take(8 * len(made.block)))
        block[:] = made.block[:]
        block[native_model._OPS] = records.ctypes.data
        return replace(made, block=block, address=ctypes.addressof(block))

    def run_shared(self: Any, prepared: Any, inputs: Any, outputs: Any, first: int, last: int) -> int:
        results = [shared.copy(y) for y in outputs]
        failed: int = run(self, prepared, [shared.copy(x) for x in inputs], results, first, last)
        for y, result in zip(outputs, results, strict=True):
            y.copy_(result)
        return failed

    native._load_cached = load  # type: ignore[assignment]
    native_model.NativeModel._workspace = workspace  # type: ignore[method-assign]
    native_model.NativeModel._run = run_shared  # type: ignore[method-assign]
    native_model.NativeModel.call_one = lambda self, x: self._call((x,))  # type: ignore[method-assign]
    return emulators


def _inside(directory: Path, variants: Sequence[str], short: bool) -> None:
    import pytest
    import torch

    emulators = use(directory, variants)
    drawn = [str(RUNTIME / name) for name in TESTS[short]]
    here = "not timed and not deploy_ and not portable_variant"  # an emulator tells no times
    if pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", here, *drawn]):
        raise SystemExit("a test failed in the emulator")
    sys.path.insert(0, str(RUNTIME))
    from test_networks import CASES, kernel_choices, make_sparse

    from gossamer.deployment.runtime import NativeModel, Setting, load_native
    from gossamer.deployment.runtime.capture import capture

    for name in ("mobile", "lstm") if short else NETWORKS:
        make, draw, lane_choices = CASES[name]
        torch.manual_seed(0)
        model = make_sparse(make())
        graph = capture(model, (draw(2),))
        for variant in variants:
            for lanes in set(lane_choices) - {2, 4, 32}:
                for kernels in kernel_choices(graph, lanes):
                    fast = NativeModel(graph, load_native(variant), Setting(lanes, 1, kernels))
                    for batch in (1, 19):
                        x = draw(batch)
                        with torch.no_grad():
                            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    unused = [variant for variant, emulator in emulators.items() if not emulator.calls]
    if unused:
        raise SystemExit(f"no call reached the emulator of {', '.join(unused)}")


def run(directory: Path, *, short: bool) -> str:
    """Compile the kernels and run the tests; raises ``RuntimeError`` with what failed."""
    from gossamer.deployment.runtime import compiling

    variants = compiling.variants_for("aarch64")
    for variant in variants:
        compile_program(directory, variant)
    command = [sys.executable, __file__, "--inside", str(directory), *(["--short"] if short else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode or "all equal" not in done.stdout:
        raise RuntimeError(f"status {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--inside", metavar="DIRECTORY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        from gossamer.deployment.runtime import compiling

        _inside(Path(given.inside), compiling.variants_for("aarch64"), given.short)
        sys.stdout.write("all equal\n")
        return
    problem = missing()
    if problem:
        sys.stdout.write(f"skipped: {problem}\n")
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory), short=given.short)
    sys.stdout.write(f"aarch64: all tests pass, {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
