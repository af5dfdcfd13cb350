"""LoRA on sparse models: the base keeps its zeros, and adapters are merged under the masks."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gossamer.zeros import impose


@dataclass(frozen=True)
class Merged:
    """A model with its adapters merged, and what the masks took from the merge."""

    model: nn.Module
    lost: dict[str, float]
    """For each weight with an adapter, the share of the adapter's change (in squares) that fell on pruned weights."""


def merge(model: Any) -> Merged:
    """`merge_and_unload()` of a PEFT model whose base is sparse; the merged weights keep the zeros of the base.

    A merge adds the low-rank product to all weights of a layer, so that its zeros would be lost.
    """
    base = model.get_base_model()
    before: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if isinstance(weight, Tensor):
            before[f"{name}.weight"] = weight.detach().clone()
    if not before:
        raise ValueError("expected a PEFT model with adapters on its layers, got one without them: add LoRA first")
    kept = {name: weight != 0 for name, weight in before.items()}
    merged: nn.Module = model.merge_and_unload()
    parameters = dict(merged.named_parameters())
    lost = {}
    for name, weight in before.items():
        change = parameters[name].detach() - weight
        total = float(change.square().sum())
        lost[name] = float(change[~kept[name]].square().sum()) / total if total else 0.0
    impose(merged, kept)
    return Merged(merged, lost)
