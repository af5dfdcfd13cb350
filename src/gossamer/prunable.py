"""Which tensors of a model are prunable.

The weights of linear, convolution, recurrent, embedding and attention layers are prunable; biases, norms and
one-dimensional weights are not. ``select`` lists each prunable tensor once, however many layers share it, together with
all its uses. It changes nothing, and it reports all problems of a model in one error, before training.

A parameter of an unknown module type (a hand-written layer, a stack of experts) is selected only if ``include`` spells
out its name, because its shape does not show whether it is a weight matrix or, say, a positional embedding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from gossamer.selectors import ParameterPath, Selector, Selectors, all_names, as_tuple, name_hint, shown, some

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class SelectionError(ValueError):
    """No tensors can be selected from the model with ``include`` and ``exclude``; ``problems`` lists the reasons."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(["cannot select prunable weights:", *(f"  - {each}" for each in problems)]))

    def __reduce__(self) -> tuple[type["SelectionError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, eq=False)
class Use:
    """A module that uses a tensor, e.g. ``("encoder.rnn", LSTM(...), "weight_ih_l0")``."""

    module_name: str
    module: nn.Module
    attribute: str


@dataclass(frozen=True, eq=False)
class Weight:
    """A prunable tensor. A tensor that several layers share (tied weights) is one Weight."""

    name: str
    """Its (first) name in ``model.named_parameters()``."""
    parameter: nn.Parameter
    uses: tuple[Use, ...]
    """All its uses; more than one if it is tied."""
    feature_axis: int
    """The axis of the output features: 0, or 1 if the layer stores its weight as (in, out, ...)."""
    groups: int
    """Groups of a convolution, otherwise 1."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A parameter that may become a Weight."""

    weight: Weight
    path: ParameterPath
    known: bool  # its layer type is known to have prunable weights
    computes: ParameterPath | None  # the layer weight that is computed from it, as in weight norm

    def is_included(self, selectors: tuple[Selector, ...]) -> bool:
        if self.known:
            return not selectors or any(self.path.matches(selector) for selector in selectors)
        return any(self.path.is_spelled_by(selector) for selector in selectors)


def select(
    model: nn.Module, *, include: Selectors = None, exclude: Selectors = None, for_training: bool = True
) -> tuple[Weight, ...]:
    """List the prunable tensors of ``model``, in the order of ``model.named_parameters()``.

    ``include`` keeps only the tensors that it matches, and ``exclude`` then removes those that it matches. Each is one
    selector or a list of selectors. A selector is

    - a name pattern such as ``"encoder.*"`` or ``"*.weight_hh_l*"`` (case-sensitive, as in ``fnmatchcase``), matched
      against the names of the parameter and of the modules that contain it;
    - a module class: all modules of that class and everything under them;
    - a module of the model: it and everything under it.

    A parameter of an unknown module type, with two or more dimensions, is added if a pattern of ``include`` spells its
    own name, as in ``"*.kernel"``; a pattern that ends in a bare ``*``, such as ``"encoder.*"``, does not add any.
    Frozen parameters (``requires_grad=False``) are omitted. Raises ``SelectionError``.

    ``for_training=False`` is for reading: it includes frozen parameters and ignores problems that concern only
    training, such as an embedding with sparse gradients.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise TypeError(f"expected a torch.nn.Module as the model, got {type(model).__name__}")
    included, excluded = as_tuple(include, "include"), as_tuple(exclude, "exclude")
    candidates, uninitialised = _candidates(model)
    chosen = [
        candidate
        for candidate in candidates
        if candidate.is_included(included) and not any(candidate.path.matches(selector) for selector in excluded)
    ]
    taken = [each.weight for each in chosen if each.weight.parameter.requires_grad or not for_training]

    problems = list(_unmatched(model, candidates, included, excluded))
    if uninitialised:
        problems.append(f"lazy layers have no shapes yet ({some(uninitialised)}); run a batch through the model first")
    engine = engine_problem(model)
    if engine is not None:
        problems.append(engine)
    problems += _computed(candidates, chosen, included, excluded)
    if for_training:
        problems += [problem for weight in taken for problem in _unusable(weight)]
        problems += overlapping_memory([(weight.name, weight.parameter) for weight in taken])
    if not taken and not problems:
        problems.append(_nothing(candidates, chosen))
    if problems:
        raise SelectionError(problems)
    return tuple(taken)


def layer_attributes(module: nn.Module) -> tuple[str, ...]:
    """Names of the prunable direct parameters of ``module``; () for unknown types."""
    if isinstance(module, nn.Linear | nn.Bilinear | _ConvNd | nn.Embedding | nn.EmbeddingBag):
        return ("weight",)
    if isinstance(module, nn.RNNBase):
        kinds = ("ih", "hh", "hr") if module.proj_size else ("ih", "hh")
        directions = ("", "_reverse") if module.bidirectional else ("",)
        layers = range(module.num_layers)
        return tuple(f"weight_{kind}_l{layer}{way}" for layer in layers for way in directions for kind in kinds)
    if isinstance(module, nn.RNNCellBase):
        return ("weight_ih", "weight_hh")
    if isinstance(module, nn.MultiheadAttention):  # its out_proj is a Linear of its own
        return ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    return ("weight",) if _is_transformers_conv1d(module) else ()


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """The linear layer of GPT-2, stored as (in, out); recognised by its path to avoid an import."""
    path = ("transformers.pytorch_utils", "Conv1D")
    return any((base.__module__, base.__name__) == path for base in type(module).__mro__)


def _layout(module: nn.Module) -> tuple[int, int]:
    """(feature axis, groups) of the weights of ``module``."""
    if isinstance(module, _ConvNd):
        return (1 if module.transposed else 0), module.groups
    return (1 if _is_transformers_conv1d(module) else 0), 1


def _candidates(model: nn.Module) -> tuple[list[_Candidate], list[str]]:
    """All parameters with two or more dimensions, except those of norms, and the names of uninitialised ones."""
    modules = dict(model.named_modules(remove_duplicate=False))
    named: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), (parameter, []))[1].append(name)

    candidates, uninitialised = [], []
    for parameter, names in named.values():
        if isinstance(parameter, UninitializedParameter):
            uninitialised.append(names[0])
            continue
        uses: dict[tuple[int, str], Use] = {}
        for name in names:
            module_name, _, attribute = name.rpartition(".")
            module = modules[module_name]
            if not isinstance(module, _NORMS):
                uses.setdefault((id(module), attribute), Use(module_name, module, attribute))
        known = [use for use in uses.values() if use.attribute in layer_attributes(use.module)]
        is_placeholder = bool(known) and parameter.numel() == 0
        if not uses or (parameter.ndim < 2 and not is_placeholder):
            continue
        axis, groups = _layout((known or list(uses.values()))[0].module)
        computed = _computed_name(names[0], modules)
        candidates.append(
            _Candidate(
                weight=Weight(names[0], parameter, tuple(uses.values()), axis, groups),
                path=ParameterPath.of(names, modules, model),
                known=bool(known),
                computes=ParameterPath.of([computed], modules, model) if computed else None,
            )
        )
    return candidates, uninitialised


def _computed_name(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The layer weight that is computed from the parameter ``name``, as in weight norm."""
    owner_name, _, own = name.rpartition(".")
    if isinstance(modules[owner_name], parametrize.ParametrizationList):
        layer_name, _, attribute = owner_name.rpartition(".")
        layer_name = layer_name.rpartition(".")[0]  # drops "parametrizations"
        attributes = [each for each in layer_attributes(modules[layer_name]) if each == attribute]
    else:
        layer_name = owner_name
        direct = modules[layer_name]._parameters
        attributes = [
            each
            for each in layer_attributes(modules[layer_name])
            if own in (f"{each}_orig", f"{each}_v") and each not in direct
        ]
    prefix = f"{layer_name}." if layer_name else ""
    return f"{prefix}{attributes[0]}" if attributes else None


def _computed(
    candidates: list[_Candidate],
    chosen: list[_Candidate],
    included: tuple[Selector, ...],
    excluded: tuple[Selector, ...],
) -> Iterator[str]:
    """Problems of layer weights that cannot be selected because they are computed from other parameters."""
    behind: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        if candidate.computes is not None and candidate.weight.parameter.requires_grad:
            behind.setdefault(candidate.computes.names[0], []).append(candidate)
    for name, parts in behind.items():
        paths = [path for part in parts for path in (part.path, part.computes) if path is not None]
        is_excluded = any(path.matches(selector) for path in paths for selector in excluded)
        is_included = any(path.matches(selector) for path in paths for selector in included)
        if is_excluded or (included and not is_included) or any(part in chosen for part in parts):
            continue
        # Of several parameters, as in weight norm, the largest is the weight matrix.
        largest = max(parts, key=lambda part: part.weight.parameter.numel()).weight.name
        yield (
            f"{name} is not a parameter but computed from {largest} in every forward pass; make it a plain parameter "
            f"(remove_parametrizations, remove_weight_norm, prune.remove), or pass exclude={name!r}, or, if zeros of "
            f"{largest} are zeros of {name}, spell {largest!r} in include"
        )


def _unmatched(
    model: nn.Module,
    candidates: list[_Candidate],
    included: tuple[Selector, ...],
    excluded: tuple[Selector, ...],
) -> Iterator[str]:
    """Problems of selectors that match nothing: almost always a typo, which would otherwise go unnoticed."""
    for selector in included:
        if any(candidate.is_included((selector,)) for candidate in candidates):
            continue
        if any(each.computes is not None and each.computes.matches(selector) for each in candidates):
            continue  # reported by _computed
        unknown = [each.weight.name for each in candidates if each.path.matches(selector)]
        if unknown:
            yield (
                f"include={shown(selector)} matches only parameters of unknown module types; to select them, spell "
                f"their names: {some(unknown)}"
            )
        elif isinstance(selector, str):
            yield f"include={selector!r} matches no prunable weights; {name_hint(selector, model)}"
        else:
            layers = sorted({type(module).__name__ for module in model.modules() if layer_attributes(module)})
            found = ", ".join(layers) or "none"
            yield f"include={shown(selector)} matches no prunable weights; the layers of the model are {found}"
    names = all_names(model) + tuple(each.computes.names[0] for each in candidates if each.computes is not None)
    for selector in excluded:
        if isinstance(selector, str):
            if not ParameterPath(names, ()).matches(selector):
                yield f"exclude={selector!r} matches nothing; {name_hint(selector, model)}"
        elif isinstance(selector, nn.Module) and all(module is not selector for module in model.modules()):
            yield f"exclude={shown(selector)} is not part of the model; pass one of its modules"


def _unusable(weight: Weight) -> Iterator[str]:
    parameter, remedy = weight.parameter, f"pass exclude={weight.name!r}"
    if any(isinstance(use.module, nn.Embedding | nn.EmbeddingBag) and use.module.sparse for use in weight.uses):
        yield (
            f"{weight.name} belongs to an embedding with sparse=True, and masks need the whole gradient; "
            f"build the embedding with sparse=False, or {remedy}"
        )
    if parameter.is_complex():
        yield f"{weight.name} is complex ({parameter.dtype}), and masks need real weights; {remedy}"
    if parameter.numel() == 0:
        yield (
            f"{weight.name} is empty, of shape {tuple(parameter.shape)}: if a training engine left it as "
            f"a placeholder, use FSDP2 (fully_shard) or DistributedDataParallel instead; otherwise {remedy}"
        )


def _nothing(candidates: list[_Candidate], chosen: list[_Candidate]) -> str:
    if chosen:
        frozen = some([candidate.weight.name for candidate in chosen])
        return f"all selectable tensors are frozen: {frozen}; set requires_grad=True on some"
    known = [candidate.weight.name for candidate in candidates if candidate.known]
    unknown = [candidate.weight.name for candidate in candidates if not candidate.known]
    advice = f"; parameters of unknown module types can be included by name: {some(unknown)}" if unknown else ""
    if known:
        return f"nothing to sparsify: exclude= removes all selectable tensors, {some(known)}{advice}"
    return (
        "nothing to sparsify: expected weights of linear, convolution, recurrent, embedding or attention "
        f"layers, found none{advice}"
    )


# --- training engines and shared memory ---

# Masks belong to single entries of a weight, so a parameter has to be the real, whole (or DTensor-sharded) weight.
# DeepSpeed ZeRO and FSDP1 keep the true values in flat buffers of their own and leave views or empty placeholders in
# the model; they are recognised here without importing either.
_INSTEAD = "use torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel instead"
# Attributes that DeepSpeed puts on parameters: ZeRO stage 3 (ds_*), stages 1 and 2 (_hp_mapping).
_DEEPSPEED_MARKS = frozenset({"ds_id", "ds_tensor", "_hp_mapping"})


def engine_problem(model: nn.Module) -> str | None:
    """Why the parameters of a training engine cannot be made sparse, or None."""
    if any(_class_named("FullyShardedDataParallel", module) for module in model.modules()):
        return f"the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters; {_INSTEAD}"
    for name, parameter in model.named_parameters():
        if _class_named("FlatParameter", parameter):
            return f"{name} is a FlatParameter (FSDP1), many weights in one flat tensor; {_INSTEAD}"
        if _DEEPSPEED_MARKS & vars(parameter).keys():
            return f"{name} is managed by DeepSpeed ZeRO, which trains flat copies of the weights; {_INSTEAD}"
    return None


def _class_named(name: str, value: object) -> bool:
    return any(base.__name__ == name for base in type(value).__mro__)


def overlapping_memory(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Problems of distinct parameters that share memory: each would overwrite the zeros of the other."""
    extents = []
    for name, parameter in parameters:
        # Subclasses (DTensor, quantised tensors) and meta tensors do not expose their memory.
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.numel() == 0:
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = parameter.data_ptr()
        extents.append((str(parameter.device), start, start + span * parameter.element_size(), name))
    extents.sort()
    return [
        f"{second} and {first} are two parameters that share memory; tie them as one parameter "
        "(a.weight = b.weight), or give one of them its own copy"
        for (device, _, end, first), (other_device, start, _, second) in pairwise(extents)
        if device == other_device and start < end
    ]


# --- output features ---


def by_feature(tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """View `tensor` as (output features, weights of the feature).

    The features of a transposed convolution are on axis 1, once per group of input channels.
    """
    if axis == 0:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    inputs, size = tensor.shape[0] // groups, math.prod(tensor.shape[2:])
    grouped = tensor.reshape(groups, inputs, tensor.shape[1], size)
    return grouped.transpose(1, 2).reshape(groups * tensor.shape[1], inputs * size)


def along_features(scale: Tensor, tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """Reshape one number per feature so that it broadcasts against `tensor`: the inverse of `by_feature`."""
    ones = [1] * (tensor.dim() - 2)
    if axis == 0:
        return scale.reshape(-1, 1, *ones)
    rows = scale.reshape(groups, 1, -1).expand(groups, tensor.shape[0] // groups, -1)
    return rows.reshape(tensor.shape[0], tensor.shape[1], *ones)
