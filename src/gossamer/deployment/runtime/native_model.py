"""A sparse network that runs in one native call.

Small networks take microseconds, so a call does as little as possible in Python. Everything that depends only on the
shape of the input is prepared once per batch size, and a workspace (arena and argument block) comes from a pool, which
also makes calls from several threads safe.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_unflatten

from gossamer.deployment.runtime import torch_op
from gossamer.deployment.runtime.checked import (
    check_kind,
    check_tensors,
    dispatch_modes,
    empty,
    function_modes,
    intercepted,
    is_dynamo_compiling,
    is_plain,
    readable,
    tracing_state,
)
from gossamer.deployment.runtime.lengths import axis_of_steps, shortened, steps_of
from gossamer.deployment.runtime.native import Native
from gossamer.deployment.runtime.network import (
    Attention,
    Column,
    Floats,
    Network,
    Recall,
    Recurrent,
    Source,
    UnsupportedError,
    batch_axis,
)
from gossamer.deployment.runtime.plan import choices, make_plan
from gossamer.deployment.runtime.records import RECORD, Plan
from gossamer.deployment.runtime.weights import Kernel, aligned_zeros

MAX_LANES = 64
KEPT = 32  # maximum number of prepared batch sizes, each with its memory; the oldest are dropped first
KEPT_LENGTHS = 8  # maximum number of shorter lengths, each with its own plans
_OUTSIDE = "expected tokens within the embedding table, got one outside"
empty_like = torch.empty_like
# Fields of the argument block, in the order of `struct request` in kernels.c.
_OPS, _N_OPS, _ARENA, _BATCH, _LANES, _FIRST, _LAST, _N_INPUTS, _TIMES, _POINTERS = range(10)


@dataclass(frozen=True)
class Setting:
    """How a batch is run: samples per group (lanes), threads, and the kernels of operations (by number) that do not use
    the first possible one."""

    lanes: int
    threads: int = 1
    kernels: tuple[tuple[int, Kernel], ...] = ()


def possible_lanes(graph: Network, batch: int) -> list[int]:
    """Numbers of lanes to try for a batch size, the best guess first.

    Images fill vector registers with pixels and slow down when a group exceeds the cache; vectors and sequences need
    several samples.
    """
    if any(isinstance(operation, Column | Recall) for operation in graph.operations):
        return [1]  # each sample has its own position
    wide = max(16, min(MAX_LANES, -(-batch // 16) * 16))
    if any(isinstance(operation, Recurrent) for operation in graph.operations):
        return [1] if batch == 1 else [wide, 1]
    if all(graph.values[operation.y].pixels == 1 for operation in graph.operations):
        return [1] if batch == 1 else list(dict.fromkeys([wide, 32, 16, 1]))
    attention = [operation for operation in graph.operations if isinstance(operation, Attention)]
    if attention:  # it takes the samples of a group apart, so that groups pay only for few tokens that fill no vectors
        filled = all(operation.lengths[0] % 16 == 0 or operation.lengths[0] > 128 for operation in attention)
        return [lanes for lanes in ((1, 16) if filled else (1, 4, 16)) if lanes < 2 * batch]
    guess = 1 if batch < 4 else 8 if batch < 16 else 16
    return [guess, *(lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes != guess and lanes < 2 * batch)]


@dataclass(frozen=True, eq=False)
class _Workspace:
    arena: Floats
    block: Any
    address: int  # of the block: passing it is faster than looking it up with ctypes


@dataclass(frozen=True, eq=False)
class _Prepared:
    """The prepared data of a batch size."""

    plan: Plan
    records: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    outputs: tuple[tuple[int, ...], ...]
    like: Tensor  # of the first output, in the form that torch copies fastest
    nbytes: int  # of the first input
    itemsize: int
    batch: int
    shares: tuple[tuple[int, int], ...]  # groups of each thread
    spare: list[_Workspace] = field(default_factory=list)


class NativeModel:
    """Runs a captured network for inputs with the shapes of the example, except for the batch."""

    def __init__(self, graph: Network, native: Native, setting: Setting | None = None) -> None:
        self.graph = graph
        self.native = native
        self.setting = setting
        self._dtypes = [torch.int64 if s.form == "tokens" else torch.float32 for s in graph.inputs]
        self._dtype = self._dtypes[0]
        self._native_run = native.run
        self._alone: dict[torch.Size, _Prepared] = {}  # one input, one output, one thread: the fast path
        self._plans: dict[tuple[int, tuple[tuple[int, Kernel], ...]], Plan] = {}
        self._ready: dict[tuple[torch.Size, ...], _Prepared] = {}
        self._settings: dict[int, Setting] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._name = torch_op.register(self)
        #: Models of shorter sequences, by their number of steps; None if these have not been checked.
        self.shorter: dict[int, NativeModel] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles build new plans, as those of this model contain addresses."""
        return (
            NativeModel,
            (self.graph, self.native, self.setting),
            {
                "_settings": dict(self._settings),
                "shorter": None if self.shorter is None else {},
            },
        )

    def __call__(self, *arguments: Any) -> Any:
        """Call it like the model: arguments and results are tensors, or nested tuples of tensors."""
        return self.call_one(arguments[0]) if len(arguments) == 1 else self._call(arguments)

    def call_one(self, x: Any) -> Any:
        """A call with one argument.

        The checks of ``intercepted`` and ``readable`` are inlined for one plain tensor, because they take a fifth of
        the time of a small network.
        """
        ready = None
        if not is_dynamo_compiling() and type(x) is Tensor:
            try:
                ready = self._alone.get(x.shape)
                if (
                    ready is not None
                    and x.dtype is self._dtype
                    and x.is_cpu
                    and x.is_contiguous()
                    and not x.is_neg()
                    and x.untyped_storage().nbytes() >= ready.nbytes + x.storage_offset() * ready.itemsize
                    and (source := x.data_ptr())
                    and not dispatch_modes()
                    and not function_modes()
                    and tracing_state() is None
                    and forward_ad._current_level < 0
                ):
                    y = empty_like(ready.like)
                    target = y.data_ptr()
                else:
                    ready = None
            except RuntimeError:  # a tensor without its own memory, as inside a transform
                ready = None
        if ready is None:
            return self._call((x,))
        try:
            workspace = ready.spare.pop()
        except IndexError:
            workspace = self._workspace(ready)
        block = workspace.block
        block[_POINTERS] = source
        block[_POINTERS + 1] = target
        failed = self._native_run(workspace.address)
        ready.spare.append(workspace)
        if failed:
            raise IndexError(_OUTSIDE)
        return y

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        inputs: list[Tensor] = tree_leaves(arguments)
        check_tensors(inputs)
        if self.shorter is not None and (model := self._for_steps(inputs)) is not None:
            return model._call(arguments)
        if is_dynamo_compiling():
            outputs = self._run_as_operator(inputs)
        elif intercepted() or not all(map(is_plain, inputs)):
            torch_op.refuse_gradients(inputs)
            outputs = self._run_as_operator(inputs)
        else:
            outputs = self.run(inputs)
        return outputs[0] if self.graph.structure is None else tree_unflatten(outputs, self.graph.structure)

    def _for_steps(self, inputs: Sequence[Tensor]) -> NativeModel | None:
        """The model of shorter sequences, if the inputs are such."""
        axis, length = axis_of_steps(self.graph), steps_of(self.graph)
        steps = inputs[0].shape[axis] if inputs and inputs[0].dim() > 1 else 0
        if self.shorter is None or length is None or not 0 < steps < length:
            return None
        with self._lock:
            if steps not in self.shorter:
                while len(self.shorter) >= KEPT_LENGTHS:
                    del self.shorter[next(iter(self.shorter))]
                self.shorter[steps] = NativeModel(shortened(self.graph, steps), self.native)
            return self.shorter[steps]

    def _run_as_operator(self, inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            outputs: list[Tensor] = torch_op.run(inputs, self._name)
        return outputs

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for plain tensors, which are checked before native code reads them."""
        check_tensors(inputs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            prepared = self._ready.get(tuple([x.shape for x in inputs])) or self._prepare(inputs)
            sources = [readable(x, dtype) for x, dtype in zip(inputs, self._dtypes, strict=True)]
            outputs = [empty(shape) for shape in prepared.outputs]
            if len(prepared.shares) > 1:
                pool = self._threads(len(prepared.shares) - 1)
                rest = [pool.submit(self._run, prepared, sources, outputs, *share) for share in prepared.shares[1:]]
                failed = max(self._run(prepared, sources, outputs, *prepared.shares[0]), *(r.result() for r in rest))
            else:
                failed = max((self._run(prepared, sources, outputs, *share) for share in prepared.shares), default=0)
        if failed:
            raise IndexError(_OUTSIDE)
        return outputs

    def run_fake(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs without values, for tracing."""
        batch = self._batch_of(inputs)
        for x, dtype in zip(inputs, self._dtypes, strict=True):
            check_kind(x, dtype, devices=("cpu", "meta"))
        return [empty(shape, inputs[0].device) for shape in self._output_shapes(batch)]

    def plan(self, lanes: int, kernels: tuple[tuple[int, Kernel], ...] = ()) -> Plan:
        """The plan for a number of lanes (1, 2, 4, 8 or a multiple of 16)."""
        if lanes not in (1, 2, 4, 8) and (lanes < 16 or lanes % 16):
            raise ValueError(f"expected lanes of 1, 2, 4, 8 or a multiple of 16, got {lanes}")
        if 1 < lanes < 16 and any(isinstance(operation, Recurrent) for operation in self.graph.operations):
            raise UnsupportedError(f"recurrent layers with {lanes} lanes; use 1 or a multiple of 16")
        with self._lock:
            if (lanes, kernels) not in self._plans:
                self._plans[lanes, kernels] = make_plan(self.graph, lanes, dict(kernels))
            return self._plans[lanes, kernels]

    def plan_for(self, batch: int) -> Plan:
        """The plan for a batch size."""
        setting = self.setting_for(batch)
        return self.plan(setting.lanes, setting.kernels)

    def setting_for(self, batch: int) -> Setting:
        """The chosen setting for a batch size, or the best guess."""
        return self.setting or self._settings.get(batch) or self._untimed(batch)

    def _untimed(self, batch: int) -> Setting:
        lanes = possible_lanes(self.graph, batch)[0]
        fast: Kernel = "windows" if self.native.variant in ("vnni", "avx512") else "gather"
        preferred: tuple[Kernel, ...] = ("int8", fast)
        chosen = {
            number: next((kernel for kernel in preferred if kernel in each), None)
            for number, each in choices(self.graph, lanes).items()
        }
        return Setting(lanes, 1, tuple((number, kernel) for number, kernel in chosen.items() if kernel is not None))

    def choose(self, batch: int, setting: Setting) -> None:
        """Set how batches of this size are run."""
        with self._lock:
            self._settings[batch] = setting
            self._ready = {shape: ready for shape, ready in self._ready.items() if ready.batch != batch}
            self._alone = {shape: ready for shape, ready in self._alone.items() if ready.batch != batch}

    def _by_itself(self, arguments: Sequence[Any]) -> tuple[_Prepared, list[Tensor], list[Tensor], _Workspace]:
        """What a call by one thread needs, with a workspace of its own."""
        leaves = tree_leaves(arguments)
        check_tensors(leaves)
        prepared = self._ready.get(tuple([x.shape for x in leaves])) or self._prepare(leaves)
        inputs = [readable(x, dtype) for x, dtype in zip(leaves, self._dtypes, strict=True)]
        outputs = [empty(shape) for shape in prepared.outputs]
        workspace = self._workspace(prepared)
        return prepared, inputs, outputs, workspace

    def profile(self, *arguments: Any) -> dict[int, float]:
        """Seconds per operation in one call by one thread, by operation number; -1: input and output."""
        prepared, inputs, outputs, workspace = self._by_itself(arguments)
        seconds = np.zeros(len(prepared.records))
        workspace.block[_TIMES] = seconds.ctypes.data
        own = replace(prepared, spare=[workspace])
        if self._run(own, inputs, outputs, prepared.shares[0][0], prepared.shares[-1][1]):
            raise IndexError(_OUTSIDE)
        found: dict[int, float] = {}
        for owner, spent in zip(prepared.plan.owners, seconds.tolist(), strict=True):
            found[owner] = found.get(owner, 0.0) + spent
        return found

    def traced(self, *arguments: Any) -> Iterator[tuple[int, Floats]]:
        """Run a call by one thread, group by group and operation by operation: yields the number of each operation and
        the arena before it runs."""
        prepared, inputs, outputs, workspace = self._by_itself(arguments)
        own, records = replace(prepared, spare=[workspace]), workspace.block[_OPS]
        workspace.block[_N_OPS] = 1
        for group in range(prepared.shares[0][0], prepared.shares[-1][1]):
            for place, owner in enumerate(prepared.plan.owners):
                yield owner, workspace.arena
                workspace.block[_OPS] = records + place * prepared.records.itemsize * RECORD
                if self._run(own, inputs, outputs, group, group + 1):
                    raise IndexError(_OUTSIDE)

    @property
    def example_batch(self) -> int:
        first = self.graph.inputs[0]
        return first.shape[self._axis(first)]

    def _axis(self, source: Source) -> int:
        return batch_axis(source.form, self.graph.time_major)

    def _with_batch(self, source: Source, batch: int) -> tuple[int, ...]:
        axis = self._axis(source)
        return (*source.shape[:axis], batch, *source.shape[axis + 1 :])

    def _batch_of(self, inputs: Sequence[Tensor]) -> int:
        """The batch size of the inputs; raises if their shapes are wrong."""
        if len(inputs) != len(self.graph.inputs):
            raise ValueError(
                f"expected {len(self.graph.inputs)} inputs, got {len(inputs)}; pass the same number as in the example"
            )
        batches: list[int] = []
        for x, source in zip(inputs, self.graph.inputs, strict=True):
            batch = x.shape[self._axis(source)] if x.dim() == len(source.shape) else 0
            if x.dim() != len(source.shape) or tuple(x.shape) != self._with_batch(source, batch):
                wanted = self._with_batch(source, -1)
                raise ValueError(
                    f"expected an input of shape {wanted}, where -1 is any batch size, got {tuple(x.shape)}; "
                    "deploy again with an example of this shape"
                )
            batches.append(batch)
        if any(batch != batches[0] for batch in batches):
            raise ValueError(
                f"expected inputs of the same batch size, got {sorted(set(batches))}; pass the same for all"
            )
        return batches[0]

    def _prepare(self, inputs: Sequence[Tensor]) -> _Prepared:
        batch = self._batch_of(inputs)
        setting = self.setting_for(batch)
        plan = self.plan(setting.lanes, setting.kernels)
        groups = -(-batch // plan.lanes)
        edges = [groups * i // setting.threads for i in range(setting.threads + 1)]
        shares = tuple((a, b) for a, b in pairwise(edges) if a < b)
        shapes = self._output_shapes(batch)
        itemsize = self._dtypes[0].itemsize
        nbytes = inputs[0].numel() * itemsize
        like = empty(shapes[0])
        prepared = _Prepared(plan, plan.for_batch(batch), shapes, like, nbytes, itemsize, batch, shares)
        with self._lock:
            while len(self._ready) >= KEPT:
                oldest = next(iter(self._ready))
                del self._ready[oldest]
                self._alone.pop(oldest[0], None)
            self._ready[tuple([x.shape for x in inputs])] = prepared
            if len(inputs) == len(prepared.outputs) == len(shares) == 1 and self.graph.structure is None:
                self._alone[inputs[0].shape] = prepared
        return prepared

    def _output_shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        shapes: list[tuple[int, ...]] = []
        for form, shape in zip(self.graph.forms, self.graph.shapes, strict=True):
            if form == "sequence" and len(shape) == 2:  # steps and samples in one dimension
                shapes.append((shape[0] // self.example_batch * batch, shape[1]))
            else:
                shapes.append(self._with_batch(Source(form, shape), batch))
        return tuple(shapes)

    def _run(
        self, prepared: _Prepared, inputs: Sequence[Tensor], outputs: Sequence[Tensor], first: int, last: int
    ) -> int:
        try:
            workspace = prepared.spare.pop()  # atomic: no other thread gets the same one
        except IndexError:
            workspace = self._workspace(prepared)
        block = workspace.block
        block[_FIRST], block[_LAST] = first, last
        place = _POINTERS
        for x in inputs:
            block[place] = x.data_ptr()
            place += 1
        for y in outputs:
            block[place] = y.data_ptr()
            place += 1
        failed: int = self.native.run(workspace.address)
        prepared.spare.append(workspace)
        return failed

    def _workspace(self, prepared: _Prepared) -> _Workspace:
        plan = prepared.plan
        arena = aligned_zeros(plan.arena)
        block = (ctypes.c_int64 * (_POINTERS + len(self.graph.inputs) + len(prepared.outputs)))()
        block[_OPS], block[_N_OPS] = prepared.records.ctypes.data, len(prepared.records)
        block[_ARENA], block[_BATCH], block[_LANES] = arena.ctypes.data, prepared.batch, plan.lanes
        block[_N_INPUTS] = len(self.graph.inputs)
        block[_FIRST], block[_LAST] = prepared.shares[0]
        return _Workspace(arena, block, ctypes.addressof(block))

    def _threads(self, count: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pool._max_workers < count:
                self._pool = ThreadPoolExecutor(count, thread_name_prefix="gossamer")
            return self._pool

    def start_anew(self) -> None:
        """Called in a forked child: threads do not survive a fork, and one of them may have held a lock."""
        self._lock = threading.Lock()
        if self._pool is not None:
            _LEFT_BEHIND.append(self._pool)
            self._pool = None


_LEFT_BEHIND: list[ThreadPoolExecutor] = []  # pools of a parent process, never finalized: their locks may be held
