"""The report of compaction: what was removed, and why other dead features were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from gossamer.deployment.compaction.analysis import Analysis
from gossamer.deployment.compaction.layers import by_output


@dataclass(frozen=True)
class Layer:
    """One layer before and after: the shape of its weight and its number of parameters. A shape of None means
    that the layer was removed."""

    name: str
    type: str
    before: tuple[int, ...]
    after: tuple[int, ...] | None
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class Stayed:
    """``count`` dead features (constant or unused) of a layer that had to be kept."""

    layer: str
    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.count} dead feature{'s' if self.count > 1 else ''} kept: {self.why}"


@dataclass(frozen=True)
class CompactionReport:
    """The report of ``gossamer.compact``; ``str`` is a table and a list of reasons."""

    layers: tuple[Layer, ...]
    """All layers with a weight, in order."""
    stayed: tuple[Stayed, ...]
    folded: int
    """Number of constants folded into a bias."""
    branches: tuple[str, ...]
    """Names of additions with a constant side."""
    rows: int
    """Number of merged zero rows of embeddings."""
    parameters_before: int
    parameters_after: int
    difference: float
    """Largest difference of the outputs for the example input, relative to the largest output."""

    def __str__(self) -> str:
        share = self.parameters_after / self.parameters_before if self.parameters_before else 1.0
        lines = [
            f"{self.parameters_before:,} parameters before, {self.parameters_after:,} after ({share:.1%}); "
            f"largest relative difference of the outputs {self.difference:.1e}"
        ]
        changed = [layer for layer in self.layers if layer.after != layer.before]
        width = max((len(layer.name) for layer in changed), default=0)
        for layer in changed:
            after = "removed" if layer.after is None else _shape(layer.after)
            lines.append(f"  {layer.name:<{width}}  {layer.type:<12}  {_shape(layer.before):>16} → {after}")
        if not changed:
            lines.append("  nothing could be removed")
        if self.folded:
            lines.append(f"  {self.folded} constant{'s' if self.folded > 1 else ''} folded into biases and weights")
        if self.rows:
            lines.append(f"  {self.rows} zero rows of embeddings were merged")
        lines += [f"  {name}: one side was constant; its branch was removed" for name in self.branches]
        lines += [f"  {each}" for each in self.stayed]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Compaction:
    """The smaller model, in evaluation mode, and the report of its changes; ``str`` is the report."""

    model: nn.Module
    report: CompactionReport

    def __str__(self) -> str:
        return str(self.report)


Sizes = dict[str, tuple[str, tuple[int, ...], int]]


def sizes(model: nn.Module) -> Sizes:
    """Type, weight shape and number of parameters of all layers with direct parameters."""
    found = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            main = max(own, key=lambda each: each.ndim)
            kind = type(module).__name__.replace("NonDynamicallyQuantizable", "")  # the linear layer in an attention
            found[name or "(model)"] = kind, tuple(main.shape), sum(each.numel() for each in own)
    return found


def tied_layers(model: nn.Module) -> dict[str, list[str]]:
    """For every layer, the layers that share a tensor with it."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name: names for names in owners.values() if len(names) > 1 for name in names}


def compare(before: Sizes, after: nn.Module, tied: dict[str, list[str]]) -> tuple[Layer, ...]:
    now = sizes(after)
    for name in before.keys() - now.keys():
        # An expanded attention counts as if its three projections were still one tensor.
        parts = [now[f"{name}.{part}"] for part in ("q_proj", "k_proj", "v_proj") if f"{name}.{part}" in now]
        twins = [now[twin] for twin in tied.get(name, ()) if twin in now]
        if len(parts) == 3:
            shape = (sum(part[1][0] for part in parts), *parts[0][1][1:])
            now[name] = "", shape, sum(part[2] for part in parts)
        elif twins:
            now[name] = twins[0]  # a tensor of two layers may remain in only one of them
    return tuple(
        Layer(name, kind, shape, now[name][1] if name in now else None, count, now[name][2] if name in now else 0)
        for name, (kind, shape, count) in before.items()
    )


def kept_features(analysis: Analysis, obstacles: Mapping[str, str]) -> tuple[Stayed, ...]:
    """The kept dead features by layer and reason. ``obstacles`` are layers that could not be analysed; their filters
    without nonzeros are counted."""
    counts: Counter[tuple[str, str]] = Counter()
    seen: set[int] = set()
    for node, features in analysis.features.items():
        dead = ~analysis.needed[node] | features.is_constant
        for feature, is_dead in zip(features.ids.tolist(), dead.tolist(), strict=True):
            reason = analysis.groups.reason(feature)
            if feature not in seen and node.op == "call_module" and is_dead and reason is not None:
                counts[analysis.name(node), str(reason)] += 1
            seen.add(feature)
    for name, why in obstacles.items():
        module = analysis.graph_module.get_submodule(name)
        if isinstance(module, nn.Linear | _ConvNd):
            counts[name, why] = int((by_output(module) == 0).flatten(1).all(1).sum())
    return tuple(Stayed(layer, count, why) for (layer, why), count in counts.items() if count)


def _shape(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes))
