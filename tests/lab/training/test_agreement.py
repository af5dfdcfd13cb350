"""When the processes of a run ask each other whether to stop."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from gossamer.lab.training import loop
from gossamer.lab.training.distributed import DistributedContext


class Pair(DistributedContext):
    """One of two processes; `other` is what the other one proposes."""

    other = 100

    def minimum(self, value: Tensor) -> Tensor:
        return value.clamp_max(self.other)


def turns(seconds_a_step: float, steps: int, context: DistributedContext) -> list[int]:
    """The steps, counted from 1, after which it is asked."""
    with mock.patch.object(loop.time, "monotonic") as now:
        now.return_value = 0.0
        agreement, found = loop._Agreement(context), []
        for step in range(1, steps + 1):
            now.return_value += seconds_a_step
            if agreement.is_due():
                found.append(step)
    return found


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.001, [1, 11, 21, 31]), (0.0, [1, 11, 21, 31]), (0.5, [1, 5, 9, 13]), (5.0, [1, 2, 3, 4])],
)
def test_fast_steps_are_not_held_up_and_slow_ones_do_not_keep_a_stop_waiting(
    seconds: float, expected: list[int]
) -> None:
    assert turns(seconds, 40, Pair(torch.device("cpu"), rank=0, world=2))[:4] == expected


def test_all_ask_as_often_as_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "other", 2)
    assert turns(0.001, 7, Pair(torch.device("cpu"), rank=0, world=2)) == [1, 3, 5, 7]


def test_a_process_alone_looks_in_every_step() -> None:
    assert turns(0.001, 4, DistributedContext(torch.device("cpu"))) == [1, 2, 3, 4]
