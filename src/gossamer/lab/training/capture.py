"""A step as one CUDA graph: captured once, replayed from then on. On a CPU the step simply runs."""

from collections.abc import Callable

import torch


class Captured:
    """Calls a function that takes and returns nothing and does the same kernels every time.

    The first calls run it for real on a side stream, as libraries choose their algorithms then; the next one captures
    it (which does not run it) and replays; all later ones replay.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, *, trials: int = 3) -> None:
        self._step, self._on_gpu, self._trials = step, device.type == "cuda", trials
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def replays(self) -> bool:
        """Whether the next call replays a graph (capturing it first, if need be) instead of running the function."""
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
            # Other threads, such as the one that brings images of a folder into pinned memory, go on meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._step()
            # Where the graph finds its random numbers torch 2.11 resets on the stream of the capture, and nothing else
            # lets a replay on this stream wait for that: on a busy GPU it may come late, and dropout draws others.
            torch.cuda.synchronize()
            self._graph.replay()
