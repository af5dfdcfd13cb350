"""The model as a graph of calls to its own layers: by ``torch.fx``, or else by ``torch.export``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from gossamer._forward import arguments
from gossamer.deployment.compaction.exported import StateChangedError, trace_by_export
from gossamer.deployment.compaction.writes import show_writes


class UntraceableError(ValueError):
    """The forward pass of a model cannot be written as a graph, so nothing can be taken out of it."""


def trace(model: nn.Module, example_input: object) -> tuple[fx.GraphModule, str]:
    """The graph of a model, which shares the model's tensors, and the tool that made it: torch.fx, or torch.export
    where that cannot follow the model's code. Inputs that the example leaves at None stay None."""
    name = type(model).__name__
    try:
        found, problem, advice = _by_symbols(model, example_input)
        return (found, "torch.fx") if found is not None else (_by_export(model, example_input), "torch.export")
    except StateChangedError as error:
        raise UntraceableError(
            f"expected a forward pass that leaves the model as it is, but in {name} {error}. The model is left as it "
            "is; keep the forward pass from changing it in evaluation mode (if self.training: ...)"
        ) from error
    except _ExportError as error:
        raise UntraceableError(
            f"expected a forward pass that can be traced, but in {name} {problem}; and torch.export says: {error}. "
            f"The model is left as it is. {advice}"
        ) from error


class _ExportError(ValueError):
    """What torch.export said."""


def _by_export(model: nn.Module, example_input: object) -> fx.GraphModule:
    try:
        with _no_fast_path():
            return trace_by_export(model, example_input)
    except StateChangedError:
        raise
    except Exception as error:
        raise _ExportError(_short(error)) from error


def _by_symbols(model: nn.Module, example_input: object) -> tuple[fx.GraphModule | None, str, str]:
    """The graph by torch.fx; or None, why there is none, and what could be done about it."""
    tensors = _own_tensors(model)
    try:
        # The fused kernel for inference would look at the values of its input.
        with _no_fast_path():
            graph = _Tracer().trace(model, _absent(model, example_input))
    except Exception as error:
        advice = (
            "Usual causes are branches or loops that depend on the values of tensors; compact the traceable parts "
            "one by one"
        )
        return None, f"torch.fx says: {_short(error)}", advice
    finally:
        replaced = _put_back(model, tensors)
    if replaced:
        raise StateChangedError(f"its tensor {replaced[0]} is replaced by another")
    found = fx.GraphModule(model, graph, type(model).__name__)
    hidden = show_writes(found, example_input)
    if hidden is None:
        return found, "", ""
    if hidden.state:
        raise StateChangedError(str(hidden))
    return None, str(hidden), "Write that line so that it makes a new tensor, with torch.cat of the parts, say"


def _own_tensors(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**module._parameters, **module._buffers}.items()
    }


def _put_back(model: nn.Module, tensors: dict[tuple[str, str], Any]) -> list[str]:
    """Undo what tracing a forward pass did to the tensors of a model; gives the names of those that it replaced."""
    found = []
    for (path, name), value in tensors.items():
        module = model.get_submodule(path)
        if getattr(module, name) is not value:
            (module._parameters if name in module._parameters else module._buffers)[name] = value
            found.append(f"{path}.{name}".lstrip("."))
    return found


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Tracer(fx.Tracer):
    """Looks into the transformer layers of torch, which otherwise count as one call each."""

    proxy_buffer_attributes = True  # so that a mask can be cut to the length of the input
    record_stack_traces = True  # so that a call can be named by its line of code
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
