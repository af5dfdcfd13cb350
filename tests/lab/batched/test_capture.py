"""The order in which a captured step is tried, captured and replayed, on a stand-in for a GPU that is as late as
possible: work on another stream happens when it is waited for, and not before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gossamer.lab.training.capture import Captured


class LateGpu:
    """Random numbers as torch 2.11 gives them to a graph: from a place on the device that each replay sets, and that
    the capture resets, on its own stream."""

    def __init__(self) -> None:
        self.offset, self.place = 0, -1
        self.drawn: list[int] = []
        self.capturing = False
        self._waiting: list[int] = []  # what the stream of the capture is still to write into the place

    def draw(self) -> None:
        """The step: takes a random number."""
        if not self.capturing:
            self.drawn.append(self.offset)
            self.offset += 1

    @contextmanager
    def capture(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        self.capturing = True
        self._waiting.append(0)
        yield
        self.capturing = False

    def replay(self) -> None:
        self.place = self.offset
        self.offset += 1
        self.synchronize()  # at the latest: the other stream runs between the two parts of this one
        self.drawn.append(self.place)

    def synchronize(self) -> None:
        for value in self._waiting:
            self.place = value
        self._waiting.clear()


class Stream:
    def wait_stream(self, other: object) -> None: ...


def test_a_first_replay_waits_for_what_its_capture_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu()

    class Graph:
        def replay(self) -> None:
            gpu.replay()

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        yield

    named = {"Stream": lambda device: Stream(), "current_stream": Stream, "stream": on, "CUDAGraph": Graph}
    named |= {"graph": gpu.capture, "synchronize": gpu.synchronize}
    for name, stand_in in named.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step = Captured(gpu.draw, torch.device("cuda"))
    replays = []
    for _ in range(6):
        replays.append(step.replays)
        step()
    assert replays == [False, False, False, True, True, True]
    assert gpu.drawn == [0, 1, 2, 3, 4, 5]
