"""The kernels under sanitizers: ``python tests/sanitizers.py``, with ``--short`` for what the test suite runs.

``address`` runs the tests of kernels and networks on kernels compiled with AddressSanitizer and
UndefinedBehaviorSanitizer; every array that they read or write ends where its allocation ends. ``thread`` calls models
from several threads, each call shared by several threads, on kernels compiled with ThreadSanitizer. Each begins with a
control, a planted fault that the sanitizer has to find, unless it is short.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

RUNTIME = Path(__file__).parent / "deployment" / "runtime"
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66 report_signal_unsafe=0"},
}
TESTS = {
    True: ("test_kernels.py", "test_int8.py"),
    False: (
        *("test_kernels.py", "test_int8.py", "test_shifted.py", "test_drawn_layers.py", "test_drawn_networks.py"),
        "test_transformers.py",
    ),
}
NETWORKS = (
    *("resnet, odd size", "densenet", "mobile", "lstm", "borders", "waves", "decoder", "generator"),
    *("resnet of groups", "convnext", "vision transformer", "encoder"),
)


# ------------------------------------------------------------------------------------------------ the outer process


def runtime_libraries(kind: str) -> str | None:
    """What has to be loaded first, or None where gcc or its sanitizer is missing."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None
    found = [
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in LIBRARIES[kind]
    ]
    return " ".join(found) if all(os.path.isabs(path) for path in found) else None


def run(kind: str, directory: Path, *, short: bool) -> None:
    """Compiles the kernels, shows that the sanitizer works, runs; raises ``RuntimeError`` with what it reports."""
    from gossamer.deployment.runtime import native

    flags = (*FLAGS[kind], *(("-O0",) if short else ("-O1", "-g")))
    library = native.build((shutil.which("gcc") or "gcc",), directory, extra=flags)
    for job in ("clean",) if short else ("control", "clean"):
        done = _inner(kind, job, library, short)
        text = done.stdout[-3000:] + done.stderr[-6000:]
        reported = "ERROR: AddressSanitizer" in done.stderr or "WARNING: ThreadSanitizer" in done.stderr
        if job == "control" and not reported:
            raise RuntimeError(f"the {kind} sanitizer missed the planted fault (status {done.returncode}):\n{text}")
        if job == "clean" and (done.returncode or reported or "all clean" not in done.stdout):
            raise RuntimeError(f"the {kind} sanitizer reports (status {done.returncode}):\n{text}")


def _inner(kind: str, job: str, library: Path, short: bool) -> subprocess.CompletedProcess[str]:
    """ThreadSanitizer needs addresses that are not drawn at random."""
    fixed = ["setarch", "-R"] if kind == "thread" and shutil.which("setarch") else []
    command = [*fixed, sys.executable, __file__, "--inside", kind, job, str(library), *(["--short"] if short else [])]
    preload = runtime_libraries(kind)
    environment = {**os.environ, "LD_PRELOAD": preload or "", "OMP_NUM_THREADS": "1", **OPTIONS[kind]}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600, check=False)


# ------------------------------------------------------------------------------------------- inside, with a sanitizer


def _exactly(nbytes: int) -> object:
    """Like ``weights.cache_lines``, but with nothing behind the last byte, so that reading on is found."""
    import numpy as np

    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    if libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(max(1, nbytes))):
        raise MemoryError
    assert address.value is not None
    ctypes.memset(address.value, 0, nbytes)
    room = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), np.uint8) if nbytes else None
    return np.zeros(0, np.uint8) if room is None else room


def _use(library: Path) -> None:
    from gossamer.deployment.runtime import native, weights

    native.installed_library = lambda: library
    native.chosen_compiler = native.find_compilers = list
    weights.cache_lines = _exactly  # never freed: this process is short


def _address(library: Path, job: str, short: bool) -> None:
    import pytest
    import torch

    from gossamer.deployment.runtime import NativeModel, Setting
    from gossamer.deployment.runtime.capture import capture
    from gossamer.deployment.runtime.native import open_library

    if job == "control":
        model = NativeModel(capture(torch.nn.Linear(30, 20).eval(), (torch.randn(4, 30),)), open_library(library))
        prepared = model._prepare([torch.randn(4, 30)])
        model._run(prepared, [torch.randn(4, 30)], [torch.empty(4, 19)], 0, 1)
        return
    drawn = [str(RUNTIME / name) for name in TESTS[short]]
    if pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *drawn]):
        raise SystemExit("a test failed under the sanitizers")
    sys.path.insert(0, str(RUNTIME))
    from test_networks import CASES, kernel_choices, make_sparse

    for name in ("mobile", "lstm") if short else NETWORKS:
        make, draw, lane_choices = CASES[name]
        torch.manual_seed(0)
        model = make_sparse(make())
        graph = capture(model, (draw(2),))
        for variant in ("portable", None):
            for lanes in set(lane_choices) - {2, 4, 32}:
                for kernels in kernel_choices(graph, lanes):
                    fast = NativeModel(graph, open_library(library, variant), Setting(lanes, 1, kernels))
                    for batch in (1, 19):
                        x = draw(batch)
                        with torch.no_grad():
                            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def _thread(library: Path, job: str, short: bool) -> None:
    import torch
    from torch import nn

    from gossamer.deployment.runtime import NativeModel, Setting
    from gossamer.deployment.runtime.capture import capture
    from gossamer.deployment.runtime.native import open_library

    torch.set_num_threads(1)
    torch.manual_seed(0)
    native = open_library(library)
    networks = [
        (nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10)), torch.randn(70, 50)),
        (nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(40, 2, 8, 8)),
    ]
    if job == "control":
        model, x = networks[0]
        racy = NativeModel(capture(model.eval(), (x,)), native, Setting(16))
        prepared, y = racy._prepare([x]), torch.empty(70, 10)
        workspace = racy._workspace(prepared)
        block = workspace.block
        block[9], block[10] = x.data_ptr(), y.data_ptr()
        _together([lambda: [native.run(workspace.address) for _ in range(200)]] * 2)
        return
    for model, x in networks:
        graph = capture(model.eval(), (x[:4],))
        with torch.no_grad():
            want = model(x)
        for threads in (1, 2, 3):
            fast = NativeModel(graph, native, Setting(16, threads))

            def calls(fast: NativeModel = fast, x: torch.Tensor = x, want: torch.Tensor = want) -> None:
                for number in range(20 if short else 300):
                    batch = 1 + (number * 7) % len(x)
                    torch.testing.assert_close(fast(x[:batch]), want[:batch], rtol=1e-4, atol=1e-5)

            def changes(fast: NativeModel = fast, setting: Setting = fast.setting) -> None:
                for number in range(20 if short else 300):
                    fast.choose(1 + number % 70, setting)
                    time.sleep(0.001)

            _together([calls, calls, calls, changes])


def _together(jobs: Sequence[object]) -> None:
    problems: list[BaseException] = []

    def guarded(job: object) -> None:
        try:
            job()  # type: ignore[operator]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[], help="address, thread; both unless told")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--inside", nargs=3, metavar=("KIND", "JOB", "LIBRARY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        kind, job, library = given.inside
        _use(Path(library))
        {"address": _address, "thread": _thread}[kind](Path(library), job, given.short)
        sys.stdout.write("all clean\n")
        return
    for kind in given.kinds or list(FLAGS):
        if runtime_libraries(kind) is None:
            sys.stdout.write(f"{kind}: skipped, no gcc with this sanitizer\n")
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            run(kind, Path(directory), short=given.short)
        control = "" if given.short else "control found, "
        sys.stdout.write(f"{kind}: {control}tests clean, {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
