"""Per-sample weight gradients of one layer, squared and summed without being stored.

During a backward pass a layer is *used*: sample b goes in as x_b, and the gradient δ_b of what came out
returns. The gradient that this sample contributes to the weight is a product of the two, and a `Use` knows
how to form it for a few samples at a time. `squared_sums` then computes, for every output feature j, exactly

    Q_j = Σ_b Σ_{k∈j} (g_{b,k} · w̃_k)²,   g_b the gradient of sample b, summed over all uses of the weight.

A weight that is used several times (tied, shared, or called in a loop) needs its gradients summed before they
are squared, so all its uses come in together. Temporaries are bounded by a plan over chunks of samples, and
over blocks of rows where one sample alone would be too much.

A weight is handled as a matrix *by feature*, (output features) × (connections of one), see `by_feature`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

# On a CPU chunks that stay in the cache are several times faster than large ones, whose memory is always new.
CPU_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class ChunkPlan:
    """How many samples, and how many rows of the weight, are worked on at a time."""

    samples: int
    rows: int


def plan_chunks(
    *, samples: int, rows: int, bytes_per_row: int, bytes_per_sample: int, limit: int, split_rows: bool
) -> ChunkPlan:
    """The largest chunk whose temporaries stay within `limit` bytes.

    One sample needs `bytes_per_sample + rows * bytes_per_row`. Rows are split only where a single sample does
    not fit, and then get half the limit at least: what a sample needs beside them cannot be split, so blocks
    of a few rows would only cost time. The floor is one sample and one row.
    """
    whole = bytes_per_sample + rows * bytes_per_row
    if whole <= limit or not split_rows:
        return ChunkPlan(samples=max(1, min(samples, limit // max(whole, 1))), rows=rows)
    room = max(limit - bytes_per_sample, limit // 2)
    return ChunkPlan(samples=1, rows=max(1, min(rows, room // bytes_per_row)))


@dataclass(frozen=True)
class Product:
    """y_bt = W x_bt: linear layers, and every matrix of a recurrent one. The times belong to one sample."""

    inputs: Tensor  # (samples, times, inputs)
    deltas: Tensor  # (samples, times, features)

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    def elements_per_sample(self) -> int:
        return self.inputs.shape[1] * (self.inputs.shape[2] + self.deltas.shape[2])

    def gradients(self, start: int, stop: int, rows: slice, dtype: torch.dtype) -> Tensor:
        deltas = self.deltas[start:stop, :, rows].to(dtype)
        return torch.bmm(deltas.transpose(1, 2), self.inputs[start:stop].to(dtype))


@dataclass(frozen=True)
class Lookup:
    """y_bt = W[token_bt]: embeddings. A feature is a row of the table, that is, a token."""

    tokens: Tensor  # (samples, times), integers
    deltas: Tensor  # (samples, times, width), already zero where the layer passes no gradient on (padding)

    @property
    def samples(self) -> int:
        return self.tokens.shape[0]

    def elements_per_sample(self) -> int:
        return 3 * self.deltas.shape[1] * self.deltas.shape[2]

    def gradients(self, start: int, stop: int, rows: slice, dtype: torch.dtype) -> Tensor:
        first, last, _ = rows.indices(1 << 62)
        tokens = self.tokens[start:stop]
        count, times = tokens.shape
        inside = (tokens >= first) & (tokens < last)
        # Tokens of other row blocks are sent to row 0 with a gradient of zero: no data-dependent shapes, so
        # no waiting for the accelerator.
        deltas = self.deltas[start:stop].to(dtype) * inside.unsqueeze(-1)
        row = torch.where(inside, tokens - first, 0)
        sample = torch.arange(count, device=tokens.device).unsqueeze(1).expand(count, times)
        table = deltas.new_zeros(count, last - first, deltas.shape[2])
        return table.index_put_((sample, row), deltas, accumulate=True)


@dataclass(frozen=True)
class Convolution:
    """A convolution or a transposed one, of any number of axes.

    Both have the same weight gradient: windows of a `field` correlated with a `probe`. For a convolution the
    field is the input and the probe the output gradient; for a transposed convolution it is the other way
    round.
    """

    field: Tensor  # (samples, groups * field channels, *space)
    probe: Tensor  # (samples, groups * probe channels, *positions)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # of the field, (before, after) for each axis
    padding_mode: str  # as torch.nn.functional.pad calls it
    groups: int
    transposed: bool

    @property
    def samples(self) -> int:
        return self.field.shape[0]

    def elements_per_sample(self) -> int:
        positions = prod(self.probe.shape[2:])
        windows = self.field.shape[1] * prod(self.kernel) * positions
        space = zip(self.field.shape[2:], self.padding, strict=True)
        padded = self.field.shape[1] * prod(size + before + after for size, (before, after) in space)
        return windows + self.field[0].numel() + padded + self.probe[0].numel()

    def gradients(self, start: int, stop: int, rows: slice, dtype: torch.dtype) -> Tensor:
        field = _pad(self.field[start:stop].to(dtype), self.padding, self.padding_mode)
        probe = self.probe[start:stop].to(dtype)
        count, groups, axes = field.shape[0], self.groups, len(self.kernel)
        positions = probe.shape[2:]
        windows = field  # stays a view, (samples, channels, *positions, *kernel), until the reshape below
        for axis, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(axis + 2, (size - 1) * gap + 1, step)[..., ::gap]
            # A transposed convolution with output padding may leave room for windows that no input belongs
            # to.
            windows = windows.narrow(axis + 2, 0, positions[axis])
        places, taps = range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)
        width, size = field.shape[1] // groups, prod(self.kernel)
        patches = windows.permute(0, 1, *taps, *places).reshape(count * groups, width * size, prod(positions))
        probes = probe.reshape(count * groups, -1, prod(positions))
        gradients = torch.bmm(probes, patches.transpose(1, 2)).view(count, groups, -1, width, size)
        if self.transposed:
            gradients = gradients.transpose(2, 3)
        features = groups * gradients.shape[2]
        return gradients.reshape(count, features, -1)[:, rows]


Use = Product | Lookup | Convolution


def by_feature(weight: Tensor, *, transposed_groups: int | None = None) -> Tensor:
    """The weight as (output features, connections of one); transposed convolutions have them on axis 1."""
    if transposed_groups is None:
        return weight.reshape(weight.shape[0], -1)
    grouped = weight.reshape(transposed_groups, weight.shape[0] // transposed_groups, weight.shape[1], -1)
    return grouped.transpose(1, 2).reshape(transposed_groups * weight.shape[1], -1)


def squared_sums(uses: Sequence[Use], dense: Tensor, *, chunk_bytes: int) -> Tensor:
    """Q_j of one weight from all its uses in one backward pass.

    `dense` is w̃ by feature; its dtype is the dtype of the computation. Every use must have the same samples
    in the same order.
    """
    merged = _merge(uses)
    if len(merged) == 1:
        only = merged[0]
        if isinstance(only, Product) and only.inputs.shape[1] == 1:
            return _squared_sums_of_vectors(only, dense)
        if isinstance(only, Lookup):
            return _squared_sums_of_lookups(only, dense, chunk_bytes=chunk_bytes)
    samples, (features, fan) = merged[0].samples, dense.shape
    plan = plan_chunks(
        samples=samples,
        rows=features,
        bytes_per_row=dense.element_size() * fan * min(len(merged), 2),
        bytes_per_sample=dense.element_size() * sum(use.elements_per_sample() for use in merged),
        limit=min(chunk_bytes, CPU_CHUNK_BYTES) if dense.device.type == "cpu" else chunk_bytes,
        split_rows=not any(isinstance(use, Convolution) for use in merged),
    )
    sums = dense.new_zeros(features)
    for top in range(0, features, plan.rows):
        rows = slice(top, min(top + plan.rows, features))
        for start in range(0, samples, plan.samples):
            stop = min(start + plan.samples, samples)
            gradients = merged[0].gradients(start, stop, rows, dense.dtype)
            for use in merged[1:]:
                gradients = gradients.add_(use.gradients(start, stop, rows, dense.dtype))
            sums[rows] += _sum_of_squares(gradients.mul_(dense[rows]))
    return sums


def _merge(uses: Sequence[Use]) -> list[Use]:
    """Products are joined along time, and so are lookups: their gradients add up over time anyhow."""
    products = [use for use in uses if isinstance(use, Product)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    merged: list[Use] = [use for use in uses if isinstance(use, Convolution)]
    if products:
        merged.append(Product(_join([use.inputs for use in products]), _join([use.deltas for use in products])))
    if lookups:
        merged.append(Lookup(_join([use.tokens for use in lookups]), _join([use.deltas for use in lookups])))
    return merged


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _pad(field: Tensor, padding: Sequence[tuple[int, int]], mode: str) -> Tensor:
    if not any(before or after for before, after in padding):
        return field
    return F.pad(field, [amount for pair in reversed(padding) for amount in pair], mode=mode)


def _sum_of_squares(gradients: Tensor) -> Tensor:
    """(samples, features, fan) -> (features,), in one pass and without a squared copy."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=(0, 2))
    return norms.square()


