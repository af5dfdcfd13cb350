"""The dense weights of one run as one vector, and the copies between it and the parameters of the model.

All weights form one row of a (1, weights) matrix, so that the budget covers them all at once and a step takes a few
kernels however many layers there are. Every such matrix has a view per tensor with the tensor's shape. The columns
follow the parameters' memory for methods that treat all weights alike. For other methods, the order is fixed: output
features first and input channels last, as in batched training.

Between steps the parameters hold w = w̃ ⊙ m; during the optimizer's step they hold w̃ (`put`). The extra memory of a
learned mask is w̃, m̃ and one byte per weight.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.budget import has_triton
from gossamer.methods.base import Block, Layout, Norm, Part, SampleSums, Step, TensorView
from gossamer.methods.blocks import Blocks
from gossamer.prunable import Weight
from gossamer.sharding import is_sharded, local, shard_axis

_PIECE = 1 << 18  # weights per pass on a CPU: 1 MiB per buffer, so that a step reads most of them from the cache
_SCRATCH = 1 << 20  # weights in scratch memory that is kept between steps
_SMALL = 1 << 12  # tensors up to this size are grouped on a CPU
_LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
Follow: TypeAlias = Callable[[slice, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Scratch:
    """Buffers for the gradients and intermediate values of adjacent small tensors, with views."""

    columns: slice
    gradient: Tensor
    work: Tensor
    gradient_views: list[Tensor]
    work_views: list[Tensor]
    row: tuple[int, ...] | None
    """Where all tensors have rows of one shape, and lie in memory row by row, this shape."""

    def gather_(self, flat: Tensor, views: list[Tensor], tensors: list[Tensor]) -> None:
        """Copy the tensors to their views of the vector `flat`."""
        if self.row is None:
            torch._foreach_copy_(views, tensors)
        else:
            torch.cat(tensors, out=flat.view(-1, *self.row))  # in half the time


class State:
    """w̃ of all prunable weights, and other buffers with the same layout."""

    def __init__(self, weights: Sequence[Weight], *, any_order: bool, norms: tuple[Norm | None, ...] = ()) -> None:
        parameters: list[Tensor] = [weight.parameter for weight in weights]
        self._parameters, self.sharded = parameters, any(map(is_sharded, parameters))
        tensors = self.tensors()
        self.device = common_device(tensors)
        self.sizes = [tensor.numel() for tensor in tensors]
        self.offsets = list(accumulate(self.sizes, initial=0))[:-1]
        self.count = sum(self.sizes)
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if double else torch.float32
        self.layout = make_layout(weights, any_order=any_order, norms=norms)
        self._shapes = [
            (tuple(tensor.shape), _strides(tensor, weight.feature_axis, any_order))
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
        self.dense = self.matrix()
        self.dense_views = self.views(self.dense)
        self._scratch: dict[int, Scratch] = {}

    def tensors(self) -> list[Tensor]:
        """The parameters, or their local shards. Write to them only without autograd."""
        if not self.sharded:
            return self._parameters
        return [local(each) if is_sharded(each) else each for each in self._parameters]

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(1, self.count, dtype=dtype or self.dtype, device=self.device)

    def view(self, matrix: Tensor, index: int) -> Tensor:
        """The part of one tensor, in the tensor's shape."""
        return matrix.as_strided(*self._shapes[index], self.offsets[index])

    def views(self, matrix: Tensor) -> list[Tensor]:
        """One view per tensor, in the tensor's shape."""
        return [self.view(matrix, index) for index in range(len(self.sizes))]

    def scratch(self, these: range) -> "Scratch":
        """Buffers for adjacent tensors, reused from step to step unless they are large."""
        begin, end = self.offsets[these.start], self.offsets[these.stop - 1] + self.sizes[these.stop - 1]
        kept = self._scratch.get(these.start)
        if kept is not None:
            return kept
        gradient, work = (torch.zeros(1, end - begin, dtype=self.dtype, device=self.device) for _ in range(2))
        places = [(*self._shapes[index], self.offsets[index] - begin) for index in these]
        scratch = Scratch(
            slice(begin, end),
            gradient,
            work,
            [gradient.as_strided(shape, strides, offset) for shape, strides, offset in places],
            [work.as_strided((1, *shape), (0, *strides), offset) for shape, strides, offset in places],
            self._common_row(these),
        )
        if end - begin + sum(each.work.numel() for each in self._scratch.values()) <= _SCRATCH:
            self._scratch[these.start] = scratch
        return scratch

    def _common_row(self, these: range) -> tuple[int, ...] | None:
        rows = {shape[1:] for shape, _ in self._shapes[these.start : these.stop]}
        in_rows = all(view.is_contiguous() for view in self.dense_views[these.start : these.stop])
        return rows.pop() if in_rows and len(rows) == 1 else None

    @cached_property
    def groups(self) -> Sequence[range]:
        """Neighbouring small tensors together, the others alone: on a CPU, a call of torch takes longer than its work
        on a small tensor."""
        found, start, total = list[range](), 0, 0
        for index, size in enumerate(self.sizes):
            if index > start and (total > _SCRATCH - size or max(size, self.sizes[start]) > _SMALL):
                found.append(range(start, index))
                start, total = index, 0
            total += size
        return [*found, range(start, len(self.sizes))]

    def _groups_of(self, indices: Sequence[int]) -> Sequence[range]:
        """The groups of some tensors; those whose neighbours are not among them are alone."""
        if len(indices) == len(self.sizes):
            return self.groups
        chosen, found = set(indices), list[range]()
        for these in self.groups:
            if chosen.issuperset(these):
                found.append(these)
            else:
                found += [range(index, index + 1) for index in these if index in chosen]
        return found

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.sizes, self.offsets, self.device)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def alike(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether GPU kernels can read the tensors (one per weight, or None): all have the memory layout of the
        views."""
        there = [(tensor, shape) for tensor, shape in zip(tensors, self._shapes, strict=True) if tensor is not None]
        types = {tensor.dtype for tensor, _ in there}
        return (
            len(types) == 1
            and types.issubset(_FUSED_TYPES)
            and all(tensor.layout == torch.strided and same_memory(tensor, strides) for tensor, (_, strides) in there)
        )

    def has_kernels(self, tensors: Sequence[Tensor | None]) -> bool:
        return _on_gpu(self.dense) and self.dtype == torch.float32 and self.alike(tensors)

    def take(self, indices: Sequence[int] | None = None, follow: Follow | None = None) -> None:
        """Copy the parameters to w̃. `follow` gets columns of w̃ as it was, and the same of what it becomes."""
        tensors, chosen = self.tensors(), range(len(self.sizes)) if indices is None else indices
        if follow is None:
            torch._foreach_copy_([self.dense_views[i] for i in chosen], [tensors[i] for i in chosen])
        elif self.on_cpu:
            for index in chosen:
                after = self._as_columns(tensors[index], index)
                for columns, piece in self._pieces(index):
                    follow(columns, self.dense[:, columns], after[:, piece])
                    self.dense[:, columns].copy_(after[:, piece])
        else:
            after = self.dense.clone()
            torch._foreach_copy_([self.view(after, i) for i in chosen], [tensors[i] for i in chosen])
            for columns in self._columns(chosen):
                follow(columns, self.dense[:, columns], after[:, columns])
            self.dense.copy_(after)

    def put(self, matrix: Tensor | None = None, indices: Sequence[int] | None = None) -> None:
        """Copy w̃, or another matrix, to the parameters."""
        tensors, chosen = self.tensors(), range(len(self.sizes)) if indices is None else indices
        if isinstance(chosen, range) and matrix is None:
            part = slice(chosen.start, chosen.stop)
            torch._foreach_copy_(tensors[part], self.dense_views[part])
        elif chosen:
            views = [self.dense_views[i] if matrix is None else self.view(matrix, i) for i in chosen]
            torch._foreach_copy_([tensors[i] for i in chosen], views)

    def put_written(self, write: Follow, indices: Sequence[int] | None = None) -> None:
        """Let `write` fill columns of the parameters, from those of w̃."""
        tensors, chosen = self.tensors(), range(len(self.sizes)) if indices is None else indices
        if not self.on_cpu:
            written = torch.empty_like(self.dense)
            for columns in self._columns(chosen):
                write(columns, self.dense[:, columns], written[:, columns])
            self.put(written, chosen)
            return
        for index in chosen:
            if self.same_as_dense(tensors[index], index):
                self._write(write, index, _flat(tensors[index])[None])
            else:
                tensors[index].copy_(self._written(write, index))

    def differing_from(self, write: Follow) -> list[int]:
        """The tensors whose parameters do not hold what `write` fills them with. Synchronizes with the device."""
        everything = None
        if not self.on_cpu:
            everything = torch.empty_like(self.dense)
            write(slice(None), self.dense, everything)
        found = []
        for index, tensor in enumerate(self.tensors()):
            written = self._written(write, index) if everything is None else self.view(everything, index)
            if not torch.equal(tensor, written.to(tensor.dtype)):
                found.append(index)
        return found

    def _write(self, write: Follow, index: int, out: Tensor) -> Tensor:
        # Always in the same pieces: powers of a vector and of a number may differ in their last bit.
        for columns, piece in self._pieces(index):
            write(columns, self.dense[:, columns], out[:, piece])
        return out

    def _written(self, write: Follow, index: int) -> Tensor:
        shape, strides = self._shapes[index]
        return self._write(write, index, self.dense.new_empty(1, self.sizes[index])).as_strided(shape, strides)

    def _pieces(self, index: int) -> Iterator[tuple[slice, slice]]:
        """The columns of a tensor in pieces that fit the cache, and where they are in the tensor."""
        offset, size = self.offsets[index], self.sizes[index]
        for start in range(0, size, _PIECE):
            end = min(size, start + _PIECE)
            yield slice(offset + start, offset + end), slice(start, end)

    def _as_columns(self, tensor: Tensor, index: int) -> Tensor:
        """A tensor as the columns have it, (1, size), which is a copy where its memory differs."""
        if self.same_as_dense(tensor, index):
            return _flat(tensor)[None]
        shape, strides = self._shapes[index]
        copy = self.dense.new_empty(1, self.sizes[index])
        copy.as_strided(shape, strides).copy_(tensor)
        return copy

    def take_and_mask(self, mask: Tensor, indices: Sequence[int]) -> None:
        """Copy the parameters to w̃, and set them to w = w̃ ⊙ m."""
        tensors = self.tensors()
        if len(indices) == len(tensors) and self.has_kernels(tensors):
            from gossamer.state_triton import mask_on_gpu_  # needs Triton

            mask_on_gpu_(self.blocks, tensors, mask, self.dense)
            return
        if not self.on_cpu:
            self.take(indices)
            self.put_masked(mask, indices)
            return
        for these in self._groups_of(indices):
            index, part = these.start, slice(these.start, these.stop)
            if len(these) == 1 and self.same_as_dense(tensors[index], index):
                columns = slice(self.offsets[index], self.offsets[index] + self.sizes[index])
                _copy_and_mask_(_flat(tensors[index]), self.dense[0, columns], mask[0, columns])
            elif len(these) == 1:
                self.dense_views[index].copy_(tensors[index])
                self._put_masked(these, mask)
            else:
                scratch = self.scratch(these)
                scratch.gather_(self.dense[0, scratch.columns], self.dense_views[part], tensors[part])
                self._put_masked(these, mask)

    def release(self) -> None:
        """Free w̃ once masks are final."""
        self.dense, self.dense_views, self._scratch = self.dense.new_empty(1, 0), [], {}

    def put_masked(self, mask: Tensor, indices: Sequence[int] | None = None) -> None:
        """Set the parameters to w = w̃ ⊙ m."""
        if self.on_cpu:
            for these in self._groups_of(range(len(self.sizes)) if indices is None else indices):
                self._put_masked(these, mask)
            return
        zero = self.dense.new_zeros(())
        if indices is None:
            self.put(torch.where(mask, self.dense, zero))
            return
        masked = torch.empty_like(self.dense)
        for columns in self._columns(indices):
            torch.where(mask[:, columns], self.dense[:, columns], zero, out=masked[:, columns])
        self.put(masked, indices)

    def _put_masked(self, these: range, mask: Tensor) -> None:
        """The same for one group, on a CPU, without memory of the size of a large tensor."""
        tensors = self.tensors()[these.start : these.stop]
        if len(these) == 1:
            tensors[0].copy_(self.dense_views[these.start])
            self._mask_(tensors[0], self.view(mask, these.start))
            return
        scratch = self.scratch(these)
        columns, zero = scratch.columns, self.dense.new_zeros(())
        torch.where(mask[:, columns], self.dense[:, columns], zero, out=scratch.gradient)
        torch._foreach_copy_(tensors, scratch.gradient_views)

    def _columns(self, indices: Sequence[int]) -> Iterator[slice]:
        """The columns of some tensors, with adjacent ones merged."""
        ends = [self.offsets[index] + self.sizes[index] for index in indices]
        start = 0
        for place in range(1, len(indices) + 1):
            if place == len(indices) or indices[place] != indices[place - 1] + 1:
                yield slice(self.offsets[indices[start]], ends[place - 1])
                start = place

    def mask_parameters(self, mask: Tensor, indices: Sequence[int] | None = None) -> None:
        """Zero the pruned weights in the parameters, whatever their values."""
        chosen, tensors = range(len(self.sizes)) if indices is None else indices, self.tensors()
        if not chosen:
            return
        if len(chosen) == len(tensors) and self.has_kernels(tensors):
            from gossamer.state_triton import mask_on_gpu_  # needs Triton

            mask_on_gpu_(self.blocks, tensors, mask, None)
            return
        for these in self._groups_of(chosen) if self.on_cpu else [range(index, index + 1) for index in chosen]:
            if len(these) == 1:
                self._mask_(tensors[these.start], self.view(mask, these.start))
                continue
            scratch, part = self.scratch(these), tensors[these.start : these.stop]
            scratch.gather_(scratch.gradient[0], scratch.gradient_views, part)
            self._mask_(scratch.gradient, mask[:, scratch.columns])
            torch._foreach_copy_(part, scratch.gradient_views)

    def differing(self, mask: Tensor) -> list[int]:
        """The tensors whose parameters do not hold w = w̃ ⊙ m or, once w̃ is dropped, whose pruned weights are not zero.
        Synchronizes with the device."""
        return [index for index, tensor in enumerate(self.tensors()) if self._differs(tensor, mask, index)]

    def _differs(self, tensor: Tensor, mask: Tensor, index: int) -> bool:
        kept, dense = self.view(mask, index), self.dense_views[index] if self.dense_views else tensor
        whole = tensor[None], kept[None], dense[None]
        if self.same_as_dense(tensor, index):  # in pieces, without memory of the size of the tensor
            columns = slice(self.offsets[index], self.offsets[index] + self.sizes[index])
            whole = _flat(tensor), mask[0, columns], self.dense[0, columns] if self.dense_views else _flat(tensor)
        zero = self.dense.new_zeros(())
        for here, stays, there in zip(*(torch.split(each, _PIECE) for each in whole), strict=True):
            if not self.dense_views and bool((here.ne(0) & ~stays).any()):
                return True
            if self.dense_views and not torch.equal(here, torch.where(stays, there, zero).to(here.dtype)):
                return True
        return False

    def _mask_(self, tensor: Tensor, mask: Tensor) -> None:
        torch.where(mask, tensor, tensor.new_zeros(()), out=tensor)

    def same_as_dense(self, tensor: Tensor, index: int) -> bool:
        return tensor.dtype == self.dtype and same_memory(tensor, self._shapes[index][1])


def make_layout(weights: Sequence[Weight], *, any_order: bool, norms: tuple[Norm | None, ...] = ()) -> Layout:
    """The columns of each tensor: in the order of the parameters' memory, or output features first."""
    tensors = [local(weight.parameter) for weight in weights]
    views = tuple(
        TensorView(
            tuple(tensor.shape),
            _strides(tensor, weight.feature_axis, any_order),
            weight.feature_axis,
            weight.groups,
            split=shard_axis(weight.parameter) not in (None, weight.feature_axis),
            size=weight.parameter.numel(),
        )
        for tensor, weight in zip(tensors, weights, strict=True)
    )
    shapes = [_in_order(tensor.shape, weight.feature_axis) for tensor, weight in zip(tensors, weights, strict=True)]
    return Layout(tuple(weight.name for weight in weights), tuple(shapes), norms, views if any_order else ())


class ParameterStep(Step):
    """A step of a single run, whose gradients belong to the parameters."""

    def __init__(
        self,
        state: State,
        gradients: Sequence[Tensor | None],
        *,
        unscale: Tensor | None,
        found_inf: Tensor | None,
        samples: SampleSums | None = None,
        active: Tensor | None = None,
    ) -> None:
        self.weights, self._state, self._gradients = state.dense, state, gradients
        self.unscale, self.found_inf, self.samples, self.active = unscale, found_inf, samples, active
        self.restored = False  # whether the parameters hold w̃ again
        self._copied: list[Tensor] = []  # gradients, and copies of them to be written back
        self._copies: list[Tensor] = []
        self._views: list[Tensor] = []
        self._foreign: list[int] = []  # tensors on a CPU that need separate scratch memory
        self._small: dict[int, range] = {}  # the tensors of a block, by its first column

    @cached_property
    def gradient(self) -> Tensor:
        matrix = self._state.matrix()
        self._copy(self._gradients, self._state.views(matrix), matrix)
        if self.unscale is not None:
            matrix.mul_(self.unscale)
        if self.found_inf is not None:  # the optimizer will skip this step
            matrix.copy_(torch.where(self.found_inf == 0, matrix, 0.0))
        return matrix

    def _copy(self, gradients: Sequence[Tensor | None], views: list[Tensor], matrix: Tensor) -> int:
        """Copy the gradients that are present to their views of a matrix, to be written back later; absent ones are
        zero. Returns how many are present."""
        # Lists, not pairs: thousands of new tuples wake the garbage collector.
        present = [each for each in gradients if each is not None]
        if len(present) < len(gradients):
            matrix.zero_()
            views = [view for each, view in zip(gradients, views, strict=True) if each is not None]
        if present:
            torch._foreach_copy_(views, present)
        self._copied += present
        self._copies += views
        return len(present)

    @cached_property
    def absent(self) -> Sequence[int]:
        return [index for index, gradient in enumerate(self._gradients) if gradient is None]

    @cached_property
    def parts(self) -> Sequence[Part]:
        state = self._state
        if not state.on_cpu:
            work, matrix = state.matrix(), state.matrix()
            self._copy(self._gradients, state.views(matrix), matrix)
            self._views = [view[None] for view in state.views(work)]
            return [Part(range(len(state.sizes)), [Block(slice(None), matrix, state.dense, work)])]
        tensors = state.tensors()
        self._views = [torch.empty(0, device=state.device)] * len(tensors)
        return [
            self._together(these) if len(these) > 1 else self._alone(these.start, tensors[these.start])
            for these in state.groups
        ]

    def _together(self, these: range) -> Part:
        """Small tensors in one block, as the overhead of a torch call exceeds the work on one of them."""
        state = self._state
        scratch = state.scratch(these)
        gradient, work = scratch.gradient, scratch.work
        given = self._gradients[these.start : these.stop]
        present = [each for each in given if each is not None]
        if len(present) == len(given):
            scratch.gather_(gradient[0], scratch.gradient_views, present)
            self._copied += present
            self._copies += scratch.gradient_views
        else:
            self._copy(given, scratch.gradient_views, gradient)
        self._views[these.start : these.stop] = scratch.work_views
        columns = scratch.columns
        self._small[columns.start] = these
        return Part(these, [Block(columns, gradient if present else None, state.dense[:, columns], work)])

    def _alone(self, index: int, tensor: Tensor) -> Part:
        """A tensor in pieces that fit the cache; the memory of its parameter serves as scratch memory."""
        state, gradient = self._state, self._gradients[index]
        size, offset, (shape, strides) = state.sizes[index], state.offsets[index], state._shapes[index]
        own = state.same_as_dense(tensor, index)
        if not own:
            self._foreign.append(index)
        work = _flat(tensor) if own else torch.empty(size, dtype=state.dtype, device=state.device)
        self._views[index] = work.as_strided((1, *shape), (0, *strides), work.storage_offset())
        flat = None
        if gradient is not None and same_memory(gradient, strides):
            flat = _flat(gradient)
        elif gradient is not None:
            flat = torch.empty(size, dtype=gradient.dtype, device=state.device)
            view = flat.as_strided(shape, strides)
            view.copy_(gradient)
            self._copied.append(gradient)
            self._copies.append(view)
        blocks = []
        for start in range(0, max(size, 1), _PIECE):
            piece = slice(start, min(size, start + _PIECE))
            columns = slice(offset + piece.start, offset + piece.stop)
            blocks.append(
                Block(
                    columns,
                    None if flat is None else flat[None, piece],
                    state.dense[:, columns],
                    work[None, piece],
                )
            )
        return Part(range(index, index + 1), blocks)

    @property
    def work_views(self) -> Sequence[Tensor]:
        return self._views

    def release(self, block: Block) -> None:
        """Write w̃ to the parameter while this piece of memory is in the cache."""
        if not self._state.on_cpu:
            return
        self.restored = True
        begin = block.columns.start
        if begin in self._small:
            self._state.put(indices=self._small[begin])
        else:
            block.work.copy_(block.weight)

    def segments(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None] | None:
        tensors = self._state.tensors()
        present = any(gradient is not None for gradient in self._gradients)
        if present and self._state.has_kernels(tensors) and self._state.alike(self._gradients):
            self.restored = True
            return self._gradients, tensors
        return None

    def write_back_gradients(self) -> None:
        """Write the gradients of the method back to the parameters."""
        if "gradient" in self.__dict__ and self.unscale is not None:
            self.gradient.div_(self.unscale)
        if self._copies:
            torch._foreach_copy_(self._copied, self._copies)

    def write_back(self) -> None:
        """Write the gradients of the method and w̃ back to the parameters."""
        self.write_back_gradients()
        if not self.restored:
            self._state.put()
        elif self._foreign:
            self._state.put(indices=self._foreign)


def _on_gpu(matrix: Tensor) -> bool:
    return matrix.is_cuda and has_triton()


def same_memory(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; strides of axes of length one do not matter."""
    pairs = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(stride == ours or length == 1 for stride, ours, length in pairs)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """The common device of the tensors."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"expected all the weights on one device, got {', '.join(sorted(map(str, devices)))}: "
            "shard the model with fully_shard instead, or exclude weights on other devices"
        )
    return devices.pop()


def _strides(tensor: Tensor, feature_axis: int, any_order: bool) -> tuple[int, ...]:
    return _dense_strides(tensor) if any_order else _features_first(tensor.shape, feature_axis)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the tensor if it has a standard memory format, otherwise row-major strides."""
    if any(tensor.is_contiguous(memory_format=layout) for layout in _LAYOUTS.get(tensor.dim(), ())):
        return tensor.stride()
    return tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))


def _order(dimensions: int, feature_axis: int) -> list[int]:
    """The axes with output features first and, for images, input channels last."""
    axes = [feature_axis, *(axis for axis in range(dimensions) if axis != feature_axis)]
    return [axes[0], *axes[2:], axes[1]] if dimensions == 4 else axes


def _in_order(shape: Sequence[int], feature_axis: int) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in _order(len(shape), feature_axis))


def _features_first(shape: Sequence[int], feature_axis: int) -> tuple[int, ...]:
    strides, stride = [0] * len(shape), 1
    for axis in reversed(_order(len(shape), feature_axis)):
        strides[axis] = stride
        stride *= shape[axis]
    return tuple(strides)


def _copy_and_mask_(weights: Tensor, copy: Tensor, mask: Tensor) -> None:
    """Copy the vector `weights` to `copy` and zero its masked entries, in pieces that fit the cache.

    Masking multiplies the bit patterns, as integers, by 0 or 1, so pruned weights become +0, even if they were
    negative or NaN.
    """
    bits = torch.int32 if weights.element_size() == 4 else torch.int64
    vectors = (torch.split(vector, _PIECE) for vector in (weights, copy, mask))
    for part, target, kept in zip(*vectors, strict=True):
        target.copy_(part)
        part.view(bits).mul_(kept)
