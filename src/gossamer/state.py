"""The dense weights of one run as one long vector, and how they move between it and the model's parameters.

All weights lie side by side in one row of a (1, weights) matrix, so that the budget sees all of them at once and a
step takes a handful of kernels however many layers there are. For each tensor there is a view into every such matrix
with the tensor's own shape. Methods that treat every weight alike get columns in the order of the parameters' memory;
the others in a fixed order, output features first and input channels last, which is also the order of batched training.

Outside the optimizer's step the parameters hold w = w̃ ⊙ m; during it they hold w̃ (`put`). Extra memory of a learned
mask: w̃, m̃ and one byte per weight.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.budget import triton_is_there
from gossamer.methods.base import Block, Layout, Part, SampleSums, Step, TensorView
from gossamer.methods.blocks import Blocks
from gossamer.prunable import Weight
from gossamer.sharding import is_sharded, local, shard_axis

_PIECE = 1 << 20  # weights treated together on a CPU: 4 MiB of each kind
_KEPT_PIECE = 1 << 18  # the same where a pass has fewer operations
_SMALL = 1 << 12  # tensors up to this size are treated together on a CPU
_LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory for the gradients and the work of neighbouring small tensors, and their views."""

    columns: slice
    gradient: Tensor
    work: Tensor
    gradient_views: list[Tensor]
    work_views: list[Tensor]


