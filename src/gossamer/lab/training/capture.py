"""A step as one CUDA graph: captured once, then replayed. On a CPU, the step runs directly."""

from collections.abc import Callable

import torch


class Captured:
    """Calls a function without arguments or result that launches the same kernels every time.

    The first calls run it on a side stream, because libraries choose their algorithms then. The next call captures it
    (which does not run it) and replays the graph; all later calls replay.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, *, trials: int = 3) -> None:
        self._step, self._on_gpu, self._trials = step, device.type == "cuda", trials
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def replays(self) -> bool:
        """Whether the next call replays a graph (capturing it first, if necessary) instead of running the function."""
        return self._on_gpu and self._trials == 0

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif not self._on_gpu:
            self._step()
        elif self._trials:
            self._trials -= 1
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, such as the one that pins the images of a folder, continue during the capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._step()
            # torch 2.11 resets the random state of the graph on the capture stream, and nothing else makes a replay on
            # this stream wait for that: on a busy GPU it may be late, and dropout would draw other numbers.
            torch.cuda.synchronize()
            self._graph.replay()
