"""Running means on the rows of a race, and the scales that are made of them.

A running mean with decay d that has seen n values is Σ d^(n-i)·x_i / Σ d^(n-i): the newest value has the weight
(1-d)/(1-dⁿ), which is 1 for the first one, and for d = 0 always. So a row with d = 0 has the value itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer import method
from gossamer.methods.rule import Layout, Timeline


class RunningMean:
    """A mean for each row, each with its own decay; `value` stays where it is."""

    def __init__(self, like: Tensor, decay: Tensor, timeline: Timeline) -> None:
        """`decay` is a column, one number a row."""
        self.value = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self._decay, self._clock = decay, timeline.clock

    def update_(self, newest: Tensor) -> Tensor:
        """Take in the value of this step; returns the mean."""
        weight = (1.0 - self._decay) / (1.0 - self._decay ** (self._clock + 1))
        return self.value.lerp_(newest, weight)


class Scale:
    """Divides by the root mean square over parts of a row, to a power; the mean square may be a running mean.

    The parts are the whole row, its tensors, or the output features of its tensors: Eq. (grad_norm), from the
    mini-batch.
    """

    def __init__(
        self, parts: Sequence[tuple[int, int]], powers: Tensor, decay: Tensor | None, timeline: Timeline
    ) -> None:
        """`parts` are, for each piece of a row, into how many parts it is cut and how many columns it has.

        `powers` and `decay` are columns; without a `decay` the mean squares are those of the step.
        """
        self._parts, self._powers = list(parts), powers
        like = powers.new_zeros(len(powers), sum(number for number, _ in parts))
        self.squares = None if decay is None else RunningMean(like, decay, timeline)

    @classmethod
    def over(cls, kind: str, layout: Layout, powers: Tensor, decay: Tensor | None, timeline: Timeline) -> "Scale":
        """`kind`: network, layer or feature."""
        sizes = layout.sizes
        parts = {
            "network": [(1, layout.count)],
            "layer": [(1, size) for size in sizes],
            "feature": [(shape[0], size) for shape, size in zip(layout.shapes, sizes, strict=True)],
        }
        return cls(parts[kind], powers, decay, timeline)

    def sizes(self, squares: Tensor) -> Tensor:
        """What is divided by, from the mean squares."""
        return (squares.sqrt() + method.EPSILON) ** self._powers

    def __call__(self, direction: Tensor) -> Tensor:
        pieces = torch.split(direction, [size for _, size in self._parts], dim=1)
        rows = [piece.reshape(len(piece), number, -1) for piece, (number, _) in zip(pieces, self._parts, strict=True)]
        squares = torch.cat([piece.square().mean(2) for piece in rows], dim=1)
        if self.squares is not None:
            squares = self.squares.update_(squares)
        by_piece = torch.split(self.sizes(squares), [number for number, _ in self._parts], dim=1)
        divided = [(piece / size[:, :, None]).flatten(1) for piece, size in zip(rows, by_piece, strict=True)]
        return divided[0] if len(divided) == 1 else torch.cat(divided, dim=1)
