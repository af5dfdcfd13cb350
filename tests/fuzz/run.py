"""Fuzz readers, from the folder of tests: ``python -m fuzz.run --reader all --seconds 60``.

Two engines take turns on each reader. ``structured`` damages whole files and makes their lengths and checksums right
again. ``guided`` is atheris (libFuzzer): it keeps the inputs that reach new lines of the readers, and changes these
further, half of the time by the same damage. Each case has to be read, or refused by a ValueError or OSError with a
sentence, within the reader's bounds of time and memory. What is not is left in ``--out``, one file for each cause, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.limits import judge, large_blocks_are_returned, never_more_than
from fuzz.mutate import mutated_bytes
from fuzz.readers import READERS, Reader

CORPUS = Path(__file__).parent / "corpus"
ENGINES = ("structured", "guided")
_HANGS = 120  # seconds after which a case that nothing interrupts ends the program, with a traceback
_ROOM = 24 << 30


@dataclass
class Tally:
    """What came of the cases of a reader."""

    cases: int = 0
    accepted: int = 0
    wall: float = 0.0
    slowest: float = 0.0
    largest: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    """The first problem of each cause, by the name of the file that shows it."""

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.accepted += other.accepted
        self.wall += other.wall
        self.slowest, self.largest = max(self.slowest, other.slowest), max(self.largest, other.largest)
        self.findings |= other.findings


class Session:
    """Runs cases of one reader and keeps what is found."""

    def __init__(self, reader: Reader, out: Path) -> None:
        self.reader, self.out, self.tally = reader, out, Tally()
        self._started, self._armed = time.monotonic(), -math.inf
        memory = Path("/dev/shm")  # no disk is worn, or waited for
        self._place = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
        large_blocks_are_returned()
        for seed in reader.seeds():  # whatever is imported or cached at first is no case's
            with suppress(ValueError):  # a network of another shape than the model's file
                reader.read(seed, self._emptied())

    def _emptied(self) -> Path:
        folder = self._place / "case"
        if folder.exists():
            for each in folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        else:
            folder.mkdir()
        return folder

    def run(self, content: bytes) -> str:
        """The problem of a case; empty where there is none."""
        folder = self._emptied()
        if time.monotonic() > self._armed + _HANGS / 4:  # not for each case, as it starts a thread
            faulthandler.dump_traceback_later(_HANGS, exit=True)
            self._armed = time.monotonic()
        verdict = judge(lambda: self.reader.read(content, folder), len(content), self.reader.bounds)
        tally = self.tally
        tally.cases += 1
        tally.accepted += verdict.accepted
        tally.slowest, tally.largest = max(tally.slowest, verdict.seconds), max(tally.largest, verdict.memory)
        if verdict.problem:
            self._keep(content, verdict.problem)
        return verdict.problem

    def _keep(self, content: bytes, problem: str) -> None:
        name = f"{self.reader.name}_{re.sub(r'[^A-Za-z0-9]+', '_', problem.partition(':')[0])}"
        if name not in self.tally.findings:
            self.tally.findings[name] = problem
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(content)

    def close(self) -> Tally:
        faulthandler.cancel_dump_traceback_later()
        self.tally.wall = time.monotonic() - self._started
        shutil.rmtree(self._place)
        return self.tally


def known(reader: Reader) -> list[bytes]:
    """Whole files, and those that once were a problem."""
    return [*reader.seeds(), *(path.read_bytes() for path in sorted((CORPUS / reader.name).glob("*")))]


def structured(reader: Reader, out: Path, *, seconds: float, cases: int | None = None, seed: int = 0) -> Tally:
    session, rng, begin = Session(reader, out), random.Random(f"{reader.name} {seed}"), known(reader)
    started = time.monotonic()
    while session.tally.cases != cases and time.monotonic() - started < seconds:
        content = rng.choice(begin)
        session.run(reader.forge(content, rng) if rng.random() < 0.9 else mutated_bytes(content, rng, begin))
    return session.close()


def guided(name: str, out: Path, *, seconds: float, cases: int | None = None, seed: int = 0) -> Tally:
    """In a process of its own, as atheris does not return."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.json")
        command = [sys.executable, "-m", "fuzz.guided", name, str(out), str(told), str(seconds), str(cases), str(seed)]
        here = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        if done.returncode or not told.exists():
            text = done.stdout[-2000:] + done.stderr[-2000:]
            raise RuntimeError(f"the guided fuzzer of {name} has ended with {done.returncode}:\n{text}")
        return Tally(**json.loads(told.read_text()))


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def fuzz(
    names: Sequence[str], engines: Sequence[str], out: Path, *, seconds: float, cases: int | None, seed: int
) -> Mapping[str, Tally]:
    """Every reader with every engine, for its part of the seconds, or for its part of the cases where they come
    first."""
    parts = len(names) * len(engines)
    found: dict[str, Tally] = {}
    for name in names:
        for engine in engines:
            share = None if cases is None else -(-cases // parts)
            if engine == "structured":
                tally = structured(READERS[name], out, seconds=seconds / parts, cases=share, seed=seed)
            else:
                tally = guided(name, out, seconds=seconds / parts, cases=share, seed=seed)
            found[f"{name}, {engine}"] = tally
            _print(f"{name}, {engine}", tally)
    return found


def _print(name: str, tally: Tally) -> None:
    sys.stdout.write(
        f"{name:22s} {tally.cases:9,d} cases, {tally.accepted:8,d} read, {tally.wall:7.1f} s, slowest "
        f"{tally.slowest:5.2f} s, largest {tally.largest / 2**20:4.0f} MiB, {len(tally.findings)} problems\n"
    )
    for where, problem in tally.findings.items():
        sys.stdout.write(f"    {where}: {problem}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", nargs="+", default=["all"], choices=["all", *READERS])
    parser.add_argument("--engine", default="both", choices=["both", *ENGINES])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all together")
    parser.add_argument("--cases", type=int, help="of all together, where they come first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    told = parser.parse_args(arguments)
    engines = ENGINES if told.engine == "both" else (told.engine,)
    if "guided" in engines and not has_atheris():
        sys.stdout.write("the guided engine is left out: pip install atheris\n")
        engines = ("structured",)
    never_more_than(_ROOM)
    names = [*READERS] if "all" in told.reader else told.reader
    found = fuzz(names, engines, told.out, seconds=told.seconds, cases=told.cases, seed=told.seed)
    total = Tally()
    for tally in found.values():
        total.add(tally)
    _print("all", total)
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
