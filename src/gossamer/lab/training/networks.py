"""The network of a run by name, checked against its data before anything is trained."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.forward import undisturbed
from gossamer.hints import did_you_mean
from gossamer.lab import models
from gossamer.lab.data import kind_of
from gossamer.lab.models.indrnn import IndRNN, limit_recurrence_
from gossamer.lab.training.run import Run
from gossamer.lab.training.setting_names import options_of

_LARGEST = 100_000  # limit on modules and parameters of a network; ResNet-110 has about a thousand


def create(run: Run, num_classes: int) -> nn.Module:
    """Build the run's network with fresh random weights."""
    check_options(run)
    builder = models.entry(run.model).builder
    if not run.model_options:
        return builder(num_classes=num_classes)
    try:
        with models.at_most(_LARGEST, run.model_options, "model_options"):
            return builder(num_classes=num_classes, **run.model_options)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        options = ", ".join(f"model_options.{name}={value}" for name, value in run.model_options.items())
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{run.model} cannot be built with {options} ({first_line}): change or drop them") from error


def check_options(run: Run) -> None:
    """Refuse an unknown network, and arguments that it does not take."""
    allowed = options_of(run.model)
    for name in run.model_options:
        if name not in allowed:
            hint = did_you_mean(name, allowed, f"its options are {', '.join(allowed)}" if allowed else "it has none")
            raise ValueError(f"{run.model} does not take model_options.{name}: {hint}")


def keep_stable(model: nn.Module, optimizer: Optimizer, example: Tensor) -> None:
    """Clip the recurrent weights of an IndRNN after every optimizer step, as its gradients would explode otherwise."""
    if isinstance(model, IndRNN):
        steps = example[0].numel() // model.input_size
        optimizer.register_step_post_hook(lambda *_: limit_recurrence_(model, steps=steps))


def check_shapes(run: Run, model: nn.Module, example: Tensor, num_classes: int) -> None:
    """Refuse a network that does not fit the data, and say what to change."""
    try:
        with undisturbed(model):
            out = model(example)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"{run.model} does not take batches of {run.data}, of shape {tuple(example.shape)} ({first_line}): "
            f"choose a network for this data{' or other model_options' if run.model_options else ''}; "
            f"{_takes(run.model)}"
        ) from error
    logits = out[0] if isinstance(out, tuple) else out
    if not isinstance(logits, Tensor) or logits.shape[-1] != num_classes:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"expected {run.model} to give {num_classes} logits for {run.data}, got {got}")


def _takes(name: str) -> str:
    entry = models.entry(name)
    takes = f"{name} takes samples of shape {entry.input_shape}"
    if kind_of(entry.data) is None:
        return f"{takes}, for which there is no data set; train it with gossamer reproduce map-fitting"
    return f"{takes}, such as those of {entry.data}"


def to_layout(model: nn.Module, run: Run, device: torch.device) -> nn.Module:
    """The model on the device, in the memory layout of the run."""
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if run.channels_last else model  # type: ignore[call-overload]
