"""A sparse network that runs in one native call, and says what it does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gossamer.deploy.graph import Graph, Source
from gossamer.deploy.native import Native
from gossamer.deploy.plan import Line, Plan, make_plan

MAX_LANES = 64


def choose_lanes(graph: Graph, batch: int) -> int:
    """Samples that travel together: pictures fill vectors by themselves, vectors and sequences need many
    samples."""
    if any(
        source.form == "picture" and len(source.shape) == 4 and source.shape[2] > 1 for source in graph.inputs
    ):
        return 1 if batch < 6 else 16
    return 1 if batch == 1 else min(MAX_LANES, -(-batch // 16) * 16)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A plan with its records for one batch size."""

    plan: Plan
    records: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    outputs: tuple[tuple[int, ...], ...]
    groups: int


class NativeModel:
    """Runs a captured network. Safe to call from several threads: each call takes an arena of its own."""

    def __init__(self, graph: Graph, native: Native, *, lanes: int | None = None) -> None:
        self.graph = graph
        self.native = native
        self._lanes = lanes
        self._plans: dict[int, Plan] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._arenas: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def plan(self, lanes: int) -> Plan:
        """The plan for a number of samples that travel together (1, 2, 4, 8 or a multiple of 16)."""
        with self._lock:
            if lanes not in self._plans:
                self._plans[lanes] = make_plan(self.graph, lanes)
            return self._plans[lanes]

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        batch = self._batch(inputs)
        prepared = self._prepared.get(batch) or self._prepare(batch)
        tensors = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        outputs = [torch.empty(shape) for shape in prepared.outputs]
        arena = self._take_arena(prepared.plan.arena)
        sources = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
        targets = (ctypes.c_void_p * len(outputs))(*[y.data_ptr() for y in outputs])
        records, lanes = prepared.records, prepared.plan.lanes
        where = arena.data_ptr()
        failed = self.native.run(
            records.ctypes.data, len(records), where, sources, targets, batch, lanes, 0, prepared.groups
        )
        with self._lock:
            self._arenas[prepared.plan.arena].append(arena)
        if failed:
            raise IndexError(
                f"expected tokens inside the embedding's table, got others (native code {failed})"
            )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def explain(self, batch: int | None = None) -> tuple[Line, ...]:
        """Per operation: what it is, how large, which kernel runs it."""
        batch = self._example_batch() if batch is None else batch
        return (self._prepared.get(batch) or self._prepare(batch)).plan.lines

    def _example_batch(self) -> int:
        return _batch_of(self.graph.inputs[0].shape, self.graph.inputs[0], self.graph.time_major)

    def _batch(self, inputs: Sequence[Tensor]) -> int:
        sources = self.graph.inputs
        if len(inputs) != len(sources):
            raise ValueError(f"expected {len(sources)} inputs, got {len(inputs)}; pass what the example had")
        batches = set()
        for x, source in zip(inputs, sources, strict=True):
            dtype = torch.int64 if source.form == "tokens" else torch.float32
            if x.dtype != dtype or x.device.type != "cpu":
                raise ValueError(
                    f"expected {dtype} on the CPU, got {x.dtype} on {x.device}; convert it first"
                )
            batch = _batch_of(tuple(x.shape), source, self.graph.time_major)
            if tuple(x.shape) != _with_batch(source, batch, self.graph.time_major):
                wanted = _with_batch(source, -1, self.graph.time_major)
                raise ValueError(
                    f"expected an input of shape {wanted} (any batch for -1), got {tuple(x.shape)}"
                )
            batches.add(batch)
        if len(batches) != 1 or 0 in batches:
            raise ValueError(f"expected inputs of one batch size of at least 1, got {sorted(batches)}")
        return batches.pop()

    def _prepare(self, batch: int) -> _Prepared:
        plan = self.plan(self._lanes or choose_lanes(self.graph, batch))
        shapes: list[tuple[int, ...]] = []
        for form, shape in zip(self.graph.forms, self.graph.shapes, strict=True):
            if form == "sequence" and len(shape) == 2:
                example = self._example_batch()
                shapes.append((shape[0] // example * batch, shape[1]))
            else:
                shapes.append(_with_batch(Source(form, shape), batch, self.graph.time_major))
        prepared = _Prepared(plan, plan.for_batch(batch), tuple(shapes), -(-batch // plan.lanes))
        with self._lock:
            self._arenas.setdefault(plan.arena, [])
            self._prepared[batch] = prepared
        return prepared

    def _take_arena(self, floats: int) -> Tensor:
        with self._lock:
            free = self._arenas[floats]
            if free:
                return free.pop()
        return torch.zeros(floats)


def _axis(source: Source, time_major: bool) -> int:
    return 1 if time_major and source.form in ("sequence", "tokens") else 0


def _batch_of(shape: tuple[int, ...], source: Source, time_major: bool) -> int:
    return shape[_axis(source, time_major)] if len(shape) == len(source.shape) else 0


def _with_batch(source: Source, batch: int, time_major: bool) -> tuple[int, ...]:
    axis = _axis(source, time_major)
    return (*source.shape[:axis], batch, *source.shape[axis + 1 :])
