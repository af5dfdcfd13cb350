"""Being asked to stop by a signal, and stopping where nothing is lost."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and has stopped. The words say how to go on, and what was lost, if anything was."""


class StopSignal:
    """Notes SIGINT and SIGTERM, so that the step in progress can be finished; a second one is not held back.

    Except where a launcher has started several processes: it sends each signal of the terminal once more, and by itself
    kills who takes too long.

    Once it was asked, an error that may come of the same signal (`may_be_of`) is the stop that was asked for.
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
    """Whether an error may come of the signal that asked for a stop: that of a terminal goes to every process that was
    started there, and a compiler that dies of it lets the step fail that waits for it. A disk that is full, or a loss
    that is not finite, is none."""
    return isinstance(error, Exception) and not isinstance(error, OSError | ArithmeticError)
