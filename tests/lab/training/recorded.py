"""A graph for CPUs: a step is recorded as the list of its operations on its very tensors, and replayed from that list.

As with a CUDA graph, no Python runs in a replay: what a step took from the host when it was recorded is taken again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # where they were recorded
            self._replay()

    def _replay(self) -> None:
        for func, args, kwargs, before in self.operations:
            after = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                # What is a view, or was changed in place, is up to date already.
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class Recorded:
    """What `Captured` is on a GPU. Recording runs the step too, so that is its first replay."""

    replays_done = 0

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._trials = step, 3
        self._recorder: _Recorder | None = None

    @property
    def replays(self) -> bool:
        return self._trials == 0

    def __call__(self) -> None:
        if self._recorder is not None:
            self._recorder.replay()
            Recorded.replays_done += 1
        elif self._trials:
            self._trials -= 1
            self._step()
        else:
            self._recorder = _Recorder()
            with self._recorder:
                self._step()
