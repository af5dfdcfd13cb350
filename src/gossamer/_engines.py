"""Training engines and sharing of memory that make a parameter other than it seems.

Masks belong to single entries of a weight, so a parameter has to be the real, whole (or DTensor-sharded)
weight. DeepSpeed ZeRO and the first FSDP keep the true values in flat buffers of their own and leave views or
empty placeholders in the model; these are recognised here without importing either.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

_INSTEAD = "use torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel instead"
# Attributes that DeepSpeed puts on parameters: ZeRO stage 3 (ds_*), stages 1 and 2 (_hp_mapping).
_DEEPSPEED_MARKS = frozenset({"ds_id", "ds_tensor", "_hp_mapping"})


def engine_problem(model: nn.Module) -> str | None:
    """Why an engine's flattened parameters cannot be made sparse, or None."""
    if any(_class_named("FullyShardedDataParallel", module) for module in model.modules()):
        return f"the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters; {_INSTEAD}"
    for name, parameter in model.named_parameters():
        if _class_named("FlatParameter", parameter):
            return f"{name} is a FlatParameter (FSDP1), many weights in one flat tensor; {_INSTEAD}"
        if _DEEPSPEED_MARKS & vars(parameter).keys():
            return f"{name} is managed by DeepSpeed ZeRO, which trains flat copies of the weights; {_INSTEAD}"
    return None


def _class_named(name: str, thing: object) -> bool:
    return any(base.__name__ == name for base in type(thing).__mro__)


def overlapping_memory(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Pairs of different parameters that lie in the same memory: each would undo the zeros of the other."""
    extents = []
    for name, parameter in parameters:
        # Subclasses (DTensor, quantised tensors) and meta tensors do not say where their memory is.
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.numel() == 0:
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = parameter.data_ptr()
        extents.append((str(parameter.device), start, start + span * parameter.element_size(), name))
    extents.sort()
    return [
        f"{second} and {first} are two parameters in the same memory; tie them as one parameter "
        "(a.weight = b.weight), or give one of them its own copy"
        for (device, _, end, first), (other_device, start, _, second) in pairwise(extents)
        if device == other_device and start < end
    ]
