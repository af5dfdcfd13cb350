"""The model as a graph of calls to its own layers: by ``torch.fx``, or else by ``torch.export``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from gossamer._forward import arguments
from gossamer.compaction.exported import trace_by_export


class UntraceableError(ValueError):
    """The forward pass of a model cannot be written as a graph, so nothing can be taken out of it."""


def trace(model: nn.Module, example_input: object) -> tuple[fx.GraphModule, str]:
    """The graph of a model, which shares the model's tensors, and the tool that made it: torch.fx, or torch.export
    where that cannot follow the model's code. Inputs that the example leaves at None stay None."""
    try:
        # The fused kernel for inference would look at the values of its input.
        with _no_fast_path():
            graph = _Tracer().trace(model, _absent(model, example_input))
        return fx.GraphModule(model, graph, type(model).__name__), "torch.fx"
    except Exception as error:
        first = error
    try:
        with _no_fast_path():
            return trace_by_export(model, example_input), "torch.export"
    except Exception as error:
        raise UntraceableError(
            f"expected a forward pass that can be traced, but in {type(model).__name__} torch.fx says: "
            f"{_short(first)}; and torch.export: {_short(error)}. The model is left as it is. Usual causes are "
            "branches or loops that depend on the values of tensors; compact the traceable parts one by one"
        ) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Tracer(fx.Tracer):
    """Looks into the transformer layers of torch, which otherwise count as one call each."""

    proxy_buffer_attributes = True  # so that a mask can be cut to the length of the input
    _INSIDE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) not in self._INSIDE and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(m) is nn.TransformerEncoder and len(args) == 1 and not any(kwargs.values()):
            return _in_turn(m, args[0])
        if type(m) is nn.TransformerDecoder and len(args) == 2 and not any(kwargs.values()):
            return _in_turn(m, *args)
        return super().call_module(m, forward, args, kwargs)


def _in_turn(stack: nn.TransformerEncoder | nn.TransformerDecoder, x: Any, *memory: Any) -> Any:
    """What a stack of layers computes without masks; its own code asks whether its input is nested, say."""
    for layer in stack.layers:
        x = layer(x, *memory)
    return x if stack.norm is None else stack.norm(x)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _absent(model: nn.Module, example_input: object) -> dict[str, None]:
    positional, named = arguments(example_input)
    parameters = list(inspect.signature(model.forward).parameters.values())[len(positional) :]
    return {each.name: None for each in parameters if each.default is None and each.name not in named}
