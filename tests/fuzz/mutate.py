"""Damage: of bytes, of JSON values and of trees of tensors, drawn from a random generator."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INTEGERS = (0, 1, -1, 2, 7, 64, 65, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 10**30)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "a", "[/b]", "\x00", "é\ud800", "F32", "module:function", [], {}, [[]], {"a": 1}),
    *(1.5, -0.0, 1e308, float("inf"), float("nan"), *INTEGERS, [1] * 100, [2**62] * 70, "x" * 1000),
)


def mutated_bytes(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """One to a few changes; now and then something else altogether."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change(content, rng, others)
    return bytes(content)


def _change(content: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    size = len(content)
    at = rng.randrange(size + 1)
    kind = rng.randrange(9)
    if kind == 0 and size:
        content[at % size] ^= 1 << rng.randrange(8)
    elif kind == 1 and size:
        content[at % size] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    elif kind == 2:
        content[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 3:
        del content[at : at + rng.choice((1, 2, 4, 8, 512))]
    elif kind == 4:
        length = rng.choice((1, 4, 16, 512))
        content[at:at] = content[at : at + length] * rng.choice((1, 2, 50))
    elif kind == 5:
        del content[at:]
    elif kind == 6:
        number = rng.choice(INTEGERS) & (2**64 - 1)
        packed = struct.pack(rng.choice(("<Q", ">Q")), number)[: rng.choice((1, 2, 4, 8))]
        content[at : at + len(packed)] = packed
    elif kind == 7:
        spots = [*re.finditer(rb"\d+", bytes(content[:100_000]))]
        if spots:
            spot = rng.choice(spots)
            content[spot.start() : spot.end()] = str(rng.choice(INTEGERS)).encode()
    elif others:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        content[at : at + rng.randrange(64)] = other[start : start + rng.randrange(200)]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one to a few parts of it changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _change_one(value, rng)
    return value


def json_text(value: Any, rng: random.Random) -> bytes:
    """As text, which is not always well formed."""
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        return b"[" * rng.randrange(1, 100_000) + text
    return mutated_bytes(text, rng) if rng.random() < 0.2 else text


def _change_one(tree: Any, rng: random.Random) -> Any:
    """Walk down at random and change what is there."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice([*tree])
        kind = rng.random()
        if kind < 0.15:
            del tree[key]
        elif kind < 0.2:
            tree[rng.choice(("x", "", "[/x]", key + "x" if isinstance(key, str) else "y"))] = tree.pop(key)
        else:
            tree[key] = _change_one(tree[key], rng)
        return tree
    if isinstance(tree, list | tuple) and tree and rng.random() < 0.9:
        items, at = [*tree], rng.randrange(len(tree))
        kind = rng.random()
        if kind < 0.1:
            del items[at]
        elif kind < 0.2:
            items.insert(at, copy.deepcopy(items[at]))
        elif kind < 0.25:
            items *= rng.choice((2, 30))
        else:
            items[at] = _change_one(items[at], rng)
        return type(tree)(items) if type(tree) in (list, tuple) else items
    if isinstance(tree, Tensor) and rng.random() < 0.7:
        return _changed_tensor(tree, rng)
    if type(tree) is int and rng.random() < 0.5:
        return rng.choice((tree + 1, tree - 1, -tree, rng.choice(INTEGERS), float(tree)))
    return copy.deepcopy(rng.choice(VALUES))


def _changed_tensor(tensor: Tensor, rng: random.Random) -> Tensor:
    kind = rng.randrange(7)
    if kind == 0:
        return tensor.reshape(-1)[: max(0, tensor.numel() - 1)]
    if kind == 1:
        return tensor.to(rng.choice((torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64)))
    if kind == 2:
        return torch.full_like(tensor, 1) * (float("nan") if tensor.is_floating_point() else 1)
    if kind == 3:
        return tensor.unsqueeze(0)
    if kind == 4:
        return torch.empty(0)
    if kind == 5:
        return tensor.to("meta")
    return torch.zeros(3, 2)
