"""What the drawn tests of the kernels share: small graphs, inputs, and how near an output has to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.deployment.runtime.compiling import VARIANTS, NoCompilerError
from gossamer.deployment.runtime.native import load_native
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import Input, Network, Operation, Source, Value
from gossamer.deployment.runtime.plan import choices
from gossamer.deployment.runtime.weights import KERNELS, Kernel

try:
    load_native()
except NoCompilerError as error:
    pytest.skip(str(error), allow_module_level=True)


def variants() -> list[str]:
    found = []
    for variant in VARIANTS:
        try:
            load_native(variant)
        except ValueError:
            continue
        found.append(variant)
    return found


RUNNABLE = variants()
any_variant = st.sampled_from(RUNNABLE)
any_kernel = st.sampled_from(KERNELS)
any_sparsity = st.sampled_from([0.0, 0.5, 0.9, 0.97, 1.0])
drawn = settings(deadline=None, max_examples=120)


def sparse(shape: tuple[int, ...], sparsity: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < sparsity] = 0
    if shape[0] > 2:
        weight[1] = 0  # a row without connections
    return weight


def graph_of(x: Tensor, values: list[Value], operations: list[Operation], shape: tuple[int, ...]) -> Network:
    form = "picture" if x.dim() == 4 else "vector"
    out = "picture" if len(shape) == 4 else "vector"
    source = Source(form, tuple(x.shape))
    return Network(values, [Input(0, 0), *operations], (len(values) - 1,), (out,), (shape,), (source,), False)


def value_of(x: Tensor) -> Value:
    return Value(*x.shape[1:]) if x.dim() == 4 else Value(x.shape[1], 1, 1)


def run(graph: Network, x: Tensor, variant: str, lanes: int, kernel: Kernel | None = None, *more: Tensor) -> Tensor:
    """What the graph makes of x and other inputs, by the given kernel where that could run an operation."""
    given = tuple((number, kernel) for number, kernels in choices(graph, lanes).items() if kernel in kernels)
    model = NativeModel(graph, load_native(variant), Setting(lanes, 1, given))  # type: ignore[arg-type]
    model(x, *more)
    out = model(x, *more)  # the second call finds the arena as the first one left it
    assert isinstance(out, Tensor)
    return out


def assert_near(actual: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Within 1e-6 of the size of the terms that were summed (the same operation on absolute values).

    A sum may cancel to almost nothing; no float32 kernel is then right to a fixed part of the result.
    """
    assert actual.shape == expected.shape
    scale = float(terms.max()) if terms.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6 * scale)
