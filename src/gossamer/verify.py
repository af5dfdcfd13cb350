"""Comparison of two forms of a model: the same zeros in every prunable tensor, and the same outputs.

For use after any step that may lose zeros or change results: saving and loading, export, quantisation, compaction,
further training. ``other`` is another module, a state dict, an exported program, or a function of the same inputs (an
ONNX session, say); for a function, only outputs are compared.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gossamer.forward import arguments, undisturbed
from gossamer.patterns import Patterns, Shape, assign, canonical, described
from gossamer.prunable import select
from gossamer.report import report
from gossamer.selectors import Selectors, clean_name, some
from gossamer.sharding import whole

Other: TypeAlias = nn.Module | torch.export.ExportedProgram | Mapping[str, Tensor] | Callable[..., Any]


class DifferenceError(ValueError):
    """Two forms of a model differ."""


@dataclass(frozen=True)
class Verification:
    """The result of ``gossamer.verify``. It is true if nothing differs; ``str`` lists the differences."""

    differences: tuple[str, ...]
    """One sentence per difference."""
    tensors: int
    """Tensors whose zeros were compared."""
    outputs: int
    """Output tensors that were compared."""
    max_absolute: float
    """Largest difference of any output value."""
    max_relative: float
    """The same, relative to the largest value of the output tensor."""
    ignored: tuple[str, ...]
    """Outputs that were not compared, because they are neither tensors nor numbers."""
    patterns: str = ""
    """The patterns that were checked."""

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        compared = [f"zeros of {self.tensors} tensors"] if self.tensors else []
        if self.outputs:
            compared.append(
                f"{self.outputs} outputs (largest difference {self.max_absolute:.3g}, relative {self.max_relative:.3g})"
            )
        if self.patterns:
            compared.append(f"patterns ({self.patterns})")
        verdict = f"{len(self.differences)} differences" if self.differences else "same"
        lines = [f"{verdict}; compared {' and '.join(compared) or 'nothing'}"]
        lines += [f"  - {difference}" for difference in self.differences]
        if self.ignored:
            lines.append(f"  not compared: {some(self.ignored)}")
        return "\n".join(lines)

    def raise_if_different(self) -> None:
        """Raise ``DifferenceError`` with all differences, if there are any."""
        if self.differences:
            raise DifferenceError(str(self))


def verify(
    model: nn.Module | Mapping[str, Tensor],
    other: Other,
    example_input: object = None,
    *,
    tolerance: float = 0.0,
    pattern: Patterns = None,
    include: Selectors = None,
    exclude: Selectors = None,
) -> Verification:
    """Compare ``model`` with ``other``: zeros tensor by tensor, and with ``example_input`` the outputs.

    Zeros have to be at exactly the same positions. An output may differ by ``tolerance`` times the largest absolute
    value of that output tensor; 0 requires equal values (NaN equals NaN). Both models run in evaluation mode and in
    their own precision, on copies of ``example_input`` (a tensor, a tuple of inputs or a mapping of keyword inputs).
    Neither is changed. With ``pattern``, as in ``Sparsifier``, tensors of ``model`` without it are differences, too.
    ``include`` and ``exclude`` are as in ``select``.

    ``model`` may also be a state dict. Its weights are those that ``report`` counts; it has no outputs, and takes
    neither ``example_input`` nor ``pattern``.
    """
    if not tolerance >= 0:
        raise ValueError(f"expected a tolerance (relative to the largest output) of at least 0, got {tolerance}")
    if isinstance(other, torch.export.ExportedProgram):
        other = other.module()
    differences, patterns = list[str](), ""
    if isinstance(model, nn.Module):
        differences, patterns = _pattern_differences(model, pattern, include, exclude)
    elif example_input is not None or pattern is not None or not isinstance(other, nn.Module | Mapping):
        raise TypeError("expected a model whose outputs can be compared, got a state dict: pass the model itself")
    tensors = 0
    runnable: Callable[..., Any] | None
    if isinstance(other, nn.Module | Mapping):
        weights = [*_weights_of(model, include, exclude)]
        tensors = len(weights)
        differences += _zero_differences(weights, _tensors_of(other))
        runnable = other if isinstance(other, nn.Module) else None
        if example_input is not None and isinstance(other, Mapping) and isinstance(model, nn.Module):
            runnable = _filled(model, other, differences)
    elif callable(other):
        if example_input is None:
            raise TypeError("a function can only be compared by its outputs; pass example_input")
        runnable = other
    else:
        raise TypeError(f"expected a module, a state dict or a function to compare with, got {type(other).__name__}")

    found = _Outputs((), 0, 0.0, 0.0, ())
    if example_input is not None and runnable is not None and isinstance(model, nn.Module):
        expected = _run(model, example_input)
        found = _compare_outputs(expected, _run(runnable, example_input), tolerance)
    return Verification(
        differences=(*differences, *found.differences),
        tensors=tensors,
        outputs=found.count,
        max_absolute=found.max_absolute,
        max_relative=found.max_relative,
        ignored=found.ignored,
        patterns=patterns,
    )


def _pattern_differences(
    model: nn.Module, pattern: Patterns, include: Selectors, exclude: Selectors
) -> tuple[list[str], str]:
    """The tensors that do not have their pattern, and the patterns in a line."""
    if pattern is None:
        return [], ""
    weights = select(model, include=include, exclude=exclude, for_training=False)
    assigned = assign(pattern, [Shape.of_weight(weight) for weight in weights])
    assert assigned is not None
    differences = []
    for weight, each in zip(weights, assigned, strict=True):
        kept = canonical(_plain(weight.parameter) != 0, weight.feature_axis, weight.groups)
        broken = 0 if each is None else each.broken(kept, exactly=False)
        if broken:
            differences.append(f"{weight.name}: {broken:,} groups do not have the pattern {each}")
    return differences, described(assigned, [weight.name for weight in weights])


def _tensors_of(other: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors by name without the parts that wrappers insert; tied tensors appear under each of their names."""
    if isinstance(other, nn.Module):
        named = other.named_parameters(remove_duplicate=False)
        everything: dict[str, Tensor] = dict(other.named_buffers(remove_duplicate=False))
        everything.update(named)
        return {clean_name(name, other): tensor for name, tensor in everything.items()}
    return dict(other)


