"""Whether a saved state fits the Sparsifier that shall go on from it, found out before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gossamer.prunable import Weight
from gossamer.schedule import Phase, Plan
from gossamer.settings import Settings
from gossamer.target import Target

FORMAT = 1  # of the state dict


def check_state(state: Mapping[str, Any], weights: Sequence[Weight], settings: Settings, target: Target) -> None:
    """Raise a ValueError that says what to do where `state` is not one to go on from."""
    if not isinstance(state, Mapping):
        raise damaged("a table of values", type(state).__name__)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"expected the state of a Sparsifier in format {FORMAT}, got {state.get('format')!r}: "
            "load it with the version of gossamer that wrote it"
        )
    check_place(state)
    if "mask" not in state:
        if Phase(state["phase"]) not in (Phase.WARMUP, Phase.FINISHED):
            raise ValueError(
                f"the state is of the {state['phase']} phase but has no masks: give back all of state_dict() "
                "(torch.distributed.checkpoint loads only entries that the state given to it has)"
            )
        return
    _check_names(state, weights)
    _check_log(state, len(weights))
    if "mask_variable" in state:
        _check_learning(state, settings)
    elif state.get("target", str(target)) != str(target):  # states written before it was noted have none
        raise ValueError(
            f"the masks of the state are frozen, learned for {state['target']}, but this Sparsifier was asked for "
            f"{target}: ask for the same, or load the model alone and begin anew"
        )


def damaged(expected: str, got: object) -> ValueError:
    return ValueError(
        f"expected {expected} in the state, got {got!s:.80}: it is damaged, or not one of state_dict(); go on from an "
        "older checkpoint, or load the model alone and begin anew"
    )


def check_place(state: Mapping[str, Any]) -> None:
    """The step, phase and plan of a state."""
    step, phase, plan = (state.get(name) for name in ("step", "phase", "plan"))
    if type(step) is not int or step < 0:
        raise damaged("the number of a step", repr(step))
    if not isinstance(phase, str) or phase not in [*Phase]:
        raise damaged(f"a phase out of {', '.join(Phase)}", repr(phase))
    names = {each.name for each in fields(Plan)}
    if not isinstance(plan, Mapping) or plan.keys() != names or any(type(value) is not int for value in plan.values()):
        raise damaged(f"a plan with whole numbers for {', '.join(sorted(names))}", repr(plan))


def _check_names(state: Mapping[str, Any], weights: Sequence[Weight]) -> None:
    names = {weight.name: weight.parameter.shape for weight in weights}
    for entry in ("mask", "dense", "mask_variable", "velocity", "protected"):
        if entry in state:
            _check_tensors(state[entry], names, entry)


def _check_tensors(tensors: Any, names: Mapping[str, torch.Size], entry: str) -> None:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_meta for name, tensor in tensors.items()
    ):
        raise damaged(f"tensors by the names of weights as {entry}", type(tensors).__name__)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if names != found:
        wrong = sorted(set(names.items()) ^ set(found.items()))
        raise ValueError(
            "the state is of another model or selection of tensors; they differ in "
            + ", ".join(f"{name} {tuple(shape)}" for name, shape in wrong[:4])
            + ": build the model and give include= and exclude= as before"
        )


def _check_log(state: Mapping[str, Any], tensors: int) -> None:
    log = state.get("log")
    if not isinstance(log, Mapping) or type(log.get("mask_steps")) is not int or log["mask_steps"] < 1:
        raise damaged("the log of mask learning", "none")
    shapes = {"flips": (), "gradient_squares": (tensors,), "gradient_weight": (), "skipped": ()}
    for name, shape in shapes.items():
        _check_tensor(log, name, shape)
    trace = log.get("trace")
    _check_tensor(log, "trace", (len(trace) if isinstance(trace, Tensor) and trace.dim() else 0, 3))
    if not len(log["trace"]):
        raise damaged("the trace of mask learning", "an empty one")


def _check_tensor(state: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> None:
    tensor = state.get(name)
    if not isinstance(tensor, Tensor) or tensor.is_meta or tuple(tensor.shape) != shape:
        got = f"one of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise damaged(f"a tensor {name} of shape {shape}", got)


def _check_learning(state: Mapping[str, Any], settings: Settings) -> None:
    if "dense" not in state:
        raise damaged("the dense weights behind the masks", "none")
    _check_tensor(state, "budget", ())
    if "sizes" in state:  # not in those from before masks were anchored
        _check_tensor(state, "sizes", (2,))
    for entry, name, value in (
        ("velocity", "mask_momentum", settings.mask_momentum),
        ("protected", "floor", settings.floor),
    ):
        if (entry in state) != bool(value):
            raise ValueError(
                f"the state is of a run {'with' if entry in state else 'without'} {name}=, but this Sparsifier has "
                f"{name}={value}: give the settings as before"
            )
