"""Forward passes without side effects: modes, random state and buffers are restored afterwards."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves


def arguments(example_input: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call, from a tuple, a mapping or a single value.

    A named tuple (such as a PackedSequence) is one value.
    """
    if type(example_input) is tuple:
        return example_input, {}
    if isinstance(example_input, Mapping):
        return (), {str(name): value for name, value in example_input.items()}
    return (example_input,), {}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores modes, random state and buffers afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {each.device.index for each in model.parameters() if each.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        try:
            _to_evaluation(model)
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, version, saved in buffers:
                module._buffers[name] = buffer
                if buffer._version != version:  # an unchanged buffer may belong to a pending backward pass
                    buffer.copy_(saved)


def check_example(model: nn.Module, example_input: object) -> None:
    """Run the example once, so that a wrong one raises the error of the model instead of an error of the tracer."""
    positional, named = arguments(example_input)
    try:
        with undisturbed(model):
            model(*positional, **named)
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise ValueError(
            f"expected an example input that {type(model).__name__} takes, got one for which it raises "
            f"{type(error).__name__}: {message}"
        ) from error


def _to_evaluation(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError:  # modules from torch.export have a fixed mode
        for module in model.modules():
            module.training = False


def first_input(values: object) -> Tensor | PackedSequence | None:
    """The first tensor or packed sequence in the nested ``values``."""
    leaves = tree_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor | PackedSequence)), None)


def batch_size_of(value: Tensor | PackedSequence | None) -> int:
    """The number of samples in ``value`` if the batch is its first axis."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return int(value.shape[0]) if value is not None and value.ndim else 1


def batch_size_at(module: nn.Module, value: Tensor) -> int | None:
    """The number of samples in ``value`` by the convention of the layer that receives it; None if it has none.

    Recurrent and attention layers may have the batch on their second axis, and all layers accept a single sample
    without a batch axis.
    """
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return int(value.shape[0 if module.batch_first else 1]) if value.ndim == 3 else 1
    if isinstance(module, _ConvNd):
        return int(value.shape[0]) if value.ndim == module.weight.ndim else 1
    if isinstance(module, nn.Linear | nn.RNNCellBase) and value.ndim == 1:
        return 1
    return None
