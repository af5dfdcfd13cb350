"""Validation of a saved state: whether a Sparsifier can resume from it. Runs before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from gossamer.diagnostics import HealthLog
from gossamer.driver import Driver
from gossamer.prunable import Weight
from gossamer.schedule import Phase, Plan
from gossamer.selectors import some
from gossamer.sharding import is_sharded, local
from gossamer.target import Target

_MOST_STEPS = 2**62
FORMAT = 2  # of the state dict; 1 dates from before all methods shared one form
# Entries without a tensor per weight.
_OF_ALL = frozenset(
    {"format", "method", "target", "step", "phase", "plan", "topology_done", "log", "network", "pattern"}
)


def check_state(
    state: Mapping[str, Any], weights: Sequence[Weight], *, method: str, target: Target, pattern: Mapping[str, str]
) -> None:
    """Raise a ValueError if `state` cannot be resumed."""
    if not isinstance(state, Mapping):
        raise damaged("a dict", type(state).__name__)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"expected the state of a Sparsifier in format {FORMAT}, got {shown(state.get('format'))}: "
            "load it with the version of gossamer that wrote it"
        )
    if state.get("method") != method:
        raise ValueError(
            f"expected the state of method={method!r}, got {shown(state.get('method'))}: create the Sparsifier as "
            "before, or load only the model and start over"
        )
    if state.get("pattern", {}) != pattern:
        raise ValueError(
            f"expected the state of a run with pattern {shown(dict(pattern)) if pattern else None}, got "
            f"{shown(state.get('pattern'))}: pass pattern= as before, or load only the model and start over"
        )
    _check_position(state)
    phase = Phase(state["phase"])
    if "mask" not in state:
        if phase is not Phase.WARMUP and not (phase is Phase.FINISHED and target.decay is not None):
            raise ValueError(
                f"the state is of the {phase} phase but has no masks: pass all of state_dict() "
                "(torch.distributed.checkpoint loads only the entries of the state that it is given)"
            )
        return
    _check_by_weight(state["mask"], weights, "mask", torch.bool)
    _check_log(state, len(weights))
    if ("dense" in state) != ("network" in state):
        missing = "network" if "dense" in state else "dense"
        raise damaged(f"the entries dense and network, or neither if masks are final; {missing}", "none")
    wanted = shown(state.get("target")).strip("'").replace("connections", "weights")  # the word that older states use
    if "dense" not in state and wanted != str(target):
        raise ValueError(
            f"the masks of the state are final, for {wanted}, but this Sparsifier was asked for {target}: request the "
            "same target, or load only the model and start over"
        )


def check_tensors(state: Mapping[str, Any], driver: Driver, weights: Sequence[Weight]) -> None:
    """Raise a ValueError if the tensors of a state are not those that `driver` would save."""
    if "dense" not in state:
        return
    by_weight, network = driver.entries()
    found = state.keys() - _OF_ALL
    if found != by_weight.keys():
        other = some(sorted(map(str, found ^ by_weight.keys())))
        raise ValueError(
            f"the state is from a run with other settings: only one of the two has {other}; pass the settings as "
            "before (mask_momentum= and min_density= determine what is saved)"
        )
    for name, dtype in by_weight.items():
        _check_by_weight(state[name], weights, name, dtype)
    tensors = state.get("network")
    if not isinstance(tensors, Mapping):
        raise damaged("the tensors of the method", type(tensors).__name__)
    for name, (dtype, shape) in network.items():
        _check_tensor(tensors, name, dtype, tuple(shape))


def damaged(expected: str, got: str) -> ValueError:
    return ValueError(
        f"expected {expected} in the state, got {got:.80}: the state is damaged, or not from state_dict(); resume "
        "from an older checkpoint, or load only the model and start over"
    )


def _check_position(state: Mapping[str, Any]) -> None:
    """Raise a ValueError if the step, phase and plan of a state are invalid or do not fit together."""
    step, phase, values = (state.get(name) for name in ("step", "phase", "plan"))
    for each in (step, state.get("topology_done")):
        if type(each) is not int or not 0 <= each < _MOST_STEPS:
            raise damaged("a step number", shown(each))
    assert isinstance(step, int)
    if not isinstance(phase, str) or phase not in [*Phase]:
        raise damaged(f"one of the phases {', '.join(Phase)}", shown(phase))
    names = {each.name for each in fields(Plan)}
    if (
        not isinstance(values, Mapping)
        or values.keys() != names
        or any(type(value) is not int or value >= _MOST_STEPS for value in values.values())
    ):
        raise damaged(f"a plan with integers for {', '.join(sorted(names))}", shown(values))
    try:
        plan = Plan(**values)
    except ValueError as error:
        raise damaged("a plan of phases", str(error)) from None
    # The phase is that of the step before. Masks begin at the end of the last step before theirs and are final at the
    # end of their last; those of a run that was finished early are final, too.
    finished, end = phase == Phase.FINISHED, plan.warmup + plan.sparsify + plan.stabilise
    training = "dense" in state
    if not (
        (finished or phase in (plan.at(max(0, step - 1)).phase, plan.at(step).phase))
        and ("mask" in state or phase != Phase.WARMUP or step <= plan.warmup)
        and ("mask" not in state or finished or step >= plan.warmup)
        and (not training or (not finished and step <= end))
        and (training or "mask" not in state or finished or step >= end)
    ):
        kind = "learning" if training else "final" if "mask" in state else "no"
        raise damaged("a step and a phase of the plan", f"step {step} with {kind} masks, {phase}, in {plan}")


def _check_by_weight(tensors: Any, weights: Sequence[Weight], entry: str, dtype: torch.dtype) -> None:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_readable(tensor)
        for name, tensor in tensors.items()
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
    for weight in weights:
        tensor = tensors[weight.name]
        if is_sharded(tensor) != is_sharded(weight.parameter):
            raise ValueError(
                f"expected {entry} and weight of {weight.name} both sharded or both whole: distribute the state as the "
                "model is, or gather it"
            )
        _check_values(tensor, f"{entry} of {weight.name}", dtype)


def _check_log(state: Mapping[str, Any], tensors: int) -> None:
    log = state.get("log")
    if not isinstance(log, Mapping) or type(log.get("mask_steps")) is not int or log["mask_steps"] < 1:
        raise damaged("the log of mask learning", "none")
    for name, like in HealthLog(tensors, 0, log["mask_steps"], torch.device("cpu")).state().items():
        if isinstance(like, Tensor):
            _check_tensor(log, name, like.dtype, tuple(like.shape))
            counts = log[name][:, 1:] if name == "trace" else log[name]  # after λ1, which may be negative
            if not bool(((counts >= 0) & (counts < torch.inf)).all()):
                raise damaged(f"counts of at least 0 as {name}", "others")


def _check_tensor(state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = state.get(name)
    if not isinstance(tensor, Tensor) or not _is_readable(tensor):
        raise damaged(f"a tensor {name} of shape {shape}", type(tensor).__name__)
    if tuple(tensor.shape) != shape:
        raise damaged(f"a tensor {name} of shape {shape}", f"one of shape {tuple(tensor.shape)}")
    _check_values(tensor, name, dtype)


def _check_values(tensor: Tensor, name: str, dtype: torch.dtype) -> None:
    """Numbers of the same kind as `dtype`, whose precision may differ; none is NaN, but scores may be infinite."""
    if not dtype.is_floating_point:
        if tensor.dtype != dtype:
            raise damaged(f"{name} as {dtype}", str(tensor.dtype))
        return
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise damaged(f"{name} as {dtype}", str(tensor.dtype))
    if bool(torch.isnan(local(tensor)).any()):
        raise damaged(f"numbers as {name}", "NaN")


def _is_readable(tensor: Tensor) -> bool:
    """Whether it has values in memory that can be copied into another tensor."""
    return not (tensor.is_meta or tensor.is_nested or tensor.is_quantized) and tensor.layout == torch.strided
