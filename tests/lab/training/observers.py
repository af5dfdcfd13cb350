"""Observers of a run that the tests put beside it."""

from collections.abc import Callable
from typing import Any

from gossamer.lab.training.progress import Status


class Dies:
    """Ends a run at a step, as good as a kill."""

    def __init__(self, step: int) -> None:
        self._step = step

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None:
        if status.step == self._step:
            raise MemoryError

    def move(self, step: int, seconds: float, doing: str | None = None) -> None: ...

    def close(self) -> None: ...


class Acts:
    """Does something when the run reaches a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self._step, self._action = step, action

    def begin(self, status: Status) -> None: ...

    def tell(self, status: Status) -> None:
        if status.step == self._step:
            self._action()

    def move(self, step: int, seconds: float, doing: str | None = None) -> None: ...

    def close(self) -> None: ...
