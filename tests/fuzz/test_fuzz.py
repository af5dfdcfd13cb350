"""A short run of the fuzzers, all that they once found, and readers with planted faults, which they have to find.

``python -m fuzz.run`` is the long form.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fuzz import planted, run
from fuzz.limits import Bounds, judge
from fuzz.mutate import mutated_bytes
from fuzz.readers import READERS, Reader

SECONDS = float(os.environ.get("GOSSAMER_TEST_FUZZ", "20"))  # of all readers together
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps the highest resident size on Linux")


@pytest.mark.parametrize("name", READERS)
def test_a_short_run_finds_nothing(name: str, tmp_path: Path) -> None:
    tally = run.structured(READERS[name], tmp_path, seconds=SECONDS / len(READERS))
    assert not tally.findings
    assert tally.cases > 5


@pytest.mark.parametrize("name", READERS)
def test_what_was_a_problem_once_is_none_any_more(name: str, tmp_path: Path) -> None:
    session = run.Session(READERS[name], tmp_path)
    problems = {path.name: session.run(path.read_bytes()) for path in sorted((run.CORPUS / name).glob("*"))}
    assert not any(problems.values()), problems
    session.close()


@pytest.mark.parametrize("name", READERS)
def test_whole_files_are_read(name: str, tmp_path: Path) -> None:
    for number, seed in enumerate(READERS[name].seeds()):
        folder = tmp_path / str(number)
        folder.mkdir()
        READERS[name].read(seed, folder)


def test_every_file_of_the_corpus_has_a_reader() -> None:
    assert {path.name for path in run.CORPUS.iterdir()} <= READERS.keys()


# ------------------------------------------------------------------------------------------------- planted faults


def _raises(content: bytes, folder: Path) -> None:
    """Behind all checks: on a table that no whole file has, but that is read."""
    state: dict[str, torch.Tensor] = READERS["sparse"].read(content, folder)  # type: ignore[assignment]
    if any(name not in ("a", "b", "tied", "c", "h") or tensor.ndim not in (1, 2) for name, tensor in state.items()):
        raise KeyError("planted")


def _asks_for_memory(content: bytes, folder: Path) -> None:
    (length,) = np.frombuffer(content[4:8].ljust(4, b"\0"), ">u4")
    np.ones(min(int(length), 16 << 20), np.uint8)


def _goes_on(content: bytes, folder: Path) -> None:
    if len(content) > 200:
        while time:
            pass


def _forgets_what_is_whole(content: bytes, folder: Path) -> None:
    assert content.isascii(), "planted"


PLANTED: dict[str, tuple[str, Callable[[bytes, Path], object], Bounds, str]] = {
    "a KeyError behind all checksums": ("sparse", _raises, Bounds(), "KeyError"),
    "a size that is believed": ("idx", _asks_for_memory, Bounds(memory=4 << 20), "too much memory"),
    "a loop without end": ("idx", _goes_on, Bounds(seconds=0.05, seconds_per_byte=0.0), "too slow"),
    "a wrong result": ("digest", _forgets_what_is_whole, Bounds(), "AssertionError"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(case: str, tmp_path: Path) -> None:
    if case == "a size that is believed" and sys.platform != "linux":
        pytest.skip("the kernel keeps the highest resident size on Linux")
    name, read, bounds, expected = PLANTED[case]
    broken = replace(READERS[name], name=f"broken {name}", read=read, bounds=bounds)
    for seed in range(400):  # a few cases at a time, as each one that shows the fault is slow
        tally = run.structured(broken, tmp_path, seconds=60, cases=10, seed=seed)
        if tally.findings:
            break
    assert any(problem.startswith(expected) for problem in tally.findings.values())
    found = [(tmp_path / where).read_bytes() for where in tally.findings]
    assert any(_again(broken, content, tmp_path / "again").startswith(expected) for content in found)


def _again(reader: Reader, content: bytes, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return judge(lambda: reader.read(content, folder), len(content), reader.bounds).problem


@pytest.mark.skipif(not run.has_atheris(), reason="pip install atheris")
def test_the_guided_engine_finds_a_planted_fault_that_no_draw_finds(tmp_path: Path) -> None:
    """Three letters are one case in 2²⁴; each right one reaches a new line."""
    found = run.guided("planted", tmp_path, seconds=60, cases=200_000)
    assert [*found.findings] == ["planted_KeyError_in_planted_py_read"]
    drawn = Reader("drawn", planted.read, lambda: [b""], mutated_bytes)
    assert not run.structured(drawn, tmp_path, seconds=60, cases=min(found.cases, 5_000)).findings


# ----------------------------------------------------------------------------------------------- the judge itself


def test_what_is_allowed_and_what_is_not() -> None:
    def refuse() -> None:
        raise ValueError("expected something else, got this: do that")

    def blurt() -> None:
        json.loads("{")

    def nothing() -> None:
        raise ValueError

    assert judge(lambda: None, 0, Bounds()).accepted
    assert judge(refuse, 0, Bounds()).problem == ""
    assert judge(blurt, 0, Bounds()).problem.startswith("JSONDecodeError")
    assert judge(nothing, 0, Bounds()).problem.startswith("ValueError")
    assert judge(lambda: b"\xff".decode(), 0, Bounds()).problem.startswith("UnicodeDecodeError")


@LINUX
def test_memory_that_was_given_back_is_seen() -> None:
    def take() -> None:
        torch.ones(64 << 20, dtype=torch.uint8)

    assert 60 << 20 < judge(take, 0, Bounds()).memory < 80 << 20
    assert judge(take, 0, Bounds(memory=32 << 20)).problem.startswith("too much memory")
    assert judge(lambda: gzip.compress(b"a"), 0, Bounds()).memory < 4 << 20
