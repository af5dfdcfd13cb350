"""Validation of a saved state: whether a Sparsifier can resume from it. Runs before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gossamer.driver import Driver
from gossamer.prunable import Weight
from gossamer.schedule import Phase, Plan
from gossamer.target import Target

_MOST_STEPS = 2**62
FORMAT = 2  # of the state dict; 1 dates from before all methods shared one form
# Entries without a tensor per weight.
_OF_ALL = frozenset({"format", "method", "target", "step", "phase", "plan", "topology_done", "log", "network"})


def check_state(state: Mapping[str, Any], weights: Sequence[Weight], *, method: str, target: Target) -> None:
    """Raise a ValueError if `state` cannot be resumed."""
    if not isinstance(state, Mapping):
        raise damaged("a dict", type(state).__name__)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"expected the state of a Sparsifier in format {FORMAT}, got {state.get('format')!r}: "
            "load it with the version of gossamer that wrote it"
        )
    if state.get("method") != method:
        raise ValueError(
            f"expected the state of method={method!r}, got {state.get('method')!r}: create the Sparsifier as before, "
            "or load only the model and start over"
        )
    check_position(state)
    if "mask" not in state:
        if Phase(state["phase"]) not in (Phase.WARMUP, Phase.FINISHED):
            raise ValueError(
                f"the state is of the {state['phase']} phase but has no masks: pass all of state_dict() "
                "(torch.distributed.checkpoint loads only the entries of the state that it is given)"
            )
        return
    _check_by_weight(state["mask"], weights, "mask")
    _check_log(state, len(weights))
    if ("dense" in state) != ("network" in state):
        missing = "network" if "dense" in state else "dense"
        raise damaged(f"the entries dense and network, or neither if masks are final; {missing}", "none")
    wanted = str(state.get("target")).replace("connections", "weights")  # the word that older states use
    if "dense" not in state and wanted != str(target):
        raise ValueError(
            f"the masks of the state are final, for {wanted}, but this Sparsifier was asked for {target}: request the "
            "same target, or load only the model and start over"
        )


def check_tensors(state: Mapping[str, Any], driver: Driver, weights: Sequence[Weight]) -> None:
    """Raise a ValueError if the tensors of a state are not those that `driver` would save."""
    if "dense" not in state:
        return
    by_weight, network = driver.shapes()
    found = state.keys() - _OF_ALL
    if found != by_weight:
        raise ValueError(
            "the state is from a run with other settings: only one of the two has "
            f"{', '.join(sorted(found ^ by_weight))}; pass the settings as before (mask_momentum= and min_density= "
            "determine what is saved)"
        )
    for name in by_weight:
        _check_by_weight(state[name], weights, name)
    tensors = state.get("network")
    if not isinstance(tensors, Mapping):
        raise damaged("the tensors of the method", type(tensors).__name__)
    for name, shape in network.items():
        _check_tensor(tensors, name, tuple(shape))


def damaged(expected: str, got: object) -> ValueError:
    return ValueError(
        f"expected {expected} in the state, got {got!s:.80}: the state is damaged, or not from state_dict(); resume "
        "from an older checkpoint, or load only the model and start over"
    )


def check_position(state: Mapping[str, Any]) -> None:
    """Raise a ValueError if the step, phase or plan of a state is invalid."""
    step, phase, plan = (state.get(name) for name in ("step", "phase", "plan"))
    for each in (step, state.get("topology_done")):
        if type(each) is not int or not 0 <= each < _MOST_STEPS:
            raise damaged("a step number", repr(each))
    if not isinstance(phase, str) or phase not in [*Phase]:
        raise damaged(f"one of the phases {', '.join(Phase)}", repr(phase))
    names = {each.name for each in fields(Plan)}
    if (
        not isinstance(plan, Mapping)
        or plan.keys() != names
        or any(type(value) is not int or value >= _MOST_STEPS for value in plan.values())
    ):
        raise damaged(f"a plan with integers for {', '.join(sorted(names))}", repr(plan))
    try:
        Plan(**plan)
    except ValueError as error:
        raise damaged("a plan of phases", str(error)) from None


def _check_by_weight(tensors: Any, weights: Sequence[Weight], entry: str) -> None:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_meta for name, tensor in tensors.items()
    ):
        raise damaged(f"a dict from weight names to tensors as {entry}", type(tensors).__name__)
    names: dict[str, torch.Size] = {weight.name: weight.parameter.shape for weight in weights}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if names != found:
        wrong = sorted(set(names.items()) ^ set(found.items()))
        raise ValueError(
            "the state is from another model or another selection of tensors; they differ in "
            + ", ".join(f"{name} {tuple(shape)}" for name, shape in wrong[:4])
            + ": build the model and pass include= and exclude= as before"
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
