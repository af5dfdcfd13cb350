"""Groups of features that can only be removed together, and the reasons to keep them.

A feature is an index along the feature axis of a tensor. The output of a layer, its normalisation and its activation
have the same features; an addition ties the features of its two sides. Such a group is removed from all its tensors or
from none. A group with any reason to be kept is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Hold(IntEnum):
    """Why a feature is kept, in increasing order of relevance."""

    LIVE = 0
    LAST = 1
    LAYERS = 2
    GROUPS = 3
    PADDING = 4
    UNKNOWN = 5
    OUTPUT = 6


@dataclass(frozen=True, order=True)
class Reason:
    """The reason to keep a feature, and the operation that needs it."""

    hold: Hold
    where: str

    def __str__(self) -> str:
        return {
            Hold.LIVE: f"tied to a live feature that {self.where} reads",
            Hold.LAST: f"the last one of {self.where}, which cannot be empty",
            Hold.LAYERS: "another layer of the same recurrent module needs this many",
            Hold.GROUPS: f"all groups of {self.where} have the same size, and another one needs it",
            Hold.PADDING: f"it represents the constants at the zero padding of {self.where}",
            Hold.UNKNOWN: f"read by {self.where}, which needs it",
            Hold.OUTPUT: "part of the model's output",
        }[self.hold]


@dataclass(frozen=True, eq=False)
class Features:
    """The features of one tensor. ``ids`` identify them. ``constant`` is the value of features that have the same
    number at every position for every input, and NaN for others. ``dim`` is their axis, counted from the end."""

    dim: int
    ids: Tensor
    constant: Tensor

    @property
    def count(self) -> int:
        return self.ids.numel()

    @property
    def is_constant(self) -> Tensor:
        return ~self.constant.isnan()


class Groups:
    """The groups of features, and the reasons to keep them."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._reasons: dict[int, Reason] = {}

    def fresh(self, count: int) -> Tensor:
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def join(self, left: Tensor, right: Tensor) -> None:
        for one, other in zip(left.tolist(), right.tolist(), strict=True):
            kept, merged = self._root(one), self._root(other)
            if kept != merged:
                self._parent[merged] = kept
                reason = self._reasons.pop(merged, None)
                if reason is not None:
                    self._hold(kept, reason)

    def hold(self, ids: Tensor, reason: Reason) -> None:
        for each in ids.tolist():
            self._hold(self._root(each), reason)

    def reason(self, feature: int) -> Reason | None:
        return self._reasons.get(self._root(feature))

    def kept(self, ids: Tensor) -> Tensor:
        """The features to keep."""
        return torch.tensor([self._root(each) in self._reasons for each in ids.tolist()], dtype=torch.bool)

    def _hold(self, root: int, reason: Reason) -> None:
        known = self._reasons.get(root)
        if known is None or known.hold < reason.hold:
            self._reasons[root] = reason

    def _root(self, feature: int) -> int:
        while self._parent[feature] != feature:
            self._parent[feature] = self._parent[self._parent[feature]]
            feature = self._parent[feature]
        return feature