def _weights_of(
    model: nn.Module | Mapping[str, Tensor], include: Selectors, exclude: Selectors
) -> Iterator[tuple[list[str], Tensor]]:
    """The weights to compare, each with the names that it may have elsewhere, its own first."""
    if not isinstance(model, nn.Module):
        yield from (
            ([name], tensor) for name, tensor in report(model, include=include, exclude=exclude).tensors.items()
        )
        return
    for weight in select(model, include=include, exclude=exclude, for_training=False):
        names = [weight.name, *(f"{use.module_name}.{use.attribute}" for use in weight.uses)]
        yield [*names, *(clean_name(name, model) for name in names)], weight.parameter


def _zero_differences(weights: Sequence[tuple[list[str], Tensor]], others: Mapping[str, Tensor]) -> Iterator[str]:
    for names, weight in weights:
        name = names[0]
        other = next((others[each] for each in names if each in others), None)
        if other is None:
            yield f"{name} is missing"
            continue
        here, there = _plain(weight), _plain(other)
        if here.shape != there.shape:
            yield f"{name} has shape {tuple(there.shape)}, expected {tuple(here.shape)}"
            continue
        is_zero, is_other_zero = here == 0, there.to(here.device) == 0
        lost, new = is_zero & ~is_other_zero, is_other_zero & ~is_zero
        for mask, what in ((lost, "zeros lost"), (new, "new zeros")):
            count = int(mask.sum())
            if count:
                first = tuple(torch.nonzero(mask)[0].tolist())
                yield f"{name}: {count:,} {what} of {int(is_zero.sum()):,}, the first at {first}"


