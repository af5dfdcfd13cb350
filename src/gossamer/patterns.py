"""Patterns of zeros: N:M, blocks, and whole rows and filters.

A pattern divides the weights of a tensor into groups. In an N:M group, exactly N of M weights are kept. A group of a
block pattern is kept or pruned as a whole. The tensor is seen as (output features, positions of the kernel, inputs):

    "2:4"         2 of every 4 consecutive inputs of one feature (at one position of the kernel) are kept
    "block:16x1"  blocks of 16 consecutive features and 1 input
    "row"         output features: the rows of a linear layer, the filters of a convolution
    "filter"      the same, of convolutions only
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from gossamer.hints import did_you_mean
from gossamer.prunable import Weight
from gossamer.selectors import some
from gossamer.target import Target, make_target

Patterns: TypeAlias = str | Mapping[str, str | None] | None
"""One pattern for all tensors that it fits, or one for each name pattern; None means single weights."""

_EXAMPLES = "'2:4' (any N:M), 'block:1x4' (any size), 'row' or 'filter'"


@dataclass(frozen=True)
class NM:
    """Exactly `keep` of every `of` consecutive inputs are kept."""

    keep: int
    of: int

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"

    def misfit(self, shape: "Shape") -> str:
        """Why the tensor cannot have this pattern; empty if it can."""
        return shape.problem or _not_divided(shape.inputs, self.of, "inputs per feature")

    def grouped(self, values: Tensor) -> Tensor:
        """(groups, weights of a group), from (features, positions, inputs)."""
        return values.reshape(-1, self.of)

    def broken(self, kept: Tensor, *, exactly: bool = True) -> int:
        """The number of groups that do not have this pattern. `kept` is a mask or, unless `exactly`, of the weights
        that are not zero, as a kept weight may be zero, too."""
        counts = self.grouped(kept).sum(1)
        return int((counts != self.keep if exactly else counts > self.keep).sum())


@dataclass(frozen=True)
class Block:
    """Blocks of `rows` features and `columns` inputs are kept or pruned as a whole."""

    rows: int
    columns: int | None  # None: all the weights of the features
    name: str

    def __str__(self) -> str:
        return self.name

    def misfit(self, shape: "Shape") -> str:
        """Why the tensor cannot have this pattern; empty if it can."""
        if self.name == "filter" and not shape.convolves:
            return "it is not the weight of a convolution"
        divided = "" if self.columns is None else _not_divided(shape.inputs, self.columns, "inputs per feature")
        return shape.problem or divided or _not_divided(shape.features, self.rows, "features")

    def grouped(self, values: Tensor) -> Tensor:
        """(groups, weights of a group), from (features, positions, inputs)."""
        features, positions, inputs = values.shape
        columns = inputs if self.columns is None else self.columns
        blocks = values.reshape(features // self.rows, self.rows, positions, inputs // columns, columns)
        if self.columns is None:
            return blocks.reshape(features // self.rows, -1)
        return blocks.permute(0, 2, 3, 1, 4).reshape(-1, self.rows * columns)

    def broken(self, kept: Tensor, *, exactly: bool = True) -> int:
        """The number of groups that do not have this pattern. `kept` is a mask."""
        groups = self.grouped(kept)
        return int((groups.any(1) & ~groups.all(1)).sum())


Pattern: TypeAlias = NM | Block


@dataclass(frozen=True)
class Shape:
    """A tensor as a pattern sees it."""

    names: tuple[str, ...]
    features: int
    positions: int
    inputs: int
    convolves: bool

    @property
    def size(self) -> int:
        return self.features * self.positions * self.inputs

    @property
    def problem(self) -> str:
        """Why the tensor can have no pattern; empty if it can."""
        unknown = self.positions > 1 and not self.convolves
        return "it is neither a matrix nor the weight of a convolution" if unknown else ""

    @staticmethod
    def of_weight(weight: Weight) -> "Shape":
        names = (weight.name, *(f"{use.module_name}.{use.attribute}" for use in weight.uses))
        convolves = any(isinstance(use.module, _ConvNd) for use in weight.uses)
        return Shape(
            names, *canonical_shape(tuple(weight.parameter.shape), weight.feature_axis, weight.groups), convolves
        )

    @staticmethod
    def features_first(name: str, shape: Sequence[int]) -> "Shape":
        """Of a tensor with output features first and, if it has four dimensions, inputs last."""
        if len(shape) == 4:
            return Shape((name,), shape[0], shape[1] * shape[2], shape[3], True)
        return Shape((name,), shape[0], math.prod(shape[2:]), shape[1], len(shape) > 2)


def canonical_shape(shape: tuple[int, ...], feature_axis: int, groups: int) -> tuple[int, int, int]:
    """(features, positions, inputs) of a parameter."""
    if feature_axis == 0:
        return shape[0], math.prod(shape[2:]), shape[1]
    return groups * shape[1], math.prod(shape[2:]), shape[0] // groups


def canonical(values: Tensor, feature_axis: int = 0, groups: int = 1) -> Tensor:
    """A parameter, or a mask of it, as (features, positions, inputs)."""
    features, positions, inputs = canonical_shape(tuple(values.shape), feature_axis, groups)
    if feature_axis == 0:
        return values.reshape(features, inputs, positions).transpose(1, 2)
    grouped = values.reshape(groups, inputs, values.shape[1], positions)
    return grouped.permute(0, 2, 3, 1).reshape(features, positions, inputs)


# --- from text to the pattern of each tensor ---


def parse(text: str) -> Pattern:
    """The pattern that a text names."""
    if not isinstance(text, str):
        raise TypeError(f"expected a pattern such as {_EXAMPLES}, got {text!r}")
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found:
        keep, of = int(found[1]), int(found[2])
        if not 0 < keep < of:
            raise ValueError(f"expected N:M with N from 1 to M - 1, such as '2:4', got {text!r}")
        return NM(keep, of)
    found = re.fullmatch(r"block:(\d+)x(\d+)", text)
    if found:
        rows, columns = int(found[1]), int(found[2])
        if rows * columns < 2:
            raise ValueError(f"expected blocks of at least 2 weights, such as 'block:1x4', got {text!r}")
        return Block(rows, columns, text)
    if text in ("row", "filter"):
        return Block(1, None, text)
    raise ValueError(f"expected a pattern such as {_EXAMPLES}, got {text!r}")


def parse_option(text: str) -> Patterns:
    """The value of `--pattern`: one pattern, or NAME=PATTERN;NAME=PATTERN, where `none` means single weights."""
    if "=" not in text:
        parse(text)
        return text
    named: dict[str, str | None] = {}
    for entry in text.split(";"):
        name, equals, pattern = (part.strip() for part in entry.partition("="))
        if not (name and equals and pattern):
            raise ValueError(f"expected NAME=PATTERN;NAME=PATTERN, such as '*.attn.*=2:4;head=none', got {text!r}")
        named[name] = None if pattern == "none" else str(parse(pattern))
    return named


def assign(patterns: Patterns, shapes: Sequence[Shape]) -> tuple[Pattern | None, ...] | None:
    """The pattern of each tensor; None for all if `patterns` is None.

    A single pattern is for all the tensors that it fits, and the others have none. In a mapping from name patterns, the
    last entry that matches a tensor, or a module that contains it, decides, and its pattern has to fit.
    """
    if patterns is None:
        return None
    if isinstance(patterns, str):
        pattern = parse(patterns)
        found = tuple(None if pattern.misfit(shape) else pattern for shape in shapes)
        if not any(found):
            reasons = some([f"{shape.names[0]}: {pattern.misfit(shape)}" for shape in shapes])
            raise ValueError(f"pattern={patterns!r} fits none of the tensors ({reasons})")
        return found
    if not isinstance(patterns, Mapping):
        raise TypeError(f"expected pattern= to be a text or a mapping from name patterns, got {patterns!r}")
    chosen: list[Pattern | None] = [None] * len(shapes)
    problems = []
    for name, text in patterns.items():
        pattern_or_none = None if text is None else parse(text)
        matching = [index for index, shape in enumerate(shapes) if _matches(shape, name)]
        if not matching:
            names = [shape.names[0] for shape in shapes]
            problems.append(
                f"{name!r} matches no tensor; {did_you_mean(name, names, f'the tensors are {some(names)}')}"
            )
        for index in matching:
            chosen[index] = pattern_or_none
    for each, shape in zip(chosen, shapes, strict=True):
        if each is not None and (reason := each.misfit(shape)):
            problems.append(f"{each} does not fit {shape.names[0]}: {reason}")
    if problems:
        raise ValueError(
            "pattern= does not fit the model:\n  - "
            + "\n  - ".join(problems)
            + "\nset tensors that cannot have the pattern to None in a later entry (single weights), or pass exclude="
        )
    return tuple(chosen)


_DETECTED = (2, 4, 8, 16, 32)  # of the M of N:M, and of the sides of blocks
_HEAD = 64  # features that are looked at before all others


def detect(kept: Tensor, *, convolves: bool) -> str:
    """The pattern of a mask, (features, positions, inputs); empty if it has none, or no zeros, or only zeros.

    Of several patterns, the coarsest block, else the N:M with the smallest M. Sizes are powers of two up to 32.
    """
    features, _, inputs = kept.shape
    total = int(torch.count_nonzero(kept))
    if total in (0, kept.numel()):
        return ""
    whole = Block(1, None, "filter" if convolves else "row")
    columns = [Block(1, size, f"block:1x{size}") for size in _DETECTED if inputs % size == 0]
    rows = [Block(size, 1, f"block:{size}x1") for size in _DETECTED if features % size == 0]
    if _has(kept, whole):
        return str(whole)
    wide = max((each.columns or 1 for each in columns if _has(kept, each)), default=1)
    high = max((each.rows for each in rows if _has(kept, each)), default=1)
    if wide * high > 1:
        return f"block:{high}x{wide}"
    for of in _DETECTED:
        keep, rest = divmod(total * of, kept.numel())
        if inputs % of == rest == 0 and 0 < keep < of and _has(kept, NM(keep, of)):
            return f"{keep}:{of}"
    return ""


def _has(kept: Tensor, pattern: Pattern) -> bool:
    """Whether a mask has a pattern that fits it."""
    return not pattern.broken(kept[:_HEAD]) and not pattern.broken(kept)


def described(patterns: Sequence[Pattern | None], names: Sequence[str]) -> str:
    """The patterns in a line, such as "2:4 (19 tensors), single weights (conv1.weight)"."""
    by_text: dict[str, list[str]] = {}
    for pattern, name in zip(patterns, names, strict=True):
        by_text.setdefault("single weights" if pattern is None else str(pattern), []).append(name)
    return "; ".join(
        f"{text} in {some(own, 3)}" if text == "single weights" or len(by_text) > 2 else f"{text} in {len(own)} tensors"
        for text, own in by_text.items()
    )


def _matches(shape: Shape, pattern: str) -> bool:
    """Whether a name pattern matches the tensor or a module that contains it."""
    parts = [name.split(".") for name in shape.names]
    scopes = {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}
    return any(fnmatchcase(scope, pattern) for scope in scopes)


def _not_divided(length: int, size: int, what: str) -> str:
    return f"{size} does not divide its {length} {what}" if length % size else ""


# --- the budget ---


def target_of(
    patterns: Sequence[Pattern | None],
    shapes: Sequence[Shape],
    *,
    sparsity: float | None = None,
    flops: float | None = None,
    decay: float | None = None,
    positions: Sequence[int] | None = None,
    min_density: float = 0.0,
) -> Target:
    """The target of a run with patterns. N:M fixes the sparsity of its tensors; all others share the rest."""
    sizes = [shape.size for shape in shapes]
    fixed = [
        each.keep * size // each.of if isinstance(each, NM) else 0 for each, size in zip(patterns, sizes, strict=True)
    ]
    if decay is not None:
        raise ValueError("pattern= needs an exact budget, got decay=: pass sparsity= instead")
    if flops is not None and any(fixed):
        raise ValueError(
            "flops= cannot be combined with an N:M pattern, which fixes the density: pass sparsity= instead"
        )
    floors = [
        kept or _floor(size // group_size(each, shape), min_density) * group_size(each, shape)
        for kept, size, each, shape in zip(fixed, sizes, patterns, shapes, strict=True)
    ]
    if sparsity is None and flops is None and any(fixed):  # tensors without a pattern stay dense
        return Target(None, sum(sizes), sum(kept or size for kept, size in zip(fixed, sizes, strict=True)), None)
    most = sum(kept or size for kept, size in zip(fixed, sizes, strict=True))
    target = make_target(sizes, sparsity=sparsity, flops=flops, positions=positions, floors=[0] * len(sizes))
    if target.costs is not None:
        return make_target(sizes, flops=flops, positions=positions, floors=floors)
    if not sum(floors) <= target.final <= most:
        given = ", ".join(dict.fromkeys(str(each) for each in patterns if each is not None))
        least, highest = 1 - most / target.total, 1 - sum(floors) / target.total
        raise ValueError(
            f"sparsity={sparsity} keeps {target.final} of {target.total} weights, but pattern {given} allows "
            f"{sum(floors)} to {most}, a sparsity of {least:.6g} to {highest:.6g}: ask for one of these"
            + (", or omit sparsity= to leave the tensors without a pattern dense" if any(fixed) else "")
        )
    return target


def group_size(pattern: Pattern | None, shape: Shape) -> int:
    """The number of weights that are pruned together."""
    if not isinstance(pattern, Block):
        return 1
    columns = shape.positions * shape.inputs if pattern.columns is None else pattern.columns
    return pattern.rows * columns


def _floor(groups: int, min_density: float) -> int:
    return min(groups, max(1, math.ceil(min_density * groups))) if min_density else 0
