"""What any input may do to a reader: be read, or be refused with a sentence, in bounded time and memory.

Time is that of the process, so that a busy machine makes nobody fail; a case that runs on is interrupted. Memory is the
highest resident size during the case, which the Linux kernel keeps; elsewhere it is not checked.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

_MEASURES_MEMORY = sys.platform == "linux"
_M_MMAP_THRESHOLD = -3
_RAW_ERRORS = (UnicodeError, json.JSONDecodeError)  # ValueErrors of Python's own, which say nothing of the file


@dataclass(frozen=True)
class Bounds:
    """The seconds and bytes that a reader may take, and how many more per byte of its input."""

    seconds: float = 1.0
    seconds_per_byte: float = 2e-5
    memory: int = 48 << 20
    memory_per_byte: int = 256


@dataclass(frozen=True)
class Verdict:
    """What came of one case; ``problem`` is empty where that was allowed, and starts with what is alike in all cases of
    one cause."""

    accepted: bool
    seconds: float
    memory: int
    problem: str = ""


class _TooSlow(BaseException):
    """Not an Exception, which a reader may catch."""


def large_blocks_are_returned() -> None:
    """Let the allocator give large blocks back at once: one that is taken from what was freed before is not seen."""
    if _MEASURES_MEMORY:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def judge(read: Callable[[], object], size: int, bounds: Bounds) -> Verdict:
    """Read once, an input of ``size`` bytes, and hold the reader to its bounds."""
    most_seconds = bounds.seconds + bounds.seconds_per_byte * size
    most_memory = bounds.memory + bounds.memory_per_byte * size
    problem, accepted, before = "", False, _reset_peak()
    started = time.process_time()
    try:
        with _interrupted_after(2 * most_seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
        accepted = True
    except (ValueError, OSError) as error:
        if isinstance(error, _RAW_ERRORS) or len(str(error)) < 20:
            problem = _told(error)
    except _TooSlow as error:
        problem = f"too slow {_place(error)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = _told(error)
    seconds = time.process_time() - started
    memory = _peak() - before
    if not problem and seconds > most_seconds:
        problem = f"too slow: {seconds:.2f} s for {size} bytes, at most {most_seconds:.2f} s are allowed"
    if not problem and memory > most_memory:
        problem = f"too much memory: {memory} bytes for {size} bytes, at most {most_memory} are allowed"
    if memory > most_memory or seconds > most_seconds:
        gc.collect()
    return Verdict(accepted, seconds, memory, problem)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__} {_place(error)}: {str(error)[:200]}"


def _place(error: BaseException) -> str:
    """The last line of this package that the error went through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "gossamer" in Path(each.filename).parts]
    frames = frames or traceback.extract_tb(error.__traceback__)
    return f"in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "nowhere"


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises in the running code after this many seconds of processor time."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise _TooSlow

    former = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


def _reset_peak() -> int:
    if not _MEASURES_MEMORY:
        return 0
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def _peak() -> int:
    if not _MEASURES_MEMORY:
        return 0
    with open("/proc/self/status", "rb") as file:
        status = file.read()
    start = status.index(b"VmHWM:") + 6
    return 1024 * int(status[start : status.index(b"kB", start)])


def never_more_than(memory: int) -> None:
    """A limit of the operating system's, so that a case without bound fails and the machine goes on."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