def _plain(tensor: Tensor) -> Tensor:
    tensor = whole(tensor.detach())
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _filled(model: nn.Module, state: Mapping[str, Tensor], differences: list[str]) -> nn.Module | None:
    """A copy of ``model`` with the values of ``state``, or None (with a reason in ``differences``) if they do not
    fit."""
    filled = copy.deepcopy(model)
    try:
        filled.load_state_dict({name: _plain(tensor) for name, tensor in state.items()})
    except RuntimeError as error:
        differences.append(f"outputs cannot be compared, the state dict does not fit: {error}")
        return None
    return filled


def _run(runnable: Callable[..., Any], example_input: object) -> object:
    precision = _precision(runnable)

    def copy_of(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(precision, copy=True) if precision and leaf.is_floating_point() else leaf.clone()

    positional, keyword = arguments(tree_map(copy_of, example_input))
    with ExitStack() as stack:
        # Both sides draw the same random numbers, if any.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        if isinstance(runnable, nn.Module):
            stack.enter_context(undisturbed(runnable))
        return runnable(*positional, **keyword)


def _precision(runnable: Callable[..., Any]) -> torch.dtype | None:
    """The dtype of the parameters, if they all have the same: a copy in half precision needs inputs of its dtype."""
    if not isinstance(runnable, nn.Module):
        return None
    types = {parameter.dtype for parameter in runnable.parameters() if parameter.is_floating_point()}
    return types.pop() if len(types) == 1 else None


@dataclass(frozen=True)
class _Outputs:
    differences: tuple[str, ...]
    count: int
    max_absolute: float
    max_relative: float
    ignored: tuple[str, ...]


def _compare_outputs(expected: object, got: object, tolerance: float) -> _Outputs:
    ignored: list[str] = []
    here, there = dict(_leaves(expected, "output", ignored)), dict(_leaves(got, "output", ignored))
    differences = [f"{name} is missing" for name in here if name not in there]
    differences += [f"{name} was not expected" for name in there if name not in here]
    absolutes, relatives = [0.0], [0.0]
    both = [name for name in here if name in there]
    for name in both:
        a, b = here[name], there[name].to(here[name].device)
        if a.shape != b.shape:
            differences.append(f"{name} has shape {tuple(b.shape)}, expected {tuple(a.shape)}")
            continue
        if a.numel() == 0:
            continue
        absolute, scale, index = _largest_difference(a, b)
        relative = absolute / scale if scale else (float("inf") if absolute else 0.0)
        absolutes.append(absolute)
        relatives.append(relative)
        if not relative <= tolerance:
            differences.append(
                f"{name} differs by up to {absolute:.3g} (relative {relative:.3g}, "
                f"tolerance {tolerance:.3g}), most at {index}"
            )
    if not both and not differences:
        differences.append("no tensor among the outputs, so nothing could be compared")
    return _Outputs(tuple(differences), len(both), max(absolutes), max(relatives), tuple(dict.fromkeys(ignored)))


def _largest_difference(a: Tensor, b: Tensor) -> tuple[float, float, tuple[int, ...]]:
    """(largest absolute difference, largest finite value of ``a``, position); inf if only one of them is NaN."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)
    largest, position = apart.flatten().max(dim=0)
    finite = torch.where(a.isfinite(), a.abs(), 0.0)
    index = tuple(int(each) for each in np.unravel_index(int(position), tuple(a.shape))) if a.ndim else ()
    return float(largest), float(finite.max()), index


def _leaves(value: object, name: str, ignored: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, array and number in a nested output, with its path as the name."""
    if isinstance(value, Tensor):
        yield name, _plain(value)
    elif isinstance(value, np.ndarray | np.number | bool | int | float | complex):
        yield name, torch.as_tensor(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}[{key!r}]", ignored)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{name}[{index}]", ignored)
    elif value is not None:
        ignored.append(f"{name} ({type(value).__name__})")
