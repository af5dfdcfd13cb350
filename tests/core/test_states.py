"""Damaged states: loading one is a ValueError with a sentence and changes nothing, or the run ends as it should."""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.schedule import Phase

TOTAL = 24  # optimizer steps: 6 of warm-up, 8 to sparsify, 4 to stabilise, 6 of fine-tuning


class Training:
    def __init__(self, method: str = "scl") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sparsifier = gossamer.Sparsifier(
            self.model, self.optimizer, sparsity=0.8, total_steps=TOTAL, method=method
        )

    def steps(self, last: int) -> "Training":
        for step in range(self.sparsifier.step, last):
            self.optimizer.zero_grad()
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
        return self

    def everything(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.sparsifier.state_dict()))


OTHERS: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**40, 2**62, 2**63, 10**30, 1.5, math.nan),
    *("", "warm-up", "sparsify", "fine-tune", "finished", b"bytes"),
    *([], {}, {"a": 1}, {1: 2}, (), object()),
)


def nested() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    return deep


NESTED = nested()


def other_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Of other values, types, shapes and layouts."""
    numbers = tensor.float()
    for value in (math.nan, math.inf, -math.inf, 3e38, 0.0, -1.0):
        yield torch.full_like(numbers, value)
    yield torch.full_like(numbers, 1e300, dtype=torch.float64)
    yield torch.full_like(numbers, 2**40, dtype=torch.int64)
    yield torch.full_like(numbers, -5, dtype=torch.int64)
    yield torch.ones_like(numbers, dtype=torch.bool)
    yield torch.zeros_like(numbers, dtype=torch.bool)
    yield from (numbers.to(dtype) for dtype in (torch.complex64, torch.float16, torch.float8_e4m3fn))
    yield numbers.to("meta")
    yield torch.zeros(())
    yield torch.zeros(0)
    yield torch.zeros(*numbers.shape, 1)
    yield torch.zeros(()).expand(numbers.shape)
    yield nn.Parameter(numbers.clone())
    if numbers.dim():
        yield numbers[:0]
        yield numbers.to_sparse()
        yield torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8)
        yield torch.nested.nested_tensor([numbers.clone()])
    if numbers.dim() == 2:
        yield numbers.T
        yield numbers.to_sparse_csr()


def damages(state: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every entry left out, doubled, or something else: the path to it, and what is there instead."""

    def visit(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        if path:
            yield path, KeyError
        yield from ((path, other) for other in (*OTHERS, NESTED))
        if isinstance(value, Tensor):
            yield from ((path, other) for other in other_tensors(value))
        if isinstance(value, int):
            yield from ((path, other) for other in (value + 1, value - 1, value * 1000))
        if isinstance(value, Mapping):
            yield path, {**value, "another": torch.zeros(3)}
            yield path, {**value, 5: torch.zeros(3)}
            for name in value:
                yield from visit(value[name], (*path, name))

    return visit(state, ())


def damaged(state: dict[str, Any], path: tuple[Any, ...], instead: Any) -> Any:
    if not path:
        return instead
    state = {name: dict(value) if isinstance(value, Mapping) else value for name, value in state.items()}
    inner = state
    for name in path[:-1]:
        inner[name] = dict(inner[name])
        inner = inner[name]
    if instead is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = instead
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|quantize_per_tensor)")
@pytest.mark.parametrize(("saved", "target"), [(3, 12), (10, 0), (10, 12), (20, 12), (TOTAL, 0)])
def test_a_damaged_state_is_refused_whole_or_the_run_ends_as_it_should(saved: int, target: int) -> None:
    source = Training().steps(saved)
    if saved == TOTAL:
        source.sparsifier.finish()
    weights, state = source.everything()
    del source
    run = Training().steps(target)
    refused = accepted = 0
    for path, instead in damages(state):
        before, refusal = run.everything(), None
        try:
            run.sparsifier.load_state_dict(damaged(state, path, instead))
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            refused += 1
            assert 20 < len(refusal) < 500, path
            assert same(run.everything(), before), path
            continue
        accepted += 1
        ends_as_it_should(run, weights, str(path))
        run = Training().steps(target)
    assert refused > 10 * accepted / 3 > 0
    run.steps(TOTAL).sparsifier.finish()  # after all the refusals
    assert int(sum(mask.sum() for mask in run.sparsifier.masks.values())) == 16


def ends_as_it_should(run: Training, weights: dict[str, Tensor], path: str) -> None:
    """With the zeros that were asked for, or with an error that says why not."""
    sparsifier, problem = run.sparsifier, None
    if sparsifier.phase is not Phase.FINISHED:
        run.model.load_state_dict(weights)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a run that was finished early, by a longer plan
                run.steps(min(TOTAL, sparsifier.step + TOTAL))
                sparsifier.metrics()
                if "log" in sparsifier.state_dict():
                    sparsifier.health()
                sparsifier.finish()
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            assert "not finite" in problem or "final masks keep" in problem, path
            return
        assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters()), path
    assert int(sum(mask.sum() for mask in sparsifier.masks.values())) == 16, path


@pytest.mark.parametrize("method", ["gradual", "str", "rigl", "l0", "hyperflux"])
def test_states_of_other_methods_are_checked_too(method: str) -> None:
    state = Training(method).steps(10).sparsifier.state_dict()
    run = Training(method).steps(12)
    before = run.everything()
    for name in state["network"]:
        for instead in (KeyError, None, torch.zeros(3, 3), state["network"][name].to("meta")):
            with pytest.raises(ValueError, match="in the state"):
                run.sparsifier.load_state_dict(damaged(state, ("network", name), instead))
    for instead in (KeyError, None, torch.zeros(3, 3), torch.full((8, 6), math.nan)):
        with pytest.raises(ValueError, match="state"):
            run.sparsifier.load_state_dict(damaged(state, ("dense", "0.weight"), instead))
    assert same(run.everything(), before)