class State:
    """w̃ of all prunable weights, and what lies in memory like it."""

    def __init__(self, weights: Sequence[Weight], *, any_order: bool, gains: tuple[slice | None, ...] = ()) -> None:
        self._weights = weights
        tensors = self.tensors()
        self.device = common_device(tensors)
        self.sizes = [tensor.numel() for tensor in tensors]
        self.offsets = list(accumulate(self.sizes, initial=0))[:-1]
        self.count = sum(self.sizes)
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if double else torch.float32
        self.layout = make_layout(weights, any_order=any_order, gains=gains)
        self._shapes = [
            (tuple(tensor.shape), _strides(tensor, weight.feature_axis, any_order))
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
        self.dense = self.matrix()
        self.dense_views = self.views(self.dense)
        self._scratch: dict[int, Scratch] = {}

    def tensors(self) -> list[Tensor]:
        """The parameters, or the parts of them that this process has. To be written to without gradients."""
        parameters = [weight.parameter for weight in self._weights]
        return [local(each) if is_sharded(each) else each for each in parameters]

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(1, self.count, dtype=dtype or self.dtype, device=self.device)

    def views(self, matrix: Tensor) -> list[Tensor]:
        """The part of each tensor, in the tensor's shape."""
        return [
            matrix.as_strided(shape, strides, offset)
            for (shape, strides), offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def scratch(self, these: range) -> "Scratch":
        """Memory for some neighbouring tensors, kept from step to step unless it is large."""
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
        )
        if end - begin + sum(each.work.numel() for each in self._scratch.values()) <= _PIECE:
            self._scratch[these.start] = scratch
        return scratch

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.sizes, self.offsets, self.device)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def alike(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether GPU kernels can read the tensors, one per weight or None: all lie in memory as the views do."""
        there = [(tensor, shape) for tensor, shape in zip(tensors, self._shapes, strict=True) if tensor is not None]
        types = {tensor.dtype for tensor, _ in there}
        return (
            len(types) == 1
            and types.issubset(_FUSED_TYPES)
            and all(tensor.layout == torch.strided and same_memory(tensor, strides) for tensor, (_, strides) in there)
        )

    def has_kernels(self, tensors: Sequence[Tensor | None]) -> bool:
        return _on_gpu(self.dense) and self.dtype == torch.float32 and self.alike(tensors)

    def take(self, indices: Sequence[int] | None = None) -> None:
        """w̃ becomes what the parameters hold."""
        tensors, chosen = self.tensors(), range(len(self.sizes)) if indices is None else indices
        torch._foreach_copy_([self.dense_views[i] for i in chosen], [tensors[i] for i in chosen])

    def put(self, matrix: Tensor | None = None, indices: Sequence[int] | None = None) -> None:
        """The parameters get w̃, or another matrix."""
        tensors, chosen = self.tensors(), range(len(self.sizes)) if indices is None else indices
        if matrix is None:
            views = [self.dense_views[i] for i in chosen]
        else:
            views = [matrix.as_strided(*self._shapes[i], self.offsets[i]) for i in chosen]
        if chosen:
            torch._foreach_copy_([tensors[i] for i in chosen], views)

    def take_and_mask(self, mask: Tensor, indices: Sequence[int]) -> None:
        """w̃ becomes what the parameters hold, and they get w = w̃ ⊙ m."""
        tensors = self.tensors()
        if len(indices) == len(tensors) and self.has_kernels(tensors):
            from gossamer.state_triton import mask_on_gpu_  # needs Triton

            mask_on_gpu_(self.blocks, tensors, mask, self.dense)
            return
        large, rest = self._large(tensors, indices)
        for index in large:
            begin = self.offsets[index]
            part = slice(begin, begin + self.sizes[index])
            flat = tensors[index].as_strided((tensors[index].numel(),), (1,))
            _keep_and_mask_(flat, self.dense[0, part], mask[0, part])
        if rest:
            self.take(rest)
            self.put_masked(mask, rest)

    def release(self) -> None:
        """Drop w̃, once masks are final."""
        self.dense, self.dense_views, self._scratch = self.dense.new_empty(1, 0), [], {}

    def put_masked(self, mask: Tensor, indices: Sequence[int] | None = None) -> None:
        """The parameters get w = w̃ ⊙ m."""
        zero = self.dense.new_zeros(())
        if indices is None:
            self.put(torch.where(mask, self.dense, zero))
            return
        masked = torch.empty_like(self.dense)
        for columns in self._columns(indices):
            torch.where(mask[:, columns], self.dense[:, columns], zero, out=masked[:, columns])
        self.put(masked, indices)

    def _columns(self, indices: Sequence[int]) -> Iterator[slice]:
        """The columns of some tensors, neighbours together."""
        ends = [self.offsets[index] + self.sizes[index] for index in indices]
        start = 0
        for place in range(1, len(indices) + 1):
            if place == len(indices) or indices[place] != indices[place - 1] + 1:
                yield slice(self.offsets[indices[start]], ends[place - 1])
                start = place

    def mask_parameters(self, mask: Tensor, indices: Sequence[int] | None = None) -> None:
        """Pruned weights become zero in the parameters, whatever these hold."""
        chosen, tensors = range(len(self.sizes)) if indices is None else indices, self.tensors()
        if not chosen:
            return
        if len(chosen) == len(tensors) and self.has_kernels(tensors):
            from gossamer.state_triton import mask_on_gpu_  # needs Triton

            mask_on_gpu_(self.blocks, tensors, mask, None)
            return
        masks = self.views(mask)
        for index in chosen:
            tensor = tensors[index]
            torch.where(masks[index], tensor, tensor.new_zeros(()), out=tensor)

    def _large(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """On a CPU, tensors that lie in memory like w̃ and are worth a pass of their own, and the rest."""
        if not self.on_cpu:
            return [], list(indices)
        large = [i for i in indices if self.sizes[i] > _SMALL and self.same_as_dense(tensors[i], i)]
        chosen = set(large)
        return large, [index for index in indices if index not in chosen]

    def same_as_dense(self, tensor: Tensor, index: int) -> bool:
        return tensor.dtype == self.dtype and same_memory(tensor, self._shapes[index][1])


def make_layout(weights: Sequence[Weight], *, any_order: bool, gains: tuple[slice | None, ...] = ()) -> Layout:
    """Which columns are which tensor: in the order of the parameters' memory, or output features first."""
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
    return Layout(tuple(weight.name for weight in weights), tuple(shapes), gains, views if any_order else ())


class ParameterStep(Step):
    """A step of one run whose gradients lie beside the parameters."""

    def __init__(
        self,
        state: State,
        gradients: Sequence[Tensor | None],
        *,
        unscale: Tensor | None,
        found_inf: Tensor | None,
        samples: SampleSums | None,
    ) -> None:
        self.weights, self._state, self._gradients = state.dense, state, gradients
        self.unscale, self.found_inf, self.samples = unscale, found_inf, samples
        self.restored = False  # whether the parameters hold w̃ again
        self._copies: list[tuple[Tensor, Tensor]] = []  # gradients, and copies of them to be written back
        self._views: list[Tensor] = []
        self._foreign: list[int] = []  # tensors on a CPU whose own memory is not the scratch memory
        self._small: dict[int, range] = {}  # by the first column of a block, the tensors in it

    @cached_property
    def gradient(self) -> Tensor:
        matrix = self._state.matrix()
        present = [
            (g, view) for g, view in zip(self._gradients, self._state.views(matrix), strict=True) if g is not None
        ]
        if present:
            torch._foreach_copy_([view for _, view in present], [gradient for gradient, _ in present])
        if self.unscale is not None:
            matrix.mul_(self.unscale)
        if self.found_inf is not None:  # the optimizer will skip this step
            matrix.copy_(torch.where(self.found_inf == 0, matrix, 0.0))
        self._copies += [(gradient, view) for gradient, view in present]
        return matrix

    @property
    def absent(self) -> Sequence[int]:
        return [index for index, gradient in enumerate(self._gradients) if gradient is None]

    @cached_property
    def parts(self) -> Sequence[Part]:
        state = self._state
        if not state.on_cpu:
            work, matrix = state.matrix(), state.matrix()
            present = [(g, v) for g, v in zip(self._gradients, state.views(matrix), strict=True) if g is not None]
            if present:
                torch._foreach_copy_([view for _, view in present], [gradient for gradient, _ in present])
            self._copies += present
            self._views = [view[None] for view in state.views(work)]
            return [Part(range(len(state.sizes)), [Block(slice(None), matrix, state.dense, work)])]
        tensors, found = state.tensors(), list[Part]()
        self._views = [torch.empty(0, device=state.device)] * len(tensors)
        index = 0
        while index < len(tensors):
            stop = index
            total = 0
            while stop < len(tensors) and state.sizes[stop] <= _SMALL and total + state.sizes[stop] <= _PIECE:
                total += state.sizes[stop]
                stop += 1
            if stop - index > 1:
                found.append(self._together(range(index, stop)))
                index = stop
            else:
                found.append(self._alone(index, tensors[index]))
                index += 1
        return found

    def _together(self, these: range) -> Part:
        """Small tensors in one block: torch takes longer to be called than to treat them."""
        state = self._state
        scratch = state.scratch(these)
        gradient, work = scratch.gradient, scratch.work
        given = [self._gradients[index] for index in these]
        present = [(each, view) for each, view in zip(given, scratch.gradient_views, strict=True) if each is not None]
        if len(present) < len(given):
            gradient.zero_()
        if present:
            torch._foreach_copy_([view for _, view in present], [each for each, _ in present])
        self._copies += present
        self._views[these.start : these.stop] = scratch.work_views
        columns = scratch.columns
        self._small[columns.start] = these
        return Part(these, [Block(columns, gradient if present else None, state.dense[:, columns], work)])

    def _alone(self, index: int, tensor: Tensor) -> Part:
        """A tensor in pieces that stay in the cache; its parameter's own memory is the scratch memory."""
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
            self._copies.append((gradient, view))
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
        """Leave w̃ in the parameter here, while this piece of memory is in the cache."""
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
        """Give the optimizer the gradients as the method left them."""
        if "gradient" in self.__dict__ and self.unscale is not None:
            self.gradient.div_(self.unscale)
        if self._copies:
            torch._foreach_copy_([each for each, _ in self._copies], [view for _, view in self._copies])

    def write_back(self) -> None:
        """Give the optimizer the gradients as the method left them, and the parameters w̃."""
        self.write_back_gradients()
        if not self.restored:
            self._state.put()
        elif self._foreign:
            self._state.put(indices=self._foreign)


def _on_gpu(matrix: Tensor) -> bool:
    return matrix.is_cuda and triton_is_there()


def same_memory(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; along an axis of length one a stride means nothing."""
    pairs = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(stride == ours or length == 1 for stride, ours, length in pairs)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device of all the tensors."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"expected all the weights on one device, got {', '.join(sorted(map(str, devices)))}: "
            "spread the model with fully_shard instead, or exclude what lies elsewhere"
        )
    return devices.pop()


def _strides(tensor: Tensor, feature_axis: int, any_order: bool) -> tuple[int, ...]:
    return _dense_strides(tensor) if any_order else _features_first(tensor.shape, feature_axis)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the tensor where they are those of a usual memory format, else row-major ones."""
    if any(tensor.is_contiguous(memory_format=layout) for layout in _LAYOUTS.get(tensor.dim(), ())):
        return tensor.stride()
    return tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))


def _order(dimensions: int, feature_axis: int) -> list[int]:
    """The axes with output features first and, of images, input channels last."""
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


def _keep_and_mask_(weights: Tensor, kept: Tensor, mask: Tensor) -> None:
    """Copy the vector `weights` to `kept` and zero what is masked in it, in pieces that stay in the cache.

    The masking multiplies the bits of the numbers, as integers, by 0 or 1: pruned weights become +0, whatever their
    sign was and even if they were NaN.
    """
    bits = torch.int32 if weights.element_size() == 4 else torch.int64
    vectors = (torch.split(vector, _KEPT_PIECE) for vector in (weights, kept, mask))
    for here, there, connected in zip(*vectors, strict=True):
        there.copy_(here)
        here.view(bits).mul_(connected)
