"""A network from a file: the tensors of a safetensors file, loaded into their architecture.

A file contains tensors, not code. The command line names the network, or the file itself (``network`` in its metadata,
see ``gossamer.save``), or the run.json that `gossamer train` writes next to it. Only the command line can name a
function to call, so that opening a file never runs code from it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.io.container import read_header
from gossamer.io.sparse_file import load
from gossamer.lab import models
from gossamer.lab.json_files import read_object
from gossamer.lab.models.digits_cnn import QUICK_START, DigitsNet

# The files of `gossamer train`: the network, and its description.
MODEL = "model.safetensors"
RUN = "run.json"

# Limits on modules and parameters of a network, per tensor in its file, and in addition; it is built twice.
_A_TENSOR, _SPARE = 16, 1000


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A network with its weights, and the shape of its inputs."""

    name: str
    model: nn.Module
    path: Path
    input_shape: tuple[int, ...]
    tokens: int
    """Size of the vocabulary if inputs are words with time first, (steps, batch); otherwise 0."""

    @property
    def batch_axis(self) -> int:
        return 1 if self.tokens else 0

    def example(self, batch: int) -> Tensor:
        """A random batch."""
        if self.tokens:
            return torch.randint(0, self.tokens, (*self.input_shape, batch))
        if self.name in models.names() and models.entry(self.name).sentences:
            return models.example_input(self.name, batch)
        return torch.randn(batch, *self.input_shape)


def open_network(
    path: str | os.PathLike[str],
    net: str | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    otherwise: tuple[str, Mapping[str, Any]] | None = None,
    max_bytes: int | None = None,
) -> StoredModel:
    """The network of a file or a run folder, in evaluation mode.

    ``net`` is a name from `gossamer list`, or ``module:function`` for your own network, whose function is called
    without arguments; ``shape`` is then the shape of one sample. ``otherwise`` is the name and the options of a network
    for a file without a name. ``max_bytes`` bounds the memory of the tensors, as in ``gossamer.load``. Opening a file
    downloads nothing: the file of a run with pretrained weights contains all weights.
    """
    source = network_file(path)
    state = load(source, max_bytes=max_bytes)
    name, options = _named(source, net, otherwise)
    if net is not None and ":" in net:
        if shape is None:
            raise ValueError(
                f"expected the shape of one sample for {name}, got none: add --shape, e.g. --shape 3 32 32"
            )
        model, tokens = _own(name), 0
        _check(model, state, source, name)
    elif ":" in name:
        raise ValueError(
            f"expected a name from gossamer list in {source} or the {RUN} next to it, got {name!r}, which would run "
            f"code: if you trust that, say so by --net {name}"
        )
    else:
        model, known, tokens = _registered(name, options, state, source)
        shape = shape or known
    model.load_state_dict(state, strict=False)  # strict=True would report the second names of tied weights as missing
    return StoredModel(name, model.eval(), source, shape, tokens)


def network_file(path: str | os.PathLike[str]) -> Path:
    """The safetensors file of a network, which may be named by its run folder."""
    source = Path(path)
    if (source / MODEL).is_file():
        return source / MODEL
    if not source.is_file():
        problem = f"is a folder without {MODEL}: name a file" if source.is_dir() else "does not exist"
        raise FileNotFoundError(f"expected a safetensors file or a run folder, got {source}, which {problem}")
    return source


def knows_its_network(path: Path) -> bool:
    """Whether a safetensors file, or the run.json next to it, names a network of the registry."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    name, _ = _named(path, None, ("", {}))
    return name in models.names()


def _named(
    path: Path, net: str | None, otherwise: tuple[str, Mapping[str, Any]] | None
) -> tuple[str, Mapping[str, Any]]:
    """The name of the network and its options."""
    if net is not None:
        return net, {}
    with path.open("rb") as file:
        _, metadata = read_header(path, file)
    if "network" in metadata:
        return metadata["network"], {}
    run = path.with_name(RUN)
    if run.is_file():
        values = read_object(run)
        if isinstance(values.get("model"), str):
            options = values.get("model_options", {})
            if not isinstance(options, dict):
                raise ValueError(
                    f"expected a table of model_options in {run}, got {options!r:.80}: correct or delete it"
                )
            return values["model"], options
    if otherwise is not None:
        return otherwise
    raise ValueError(
        f"expected {path} or a {RUN} next to it to name the network, got neither: "
        "add --net NAME (see gossamer list), or save the file with network=NAME"
    )


def _registered(
    name: str, options: Mapping[str, Any], state: Mapping[str, Tensor], path: Path
) -> tuple[nn.Module, tuple[int, ...], int]:
    """A registered network with the number of classes of the file."""
    run = path.with_name(RUN)
    options = {key: value for key, value in options.items() if key != "pretrained"}  # which would download weights
    try:
        # Sizes from a file are checked against its tensors before memory is allocated.
        with torch.device("meta"), models.at_most(_SPARE + _A_TENSOR * len(state), options, str(run)):
            build, shape, tokens = _builder(name, options, state)
            _check(build(), state, path, name)
    except (TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"expected options of {name} in {run}, got others ({error}): correct or delete them"
        ) from error
    return build(), shape, tokens


def _builder(
    name: str, options: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[Callable[[], nn.Module], tuple[int, ...], int]:
    """A builder of the network, the shape of one sample, and the size of its vocabulary."""
    entry = models.entry(name)
    if name == QUICK_START:
        first, last = (state.get(f"{layer}.weight") for layer in ("features.0", "classifier"))
        width, answers = (each.shape[0] if each is not None and each.ndim else 0 for each in (first, last))
        return partial(DigitsNet, answers or entry.num_classes, width or 32), entry.input_shape, 0
    build = partial(models.create, name, **options)
    classes = _classes(build(), state)
    return partial(build, num_classes=classes), entry.input_shape, (classes or entry.num_classes) if entry.tokens else 0


def _classes(default: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes, from the tensors that do not fit the default; None for the default."""
    found = {
        state[name].shape[0]
        for name, tensor in default.state_dict().items()
        if name in state and state[name].shape != tensor.shape and state[name].ndim
    }
    return found.pop() if len(found) == 1 else None


def _own(name: str) -> nn.Module:
    module, _, function = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # a module in the current folder, which the installed command does not search
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"expected --net module:function, got {name!r}, which cannot be imported ({error})") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"expected {name} to return a torch.nn.Module, got {type(made).__name__}")
    return made


def _check(model: nn.Module, state: Mapping[str, Tensor], path: Path, name: str) -> None:
    """Check that the file has the tensors of the model; a tied tensor may be stored under its other name."""
    wanted = model.state_dict(keep_vars=True)
    stored = {id(tensor) for key, tensor in wanted.items() if key in state}
    missing = [key for key, tensor in wanted.items() if key not in state and id(tensor) not in stored]
    foreign = [key for key in state if key not in wanted]
    shapes = [key for key in state if key in wanted and state[key].shape != wanted[key].shape]
    problems = {"missing": missing, "unknown": foreign, "of another shape": shapes}
    if any(problems.values()):
        listed = "; ".join(f"{what}: {', '.join(keys[:4])}" for what, keys in problems.items() if keys)
        raise ValueError(f"expected the tensors of {name} in {path}, got others ({listed}): is it another network?")
