"""A folder whose system calls are recorded, can be refused, and after any of which the power can fail.

`Recorder` patches the calls by which files are written: open, write, fsync, rename and unlink. At one of them the
process can be killed (nothing after it runs, not even a `finally`; half of a write may be done), or the call can be
refused with an error.

`after_power_loss` says what may be on the disk if the power fails after a number of calls. The bytes that a file had
at its last fsync are safe; any part of each later write may be lost, whatever came after it. The names that a folder
had at its own last fsync are safe; each later creation, renaming and removal may be lost. Every common file system
promises more.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
Files = Mapping[str, bytes]


class Killed(BaseException):
    """The process is gone: every further call ends like this, so that nothing is tidied up."""


@dataclass(frozen=True)
class Call:
    """One call. ``kind`` is open, write, fsync, fsync folder, rename or unlink; ``file`` is the number of a file, which
    stays the same when it is renamed."""

    kind: str
    name: str = ""
    target: str = ""
    file: int = -1
    offset: int = 0
    content: bytes = b""


@dataclass(frozen=True)
class Fault:
    """What happens at call number ``at``: ``kill``, ``tear`` (a kill in the middle of a write) or the name of an error
    such as ENOSPC; with ``lasting`` all later calls that need room fail as well."""

    at: int
    kind: str
    lasting: bool = False


class Recorder:
    """Records the calls in one folder, within ``with``."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        self.folder, self.fault, self.calls = folder, fault, list[Call]()
        self.before: Files = content_of(folder)
        self._dead = False
        self._files = {name: number for number, name in enumerate(sorted(self.before))}
        self._opened: dict[int, int | str] = {}  # numbers of files, and folders, by descriptor
        self._patches: list[Any] = []

    def __enter__(self) -> Recorder:
        self._real = {name: getattr(os, name) for name in ("open", "close", "fsync", "replace", "unlink")}
        self._real_open = builtins.open
        for name in self._real:
            self._patches.append(patch.object(os, name, getattr(self, f"_{name}")))
        self._patches.append(patch.object(builtins, "open", self._open_file))
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in reversed(self._patches):
            each.stop()
        for descriptor in self._opened:
            self._real["close"](descriptor)

    def _do(self, call: Call, really: Callable[[], T], half: Callable[[], object] = lambda: None) -> T:
        if self._dead:
            raise Killed
        fault = self.fault
        if fault is not None and len(self.calls) >= fault.at:
            if fault.kind in ("kill", "tear"):
                if fault.kind == "tear":
                    half()
                self._dead = True
                raise Killed
            if len(self.calls) == fault.at or (fault.lasting and call.kind in ("open", "write", "fsync")):
                self.calls.append(Call("refused"))
                number = getattr(errno, fault.kind)
                raise OSError(number, os.strerror(number), call.name)
        done = really()
        self.calls.append(call)
        return done

    def _mine(self, path: object) -> str | None:
        """The name of a file in the folder; None where it is elsewhere."""
        if not isinstance(path, str | Path) or Path(path).parent != self.folder:
            return None
        return Path(path).name

    def _open(self, path: Any, flags: int, mode: int = 0o777, **how: Any) -> int:
        name = self._mine(path)
        if name is not None and flags & os.O_CREAT:
            number = max(self._files.values(), default=-1) + 1
            call = Call("open", name, file=number)
            descriptor: int = self._do(call, lambda: self._real["open"](path, flags, mode, **how))
            self._files[name] = self._opened[descriptor] = number
            return descriptor
        descriptor = self._real["open"](path, flags, mode, **how)
        if path == self.folder or path == str(self.folder):
            self._opened[descriptor] = "folder"
        return descriptor

    def _open_file(self, file: Any, mode: str = "r", *rest: Any, **how: Any) -> Any:
        if isinstance(file, int) and isinstance(self._opened.get(file), int):
            return _File(self, file, self._opened[file])  # type: ignore[arg-type]
        if self._mine(file) is not None and not set(mode) <= set("rbt"):
            raise AssertionError(f"{file} is opened to be written in a way that is not recorded")
        return self._real_open(file, mode, *rest, **how)

    def _close(self, descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        self._real["close"](descriptor)

    def _fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        number = self._opened.get(descriptor)
        if number == "folder":
            self._do(Call("fsync folder"), lambda: None)
        elif isinstance(number, int):
            self._do(Call("fsync", file=number), lambda: None)
        else:
            self._real["fsync"](descriptor)

    def _replace(self, source: Any, target: Any) -> None:
        old, new = self._mine(source), self._mine(target)
        if old is None or new is None:
            self._real["replace"](source, target)
            return
        self._do(Call("rename", old, new), lambda: self._real["replace"](source, target))
        self._files[new] = self._files.pop(old)

    def _unlink(self, path: Any, **how: Any) -> None:
        name = self._mine(path)
        if name is None or not (self.folder / name).exists():
            self._real["unlink"](path, **how)
            return
        self._do(Call("unlink", name), lambda: self._real["unlink"](path, **how))
        del self._files[name]

    def write(self, descriptor: int, number: int, offset: int, content: bytes) -> None:
        half = content[: len(content) // 2]
        self._do(
            Call("write", file=number, offset=offset, content=content),
            lambda: os.pwrite(descriptor, content, offset),
            lambda: os.pwrite(descriptor, half, offset),
        )


class _File(io.RawIOBase):
    """A file that is written, without a buffer: each write is a call."""

    def __init__(self, recorder: Recorder, descriptor: int, number: int) -> None:
        self._recorder, self._descriptor, self._number, self._at = recorder, descriptor, number, 0

    def write(self, content: Any) -> int:
        held = bytes(content)
        self._recorder.write(self._descriptor, self._number, self._at, held)
        self._at += len(held)
        return len(held)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0, "seeking from elsewhere is not recorded"
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def content_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def put(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


# ----------------------------------------------------------------------------------------------------- power loss


def after_power_loss(before: Files, calls: Sequence[Call], rng: random.Random, most: int) -> Iterator[Files]:
    """What may be found after these calls, in up to ``most`` versions, the extreme ones first."""
    first = {name: number for number, name in enumerate(sorted(before))}
    safe: dict[int, bytes] = {number: before[name] for name, number in first.items()}
    writes: dict[int, list[Call]] = {}
    names, changes = dict(first), list[Call]()  # names that are safe, and changes to them that are not
    now = dict(safe)
    for call in calls:
        if call.kind in ("open", "rename", "unlink"):
            changes.append(call)
            if call.kind == "open":
                safe[call.file] = now[call.file] = b""
        elif call.kind == "write":
            writes.setdefault(call.file, []).append(call)
            now[call.file] = _written(now[call.file], call)
        elif call.kind == "fsync":
            safe[call.file] = now[call.file]
            writes.pop(call.file, None)
        elif call.kind == "fsync folder":
            names, changes = _changed(names, changes), []
    seen = set()
    for kept_changes, kept_writes in itertools.islice(_choices(changes, writes, rng), most):
        files = {}
        for name, number in _changed(names, kept_changes).items():
            content = safe[number]
            for call in kept_writes.get(number, ()):
                content = _written(content, call)
            files[name] = content
        key = tuple(sorted(files.items()))
        if key not in seen:
            seen.add(key)
            yield files


def _choices(
    changes: list[Call], writes: dict[int, list[Call]], rng: random.Random
) -> Iterator[tuple[list[Call], dict[int, list[Call]]]]:
    """First all subsets of the changes to names with all, none and the first of the writes; then drawn ones."""
    subsets = [
        list(itertools.compress(changes, bits))
        for bits in itertools.product((True, False), repeat=min(len(changes), 6))
    ]
    for subset in subsets:
        yield subset, writes
        if writes:
            yield subset, {}
            yield subset, {number: each[:1] for number, each in writes.items()}
    while writes or len(changes) > 6:
        drawn = {n: [_torn(c, rng) for c in each if rng.random() < 0.7] for n, each in writes.items()}
        yield [each for each in changes if rng.random() < 0.7], drawn


def _torn(call: Call, rng: random.Random) -> Call:
    if rng.random() < 0.8:
        return call
    begin = rng.randrange(len(call.content) + 1)
    end = rng.randrange(begin, len(call.content) + 1)
    return Call("write", file=call.file, offset=call.offset + begin, content=call.content[begin:end])


def _written(content: bytes, call: Call) -> bytes:
    whole = content.ljust(call.offset, b"\0")
    return whole[: call.offset] + call.content + whole[call.offset + len(call.content) :]


def _changed(names: Mapping[str, int], changes: Sequence[Call]) -> dict[str, int]:
    """The names after some of the changes; one whose file has not come to be, or has moved, does nothing."""
    found = dict(names)
    for call in changes:
        if call.kind == "open":
            found[call.name] = call.file
        elif call.kind == "unlink":
            found.pop(call.name, None)
        elif call.name in found:
            found[call.target] = found.pop(call.name)
    return found