def _squared_sums_of_vectors(use: Product, dense: Tensor) -> Tensor:
    """(δ_bj x_bi w̃_ji)² factorises: Σ_b δ_bj² ((x²)(w̃²)ᵀ)_bj never forms rows × columns for a sample."""
    inputs, deltas = use.inputs[:, 0].to(dense.dtype), use.deltas[:, 0].to(dense.dtype)
    return (deltas.square() * F.linear(inputs.square(), dense.square())).sum(0)


def _squared_sums_of_lookups(use: Lookup, dense: Tensor, *, chunk_bytes: int) -> Tensor:
    """Only the (sample, token) pairs that occur: equal ones are sorted together, summed, then squared."""
    sums = dense.new_zeros(dense.shape[0])
    plan = plan_chunks(
        samples=use.samples,
        rows=1,
        bytes_per_row=0,
        bytes_per_sample=dense.element_size() * 2 * use.elements_per_sample(),
        limit=chunk_bytes,
        split_rows=False,
    )
    for start in range(0, use.samples, plan.samples):
        tokens = use.tokens[start : start + plan.samples]
        deltas = use.deltas[start : start + plan.samples].to(dense.dtype).flatten(0, 1)
        sample = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)
        pairs, order = (sample * dense.shape[0] + tokens).flatten().sort()
        is_new = torch.ones_like(pairs)
        is_new[1:] = (pairs[1:] != pairs[:-1]).long()
        pair_of_entry = is_new.cumsum(0) - 1
        gradients = torch.zeros_like(deltas).index_add_(0, pair_of_entry, deltas[order])
        token_of_pair = torch.zeros_like(pairs).scatter_(0, pair_of_entry, pairs % dense.shape[0])
        squares = (gradients * dense[token_of_pair]).square().sum(1)
        sums.index_add_(0, token_of_pair, squares)
    return sums
