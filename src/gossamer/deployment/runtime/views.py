"""Views: how the axes of a tensor map to the samples, channels and pixels of a value.

Reshapes, permutations and selections between the layers of a transformer move no data here. A view lists the parts of
each axis, outermost first; a part counts samples, channels or pixels with a stride, and a stride of 0 repeats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from gossamer.deployment.runtime.network import Integers, UnsupportedError

Of = Literal["sample", "channel", "pixel"]


@dataclass(frozen=True)
class Part:
    of: Of
    size: int
    stride: int = 1


Axis = tuple[Part, ...]


@dataclass(frozen=True)
class View:
    """The axes, and the first channel and pixel."""

    axes: tuple[Axis, ...]
    channel: int = 0
    pixel: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(part.size for part in axis) for axis in self.axes)

    def reshaped(self, shape: Sequence[int]) -> View:
        parts = [part for axis in self.axes for part in axis]
        axes: list[Axis] = []
        for size in shape:
            axis: list[Part] = []
            while parts and (_is_one_sample(parts[0]) or size > 1):
                first = parts.pop(0)
                if size % first.size and first.size % size:
                    raise UnsupportedError(f"a view from {self.shape} to {tuple(shape)}")
                if first.size > size:  # the outer share of the part
                    rest = first.size // size
                    parts.insert(0, replace(first, size=rest))
                    first = replace(first, size=size, stride=first.stride * rest)
                axis.append(first)
                size //= first.size
                if size == 1:
                    break
            axes.append(_joined(axis))
        if parts:  # a single sample after the last axis
            axes[-1] = (*axes[-1], *parts)
        return replace(self, axes=tuple(axes))

    def permuted(self, order: Sequence[int]) -> View:
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def with_axis(self, dim: int) -> View:
        return replace(self, axes=(*self.axes[:dim], (), *self.axes[dim:]))

    def without_axis(self, dim: int) -> View:
        if any(part.of == "sample" for part in self.axes[dim]):
            raise UnsupportedError("a view without the axis of samples")
        return replace(self, axes=(*self.axes[:dim], *self.axes[dim + 1 :]))

    def sliced(self, dim: int, start: int, size: int, step: int) -> View:
        if size == self.shape[dim]:
            return self
        axis = self.axes[dim]
        if len(axis) != 1 or axis[0].of == "sample":
            raise UnsupportedError(f"a slice of dimension {dim} of a view")
        part = replace(axis[0], size=size, stride=axis[0].stride * step)
        moved = self._moved(axis[0].of, start * axis[0].stride)
        return replace(moved, axes=(*self.axes[:dim], _joined([part]), *self.axes[dim + 1 :]))

    def selected(self, dim: int, index: int) -> View:
        view = self
        for part in reversed(self.axes[dim]):
            if part.of == "sample":
                raise UnsupportedError("a selection of samples")
            view = view._moved(part.of, index % part.size * part.stride)
            index //= part.size
        return replace(view, axes=(*view.axes[:dim], *view.axes[dim + 1 :]))

    def expanded(self, shape: Sequence[int]) -> View:
        """Axes of size 1 repeated, and new ones in front."""
        axes = [*[()] * (len(shape) - len(self.axes)), *self.axes]
        wider = []
        for axis, size in zip(axes, shape, strict=True):
            have = prod(part.size for part in axis)
            if size in (have, -1):
                wider.append(axis)
            elif axis:
                raise UnsupportedError("an expansion over the batch")
            else:
                wider.append((Part("channel", size, 0),))
        return replace(self, axes=tuple(wider))

    def places(self, of: Of) -> Integers:
        """The channel or pixel of every element of a sample, as an array of the shape of the view in which the axis of
        samples has length 1."""
        found = np.full([1] * len(self.axes), self.channel if of == "channel" else self.pixel, np.int64)
        for dim, axis in enumerate(self.axes):
            along = np.zeros(1, np.int64)
            for part in axis:
                if part.of != "sample":
                    steps = np.arange(part.size) * (part.stride if part.of == of else 0)
                    along = (along[:, None] + steps).ravel()
            found = found + along.reshape([-1 if d == dim else 1 for d in range(len(self.axes))])
        return found

    def _moved(self, of: Of, by: int) -> View:
        if of == "channel":
            return replace(self, channel=self.channel + by)
        return replace(self, pixel=self.pixel + by)


def _is_one_sample(part: Part) -> bool:
    return part.of == "sample" and part.size == 1


def _joined(axis: Sequence[Part]) -> Axis:
    """The same axis with as few parts as possible."""
    joined: list[Part] = []
    for part in axis:
        last = joined[-1] if joined else None
        if part.size == 1 and part.of != "sample":
            continue
        if last is not None and last.of == part.of and last.stride == part.size * part.stride:
            joined[-1] = replace(part, size=last.size * part.size)
        else:
            joined.append(part)
    return tuple(joined)


def axis(of: Of, size: int, stride: int = 1) -> Axis:
    return _joined([Part(of, size, stride)])
