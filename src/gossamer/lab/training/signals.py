"""Graceful stops: a signal ends training after the current step."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training stopped on request. The message says how to resume, and what was lost, if anything."""


class StopSignal:
    """Records SIGINT and SIGTERM, so that the current step can finish; a second signal is not intercepted.

    With several processes, a second signal is ignored: the launcher repeats each signal of the terminal, and kills
    processes that stop too late.

    After a signal, an error that the same signal may have caused (`may_be_of`) counts as the requested stop.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, launched: bool = False) -> None:
        self.asked = False
        self._launched = launched
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = [(each, signal.signal(each, self._note)) for each in self._SIGNALS]
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._launched:
            self._restore()

    def _restore(self) -> None:
        for each, handler in self._before:
            signal.signal(each, handler)
        self._before = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self.asked and may_be_of(error):
            raise KeyboardInterrupt from error


def may_be_of(error: BaseException | None) -> bool:
    """Whether the signal may have caused an error. A terminal signals all its processes, and if a compiler dies from
    it, the waiting step fails. A full disk or a non-finite loss has another cause."""
    return isinstance(error, Exception) and not isinstance(error, OSError | ArithmeticError)
