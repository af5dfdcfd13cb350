"""Crash every writer at every call, from the folder of tests: ``python -m crash.run``.

At each call of a second version that is written over a first one, the process is killed, killed in the middle of a
write, or refused with ENOSPC or EIO, once or from there on; and after each call the power fails, in up to ``--states``
versions of what the disk may have kept. A reader has to find the first version whole, or the second; the second for
certain once the writer has returned. A third version has to go in afterwards as if nothing had been.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from crash.filesystem import Fault, Files, Killed, Recorder, after_power_loss, content_of, put
from crash.writers import WRITERS, Writer

FAULTS = (*(("kill", False), ("tear", False), ("ENOSPC", False), ("ENOSPC", True), ("EIO", False), ("EIO", True)),)


def crash_at_every_call(writer: Writer) -> tuple[int, list[str]]:
    """How many crashes there were, and what was wrong after some."""
    problems, crashes = [], 0
    calls = len(_recorded(writer)[0].calls)
    for kind, lasting in FAULTS:
        for at in range(calls):
            crashes += 1
            with _folder() as folder:
                writer.write(folder, 1)
                done = _interrupted(writer, folder, Fault(at, kind, lasting))
                problem = _problem(writer, folder, (2,) if done else (1, 2))
                if kind not in ("kill", "tear") and not problem:
                    problem = _left_behind(folder)
                problem = problem or _goes_on(writer, folder)
            if problem:
                problems.append(f"{writer.name}: {kind} at call {at} of {calls}: {problem}")
    return crashes, problems


def _interrupted(writer: Writer, folder: Path, fault: Fault) -> bool:
    """Whether the writer has returned as if all were well."""
    with Recorder(folder, fault):
        try:
            writer.write(folder, 2)
        except (Killed, OSError):
            return False
    return True


def lose_power_after_every_call(writer: Writer, states: int, seed: int = 0) -> tuple[int, list[str]]:
    """How many states of the disk were read, and what was wrong with some."""
    recorder, before = _recorded(writer)
    rng, seen, problems = random.Random(seed), set(), []
    for count in range(len(recorder.calls) + 1):
        returned = count == len(recorder.calls)
        for files in after_power_loss(before, recorder.calls[:count], rng, states):
            key = (returned, tuple(sorted(files.items())))
            if key in seen:
                continue
            seen.add(key)
            with _folder() as folder:
                put(files, folder)
                problem = _problem(writer, folder, (2,) if returned else (1, 2)) or _goes_on(writer, folder)
            if problem:
                problems.append(f"{writer.name}: power lost after call {count} of {len(recorder.calls)}: {problem}")
    return len(seen), problems


def _recorded(writer: Writer) -> tuple[Recorder, Files]:
    with _folder() as folder:
        writer.write(folder, 1)
        before = content_of(folder)
        with Recorder(folder) as recorder:
            writer.write(folder, 2)
    return recorder, before


def _problem(writer: Writer, folder: Path, expected: Sequence[int]) -> str:
    try:
        found = writer.read(folder)
    except Exception as error:  # a reader that stumbles is what is looked for
        return f"{type(error).__name__}: {error}"
    return "" if found in expected else f"found version {found}, expected {' or '.join(map(str, expected))}"


def _left_behind(folder: Path) -> str:
    """What a refusal leaves is tidied up; a kill has no chance to."""
    left = [path.name for path in folder.iterdir() if path.name.endswith(".part")]
    return f"{', '.join(left)} is left behind" if left else ""


def _goes_on(writer: Writer, folder: Path) -> str:
    """The same command again writes the next version."""
    try:
        writer.write(folder, 3)
    except Exception as error:
        return f"the next version cannot be written: {type(error).__name__}: {error}"
    return _problem(writer, folder, (3,))


@contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=300, help="of the disk after each call, at most")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong: list[str] = []
    for writer in WRITERS.values():
        started = time.monotonic()
        crashes, problems = crash_at_every_call(writer)
        states, more = lose_power_after_every_call(writer, told.states, told.seed)
        wrong += [*problems, *more]
        sys.stdout.write(
            f"{writer.name}: {crashes} crashes, {states} states after a loss of power, {len(problems) + len(more)} "
            f"wrong, {time.monotonic() - started:.0f} s\n"
        )
        sys.stdout.flush()
    for each in wrong[:20]:
        sys.stdout.write(f"    {each}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
