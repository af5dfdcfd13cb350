"""Which tensors of a model are connections.

A connection is one entry of a weight matrix, filter or look-up table: it joins an input to an output. The
weights of linear, convolution, recurrent, embedding and attention layers are made of connections; biases,
norms and one-dimensional weights are not. ``select`` lists each such tensor once, however many layers share
it, together with every place where it is used. It looks at nothing but the model, changes nothing, and
reports everything that is wrong with the model in one error, before any training.

A parameter of a module type that is not known here (a hand-written layer, a stack of experts) is taken only
when ``include`` spells out its name, because nothing tells a matrix of connections from, say, a learned
position.
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

from gossamer.selectors import Place, Selector, Selectors, all_names, as_tuple, near_names, shown, some

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class SelectionError(ValueError):
    """The model, or ``include`` and ``exclude``, do not allow a selection; ``problems`` has every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(["cannot select connections:", *(f"  - {each}" for each in problems)]))

    def __reduce__(self) -> tuple[type["SelectionError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, eq=False)
class Use:
    """One place where a tensor is used, e.g. ``("encoder.rnn", LSTM(...), "weight_ih_l0")``."""

    module_name: str
    module: nn.Module
    attribute: str


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of connections. A tensor that several layers share (tied weights) is one Weight."""

    name: str
    """Its (first) name in ``model.named_parameters()``."""
    parameter: nn.Parameter
    uses: tuple[Use, ...]
    """Every place where it is used; more than one when tied."""
    feature_axis: int
    """The axis that runs over output features: 0, or 1 where a layer stores its weight as (in, out, ...)."""
    groups: int
    """Groups of a convolution, else 1."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A parameter that may become a Weight."""

    weight: Weight
    place: Place
    known: bool  # its layer type says that it is made of connections
    computes: Place | None  # the layer weight that is computed from it, as weight norm does

    def is_included(self, selectors: tuple[Selector, ...]) -> bool:
        if self.known:
            return not selectors or any(self.place.matches(selector) for selector in selectors)
        return any(self.place.is_spelled_by(selector) for selector in selectors)


def select(
    model: nn.Module, *, include: Selectors = None, exclude: Selectors = None, for_training: bool = True
) -> tuple[Weight, ...]:
    """List the tensors of connections of ``model``, in the order of ``model.named_parameters()``.

    ``include`` keeps only what it matches and ``exclude`` then removes what it matches. Each is one selector
    or a list of them; a selector is

    - a name pattern such as ``"encoder.*"`` or ``"*.weight_hh_l*"`` (as in ``fnmatch``, case matters), for
      the parameter's name and the name of every module around it;
    - a module class: all modules of that class and everything under them;
    - a module of the model: it and everything under it.

    A parameter (two or more dimensions) of an unknown module type is added where a pattern of ``include``
    spells its own name, as in ``"*.kernel"``; a bare last ``*``, as in ``"encoder.*"``, adds none of them.
    Frozen parameters (``requires_grad=False``) are left out. Raises ``SelectionError``.

    ``for_training=False`` is for those who only read: frozen parameters are listed too, and what stands in
    the way of training alone (an embedding with sparse gradients, say) is no error.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise TypeError(f"expected a torch.nn.Module as the model, got {type(model).__name__}")
    included, excluded = as_tuple(include, "include"), as_tuple(exclude, "exclude")
    candidates, uninitialised = _candidates(model)
    chosen = [
        candidate
        for candidate in candidates
        if candidate.is_included(included) and not any(candidate.place.matches(selector) for selector in excluded)
    ]
    taken = [each.weight for each in chosen if each.weight.parameter.requires_grad or not for_training]

    problems = list(_unmatched(model, candidates, included, excluded))
    if uninitialised:
        problems.append(
            f"lazy layers have no shapes yet ({some(uninitialised)}); run one batch through the model first"
        )
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
    """Names of the direct parameters of ``module`` that are made of connections; () for unknown types."""
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
    """The linear layer of GPT-2, stored as (in, out); recognised by its path, so nothing is imported."""
    path = ("transformers.pytorch_utils", "Conv1D")
    return any((base.__module__, base.__name__) == path for base in type(module).__mro__)


def _layout(module: nn.Module) -> tuple[int, int]:
    """(feature axis, groups) of the weights of ``module``."""
    if isinstance(module, _ConvNd):
        return (1 if module.transposed else 0), module.groups
    return (1 if _is_transformers_conv1d(module) else 0), 1


def _candidates(model: nn.Module) -> tuple[list[_Candidate], list[str]]:
    """Every parameter with two or more dimensions that is no norm's, and the names of the shapeless ones."""
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
                place=Place.of(names, modules, model),
                known=bool(known),
                computes=Place.of([computed], modules, model) if computed else None,
            )
        )
    return candidates, uninitialised


