"""Whether a saved state fits the Sparsifier that shall go on from it, found out before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.prunable import Weight
from gossamer.schedule import Phase
from gossamer.settings import Settings
from gossamer.target import Target

FORMAT = 1  # of the state dict


def check_state(state: Mapping[str, Any], weights: Sequence[Weight], settings: Settings, target: Target) -> None:
    """Raise a ValueError that says what to do where `state` is not one to go on from."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"expected the state of a Sparsifier in format {FORMAT}, got {state.get('format')!r}: "
            "load it with the version of gossamer that wrote it"
        )
    if "mask" not in state:
        if Phase(state["phase"]) not in (Phase.WARMUP, Phase.FINISHED):
            raise ValueError(
                f"the state is of the {state['phase']} phase but has no masks: give back all of state_dict() "
                "(torch.distributed.checkpoint loads only entries that the state given to it has)"
            )
        return
    _check_names(state, weights)
    if "mask_variable" in state:
        _check_learning(state, settings)
    elif state.get("target", str(target)) != str(target):  # states written before it was noted have none
        raise ValueError(
            f"the masks of the state are frozen, learned for {state['target']}, but this Sparsifier was asked for "
            f"{target}: ask for the same, or load the model alone and begin anew"
        )


def _check_names(state: Mapping[str, Any], weights: Sequence[Weight]) -> None:
    names = {weight.name: weight.parameter.shape for weight in weights}
    found = {name: tensor.shape for name, tensor in state["mask"].items()}
    if names != found:
        wrong = sorted(set(names.items()) ^ set(found.items()))
        raise ValueError(
            "the state is of another model or selection of tensors; they differ in "
            + ", ".join(f"{name} {tuple(shape)}" for name, shape in wrong[:4])
            + ": build the model and give include= and exclude= as before"
        )


def _check_learning(state: Mapping[str, Any], settings: Settings) -> None:
    for entry, name, value in (
        ("velocity", "mask_momentum", settings.mask_momentum),
        ("protected", "floor", settings.floor),
    ):
        if (entry in state) != bool(value):
            raise ValueError(
                f"the state is of a run {'with' if entry in state else 'without'} {name}=, but this Sparsifier has "
                f"{name}={value}: give the settings as before"
            )