def _computed_name(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The layer weight that is computed from the parameter ``name``, as weight norm does."""
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
    """Layer weights that would have been taken, were they not computed from other parameters."""
    behind: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        if candidate.computes is not None and candidate.weight.parameter.requires_grad:
            behind.setdefault(candidate.computes.names[0], []).append(candidate)
    for name, parts in behind.items():
        places = [place for part in parts for place in (part.place, part.computes) if place is not None]
        is_excluded = any(place.matches(selector) for place in places for selector in excluded)
        is_included = any(place.matches(selector) for place in places for selector in included)
        if is_excluded or (included and not is_included) or any(part in chosen for part in parts):
            continue
        # Where there are several, as in weight norm, the largest holds the connections.
        largest = max(parts, key=lambda part: part.weight.parameter.numel()).weight.name
        yield (
            f"{name} is no parameter but computed from {largest} each time; make it plain first "
            f"(remove_parametrizations, remove_weight_norm, prune.remove), or pass exclude={name!r}, or, "
            f"where zeros of the one are zeros of the other, spell {largest!r} in include"
        )


def _unmatched(
    model: nn.Module,
    candidates: list[_Candidate],
    included: tuple[Selector, ...],
    excluded: tuple[Selector, ...],
) -> Iterator[str]:
    """Selectors that match nothing: nearly always a misspelling, and training on without a word is worse."""
    for selector in included:
        if any(candidate.is_included((selector,)) for candidate in candidates):
            continue
        if any(each.computes is not None and each.computes.matches(selector) for each in candidates):
            continue  # reported with what it is computed from
        unknown = [each.weight.name for each in candidates if each.place.matches(selector)]
        if unknown:
            yield (
                f"include={shown(selector)} matches only parameters of module types that are not known to be "
                f"made of connections; to take them spell their names: {some(unknown)}"
            )
        elif isinstance(selector, str):
            yield f"include={selector!r} matches no connections; {near_names(selector, model)}"
        else:
            layers = sorted({type(module).__name__ for module in model.modules() if layer_attributes(module)})
            found = ", ".join(layers) or "none"
            yield f"include={shown(selector)} matches no connections; the layers of the model are {found}"
    names = all_names(model) + tuple(each.computes.names[0] for each in candidates if each.computes is not None)
    for selector in excluded:
        if isinstance(selector, str):
            if not Place(names, ()).matches(selector):
                yield f"exclude={selector!r} matches nothing; {near_names(selector, model)}"
        elif isinstance(selector, nn.Module) and all(module is not selector for module in model.modules()):
            yield f"exclude={shown(selector)} is not part of the model; pass one of its own modules"


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
            f"{weight.name} is empty, of shape {tuple(parameter.shape)}: where a training engine left it as "
            f"a placeholder, use FSDP2 (fully_shard) or DistributedDataParallel instead; otherwise {remedy}"
        )


def _nothing(candidates: list[_Candidate], chosen: list[_Candidate]) -> str:
    if chosen:
        frozen = some([candidate.weight.name for candidate in chosen])
        return f"all tensors that could be taken are frozen: {frozen}; set requires_grad=True on some"
    known = [candidate.weight.name for candidate in candidates if candidate.known]
    unknown = [candidate.weight.name for candidate in candidates if not candidate.known]
    advice = f"; parameters of unknown module types can be included by name: {some(unknown)}" if unknown else ""
    if known:
        return f"nothing to sparsify: exclude= removes all that could be taken, {some(known)}{advice}"
    return (
        "nothing to sparsify: expected weights of linear, convolution, recurrent, embedding or attention "
        f"layers, found none that may be taken{advice}"
    )


# --- training engines and shared memory ---

# Masks belong to single entries of a weight, so a parameter has to be the real, whole (or DTensor-sharded) weight.
# DeepSpeed ZeRO and FSDP1 keep the true values in flat buffers of their own and leave views or empty placeholders in
# the model; they are recognised here without importing either.
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


# --- output features ---


def by_feature(tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """View `tensor` as (output features, weights of the feature).

    The features of a transposed convolution lie on axis 1, once for each group of input channels.
    """
    if axis == 0:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    inputs, size = tensor.shape[0] // groups, math.prod(tensor.shape[2:])
    grouped = tensor.reshape(groups, inputs, tensor.shape[1], size)
    return grouped.transpose(1, 2).reshape(groups * tensor.shape[1], inputs * size)


def along_features(scale: Tensor, tensor: Tensor, axis: int = 0, groups: int = 1) -> Tensor:
    """Lay out one number per feature so that it multiplies `tensor`: the inverse of `by_feature`."""
    ones = [1] * (tensor.dim() - 2)
    if axis == 0:
        return scale.reshape(-1, 1, *ones)
    rows = scale.reshape(groups, 1, -1).expand(groups, tensor.shape[0] // groups, -1)
    return rows.reshape(tensor.shape[0], tensor.shape[1], *ones)
